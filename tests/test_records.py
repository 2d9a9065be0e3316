"""What a scheme is stored as gives the same scheme again, and its class declares what its effect does."""

import json
from dataclasses import dataclass

import pytest
import torch
from cells import KINDS, TEXT, effect, exists, options, tiny
from test_schemes import geometry

from hf_posenc import SCHEMES, PosencError, Scheme, check_model, patch_model, register_scheme
from hf_posenc.core.effects import ComputedSource, Effect, OwnTable
from hf_posenc.core.tables import ComputedTable
from hf_posenc.patching.grades import cells, sample_scheme
from hf_posenc.patching.records import Record

# ---------------------------------------------------------------- records

OPTIONS = {
    "alibi": dict(alibi_bias_max=4.0),
    "kerple": dict(kernel="power", seed=3),
    "fire": dict(width=8, threshold=99, seed=3),
    "sandwich": dict(size=64),
    "dynamic_ntk": dict(factor=2.0, step=5, rope_theta=500.0, trained_length=16),
    "learned": dict(resize="hierarchical", alpha=0.3, seed=7, target_length=100),
    "linear": dict(target_length=100),
    "llama3": dict(factor=8.0, low_freq_factor=0.5, high_freq_factor=3.0),
    "longrope": dict(factor=4.0, short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=[1, 2, 3, 4], attention_factor=1.2),
    "none": dict(target_length=64),
    "ntk": dict(factor=4.0, alpha=6.7),
    "proportional": dict(partial_rotary_factor=0.5, factor=2.0),
    "rope": dict(rope_theta=123.0),
    "sinusoidal": dict(base=500.0, layout="concatenated"),
    "t5": dict(relative_attention_num_buckets=16, relative_attention_max_distance=99, seed=3),
    "yarn": dict(factor=4.0, beta_fast=16.0, truncate=False, mscale=1.0, mscale_all_dim=0.5),
    "self_extend": dict(factor=4.0, window=5, group=9, logit_scaling=True),
    "rerope": dict(window=7, slope=3.0),
    "string": dict(shift=12, window=5),
    "clip": dict(pairs=2, taper=True, rope_theta=500.0),
    "dca": dict(chunk=9, local_window=5),
    "streaming": dict(sinks=3, window=9),
    "lm_infinite": dict(global_tokens=3, window=9),
    "window": dict(window=9),
    "sparse": dict(window=5, global_tokens=2, stride=4, random_blocks=2, block=8, seed=3),
}
ROPES = [
    None,
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]},
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("plain", [True, False])
def test_records_survive_json(scheme, rope, plain):
    made = sample_scheme(scheme) if plain else SCHEMES[scheme](**(OPTIONS.get(scheme) or options(scheme)))
    original = {"max_position_embeddings": 32} | ({"rope_parameters": rope} if rope else {})
    record = Record(made, {"": geometry(rope=rope, causal=plain, initializer_range=0.3)}, original)
    text = json.dumps(record.to_dict())
    again = Record.from_dict(json.loads(text))
    assert again == record
    assert json.dumps(again.to_dict()) == text


def asks_for_positions_alone(bias):
    """Whether positions are all that a bias asks for."""
    return not bias.of_content and not bias.of_terms


@pytest.mark.parametrize("scheme", TEXT)
def test_a_record_gives_the_same_numbers_again(scheme):
    original = {"max_position_embeddings": 32}
    rope = ROPES[1] if cells()[scheme, "nothing"].startswith("refused") else None
    record = Record(SCHEMES[scheme](**(OPTIONS.get(scheme) or options(scheme))), {"": geometry(rope=rope)}, original)
    again = Record.from_dict(json.loads(json.dumps(record.to_dict())))
    one, two = (r.scheme.effect(r.geometry) for r in (record, again))
    assert one.rotation == two.rotation and one.pattern == two.pattern
    assert (one.bias is None) == (two.bias is None)
    if one.bias is not None:
        at = torch.arange(20)[None]
        kinds = [bias.state_dict() for bias in (one.bias, two.bias)]
        assert list(kinds[0]) == list(kinds[1]) and all(map(torch.equal, kinds[0].values(), kinds[1].values()))
        assert not asks_for_positions_alone(one.bias) or torch.equal(one.bias(at, at), two.bias(at, at))
    if one.table is not None and one.pattern is None:
        rows = [e.table.module(None, torch.zeros(1))(torch.arange(20)) for e in (one, two)]
        assert torch.equal(*rows)


# ---------------------------------------------------------------- what a class declares


@pytest.mark.parametrize("scheme", TEXT)
def test_a_class_declares_what_its_effect_does(scheme):
    """These are asked before there is an effect; patch_model refuses a scheme that keeps them quiet."""
    cls, effects = SCHEMES[scheme], [effect(scheme, kind) for kind in KINDS if exists(scheme, kind)]
    assert cls.adds_to_input == any(e.table is not None and not isinstance(e.table, OwnTable) for e in effects)
    assert cls.follows == any(e.rotation is not None and e.rotation.follows_length for e in effects)


class Quiet(Scheme):
    """A scheme like another that does not declare what it does."""

    like: str

    def effect(self, geometry):
        return SCHEMES[self.like](**options(self.like)).effect(geometry)


@pytest.mark.parametrize(("like", "word"), [("sinusoidal", "adds_to_input"), ("dynamic_ntk", "follows")])
def test_what_is_not_declared_is_refused(like, word, monkeypatch):
    monkeypatch.setattr(SCHEMES, "_entries", dict(SCHEMES._entries))
    attributes = {"name": "quiet", "summary": "keeps quiet", "like": like, "__module__": __name__}
    made = register_scheme(dataclass(frozen=True, kw_only=True)(type("Made", (Quiet,), attributes)))
    model = tiny("llama")
    with pytest.raises(PosencError, match=f"'quiet'.*{word} = True"):
        patch_model(model, made())
    check_model(model)


class Unmarked(ComputedTable):
    """A table with a parameter that a checkpoint could not tell from one of the model's."""

    def __init__(self, size, rows, like):
        super().__init__(size, rows, like)
        self.speed = torch.nn.Parameter(torch.ones(1))

    def vectors(self, coordinates):
        return (self.speed * coordinates).sin().expand(*coordinates.shape[:-1], self.size)


def test_parameters_of_a_table_are_marked(monkeypatch):
    monkeypatch.setattr(SCHEMES, "_entries", dict(SCHEMES._entries))
    source = ComputedSource(Unmarked, geometry(), 32)
    attributes = {"name": "unmarked", "summary": "s", "adds_to_input": True, "effect": lambda self, geometry: effect}
    effect = Effect(table=source)
    made = register_scheme(dataclass(frozen=True, kw_only=True)(type("Made", (Scheme,), attributes)))
    model = tiny("gpt2")
    with pytest.raises(PosencError, match=r"\['speed'\] of Unmarked could be confused.*begin with 'posenc_'"):
        patch_model(model, made())
    check_model(model)
    patch_model(tiny("llama"), made())  # where its place tells it


def test_a_pattern_that_would_be_drawn_for_ever_is_refused():
    assert SCHEMES["sparse"](random_blocks=1024).random_blocks == 1024
    with pytest.raises(PosencError, match="more than 1024"):
        SCHEMES["sparse"](random_blocks=10**15)
