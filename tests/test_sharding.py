"""Sharded parameters and sharded texts: two processes, by the launchers' files that are for GPUs (see sharded.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cells import VOCAB, options, tiny
from safetensors.torch import load_file

from hf_posenc import PosencError, describe, load, patch_model
from hf_posenc.models import NAMES
from hf_posenc.training.recipe import train
from hf_posenc.training.recipe_files import launchers
from hf_posenc.training.rows import StreamedRows
from hf_posenc.training.settings import Settings
from hf_posenc.training.settings_file import read_settings
from hf_posenc.training.sharding import (
    prepare_shared_text,
    refuse_lost_rows,
    refuse_sharded_text,
    refuse_zero3,
    unsplit_inputs,
)
from hf_posenc.training.trainer import arguments, rows_a_step

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
LENGTH = 64
SMALL = [
    f"--data.length={LENGTH}", "--data.passkey=0.0", "--measure={lengths: [32], windows: 1, scored: 8}",
    "--train.logging_steps=1", "--train.warmup_steps=0", "--train.max_steps=3", "--train.save_steps=2",
]  # fmt: skip
PLAIN = ["--data.documents=joined", "--data.answer_weight=1.0"]
SHARED = {
    "yarn": ["tiny_yarn", *PLAIN],
    # Leaps tell apart what is counted within a part of the text, or from its middle; few leaps leave middles alike.
    "alibi": ["tiny_alibi", *PLAIN, "--data.pose={target_length: 200, chunks: 4}"],
    "rope": ["tiny_gpt2_rope", *PLAIN, *(f"--model.config.{part}_pdrop=0.0" for part in ("attn", "embd", "resid"))],
}
REFUSED = {
    "dropout": (["tiny_gpt2_rope", *PLAIN], "(attn_pdrop)"),
    "documents": (["tiny_yarn", "--data.answer_weight=1.0"], "cross document boundaries"),
    "dynamic_ntk": (["tiny_yarn", *PLAIN, "--scheme={name: dynamic_ntk}"], "'dynamic_ntk' rotates all keys again"),
}

with_tiny = pytest.mark.skipif("tiny" not in NAMES, reason="the package was built without its model")


def words(name: str, *others: str) -> list[str]:
    return [name, *SMALL, *others]


def in_two(launcher: str, runs: list[list[str]]) -> None:
    """Runs one after the other in the same two processes: they take longer to start than to train."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    command += [str(launchers()[launcher]), str(ROOT / "tests" / "sharded.py")]
    for run in runs:
        command += [*run, "--train.use_cpu=false", "--train.per_device_train_batch_size=1", "--then"]
    done = subprocess.run(command[:-1], capture_output=True, text=True, env=ENV, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def in_one(run: list[str]) -> None:
    train(read_settings(run[0], run[1:]), resume=False, merged=False, compared=False)


def losses(folder: Path) -> list[float]:
    return [loss for _, loss in json.loads((folder / "metrics.json").read_text())["facts"]["losses"]]


def read_notes(folder: Path) -> list[dict]:
    return [json.loads((folder / f"seen-{process}.json").read_text()) for process in range(2)]


def same_in_the_end(resumed: Path, whole: Path) -> None:
    """A run that was gone on with ends as the one that nothing happened to."""
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 3
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (resumed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@with_tiny
def test_sharded_parameters_train_as_whole_ones(tmp_path, text):
    one, two = tmp_path / "one", tmp_path / "two"
    in_one(words("tiny_yarn", text, "--train.per_device_train_batch_size=2", f"--output={one}"))
    sharded = words("tiny_yarn", text, "--train.processes=2")
    again = [*sharded, f"--output={tmp_path / 'again'}", f"--after={two / 'checkpoint-2'}"]
    in_two("fsdp2", [[*sharded, f"--output={two}"], again])
    same_in_the_end(tmp_path / "again", two)
    for process in read_notes(two):
        assert process["distributed"].endswith("FSDP")
        assert process["whole"] == [] and process["sharded"] > 40  # LoRA, norms and embeddings
        assert len(process["positions"][0]) == LENGTH
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)

    saved, wanted = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (two, one))
    assert saved.keys() == wanted.keys()
    loaded = load(two / "adapter", dtype=torch.float32)  # trained so, whatever the base is stored in
    assert describe(loaded.get_base_model()).scheme == "yarn"
    state = loaded.state_dict()
    for name, weight in saved.items():
        assert weight.shape == wanted[name].shape
        # Adam turns rounding into a whole step where a gradient is nothing, so that a few weights may differ.
        assert float((weight - wanted[name]).abs().mean()) < 2e-5, name
        inside = [key for key in state if key.replace(".default", "").replace(".modules_to_save", "") == name]
        assert inside and all(torch.equal(state[key], weight) for key in inside if "original" not in key), name


@pytest.fixture(scope="module")
def shared(once, text) -> Path:
    """All runs of which two processes share the texts."""
    runs = {**SHARED, **{name: run for name, (run, _) in REFUSED.items()}}

    def run(folder: Path) -> None:
        every = [words(*run, text, f"--output={folder / name}") for name, run in runs.items()]
        first = words(*SHARED["yarn"], text, f"--output={folder / 'again'}")
        in_two("context_parallel", [*every, [*first, f"--after={folder / 'yarn' / 'checkpoint-2'}"]])

    return once("shared", run)


@with_tiny
def test_a_run_on_shared_texts_goes_on_to_the_same_weights(shared):
    same_in_the_end(shared / "again", shared / "yarn")


@with_tiny
@pytest.mark.parametrize("name", SHARED)
def test_a_shared_text_trains_as_a_whole_one(tmp_path, text, shared, name):
    in_one(words(*SHARED[name], text, "--train.per_device_train_batch_size=1", f"--output={tmp_path}"))
    parts = [process["positions"][0] for process in read_notes(shared / name)]
    assert [len(part) for part in parts] == [LENGTH // 2] * 2
    together = sorted(parts[0] + parts[1])
    assert len(set(together)) == LENGTH and (name == "alibi" or together == list(range(LENGTH)))
    assert losses(shared / name) == pytest.approx(losses(tmp_path), abs=1e-4)


@with_tiny
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_launch_would_get_wrong_is_refused(shared, name):
    for process in read_notes(shared / name):
        assert REFUSED[name][1] in process["refused"]


@pytest.mark.parametrize(
    "scheme", ["t5", "dynamic_ntk", "longrope", "self_extend", "rerope", "dca", "streaming", "window", "sparse"]
)
def test_schemes_that_need_more_than_causal_attention_are_refused(scheme):
    model = patch_model(tiny("llama"), scheme, **options(scheme))
    with pytest.raises(PosencError, match=f"only causal attention, and the scheme '{scheme}'"):
        prepare_shared_text(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["alibi", "rope", "yarn", "sinusoidal", "learned", "none"])
def test_schemes_that_need_no_more_are_let_through(kind, scheme):
    model = patch_model(tiny(kind, **({"attn_pdrop": 0.0} if kind == "gpt2" else {})), scheme, **options(scheme))
    ids = torch.randint(3, VOCAB, (1, 24))
    before = model(ids).logits
    prepare_shared_text(model)
    assert getattr(getattr(model.base_model, "posenc", None), "rendering", None) == (
        "shared_columns" if scheme == "alibi" else None
    )
    torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)


def test_layers_that_count_tokens_are_refused():
    model = patch_model(tiny("llama"), "alibi")

    def untold(module, args, kwargs):
        angles = tuple(part.clone() for part in kwargs["position_embeddings"])  # a copy does not know its positions
        return args, {**kwargs, "position_ids": None, "position_embeddings": angles}

    model.model.layers[1].self_attn.register_forward_pre_hook(untold, with_kwargs=True, prepend=True)
    with pytest.raises(PosencError, match="'llama' model do not get positions"):
        prepare_shared_text(model)


def test_dropped_attention_is_refused():
    with pytest.raises(PosencError, match="Set attn_pdrop to 0"):
        prepare_shared_text(patch_model(tiny("gpt2", attn_pdrop=0.1), "rope"))


def test_other_kernels_are_refused():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(PosencError, match="uses 'eager'"):
        prepare_shared_text(model)
    with pytest.raises(PosencError, match="uses 'hf_posenc_eager'"):
        prepare_shared_text(patch_model(model, "alibi"))


def settings(data: dict | None = None, model: dict | None = None, tune: dict | None = None) -> Settings:
    return Settings.model_validate(
        {
            "model": {"path": "tiny", **(model or {})},
            "data": {"length": 64, "documents": "joined", **(data or {})},
            "tune": tune or {},
            "train": {"max_steps": 1, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
            "output": "out",
        }
    )


def launch(dataset: object = (), **sizes: int) -> tuple[SimpleNamespace, object]:
    """How texts are spread, and what is trained on."""
    sizes = {"cp_size": 1, "tp_size": 1, "sp_size": 1, **sizes}
    enabled = {name.replace("_size", "_enabled"): size > 1 for name, size in sizes.items()}
    return SimpleNamespace(**sizes, **enabled), dataset


@pytest.mark.parametrize(
    "asked, said",
    [
        (settings(data={"documents": "separate"}), "document boundaries"),
        (settings(data={"short": {"share": 0.5, "length": 8}}), "document boundaries"),
        (settings(data={"answer_weight": 2.0}), "answer_weight: 1"),
        (settings(model={"objective": "masked"}), "causal models"),
        (settings(data={"stages": [{"length": 30, "steps": 1}]}), "a multiple of 4"),
    ],
)
def test_data_that_cannot_be_shared_is_refused(asked, said):
    with pytest.raises(PosencError, match=said):
        refuse_sharded_text(asked, *launch(cp_size=2))
    refuse_sharded_text(asked, *launch())
    refuse_sharded_text(settings(), *launch(cp_size=2))


def test_streams_and_other_ways_to_share_are_refused():
    with pytest.raises(PosencError, match="A stream of text"):
        refuse_sharded_text(settings(), *launch(StreamedRows(list, None), cp_size=2))
    for kind in ("tp_size", "sp_size"):
        with pytest.raises(PosencError, match="which recipes do not support"):
            refuse_sharded_text(settings(), *launch(**{kind: 2}))


def test_zero3_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    refuse_zero3()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(PosencError, match=r"Launch with .*fsdp2"):
        refuse_zero3()


def test_old_rows_that_would_be_trained_are_refused():
    asked = settings(tune={"positions": "new"})
    with pytest.raises(PosencError, match=r"ddp\.yaml"):
        refuse_lost_rows(asked, True)
    refuse_lost_rows(asked, False)
    refuse_lost_rows(settings(), True)


def test_padding_and_borders_are_refused_in_every_batch():
    positions = torch.arange(8)[None]
    row = {"input_ids": positions, "labels": positions, "position_ids": positions}
    found = unsplit_inputs({**row, "attention_mask": torch.ones(1, 8), "answers": positions})
    assert found["shift_labels"].tolist() == [[1, 2, 3, 4, 5, 6, 7, -100]] and bool(found["attention_mask"].all())
    assert set(found) == {"input_ids", "position_ids", "attention_mask", "shift_labels"}
    with pytest.raises(PosencError, match="padded or masked"):
        unsplit_inputs({**row, "attention_mask": (positions > 2).long()})
    with pytest.raises(PosencError, match="several texts"):
        unsplit_inputs({**row, "position_ids": positions % 5})


def test_processes_that_share_a_text_take_its_rows_once(monkeypatch):
    args = arguments(settings())
    assert rows_a_step(args) == 6
    four = SimpleNamespace(world_size=4, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert rows_a_step(four) == 24
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert rows_a_step(four) == 12
