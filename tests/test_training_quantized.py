"""QLoRA and optimizers that keep their moments in 8 bits, where bitsandbytes and torchao are installed."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import shipped_models
import torch
from safetensors.torch import load_file

from hf_posenc import PosencError, load, patch_model, save
from hf_posenc.models import NAMES, model_path
from hf_posenc.training.recipe import make_trainer, prepare, train
from hf_posenc.training.settings_file import read_settings
from hf_posenc.training.sharding import refuse_sharded_bits

SMALL = [
    "--data.length=64", "--data.passkey=0.0", "--train.max_steps=3", "--train.warmup_steps=0",
    "--train.logging_steps=1", "--train.per_device_train_batch_size=2",
    "--measure={lengths: [64], windows: 1, scored: 8}",
]  # fmt: skip

pytestmark = pytest.mark.skipif("tiny" not in NAMES, reason="the package was built without its model")
installed = {name: importlib.util.find_spec(name) is not None for name in ("bitsandbytes", "torchao")}
in_4_bits = pytest.mark.skipif(not installed["bitsandbytes"], reason="bitsandbytes is not installed")


@pytest.fixture(scope="session")
def models(once) -> Path:
    return once("shipped_models", shipped_models.fill)


def settings(models: Path, output: Path, *words: str):
    return read_settings(
        "tiny_yarn", [*shipped_models.words("tiny_yarn", models), *SMALL, f"--output={output}", *words]
    )


def four_bits(dtype=torch.float32):
    """The base by transformers alone, which nobody here wrote."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), quantization_config=config, dtype=dtype)
    return model.train()  # bitsandbytes packs weights anew where it is not trained


@pytest.fixture(scope="module")
def run(once, models) -> Path:
    words = ["--model.quantize=nf4"]
    return once("four_bits", lambda folder: train(settings(models, folder / "run", *words), merged=True)) / "run"


@in_4_bits
def test_adapters_learn_on_a_base_in_4_bits_as_on_the_same_weights_in_32(models, tmp_path):
    """The reference is a model whose linear layers hold the numbers that the 4 bits stand for."""
    whole = four_bits().dequantize()
    whole.save_pretrained(tmp_path / "whole")
    asked = [settings(models, tmp_path / "a", "--model.quantize=nf4")]
    asked.append(settings(models, tmp_path / "b", f"--model.path={tmp_path / 'whole'}", "--model.tokenizer=tiny"))
    found = []
    for one in asked:
        trainer = make_trainer(prepare(one))
        trainer.train()
        named = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
        found.append(([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], named))
    assert {type(m).__name__ for m in trainer.model.modules()} & {"Linear4bit"} == set()
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4) and found[0][1].keys() == found[1][1].keys()
    for name, weight in found[0][1].items():
        assert float((weight - found[1][1][name]).abs().mean()) < 2e-5, name
    moved = [n for n, w in found[0][1].items() if "lora_B" in n and bool(w.any())]
    assert len(moved) == sum("lora_B" in n for n in found[0][1])


@in_4_bits
def test_what_comes_of_it_is_loaded_on_4_bits_again_and_merged_from_what_they_stand_for(run):
    adapted, merged = load(run / "adapter", dtype=torch.float32), load(run / "merged", dtype=torch.float32)
    base = adapted.get_base_model()
    assert base.is_loaded_in_4bit and "quantization_config" not in json.loads(
        (run / "merged" / "config.json").read_text()
    )
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        tuned, whole = adapted(ids).logits, merged(ids).logits
        with adapted.disable_adapter():
            plain = adapted(ids).logits
        wanted = patch_model(four_bits(), "yarn", target_length=1280)(ids).logits
        other = load(run / "adapter", dtype=torch.float32, quantization_config=None)(ids).logits
    torch.testing.assert_close(plain, wanted)
    torch.testing.assert_close(tuned, whole, atol=1e-3, rtol=1e-3)
    assert float((tuned - other).abs().max()) > 0.1  # the base as it is stored is another model
    facts = json.loads((run / "metrics.json").read_text())["facts"]
    assert facts["parameters"] == sum(p.numel() for p in load("tiny").parameters())
    assert not any("absmax" in name for name in load_file(run / "merged" / "model.safetensors"))


@in_4_bits
def test_a_stopped_run_on_4_bits_goes_on_to_the_same_weights(models, tmp_path):
    """The base is packed anew from the same weights, the adapters, masters and moments come from the checkpoint."""
    words = ["--model.quantize=nf4", "--train.save_steps=2", "--tune.lora.lora_dropout=0.1"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(settings(models, whole, *words), merged=False)
    again.mkdir()
    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    shutil.copy(whole / "before.json", again)
    train(settings(models, again, *words), resume=True, merged=False)
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (again, whole))
    earlier = load_file(whole / "checkpoint-2" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    assert all(not torch.equal(earlier[name], theirs[name]) for name in theirs if "lora_B" in name)
    one, other = (json.loads((folder / "metrics.json").read_text()) for folder in (again, whole))
    assert one["figures"] == other["figures"] and len(one["facts"]["losses"]) == 3
    assert one["facts"]["losses"] == other["facts"]["losses"]


@in_4_bits
def test_an_adapter_on_4_bits_is_not_put_on_whole_weights_unasked(run, monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "bitsandbytes" else own(name, *a))
    with pytest.raises(PosencError, match=r"in 4 bits, by bitsandbytes: pip install bitsandbytes"):
        load(run / "adapter")


@pytest.mark.skipif(not installed["torchao"], reason="torchao is not installed")
def test_an_adapter_on_8_bits_of_torchao_is_loaded_on_them_again(tmp_path):
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    base = load("tiny", dtype=torch.float32, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    patch_model(base, "yarn", target_length=1280)
    asked = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, asked).eval()
    save(adapted, tmp_path)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        found = adapted(ids).logits
        torch.testing.assert_close(load(tmp_path, dtype=torch.float32)(ids).logits, found)
        other = load(tmp_path, dtype=torch.float32, quantization_config=None)(ids).logits
    assert float((other - found).abs().max()) > 1e-3  # the base as it is stored is another model


def test_4_bits_without_their_package_or_without_adapters_are_refused(models, tmp_path, monkeypatch):
    with pytest.raises(PosencError, match="which cannot be trained"):
        settings(models, tmp_path, "--model.quantize=nf4", "--tune.lora=null")
    asked = settings(models, tmp_path / "out", "--model.quantize=nf4")
    with pytest.raises(PosencError, match="this launch shards them"):
        refuse_sharded_bits(asked, True)
    refuse_sharded_bits(asked, False)
    own = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "bitsandbytes" else own(name, *a))
    with pytest.raises(PosencError, match=r"model\.quantize: nf4 needs bitsandbytes: pip install bitsandbytes"):
        train(asked)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"])
def test_moments_of_8_bits_train_as_those_of_32(models, tmp_path, name):
    if not installed["torchao" if name == "adamw_torch_8bit" else "bitsandbytes"]:
        pytest.skip("its package is not installed")
    found = []
    for optim in (name, "adamw_torch"):  # bitsandbytes leaves embeddings and small tensors in 32 bits
        words = [f"--train.optim={optim}", "--tune.lora={r: 64}"]
        trainer = make_trainer(prepare(settings(models, tmp_path / optim, *words)))
        named = [p for p in trainer.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in named]
        trainer.train()
        found.append(torch.cat([(p.detach() - old).flatten() for p, old in zip(named, before, strict=True)]))
    assert any(held.dtype == torch.uint8 or "8bit" in type(held).__name__ for held in moments(tmp_path / name))
    assert float(torch.cosine_similarity(*found, 0)) > 0.9


def moments(folder: Path) -> list[torch.Tensor]:
    """All tensors of an optimizer's state, however deep it keeps them."""

    def inside(value):
        if isinstance(value, dict):
            return [tensor for one in value.values() for tensor in inside(one)]
        return [value] if isinstance(value, torch.Tensor) else []

    return inside(torch.load(max(folder.glob("checkpoint-*")) / "optimizer.pt", weights_only=False)["state"])
