"""A loaded model is patched anew or unpatched as the original is, wherever its file holds what that takes."""

import pytest
import torch
from cells import LENGTH, TEXT, effect, exists, options, tiny, tokens
from stored_models import LONG, assert_same_weights, config_of, logits, patched_model
from transformers import (
    AutoModelForCausalLM,
)

from hf_posenc import SCHEMES, PosencError, check_model, is_patched, load, patch_model, save, unpatch_model


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpatching_a_loaded_rotary_model_gives_the_original(scheme, kind, tmp_path):
    original, ids = tiny(kind), tokens(2, LONG)
    expected, config = logits(original, ids), original.config.to_dict()
    save(patched_model(scheme, kind), tmp_path / "a")
    loaded = unpatch_model(load(tmp_path / "a"))
    assert not is_patched(loaded)
    found = loaded.config.to_dict()
    for key in ("architectures", "dtype", "_name_or_path"):  # what transformers notes in every config that it saves
        found.pop(key), config.pop(key)
    assert found == config
    assert torch.equal(logits(loaded, ids), expected)
    assert_same_weights(loaded, original)
    loaded.save_pretrained(tmp_path / "b")
    assert "posenc" not in config_of(tmp_path / "b")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "b"), ids), expected)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_needs_the_lost_table_of_a_loaded_model_is_refused(scheme, kind, tmp_path):
    save(patched_model(scheme, kind), tmp_path / "a")
    loaded = load(tmp_path / "a")
    before = logits(loaded, tokens(2, LENGTH))
    with pytest.raises(PosencError, match="position table that the model had"):
        unpatch_model(loaded)
    with pytest.raises(PosencError, match="load the original model"):
        patch_model(loaded, "learned", target_length=256)
    check_model(loaded)
    assert torch.equal(logits(loaded, tokens(2, LENGTH)), before)


@pytest.mark.parametrize("second", TEXT)
@pytest.mark.parametrize("first", ["yarn", "learned"])
def test_patching_a_loaded_rotary_model_equals_patching_the_original(first, second, tmp_path):
    save(patched_model(first, "llama"), tmp_path / "a")
    again = patch_model(load(tmp_path / "a"), second, **options(second))
    fresh = patch_model(tiny("llama"), second, **options(second))
    check_model(again)
    assert torch.equal(logits(again, tokens(2, LONG)), logits(fresh, tokens(2, LONG)))
    assert again.config.posenc == fresh.config.posenc
    save(again, tmp_path / "b")
    assert torch.equal(logits(load(tmp_path / "b"), tokens(2, LONG)), logits(fresh, tokens(2, LONG)))


def starts_from_a_table(scheme):
    source = effect(scheme, "gpt2").table
    return source is not None and source.reads_native


LOADED = [("alibi", "gpt2"), ("learned", "gpt2"), ("none", "bert")]
ANEW = [name for name in TEXT if exists(name, "gpt2") and not starts_from_a_table(name)]


@pytest.mark.parametrize(
    ("second", "first", "kind"), [(s, f, k) for s in ANEW for f, k in LOADED if k == "gpt2" or exists(s, k)]
)
def test_patching_a_loaded_table_model(first, second, kind, tmp_path):
    """Whatever does not start from the model's own table works as on the original, and saves."""
    save(patched_model(first, kind), tmp_path / "a")
    again = patch_model(load(tmp_path / "a"), second, **options(second))
    fresh = patch_model(tiny(kind), second, **options(second))
    assert torch.equal(logits(again, tokens(2, LONG)), logits(fresh, tokens(2, LONG)))
    with pytest.raises(PosencError, match="position table that the model had"):
        unpatch_model(again)
    save(again, tmp_path / "b")
    assert torch.equal(logits(load(tmp_path / "b"), tokens(2, LONG)), logits(fresh, tokens(2, LONG)))
