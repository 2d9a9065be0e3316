"""Folders for vLLM, SGLang, MLX and CTranslate2: what is written means the same, the rest is refused."""

import json

import pytest
import torch
from test_gguf import TARGET, TRAINED, needs_runtime, off, vocabulary
from test_gguf import model_of as shaped
from test_other_readers import logits, model_of
from transformers import AutoModelForCausalLM

from hf_posenc import PosencError, UnsupportedCell, load, patch_model, save
from hf_posenc.engines.kinds import KINDS
from hf_posenc.serving import exports, external_runtimes
from hf_posenc.serving.folders import WAYS, export_folder
from hf_posenc.serving.gguf.fix import fix_gguf
from hf_posenc.serving.gguf.write import write_gguf
from hf_posenc.serving.rules import RUNTIMES, rules_of

HOW = {
    "ntk": dict(factor=4.0),
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, truncate=False),
    "llama3": dict(factor=4.0),
    "none": {},
    "proportional": dict(partial_rotary_factor=0.5),
}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """No runtime is here, whatever the machine has."""
    for runtime in external_runtimes.EXTERNAL_RUNTIMES.values():
        monkeypatch.setenv(runtime.variable, "/nowhere/python")
    monkeypatch.setattr(external_runtimes.ExternalRuntime, "version", lambda self: None)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rules_speak_of_kinds_and_ways_that_there_are(runtime):
    rules = rules_of(runtime)
    for kinds in rules.architectures.values():
        assert set(kinds) <= set(KINDS) and set(kinds.values()) <= set(WAYS)
    assert set(rules.alike) <= set(rules.architectures)
    for kind in set(KINDS) - {"plain"}:
        try:
            rules.how("llama", kind, "x")
        except UnsupportedCell as refusal:
            assert rules.runtime in str(refusal)


@pytest.mark.parametrize("scheme", HOW)
@pytest.mark.parametrize("runtime", ["vllm", "sglang", "mlx"])
def test_transformers_reads_the_same_from_what_is_written(runtime, scheme, tmp_path):
    model = patch_model(model_of("llama"), scheme, **HOW[scheme])
    save(model, tmp_path / "a")
    assert export_folder(tmp_path / "a", tmp_path / "b", runtime) is None  # nothing to prove it with
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "posenc" not in raw
    # vLLM multiplies the length of a linear RoPE by its factor, and takes a longrope's as it stands.
    assert runtime == "mlx" or raw["rope_parameters"]["rope_type"] != "linear"
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "b"))
    torch.testing.assert_close(found, logits(model), atol=2e-4, rtol=0)


def test_mlx_is_given_lengths_from_which_it_computes_the_attention_factor(tmp_path):
    import math

    model = patch_model(model_of("llama31"), "yarn", factor=4.0, existing="extend")
    save(model, tmp_path / "a")
    export_folder(tmp_path / "a", tmp_path / "b", "mlx")
    rope, longest = json.loads((tmp_path / "b" / "config.json").read_text())["rope_scaling"], 256
    original = rope["original_max_position_embeddings"]
    computed = math.sqrt(1 + math.log(longest / original) / math.log(original))  # as mlx-lm's SuScaledRoPE does
    assert computed == pytest.approx(model.config.rope_parameters["attention_factor"]) and computed > 1.1


REFUSED = {
    ("mlx", "gemma2", "linear"): "reads rope_theta alone.* 'ntk'",
    ("ct2", "gemma2", "ntk"): "patched or not",
    ("ct2", "gemma2", "llama3"): "patched or not",
    ("sglang", "gemma2", "linear"): "reads rope_theta alone on this model type.* 'ntk'",
    ("vllm", "llama", "alibi"): "nearest scheme that vLLM can serve is",
    ("mlx", "llama", "self_extend"): "works inside attention, .* nearest scheme that MLX can serve is",
    ("vllm", "llama", "dynamic_ntk"): "by the length of each text, .* nearest scheme that vLLM can serve is 'ntk'",
}


@pytest.mark.parametrize("cell", REFUSED, ids="-".join)
def test_what_cannot_be_right_is_refused(cell, tmp_path):
    runtime, kind, scheme = cell
    options = {} if scheme == "alibi" else dict(factor=4.0)
    save(patch_model(model_of(kind), scheme, **options), tmp_path / "a")
    with pytest.raises(UnsupportedCell, match=REFUSED[cell]):
        export_folder(tmp_path / "a", tmp_path / "b", runtime)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_proved_is_said(tmp_path):
    assert "Not proved here: mlx is not installed" in exports.proof_advice("mlx", "b", "a")
    assert "hf-posenc verify b --with mlx --against a" in exports.proof_advice("mlx", "b", "a")
    assert "cannot be asked" in exports.proof_advice("sglang", "b", "a")


def test_ct2_wants_its_converter(tmp_path):
    save(patch_model(model_of("llama"), "ntk", factor=4.0), tmp_path / "a")
    with pytest.raises(PosencError, match="not installed here: pip install ctranslate2"):
        export_folder(tmp_path / "a", tmp_path / "b", "ct2")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@needs_runtime
@pytest.mark.parametrize("options", [{"attention_factor": 1.5}, {"truncate": False}], ids=lambda o: next(iter(o)))
def test_a_converted_file_is_corrected(options, tmp_path):
    """One that lost its scheme, as llama.cpp's converter would lose it."""
    write_gguf(shaped("llama"), vocabulary(), tmp_path / "lost.gguf", "f32", name="model")
    model = shaped("llama", ("yarn", {"factor": 4.0, **options}))
    save(model, tmp_path / "a")
    assert off(model, tmp_path / "lost.gguf", [TRAINED - 8]) > 0.05
    proof = fix_gguf(tmp_path / "a", tmp_path / "fixed.gguf", tmp_path / "lost.gguf")
    assert proof is not None and proof.holds
    assert off(load(tmp_path / "a"), tmp_path / "fixed.gguf", [TRAINED - 8, TARGET - 8]) < 5e-4
