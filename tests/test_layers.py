"""Attention layers that read `rope_parameters` by themselves: a patched model is what one is that was born so."""

import copy
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from cells import tiny, tokens
from safetensors.torch import save_file
from test_plain_load import plain_verdicts

sys.path.insert(0, str(Path(__file__).parent / "sweep"))
from shrink import CAUSAL, PLAIN, SCALED, tiny_model

from hf_posenc import PosencError, UnsupportedCell, check_model, describe, load, patch_model, save, unpatch_model
from hf_posenc.patching import layers

MODELS = Path(transformers.__file__).parent / "models"
READING = sorted(
    file.parent.name
    for file in MODELS.glob("*/modeling_*.py")
    if re.search(r"self\.scaling = \w+\(config\.rope_parameters", file.read_text(encoding="utf-8"))
)
"""The model types whose attention takes its scaling from there, by the words of their code."""
TYPES = [name for name in READING if name in CAUSAL]
ASKED = {
    "ntk": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "linear": {"factor": 4.0},
    "rope": {},
    "none": {},
}
TEMPERED = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
IDS = tokens(2, 28)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def patch_quietly(model, scheme, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(model, scheme, **options)


def model_from_config(model):
    """A model that was built from what the config of another says, with the same weights."""
    values = {k: v for k, v in copy.deepcopy(model.config).to_dict().items() if k != "posenc"}
    other = type(model)(type(model.config)(**values)).eval()
    other.load_state_dict(model.state_dict())
    return other


def scalings(model):
    return [m.scaling for m in model.modules() if isinstance(getattr(m, "scaling", None), float)]


def test_the_types_are_known():
    assert {"deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite"} <= set(TYPES), READING


@pytest.mark.parametrize("kind", TYPES)
def test_every_such_type_is_what_one_is_that_was_born_so(kind):
    for rope, asked in ((SCALED, {"ntk": {"factor": 4.0}, "rope": {}}), (PLAIN, {"yarn": TEMPERED})):
        model = tiny_model(kind, rope=rope)
        own, noted = logits(model), scalings(model)
        for scheme, options in asked.items():
            patch_quietly(model, scheme, **options)
            check_model(model)
            assert describe(model).portability.startswith("config")
            torch.testing.assert_close(logits(model), logits(model_from_config(model)), atol=1e-5, rtol=1e-5)
            assert (scalings(model) == noted) == (scheme == "ntk")
            unpatch_model(model)
            assert torch.equal(logits(model), own) and scalings(model) == noted


def test_plain_transformers_agrees(tmp_path):
    jobs = {}
    for kind in ("deepseek_v3", "minicpm3"):
        cases = {f"{kind} {scheme}": (SCALED, scheme, options) for scheme, options in ASKED.items()}
        cases[f"{kind} replaced"] = (SCALED, "ntk", {"factor": 4.0, "existing": "replace"})
        cases[f"{kind} tempered"] = (PLAIN, "yarn", TEMPERED)
        for name, (rope, scheme, options) in cases.items():
            model = patch_quietly(tiny_model(kind, rope=rope), scheme, **options)
            folder = tmp_path / name
            save(model, folder)
            expected = logits(model)
            assert torch.equal(logits(load(folder).eval()), expected), name
            save_file({"ids": IDS, "said": expected}, tmp_path / f"{name}.safetensors")
            jobs[name] = {"path": str(folder), "expected": str(tmp_path / f"{name}.safetensors"), "key": "said"}
            jobs[name] |= {"auto": "AutoModelForCausalLM", "arguments": {}}
    verdicts = plain_verdicts(jobs, tmp_path)
    assert set(verdicts.values()) == {"exact"}, verdicts


def test_a_temperature_on_top_of_another_is_refused():
    model = tiny_model("deepseek_v3", rope=SCALED)
    before = scalings(model)
    with pytest.raises(UnsupportedCell, match="existing='replace' drops"):
        patch_quietly(model, "yarn", **TEMPERED)
    assert scalings(model) == before
    patch_quietly(model, "yarn", **TEMPERED, existing="replace")
    torch.testing.assert_close(logits(model), logits(model_from_config(model)), atol=1e-5, rtol=1e-5)


def test_what_is_sealed_keeps_what_its_layers_have_noted(tmp_path):
    model = tiny_model("deepseek_v3", rope=SCALED)
    before = scalings(model)
    patch_quietly(model, "dynamic_ntk", factor=4.0)
    check_model(model)
    assert scalings(model) == before
    save(model, tmp_path)
    assert torch.equal(logits(load(tmp_path).eval()), logits(model))


@pytest.mark.parametrize("scheme", [None, "ntk", "dynamic_ntk"])
def test_a_check_sees_it(scheme):
    model = tiny_model("deepseek_v3", rope=SCALED)
    if scheme is not None:
        patch_quietly(model, scheme, factor=4.0)
    check_model(model)
    layer = model.model.layers[-1].self_attn
    layer.scaling *= 2
    with pytest.raises(PosencError, match="scaling of DeepseekV3Attention"):
        check_model(model)
    layer.scaling /= 2
    layer.attention_dropout = 0.3  # which is none of our business
    check_model(model)
    model.model.layers[-1].self_attn.scaling *= 2
    if scheme is None:
        with pytest.raises(PosencError, match="changed by hand"):
            patch_quietly(model, "rope")


def test_others_are_written_as_ever():
    model = patch_quietly(tiny("llama"), "yarn", **TEMPERED)
    assert not model.config.rope_parameters.get("mscale_all_dim")


def test_one_layer_of_a_kind_is_enough(monkeypatch):
    calls, build = [], layers.built_values
    monkeypatch.setattr(layers, "built_values", lambda *args: calls.append(1) or build(*args))
    patch_quietly(tiny("llama", num_hidden_layers=12), "ntk", factor=4.0)
    assert len(calls) == 2
