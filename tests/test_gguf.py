"""GGUF files in llama.cpp itself: what is written is computed there as here, or refused."""

import ctypes
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_posenc import UnsupportedCell, UnsupportedModel, load, patch_model
from hf_posenc.cli.main import app
from hf_posenc.models import model_path
from hf_posenc.serving import llama_cpp
from hf_posenc.serving.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, Vocabulary, read_vocabulary
from hf_posenc.serving.gguf.write import write_gguf

pytest.importorskip("gguf", reason="GGUF files need gguf: pip install gguf")
needs_runtime = pytest.mark.skipif(llama_cpp.version() is None, reason="llama.cpp is not here: pip install xllamacpp")

TRAINED, TARGET = 64, 256
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": TRAINED, "initializer_range": 0.15}
MODELS = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": None},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 16},
    "gemma2": {**SHAPE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "phi3": {**SHAPE, "original_max_position_embeddings": TRAINED},
    "gpt2": {**GPT2, "bos_token_id": 1, "eos_token_id": 2},
}
NOISE = {"gemma2": 5e-3, "gpt2": 5e-2}
"""What llama.cpp rounds by itself, as on the unpatched model: it reads GELU from a table in fp16."""
ROPE = {
    "unpatched": None,
    "ntk": ("ntk", {"factor": 4.0}),
    "linear": ("linear", {"factor": 4.0}),
    "yarn": ("yarn", {"factor": 4.0}),
    "yarn attention_factor": ("yarn", {"factor": 4.0, "attention_factor": 1.5}),
    "yarn betas": ("yarn", {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn untruncated": ("yarn", {"factor": 4.0, "truncate": False}),
    "llama3": ("llama3", {"factor": 4.0}),
    "none": ("none", {"target_length": TARGET}),
    "proportional": ("proportional", {"partial_rotary_factor": 0.5, "target_length": TARGET}),
}
TABLES = {
    "unpatched": None,
    "learned": ("learned", {"factor": 4.0}),
    "sinusoidal": ("sinusoidal", {"factor": 4.0}),
    "none": ("none", {"target_length": TARGET}),
}
UNSAID = {
    *((kind, how) for kind in ("qwen3", "gemma2") for how in ("llama3", "proportional")),
    *((kind, how) for kind in ("qwen3", "gemma2") for how in ("yarn betas", "yarn untruncated")),
}
"""What llama.cpp has no way to be told: it reads no factor for each pair there."""
CELLS = [
    (kind, how)
    for kind in MODELS
    for how in (TABLES if kind == "gpt2" else ROPE)
    if (kind, how) != ("phi3", "proportional")  # which Phi-3's own config refuses
]


def vocabulary():
    """Bytes and made-up words: enough for llama.cpp to start."""
    words = [f"w{i}" for i in range(253)]
    tokens = [t.encode() for t in ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 253]
    special = {"unknown": 0, "bos": 1, "eos": 2}
    return Vocabulary("llama", "default", tokens, types, scores=[0.0] * 512, special=special)


def model_of(kind, how=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])).float().eval()
    if how is not None:
        patch_model(model, how[0], **how[1])
    return model


def off(model, path, lengths, visible=400):
    """How far llama.cpp is from the live model, in log-probabilities of the next token."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, size, (1, max(lengths)), generator=torch.Generator().manual_seed(1))
    theirs = llama_cpp.log_probabilities(path, [ids[0, :n].tolist() for n in lengths], size, visible)
    found = []
    for length, row in zip(lengths, theirs, strict=True):
        with torch.no_grad():
            ours = model(ids[:, :length]).logits[0, -1].float().log_softmax(-1)
        assert row.isfinite().all()
        found.append(float((ours - row).abs().max()))
    return max(found)


@needs_runtime
@pytest.mark.parametrize(("kind", "how"), CELLS, ids=[f"{kind}-{how}" for kind, how in CELLS])
def test_llama_cpp_computes_the_same(kind, how, tmp_path):
    scheme = {**ROPE, **TABLES}[how]
    model, path = model_of(kind, scheme), tmp_path / "model.gguf"
    if (kind, how) in UNSAID:
        with pytest.raises(UnsupportedCell, match=r"reads no factor for each pair .* Patch the original model"):
            write_gguf(model, vocabulary(), path, "f32", name="model")
        assert not path.exists()
        return
    write_gguf(model, vocabulary(), path, "f32", name="model")
    lengths = [TRAINED - 8] if how == "unpatched" else [TRAINED - 8, TARGET - 8]
    assert off(model, path, lengths) < NOISE.get(kind, 5e-4)


@needs_runtime
def test_the_comparison_notices_a_dropped_scheme(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(model_of("llama", ("yarn", {"factor": 4.0})), vocabulary(), path, "f32", name="model")
    assert off(model_of("llama"), path, [TARGET - 8]) > 0.1


@needs_runtime
def test_yarn_on_a_rope_that_was_scaled_before(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED // 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    patch_model(model, "yarn", factor=4.0, existing="extend")
    write_gguf(model, vocabulary(), tmp_path / "model.gguf", "f32", name="model")
    assert off(model, tmp_path / "model.gguf", [TRAINED - 8, TARGET - 8]) < 5e-4


@pytest.mark.parametrize("scheme", ["alibi", "self_extend", "window", "dynamic_ntk", "learned"])
def test_what_only_this_package_computes_is_refused(scheme, tmp_path):
    model = model_of("llama", (scheme, {} if scheme in ("alibi", "window") else {"factor": 4.0}))
    with pytest.raises(UnsupportedCell, match=r"The nearest scheme that llama.cpp can serve is '\w+'"):
        write_gguf(model, vocabulary(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_weights_in_few_bits_are_refused(tmp_path):
    model = model_of("llama")
    packed = torch.zeros(512, 1, dtype=torch.uint8)  # as bitsandbytes holds 4 bits
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"held as torch\.uint8.*hf-posenc merge"):
        write_gguf(model, vocabulary(), tmp_path / "model.gguf")


@needs_runtime
@pytest.mark.parametrize(("dtype", "limit"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.2), ("q8_0-f16", 0.2)])
def test_smaller_weights(dtype, limit, tmp_path):
    model, path = model_of("llama", ("yarn", {"factor": 4.0})), tmp_path / "model.gguf"
    write_gguf(model, vocabulary(), path, dtype, name="model")
    assert off(model, path, [TRAINED - 8, TARGET - 8]) < limit


@needs_runtime
def test_q8_0_is_rounded_as_llama_cpp_rounds_it():
    """By ggml's own function, which its quantiser calls."""
    import gguf
    import xllamacpp

    own = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))).quantize_q8_0
    own.restype = ctypes.c_size_t
    own.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    weights = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).numpy()
    weights[3] = 0
    theirs = np.zeros(weights.size // 32 * 34, np.uint8)
    assert own(weights.ctypes.data, theirs.ctypes.data, *weights.shape, None) == theirs.size
    ours = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0).reshape(-1)
    assert np.array_equal(ours, theirs) and len(np.unique(theirs)) > 100


@needs_runtime
def test_the_command_line_exports_and_proves(tmp_path):
    patched, file = tmp_path / "patched", tmp_path / "patched.gguf"
    done = CliRunner().invoke(app, ["patch", "tiny", str(patched), "--scheme", "yarn", "--factor", "2"])
    assert done.exit_code == 0, done.output
    exported = ["export", str(patched), str(file), "--dtype", "f32"]
    done = CliRunner().invoke(app, exported)
    assert done.exit_code == 0 and "computes the same" in done.stdout, done.output
    assert json.loads((tmp_path / "patched.gguf.proof.json").read_text())["holds"]
    again = CliRunner().invoke(app, exported)
    assert again.exit_code == 2 and "exists already" in again.stderr


TEXTS = (
    "Once upon a time, there was a little girl named Lily.",
    "  spaces   and\nnewlines\t, digits 1234567, and don't.",
    "Ünïcödé — “quotes”, 你好, emoji 🙂 and a very-long-hyphenated_word",
)


@needs_runtime
def test_the_packaged_model_is_tokenized_and_read_as_here(tmp_path):
    folder, path = Path(model_path("tiny")), tmp_path / "tiny.gguf"
    model, tokenizer = load("tiny").float(), AutoTokenizer.from_pretrained(model_path("tiny"))
    patch_model(model, "ntk", factor=4.0)
    write_gguf(model, read_vocabulary(folder, model.config.vocab_size), path, "f32")
    assert llama_cpp.token_ids(path, TEXTS) == [tokenizer(text).input_ids for text in TEXTS]
    assert off(model, path, [200, 1000], visible=300) < 5e-3


@needs_runtime
@pytest.mark.skipif("HF_POSENC_MODELS" not in os.environ, reason="HF_POSENC_MODELS names no folder of real models")
def test_a_real_llama_is_tokenized_and_read_as_here(tmp_path):
    folder, path = Path(os.environ["HF_POSENC_MODELS"]) / "stories15M", tmp_path / "stories.gguf"
    model, tokenizer = load(folder).float(), AutoTokenizer.from_pretrained(folder)
    patch_model(model, "yarn", factor=4.0)
    write_gguf(model, read_vocabulary(folder, model.config.vocab_size), path, "f32")
    texts = [text.strip() for text in TEXTS]  # llama.cpp puts a space before a space, transformers does not
    assert llama_cpp.token_ids(path, texts) == [tokenizer(text).input_ids for text in texts]
    assert off(model, path, [200, 1000]) < 5e-3
