"""Checkpoints that earlier versions wrote, kept in `fixtures`: this version loads them and computes the same."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from hf_posenc import describe, load

OLD = Path(__file__).parent / "fixtures" / "v0_1_0"
FOLDERS = sorted(folder.parent.name for folder in OLD.glob("*/expected.safetensors"))
STEP = 4
"""Of the logits of a text those of every fourth token are kept."""
NEAR = 1e-5
"""The same to the last bit on the machine that wrote them; another machine may sum in another order."""
COARSE = 0.1
"""For what is computed in bfloat16, of which logits near 3 are 1/64 apart."""


def load_with_base(folder, **kwargs):
    """`load`; the base of an adapter is the folder beside it that its config names."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        kwargs["base"] = OLD / json.loads(adapter.read_text())["base_model_name_or_path"]
    return load(folder, **kwargs)


def metadata(folder):
    with safe_open(folder / "expected.safetensors", framework="pt") as stored:
        return stored.metadata()


@torch.no_grad()
def outputs_of(model, folder):
    """What the model makes of the inputs that are kept in a folder."""
    texts = metadata(folder).get("texts")
    if texts is not None:
        return model.encode(json.loads(texts), convert_to_tensor=True, show_progress_bar=False)
    stored = load_file(folder / "expected.safetensors")
    logits = model(**{k.removeprefix("input."): v for k, v in stored.items() if k.startswith("input.")}).logits
    return logits[:, ::STEP] if logits.ndim == 3 else logits


def assert_same(folder):
    """Load a folder as it is, and in float32 where it is not, and compare with what it gave when it was written."""
    if metadata(folder).get("texts") is not None:
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is an extra, 'embed'")
    stored = load_file(folder / "expected.safetensors")
    expected, model = stored["output"], load_with_base(folder)
    assert describe(model).scheme == metadata(folder).get("scheme", describe(model).scheme)  # none: not patched
    found, near = outputs_of(model, folder), NEAR if expected.dtype == torch.float32 else COARSE
    torch.testing.assert_close(found, expected, atol=near, rtol=near)
    if "output.float32" in stored:
        found = outputs_of(load_with_base(folder, dtype=torch.float32), folder)
        torch.testing.assert_close(found, stored["output.float32"], atol=NEAR, rtol=NEAR)


def test_they_are_here():
    assert len(FOLDERS) == 27


@pytest.mark.parametrize("name", FOLDERS)
def test_an_old_checkpoint_computes_the_same(name):
    assert_same(OLD / name)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_small_difference_would_be_seen(name, tmp_path):
    """One number of the expected output is off by 1e-3."""
    folder = shutil.copytree(OLD / name, tmp_path / name)
    stored, about = load_file(folder / "expected.safetensors"), metadata(folder)
    key = "output.float32" if "output.float32" in stored else "output"
    stored[key].view(-1)[-1] += 1e-3
    save_file(stored, folder / "expected.safetensors", metadata=about)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(folder)


def test_an_old_portable_checkpoint_opens_with_its_own_code(tmp_path, monkeypatch):
    """The module inside it calls this version's `load`."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds the cache to it
    folder = OLD / "llama_alibi_portable"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert describe(model).scheme == "alibi"
    expected = load_file(folder / "expected.safetensors")["output"]
    torch.testing.assert_close(outputs_of(model, folder), expected, atol=NEAR, rtol=NEAR)
