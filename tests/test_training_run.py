"""A run from its start to what is written: refused at once or not at all, the same after a resume, rightly told."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import shipped_models
import torch
import yaml
from safetensors.torch import load_file, save_file

from hf_posenc import PosencError, load, patch_model, save
from hf_posenc.checkpoints.cards import is_ours
from hf_posenc.models import NAMES
from hf_posenc.patching.sidecar import adapter_settings
from hf_posenc.training import recipe
from hf_posenc.training.card import command_as_typed
from hf_posenc.training.checks import refuse_full_disk, refuse_merging
from hf_posenc.training.command import main
from hf_posenc.training.preparation import positions_record
from hf_posenc.training.recipe import prepare, train
from hf_posenc.training.settings_file import read_settings

SMALL = [
    "--data.length=64", "--data.passkey=0.0", "--train.max_steps=4", "--train.warmup_steps=0", "--train.save_steps=2",
    "--train.logging_steps=1", "--train.per_device_train_batch_size=2",
    "--measure={lengths: [32, 64], windows: 2, scored: 8}",
]  # fmt: skip

pytestmark = pytest.mark.skipif("tiny" not in NAMES, reason="the package was built without its model")


@pytest.fixture(scope="session")
def models(once) -> Path:
    return once("shipped_models", shipped_models.fill)


def settings(models: Path, output: Path, *words: str, name: str = "tiny_yarn"):
    return read_settings(name, [*shipped_models.words(name, models), *SMALL, f"--output={output}", *words])


@pytest.fixture
def nothing_is_measured(monkeypatch):
    """What is refused is refused before any figure is taken."""

    def measured(*args, **kwargs):
        raise AssertionError("a figure was taken")

    monkeypatch.setattr(recipe, "measure_before", measured)
    monkeypatch.setattr(recipe, "train_and_save", measured)


REFUSED = {
    "scheme": (["--scheme.factor=0.5"], "factor"),
    "option": (["--scheme.beta_fastt=3"], "beta_fast"),
    "targets": (["--tune.lora.target_modules=[q_proj, w_proj]"], "no projection of this model is called 'w_proj'"),
    "length": (["--data.length=2048", "--measure.lengths=[64]"], "the model is made for 1280"),
    "launch": (["--train.processes=2"], "1 are running"),
    "package": (["--train.report_to=wandb"], "pip install wandb"),
    "precision": (["--train.bf16=true", "--train.use_cpu=false"], "support bf16"),
    "held out": (["--measure.lengths=[60000]"], "too short"),
    "passkeys": (["--measure.passkeys=5"], r"measure\.passkeys at 32 tokens: The question alone takes"),
    "rows of passkeys": (["--data.passkey=0.1", "--data.length=32"], r"data\.passkey: The question alone takes"),
    "objective": (["--model.objective=contrastive", "--train.per_device_train_batch_size=1"], "from 2 up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_can_be_refused_is_refused_before_any_work(name, models, tmp_path, nothing_is_measured, monkeypatch):
    words, said = REFUSED[name]
    if name == "package":
        monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == "wandb" else True)
    with pytest.raises(PosencError, match=said):
        train(settings(models, tmp_path / "out", *words))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged_is_refused_before_it_is_trained(models, tmp_path, nothing_is_measured):
    with pytest.raises(PosencError, match="--merge merges adapters, and this recipe trains none"):
        train(settings(models, tmp_path / "out", "--tune={whole: true}"), merged=True)
    stored = positions_record(patch_model(load("tiny"), "linear", factor=2.0))
    asked = settings(models, tmp_path / "out", "--model.quantize=nf4")
    refuse_merging(asked, False, stored)
    refuse_merging(asked, True, None)
    with pytest.raises(PosencError, match="which cannot be undone below a patch"):
        refuse_merging(asked, True, stored)


def test_an_output_that_is_a_file_is_refused(models, tmp_path, nothing_is_measured):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(PosencError, match=r"output: .*file is a file"):
            train(settings(models, output))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_refused(models, tmp_path, monkeypatch):
    asked = settings(models, tmp_path / "not" / "there")
    refuse_full_disk(asked, 1000, 10_000, merged=True)
    with pytest.raises(PosencError, match=r"about 800000000\.0 GB \(3 checkpoints of 240000000\.0 GB"):
        refuse_full_disk(asked, 20_000_000_000_000_000, 0, merged=False)


@pytest.fixture(scope="module")
def whole(once, models) -> Path:
    """A run in bf16 that nothing happened to, with its control."""
    words = ["--model.dtype=bfloat16", "--tune.lora.lora_dropout=0.1", "--tune.learning_rate=2e-5"]
    return once("whole_run", lambda folder: train(settings(models, folder / "run", *words), merged=True)) / "run"


def resumed(whole: Path, output: Path) -> None:
    """The same run, stopped after its first checkpoint and gone on with."""
    output.mkdir()
    shutil.copytree(whole / "checkpoint-2", output / "checkpoint-2")
    shutil.copy(whole / "before.json", output)
    again = yaml.safe_load((whole / "recipe.yaml").read_text())
    (output / "own.yaml").write_text(yaml.safe_dump(again))
    train(read_settings(output / "own.yaml", [f"--output={output}"]), resume=True)


def test_a_bf16_run_goes_on_to_the_same_weights_and_tells_of_all_of_it(whole, tmp_path):
    """Masters are in checkpoints: what is written at the end is rounded, and would not do to go on from."""
    past = json.loads((whole / "checkpoint-2" / "run.json").read_text())
    resumed(whole, tmp_path / "run")
    ours, theirs = (
        load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (tmp_path / "run", whole)
    )
    assert {v.dtype for k, v in ours.items() if "lora_" not in k} == {torch.bfloat16}
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    one, other = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path / "run", whole))
    assert one["figures"] == other["figures"] and one["facts"]["losses"] == other["facts"]["losses"]
    for name in ("steps", "tokens", "trained", "parameters", "written"):
        assert one["facts"][name] == other["facts"][name]
    assert one["facts"]["steps"] == 4 and one["facts"]["tokens"] == 4 * 2 * 64
    for name in ("seconds", "training_seconds"):
        assert one["facts"][name] > past[name] > 0
    assert len(one["facts"]["commands"]) == 2
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert card.count("- command: ") == 2 and f"{one['facts']['training_seconds']:.0f} s of training" in card


def test_checkpoints_hold_masters(whole):
    kept = load_file(whole / "checkpoint-4" / "adapter_model.safetensors")
    written = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert {v.dtype for v in kept.values()} == {torch.float32}
    norms = [name for name in written if "norm" in name]
    assert norms and all(torch.equal(kept[name].bfloat16(), written[name]) for name in norms)
    assert any(not torch.equal(kept[name], written[name].float()) for name in norms)
    assert not list(whole.glob("adapter/*.bin"))  # no pickle in what is given away


def test_tied_ends_are_written_once_and_loaded_into_both(whole, tmp_path):
    adapter = whole / "adapter"
    state = load_file(adapter / "adapter_model.safetensors")
    both = load_file(whole / "checkpoint-4" / "adapter_model.safetensors")
    assert both.keys() - state.keys() == {"base_model.model.lm_head.weight"}
    with warnings.catch_warnings(record=True) as warned:
        loaded = load(adapter, dtype=torch.bfloat16)
    assert not [w for w in warned if "tiny" in str(w.message)]  # of PEFT, which knows no such model
    base = loaded.get_base_model()
    first, last = (end.modules_to_save["default"].weight for end in (base.model.embed_tokens, base.lm_head))
    assert first is last and torch.equal(first, state["base_model.model.model.embed_tokens.weight"])
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        tuned = loaded(ids).logits
        with loaded.disable_adapter():
            plain = loaded(ids).logits
        untouched = patch_model(load("tiny", dtype=torch.bfloat16), "yarn", target_length=1280)(ids).logits
        merged = load(whole / "merged", dtype=torch.bfloat16)(ids).logits
    assert torch.equal(plain, untouched) and not torch.equal(tuned, plain)
    torch.testing.assert_close(merged, tuned, atol=0.2, rtol=0.05)  # adapters are rounded where they are merged
    for trainable in (False, True):  # as PEFT does it where both names are there
        ours, theirs = (load(folder, is_trainable=trainable) for folder in (adapter, whole / "checkpoint-4"))
        states = [{n: (p.requires_grad, p.dtype) for n, p in model.named_parameters()} for model in (ours, theirs)]
        assert states[0] == states[1] and ours.training == theirs.training
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    save_file({k: v for k, v in state.items() if "embed_tokens" not in k}, broken / "adapter_model.safetensors")
    with pytest.raises(PosencError, match=r"lacks .*embed_tokens.*: it is not whole"):
        load(broken)


def test_cards_are_those_of_what_they_lie_beside(whole):
    adapter, merged = ((whole / name / "README.md").read_text() for name in ("adapter", "merged"))
    assert "library_name: peft" in adapter and "- base: tiny" in adapter
    assert "base_model:" not in adapter + merged  # no hub has a model of this name
    assert all(is_ours(whole / name / "README.md") for name in ("adapter", "merged"))
    assert "library_name: transformers" in merged and "patches the base model" not in merged
    facts = json.loads((whole / "metrics.json").read_text())["facts"]
    base = sum(p.numel() for p in load("tiny").parameters())
    assert facts["parameters"] == base and 0 < facts["trained"] < base
    for card in (adapter, merged):
        assert f"{facts['trained']:,} parameters (the base has {base:,})" in card
        assert "computed in bfloat16, trained in float32; written: adapters in float32, weights in bfloat16" in card


def test_figures_before_are_left_out_where_told(models, tmp_path):
    train(settings(models, tmp_path, "--measure.before=false", "--train.max_steps=1"))
    figures = json.loads((tmp_path / "metrics.json").read_text())["figures"]
    assert {figure["scheme"] for figure in figures} == {"yarn, tuned"} and not (tmp_path / "before.json").exists()


def test_a_control_is_trained_on_the_same_rows_and_stands_beside(models, tmp_path):
    train(settings(models, tmp_path, "--train.max_steps=2"), control=True)
    figures = json.loads((tmp_path / "metrics.json").read_text())["figures"]
    states = list(dict.fromkeys(figure["scheme"] for figure in figures))
    assert states == ["unpatched", "yarn", "unpatched, tuned", "yarn, tuned"]
    assert "The control, *unpatched, tuned*" in (tmp_path / "adapter" / "README.md").read_text()
    alone = tmp_path / "control"
    assert not (alone / "adapter" / "posenc.json").exists() and (tmp_path / "adapter" / "posenc.json").exists()
    rows = [prepare(settings(models, tmp_path / name, "--train.max_steps=2")).rows for name in ("a", "b")]
    assert all(torch.equal(rows[0][i]["input_ids"], rows[1][i]["input_ids"]) for i in range(4))


def test_a_control_needs_a_scheme_and_a_model_that_reaches(models, tmp_path, nothing_is_measured):
    with pytest.raises(PosencError, match="names no scheme"):
        train(settings(models, tmp_path / "out", name="tiny_control"), control=True)
    words = ["--data.length=2048", "--measure.lengths=[64]", "--train.bf16=false"]
    with pytest.raises(PosencError, match="name a scheme that reaches further"):
        train(settings(models, tmp_path / "out", *words, name="gpt2_alibi"), control=True)


def test_a_base_that_came_patched_is_measured_as_it_came(models, tmp_path):
    model = patch_model(load(models / "llama", dtype=torch.float32), "linear", factor=2.0)
    save(model, tmp_path / "base")
    shutil.copy(models / "llama" / "tokenizer.json", tmp_path / "base")
    shutil.copy(models / "llama" / "tokenizer_config.json", tmp_path / "base")
    words = [f"--model.path={tmp_path / 'base'}", "--train.max_steps=1", "--scheme.target_length=16384"]
    with pytest.raises(PosencError, match=r"saved with 'linear' positions, and an adapter needs"):
        train(settings(models, tmp_path / "out", *words))
    train(settings(models, tmp_path / "out", *words, "--tune={whole: true}"))
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())["figures"]
    states = list(dict.fromkeys(figure["scheme"] for figure in figures))
    assert states == ["linear, as it came", "yarn", "yarn, tuned"]


@pytest.mark.parametrize(
    "line, told",
    [
        (["/usr/bin/python3", "/usr/bin/accelerate", "launch", "--config_file", "cpu.yaml", "-m", "hf_posenc.training",
          "tiny_yarn"], "accelerate launch --config_file cpu.yaml -m hf_posenc.training tiny_yarn"),
        (["python", "-m", "accelerate.commands.launch", "--cpu", "-m", "hf_posenc.training", "x.yaml"],
         "accelerate launch --cpu -m hf_posenc.training x.yaml"),
        (["/venv/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "hf_posenc.training", "x"],
         "torchrun --nproc-per-node 2 -m hf_posenc.training x"),
        (["/venv/bin/python", "/venv/bin/hf-posenc", "train", "x"], "hf-posenc train x"),
        (["python", "-m", "hf_posenc", "train", "x"], "hf-posenc train x"),
        (["python", "-m", "hf_posenc.training", "x"], "hf-posenc train x"),
        (["bash", "train.sh"], None),
        (["python", "-m", "pytest", "train"], None),
    ],
)  # fmt: skip
def test_a_command_line_is_told_as_it_was_typed(line, told):
    found = command_as_typed(line)
    assert (found and " ".join(found)) == told


def test_a_dry_run_shows_what_would_be_done_and_does_nothing(models, tmp_path, capsys, nothing_is_measured):
    output = tmp_path / "out"
    words = [*shipped_models.words("tiny_yarn", models), *SMALL, f"--output={output}"]
    main(["tiny_yarn", "--dry-run", *words])
    told = " ".join(capsys.readouterr().out.split())  # whatever the width of the terminal
    assert "8, 2 a step" in told and "512" in told and "the first row" in told
    assert "GB of tensors a process, give or take 30%" in told and "that the process has now" in told
    assert not output.exists()
    with pytest.raises(SystemExit):
        main(["tiny_yarn", "--dry-run", *words, "--tune.lora.target_modules=[nothing]"])


def test_rows_that_are_held_out_are_looked_at_and_the_best_is_kept(models, tmp_path):
    """With a rate that ruins the model, the first look is the best, and patience ends the run."""
    words = ["--train.eval_steps=1", "--train.save_steps=1", "--train.eval_rows=4", "--train.learning_rate=3.0"]
    words += ["--train.load_best_model_at_end=true", "--train.early_stopping_patience=2", "--train.max_steps=8"]
    words += ["--tune.learning_rate=3.0", "--train.lr_scheduler_type=constant", "--measure.before=false"]
    words += ["--train.save_total_limit=4"]
    train(settings(models, tmp_path, *words))
    facts = json.loads((tmp_path / "metrics.json").read_text())["facts"]
    looks = [loss for _, loss in facts["held_out_losses"]]
    best = looks.index(min(looks)) + 1
    assert facts["best_step"] == best and facts["steps"] == best + 2 < 8
    kept = load_file(tmp_path / f"checkpoint-{best}" / "adapter_model.safetensors")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], written[name]) for name in written)
    assert f"those of step {best}, the best" in (tmp_path / "adapter" / "README.md").read_text()
    # Patience that was half gone stays so: a run that was stopped before it ended goes on to the same end.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / f"checkpoint-{best + 1}", again / f"checkpoint-{best + 1}")
    shutil.copytree(tmp_path / f"checkpoint-{best}", again / f"checkpoint-{best}")
    train(settings(models, again, *words), resume=True)
    resumed = json.loads((again / "metrics.json").read_text())["facts"]
    assert resumed["steps"] == facts["steps"] and resumed["best_step"] == best
    assert resumed["held_out_losses"] == facts["held_out_losses"]


def test_texts_are_continued_while_it_trains_and_its_speed_is_told(models, tmp_path, capsys):
    words = ["--train.generate_steps=2", "--data.length=128", "--measure={lengths: [128], windows: 2, scored: 8}"]
    train(settings(models, tmp_path, *words, "--measure.before=false"))
    lines = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2] * (len(lines) // 2) + [4] * (len(lines) // 2)
    assert all(line["text"] and line["written"] for line in lines)
    history = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]
    assert all(entry["tokens_per_second"] > 0 and entry["padding"] == 0 for entry in steps)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_others_are_told_of_speed_and_padding(models, tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    told: set[str] = set()
    if name == "wandb":
        import wandb

        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        monkeypatch.setattr(wandb.Run, "log", lambda run, found, *args, **kwargs: told.update(found))
    train(settings(models, tmp_path, f"--train.report_to={name}", "--train.max_steps=1", "--measure.before=false"))
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (file,) = tmp_path.rglob("events.out.tfevents.*")
        told.update(EventAccumulator(str(file)).Reload().Tags()["scalars"])
    assert {"train/loss", "train/tokens_per_second", "train/padding"} <= told


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_kinds_of_lora_go_by_their_names_and_come_back(models, tmp_path, kind):
    words = [f"--tune.lora.{kind}=true", "--train.max_steps=2", "--measure.before=false"]
    train(settings(models, tmp_path, *words), merged=True)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter_settings(written)[kind] is True
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        one, other = (load(tmp_path / name, dtype=torch.float32)(ids).logits for name in ("adapter", "merged"))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_prompts_and_text_are_trained_on_together_and_padding_is_told(models, tmp_path):
    prompts = [{"prompt": f"Count to {i}: ", "completion": " ".join(map(str, range(i)))} for i in range(1, 21)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(record) for record in prompts))
    sources = f"[{{path: {models / 'text.txt'}}}, {{path: {tmp_path / 'prompts.jsonl'}, format: prompt_completion}}]"
    words = [*SMALL, f"--data.sources={sources}", "--measure.before=false", f"--output={tmp_path / 'out'}"]
    train(read_settings("tiny_yarn", words))
    facts = json.loads((tmp_path / "out" / "metrics.json").read_text())["facts"]
    assert "prompts.jsonl (weight 1)" in facts["data"]
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert any(entry.get("padding", 0) > 0 for entry in state["log_history"])
