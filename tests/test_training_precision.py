"""Every recipe in every precision: what is said to be trained is trained, and as in fp32."""

import json
from pathlib import Path

import pytest
import shipped_models
import torch
from cells import tiny, tokens
from safetensors.torch import load_file

from hf_posenc.models import NAMES
from hf_posenc.training import tuning
from hf_posenc.training.master_weights import keep_master_weights, rounded_dtypes
from hf_posenc.training.recipe import make_trainer, prepare, train
from hf_posenc.training.recipe_files import recipes
from hf_posenc.training.settings_file import read_settings

STEPS = 4
SHORT = [
    f"--train.max_steps={STEPS}", "--train.warmup_steps=0", "--train.logging_steps=1", "--train.save_steps=100",
    "--train.gradient_accumulation_steps=1", "--train.per_device_train_batch_size=2", "--data.passkey=0.0",
    "--measure={lengths: [64], windows: 1, scored: 8, before: false}", "--train.gradient_checkpointing=false",
]  # fmt: skip
LEAST = 0.01
"""Of the largest change: Adam moves what has a gradient by its rate, or by that of its group."""
PRECISIONS = {
    "fp32": ["--model.dtype=float32", "--train.bf16=false"],
    "bf16": ["--model.dtype=bfloat16", "--train.bf16=false"],
    "autocast": ["--model.dtype=float32", "--train.bf16=true"],
    "both": ["--model.dtype=bfloat16", "--train.bf16=true"],
}

pytestmark = pytest.mark.skipif("tiny" not in NAMES, reason="the package was built without its model")


@pytest.fixture(scope="session")
def models(once) -> Path:
    return once("shipped_models", shipped_models.fill)


def short_data(name: str, models: Path) -> list[str]:
    data = read_settings(name).data
    found = ["--data.length=64", f"--data.path={models / 'short.txt'}"]
    found += [f"--data.stages={[{'length': 32, 'steps': 1}]}"] if data.stages else []
    found += ["--data.short={share: 0.5, length: 16}"] if data.short else []
    return found


def run(name: str, models: Path, output: Path, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and by how much each trained tensor has changed."""
    words = [
        *shipped_models.words(name, models),
        *shipped_models.without_dropout(name),
        *SHORT,
        *short_data(name, models),
    ]
    settings = read_settings(name, [*words, *PRECISIONS[precision], f"--output={output / precision}"])
    trainer = make_trainer(prepare(settings))
    named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in named.items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {n: p.detach() - before[n] for n, p in named.items()}


def likeness(change: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float, float]:
    """The cosine between two changes, how large one is against the other, and how many values changed in both."""
    one, other = change.flatten().double(), wanted.flatten().double()
    moved = int((other != 0).sum())
    both = int(((one != 0) & (other != 0)).sum())
    return float(torch.cosine_similarity(one, other, 0)), float(one.norm() / other.norm()), both / moved


def differences(found, wanted) -> list[str]:
    """What a run did not do as an fp32 run does it."""
    said = []
    for step, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        if abs(one - other) > 0.01 * other:
            said.append(f"loss of step {step}: {one} against {other}")
    most = max(float(change.abs().max()) for change in wanted[1].values())
    for name, change in wanted[1].items():
        if change.abs().max() < LEAST * most:
            continue  # no gradient yet, of a fresh adapter, or ever: the bias of keys shifts all scores alike
        cosine, size, share = likeness(found[1][name], change)
        if cosine < 0.5 or not 0.7 < size < 1.4 or share < 0.9:
            said.append(f"{name}: cosine {cosine:.2f}, size {size:.2f}, changed {share:.2f}")
    return said


@pytest.mark.parametrize("name", recipes())
def test_all_that_is_trained_changes_as_in_fp32(name, models, tmp_path):
    wanted = run(name, models, tmp_path, "fp32")
    assert sum(change.any() for change in wanted[1].values()) > 0.6 * len(wanted[1])
    for precision in ("bf16", "autocast") if "alibi" not in name else ("bf16", "autocast", "both"):
        found = run(name, models, tmp_path, precision)
        assert found[1].keys() == wanted[1].keys() and {change.dtype for change in found[1].values()} == {
            torch.float32
        }
        assert not differences(found, wanted), precision


def test_without_masters_little_is_trained(models, tmp_path, monkeypatch):
    wanted = run("llama_linear", models, tmp_path, "fp32")
    monkeypatch.setattr(tuning, "keep_master_weights", lambda model: None)
    said = differences(run("llama_linear", models, tmp_path, "bf16"), wanted)
    norms = [line for line in said if "norm" in line]
    assert len(norms) == 3 and all("changed 0.00" in line for line in norms), said


def test_ties_names_and_dtypes_stay():
    model = tiny("llama", tie_word_embeddings=True).bfloat16()
    names, ids = list(dict(model.named_parameters())), tokens(1, 8)
    before = model(ids).logits
    keep_master_weights(model)
    assert list(dict(model.named_parameters())) == names == list(rounded_dtypes(model))[: len(names)]
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == torch.bfloat16 and type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    assert torch.equal(model(ids).logits, before)


def test_what_is_fp32_already_is_left_alone():
    model = tiny("llama")
    kinds = [type(module) for module in model.modules()]
    keep_master_weights(model)
    assert [type(module) for module in model.modules()] == kinds


SHIPPED = [
    "--train.max_steps=2", "--train.warmup_steps=1", "--train.gradient_accumulation_steps=1",
    "--measure={lengths: [64], windows: 1, scored: 8, before: false}",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in recipes() if not name.startswith("tiny_")])
def test_every_recipe_runs_as_it_is_shipped(name, models, tmp_path):
    """In its own precision, at its own lengths: only fewer rows. Those of `tiny` are run in test_finetune.py."""
    words = [*shipped_models.words(name, models), *SHIPPED, f"--output={tmp_path}"]
    asked = read_settings(name)
    if asked.data.stages:
        words.append(f"--data.stages={[{'length': stage.length, 'steps': 1} for stage in asked.data.stages]}")
    train(read_settings(name, words))
    folder = tmp_path / ("adapter" if asked.tune.lora else "model")
    written = {k: v.dtype for k, v in load_file(next(folder.glob("*.safetensors"))).items()}
    facts = json.loads((tmp_path / "metrics.json").read_text())["facts"]
    kinds = {"adapters" if "lora_" in key else "weights": dtype for key, dtype in written.items()}
    assert facts["steps"] == 2 and {k: str(v).removeprefix("torch.") for k, v in kinds.items()} == facts["written"]
    assert facts["written"]["weights"] == asked.model.dtype
    said = f"{'adapters in float32, ' if asked.tune.lora else ''}weights in {asked.model.dtype}"
    assert f"written: {said}" in (folder / "README.md").read_text()
    kept = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")["state"]
    assert kept and all(moments["exp_avg"].dtype == torch.float32 for moments in kept.values())
