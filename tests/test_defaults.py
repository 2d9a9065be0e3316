"""torch's own defaults: what a patch makes, and what a pass computes, does not depend on them."""

from contextlib import contextmanager

import pytest
import torch
from cells import TEXT, options, tiny, tokens

from hf_posenc import check_model, describe, load, patch_model, save


@contextmanager
def default(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("scheme", TEXT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_patch_and_a_pass_under_another_dtype(scheme, dtype):
    ids, model = tokens(2, 60), tiny("llama")
    meant = patch_model(tiny("llama"), scheme, **options(scheme))
    with default(dtype):
        patch_model(model, scheme, **options(scheme))
        check_model(model)
        assert describe(model).scheme == scheme
        found = logits(model, ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits(meant, ids), atol=1e-4, rtol=1e-4)
    kept = meant.state_dict()
    assert {name: value.dtype for name, value in model.state_dict().items()} == {n: v.dtype for n, v in kept.items()}


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "fire", "dynamic_ntk", "learned"])
def test_a_checkpoint_is_loaded_under_another_dtype(scheme, tmp_path):
    ids, model = tokens(2, 60), patch_model(tiny("llama"), scheme, **options(scheme))
    save(model, tmp_path)
    with default(torch.bfloat16):
        again = load(tmp_path, dtype=torch.float32)
        found = logits(again, ids)
    torch.testing.assert_close(found, logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", TEXT)
def test_a_patch_where_another_device_is_the_usual_one(scheme):
    ids, model = tokens(2, 60), tiny("llama")
    with torch.device("meta"):  # stands for any device that the model is not on
        patch_model(model, scheme, **options(scheme))
        check_model(model)
    meant = patch_model(tiny("llama"), scheme, **options(scheme))
    torch.testing.assert_close(logits(model, ids), logits(meant, ids))
