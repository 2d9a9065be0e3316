"""What the laws share: models with a scheme, their logits, and what is the same."""

from functools import lru_cache

import torch
from cells import LENGTH, ROTARY, TABLES, effect, geometry, options, tiny, tokens

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.effects import FollowingRotation

LONG = 3 * LENGTH
TOL = 2e-4
"""For logits of standard deviation 1.7 in fp32; a position that is off by one gives errors above 0.1."""


def is_identity(scheme, kind):
    """Whether a scheme is, up to the trained length, what the model does anyway."""
    does, own = effect(scheme, kind), SCHEMES["rope"]().effect(geometry(kind))
    only_rotates = does.rotation is not None and (does.table, does.bias, does.pattern) == (None, None, None)
    if kind not in ROTARY or not only_rotates:
        return False
    first = (does.rotation.inv_freq, does.rotation.attention_scaling)
    return first == (own.rotation.inv_freq, own.rotation.attention_scaling)


def is_absolute(scheme, kind):
    """Whether it matters to a scheme where a text begins: it adds to the input, or follows how much is seen."""
    does = effect(scheme, kind)
    by_position = does.bias is not None and not does.bias.of_distance
    return does.table is not None or by_position or isinstance(does.rotation, FollowingRotation)


def resizes(scheme, kind):
    """Whether a scheme makes its table from the model's own; resized and then rounded is not rounded and resized."""
    source = effect(scheme, kind).table
    return kind in TABLES and source is not None and source.reads_native


def patched_model(scheme, kind, **overrides):
    return patch_model(tiny(kind, **overrides), scheme, **options(scheme))


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs).logits


@lru_cache
def plain_logits(kind):
    """What the unpatched model says."""
    return logits(tiny(kind), tokens(2, LENGTH))


def assert_same(actual, expected, tolerance=TOL):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def anatomy(model):
    """All that hangs on a model but the values of its tensors: modules, attributes, hooks."""
    hooks = [f"_{name}" for name in ("forward_pre_hooks", "forward_hooks", "state_dict_pre_hooks", "state_dict_hooks")]
    return {
        name: (type(module), sorted(vars(module)), [list(vars(module)[hook].values()) for hook in hooks])
        for name, module in model.named_modules()
    }


def assert_same_model(model, expected):
    """Bit by bit: weights, config and everything that hangs on the modules."""
    mine, theirs = model.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert model.config.to_dict() == expected.config.to_dict()
    assert sorted(vars(model.config)) == sorted(vars(expected.config))
    assert model.config._attn_implementation == expected.config._attn_implementation
    assert anatomy(model) == anatomy(expected)


def where_they_stand(mask):
    """position_ids as `generate` makes them."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def padded_batch(rows, side):
    """Rows of unequal length as one batch: ids, mask, and where the real tokens are."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    places = [slice(width - len(row), width) if side == "left" else slice(0, len(row)) for row in rows]
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[i, place], mask[i, place] = row, 1
    return ids, mask, places


def in_chunks(model, ids, cache, chunks):
    """Logits of one text that is given piece by piece."""
    assert sum(chunks) == ids.shape[1]
    parts = [logits(model, part, past_key_values=cache, use_cache=True) for part in ids.split(chunks, 1)]
    return torch.cat(parts, 1)
