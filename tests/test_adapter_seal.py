"""Adapters of patched models: refused by PEFT alone, and by `load` on weights that they were not trained on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import tiny, tokens
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from stored_models import LONG, logits
from test_adapters import base_of, moved, originals, trainer, with_adapter  # noqa: F401  a fixture
from test_old_checkpoints import OLD, assert_same
from torch import nn
from transformers import AutoModelForCausalLM

from hf_posenc import PosencError, is_patched, load, merge, patch_model, reseal, save
from hf_posenc.checkpoints.on_disk import describe_checkpoint
from hf_posenc.patching.fingerprint import base_weights, fingerprint

SCRIPT = Path(__file__).with_name("plain_peft.py")
IDS = tokens(2, LONG)
RELEASES = [None, *filter(None, os.environ.get("HF_POSENC_PEFT_RELEASES", "").split(os.pathsep))]
"""Folders with other releases of PEFT (and of transformers), to be found before the installed ones."""


def in_peft_alone(base, adapters, release=None):
    """What PEFT and transformers without this package make of some adapters."""
    command = [sys.executable, str(SCRIPT), str(base), *map(str, adapters)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if release is not None:
        environment["PYTHONPATH"] = release.replace("+", os.pathsep)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


KINDS = {
    "ia3": lambda: IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    "vera": lambda: VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.fixture(scope="module")
def written(originals, tmp_path_factory):  # noqa: F811
    """Adapters of patched models as everyone saves them, and one of an unpatched model."""
    folder = tmp_path_factory.mktemp("written")
    for scheme in ("yarn", "alibi", "t5"):
        save(with_adapter(base_of(originals, "llama", scheme), "llama"), folder / f"save-{scheme}")
    with_adapter(base_of(originals, "llama", "yarn"), "llama").save_pretrained(folder / "peft")
    for kind, config in KINDS.items():
        save(moved(get_peft_model(base_of(originals, "llama", "yarn"), config())), folder / kind)
    own = base_of(originals, "llama", "alibi")
    own.add_adapter(LoraConfig(target_modules=["q_proj"], r=4))
    moved(own).save_pretrained(folder / "transformers")
    two = with_adapter(base_of(originals, "llama", "yarn"), "llama")
    two.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", target_modules=["k_proj"], r=2))
    two.save_pretrained(folder / "two")
    job = trainer(with_adapter(base_of(originals, "llama", "yarn"), "llama"), folder / "run", 1)
    job.train()
    job.save_model(folder / "final")
    with_adapter(base_of(originals, "llama"), "llama").save_pretrained(folder / "plain")
    return folder


SEALED = [*(f"save-{scheme}" for scheme in ("yarn", "alibi", "t5")), "peft", *KINDS, "transformers", "two"]
SEALED += ["two/second", "run/checkpoint-1", "final"]


@pytest.mark.parametrize("release", RELEASES)
def test_peft_alone_refuses(release, originals, written, resealed):  # noqa: F811
    plain, sealed = str(written / "plain"), [*(written / name for name in SEALED), *resealed.iterdir()]
    found = in_peft_alone(originals / "llama", [*sealed, plain], release)
    for folder in sealed:
        ways = found[str(folder)]
        assert len(ways) == 5
        for way, verdict in ways.items():
            assert "hf_posenc.load(path)" in verdict, (folder, way, verdict, found["versions"])
    if release is None:
        assert set(found[plain].values()) == {"loads"}


@pytest.mark.parametrize("name", SEALED)
def test_load_gives_them_back(name, originals, written):  # noqa: F811
    base = originals / "llama" if name == "transformers" else None
    model = load(written / name, base=base)
    assert isinstance(model, PeftModel)
    assert is_patched(model.get_base_model())
    if name != "prompt":  # PEFT leaves prompts trainable, and refuses to load them to be trained
        assert not any(parameter.requires_grad for parameter in model.parameters())
        again = load(written / name, base=base, is_trainable=True)
        assert any(parameter.requires_grad for parameter in again.parameters())
    if base is None:
        description, settings = describe_checkpoint(written / name)
        assert description.scheme == model.get_base_model().config.posenc["scheme"]
        assert settings["peft_type"] in ("LORA", "IA3", "VERA", "PROMPT_TUNING")


def test_what_others_look_for_in_an_adapter_is_not_there(written):
    """vLLM, SGLang and llama.cpp's converter ask for no type, but for these."""
    config = json.loads((written / "save-yarn" / "adapter_config.json").read_text())
    assert not {"r", "lora_alpha", "target_modules", "modules_to_save"} & set(config)
    assert {"base_model_name_or_path", "task_type"} < set(config)


def test_a_sealed_adapter_without_its_scheme_is_refused(written, tmp_path):
    shutil.copytree(written / "save-yarn", tmp_path / "a")
    (tmp_path / "a" / "posenc.json").unlink()
    with pytest.raises(PosencError, match="is lost"):
        load(tmp_path / "a")


def test_a_damaged_seal_is_refused(written, tmp_path):
    folder = shutil.copytree(written / "save-yarn", tmp_path / "a")
    file = folder / "adapter_config.json"
    good = json.loads(file.read_text())
    for bad in ({**good, "hf_posenc": None}, {**good, "hf_posenc": {"peft_type": "NONE"}}, {**good, "hf_posenc": {}}):
        file.write_text(json.dumps(bad))
        with pytest.raises(PosencError, match=r"adapter_config\.json"):
            load(folder)


def test_the_place_of_a_base_can_be_changed_by_hand(originals, written, tmp_path):  # noqa: F811
    folder = shutil.copytree(written / "save-yarn", tmp_path / "a")
    shutil.copytree(originals / "llama", tmp_path / "moved")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(tmp_path / "moved")}))
    assert load(folder).peft_config["default"].base_model_name_or_path == str(tmp_path / "moved")


def test_the_best_checkpoint_of_a_trainer_is_found_again(originals, tmp_path):  # noqa: F811
    adapted = with_adapter(base_of(originals, "llama", "yarn"), "llama")
    job = trainer(adapted, tmp_path / "run", 3, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    job.train()
    best = load(job.state.best_model_checkpoint)
    assert torch.equal(logits(best, IDS), logits(job.model.eval(), IDS))


# ---------------------------------------------------------------------------------------------------------------------
# The weights of the base


def test_a_merged_base_is_noticed(originals, tmp_path):  # noqa: F811
    """An adapter on what it was merged into would be applied twice."""
    save(with_adapter(base_of(originals, "llama", "yarn"), "llama"), tmp_path / "a")
    merge(tmp_path / "a", tmp_path / "merged")
    with pytest.raises(PosencError, match="merged into it already"):
        load(tmp_path / "a", base=tmp_path / "merged")
    with pytest.raises(PosencError, match="merged into it already"):
        load(tmp_path / "a", base=load(tmp_path / "merged"))
    assert load(tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.03, 0.3])
def test_small_changes_are_noticed_too(dtype, size, originals, tmp_path):  # noqa: F811
    """Of a part of the weights' own size that training makes of them."""
    base = base_of(originals, "llama", "yarn").to(dtype)
    save(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])), tmp_path / "a")
    other = base_of(originals, "llama", "yarn").to(dtype)
    for name, parameter in other.named_parameters():
        if "q_proj" in name:
            parameter.data += size * parameter.std() * torch.randn_like(parameter)
    with pytest.raises(PosencError, match="q_proj"):
        load(tmp_path / "a", base=other)


def test_another_version_is_noticed(originals, tmp_path):  # noqa: F811
    save(with_adapter(base_of(originals, "llama", "yarn"), "llama"), tmp_path / "a")
    tiny("llama", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(PosencError, match="another version"):
        load(tmp_path / "a", base=tmp_path / "other")
    file = tmp_path / "a" / "posenc.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "base"}))
    assert load(tmp_path / "a", base=tmp_path / "other")  # as the message says


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("trained", DTYPES)
def test_casts_raise_no_alarm(trained, originals, tmp_path):  # noqa: F811
    base = AutoModelForCausalLM.from_pretrained(originals / "llama", dtype=trained)
    adapted = get_peft_model(
        patch_model(base, "yarn", factor=4.0), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    save(adapted, tmp_path / "a")
    for dtype in DTYPES:
        load(tmp_path / "a", dtype=dtype)
        for between in DTYPES:  # rounded twice
            twice = patch_model(base_of(originals, "llama").to(between).to(dtype), "yarn", factor=4.0)
            load(tmp_path / "a", base=twice)


@pytest.mark.parametrize("start", ["pissa", "olora", "gaussian", True])
def test_adapters_that_change_the_weights_below_them_raise_no_alarm(start, originals, tmp_path):  # noqa: F811
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4, init_lora_weights=start)
    adapted = moved(get_peft_model(base_of(originals, "llama", "yarn"), config))
    expected = logits(adapted, IDS)
    save(adapted, tmp_path / "a")
    torch.testing.assert_close(logits(load(tmp_path / "a"), IDS), expected, atol=1e-3, rtol=0)


def test_an_adapter_that_is_merged_for_the_moment_raises_no_alarm(originals, tmp_path):  # noqa: F811
    adapted = with_adapter(base_of(originals, "llama", "yarn"), "llama")
    expected = logits(adapted, IDS)
    adapted.merge_adapter()
    save(adapted, tmp_path / "a")
    assert torch.equal(logits(load(tmp_path / "a"), IDS), expected)


def test_more_tokens_raise_no_alarm(originals, tmp_path):  # noqa: F811
    save(with_adapter(base_of(originals, "llama", "yarn"), "llama"), tmp_path / "a")
    larger = base_of(originals, "llama", "yarn")
    larger.resize_token_embeddings(100)
    assert load(tmp_path / "a", base=larger)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["learned", "t5", "alibi"])
def test_a_fingerprint_knows_each_kind_of_weight_and_none_of_the_scheme(scheme, kind, originals):  # noqa: F811
    model = base_of(originals, kind, scheme)
    found = fingerprint(model)
    assert not any("posenc" in name or "wpe" in name or "position_embeddings" in name for name in found)
    assert len(found) >= 7
    adapted = with_adapter(model, kind)
    assert fingerprint(adapted.get_base_model()).keys() <= {name for name, _ in tiny(kind).named_parameters()}
    assert len(json.dumps(found)) < 20_000


def test_adapted_layers_are_looked_at_first(originals):  # noqa: F811
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], layers_to_transform=[1])
    adapted = get_peft_model(base_of(originals, "llama", "yarn"), config)
    assert next(iter(fingerprint(adapted.get_base_model()))) == "model.layers.1.self_attn.q_proj.weight"


def test_what_has_no_numbers_is_left_out(originals):  # noqa: F811
    model = base_of(originals, "llama", "yarn")
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        torch.zeros(64, 16, dtype=torch.uint8), requires_grad=False
    )
    model.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.empty(32, 64, device="meta"))
    names = {name for name, _, _ in base_weights(model)}
    assert not {f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj")} & names
    assert "model.layers.0.mlp.gate_proj.weight" in names


@pytest.mark.parametrize("bad", [5, [], {"a": 1}, {"a": {"shape": [2], "dtype": "float32", "values": "?"}}, {"a": {}}])
def test_a_damaged_fingerprint_is_refused(bad, written, tmp_path):
    folder = shutil.copytree(written / "save-yarn", tmp_path / "a")
    file = folder / "posenc.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base": bad}))
    with pytest.raises(PosencError, match=r"posenc\.json"):
        load(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters of earlier versions


@pytest.fixture(scope="module")
def resealed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resealed")
    for name in ("lora_yarn_save", "lora_t5_save_pretrained"):
        shutil.copytree(OLD / name, folder / name)
        file = folder / name / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(OLD / "llama")}))
        assert reseal(folder / name)
        assert not reseal(folder / name)
    return folder


def test_old_adapters_can_be_sealed(resealed):
    for folder in resealed.iterdir():
        assert_same(folder)


def test_an_adapter_of_an_unpatched_model_is_not_sealed(written):
    with pytest.raises(PosencError, match="nothing to seal"):
        reseal(written / "plain")
