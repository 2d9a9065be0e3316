"""Models with a scheme, to be saved, and what is compared when they come back."""

import json
from pathlib import Path

import torch
from cells import LENGTH, options, tiny

from hf_posenc import patch_model
from hf_posenc.core.tables import LearnedTable

LONG = 3 * LENGTH


def disturb(model):
    """Move all that the scheme trains away from where it starts, so that a fresh start is not taken for a load."""
    tables = [m.weight for m in model.modules() if isinstance(m, LearnedTable)]
    own = [p for name, p in model.named_parameters() if "posenc_" in name]
    generator = torch.Generator().manual_seed(7)
    for parameter in {id(p): p for p in tables + own}.values():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def patched_model(scheme, kind, **overrides):
    return disturb(patch_model(tiny(kind, **overrides), scheme, **options(scheme)))


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs).logits


def assert_same_weights(model, expected):
    mine, theirs = model.state_dict(), expected.state_dict()
    assert sorted(mine) == sorted(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def config_of(path):
    return json.loads((Path(path) / "config.json").read_text())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
