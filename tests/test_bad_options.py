"""Whatever is wrong with an option is refused with a reason, and leaves the model as it was, to the last bit."""

import json
import math

import pytest
from cells import CELLS, LENGTH, options, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import FAR, assert_refused, assert_refused_also_when_patched

from hf_posenc import (
    SCHEMES,
    PosencError,
)
from hf_posenc.core.effects import CoordinateRotation
from hf_posenc.families import FAMILIES
from hf_posenc.patching.grades import sample_geometry
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.base import Scheme

INF, NAN = float("inf"), float("nan")
BAD_OPTIONS = {
    "unknown scheme": ("llama", "yarm", {}, ["'yarm'", "did you mean 'yarn'", "alibi"]),
    "unknown scheme, nothing near": ("llama", "zzzzzz", {}, ["'zzzzzz'", "known", "yarn"]),
    "scheme in capitals": ("llama", "YaRN", {}, ["'YaRN'", "known", "yarn"]),
    "empty name": ("llama", "", {}, ["known", "yarn"]),
    "scheme None": ("llama", None, {}, ["name or a scheme object", "NoneType", "yarn"]),
    "scheme number": ("llama", 3, {}, ["name or a scheme object", "int", "yarn"]),
    "scheme class": ("llama", Alibi, {}, ["name or a scheme object", "alibi"]),
    "scheme list": ("llama", ["yarn"], {}, ["name or a scheme object", "list", "yarn"]),
    "unknown option": (
        "llama",
        "yarn",
        {"beta_fats": 3, **FAR},
        ["'beta_fats'", "did you mean 'beta_fast'", "'yarn'"],
    ),
    "option of another scheme": ("gpt2", "alibi", {"beta_fast": 3}, ["'alibi'", "'beta_fast'", "alibi_bias_max"]),
    "factor below 1": ("llama", "yarn", {"factor": 0.5}, ["factor", "at least 1", "0.5"]),
    "factor zero": ("llama", "linear", {"factor": 0}, ["factor", "at least 1", "0"]),
    "factor negative": ("llama", "ntk", {"factor": -2.0}, ["factor", "at least 1", "-2.0"]),
    "factor NaN": ("llama", "yarn", {"factor": NAN}, ["factor", "finite number", "nan"]),
    "factor inf": ("llama", "yarn", {"factor": INF}, ["factor", "finite number", "inf"]),
    "factor string": ("llama", "yarn", {"factor": "4"}, ["factor", "finite number", "'4'"]),
    "factor bool": ("llama", "yarn", {"factor": True}, ["factor", "finite number", "True"]),
    "factor list": ("llama", "yarn", {"factor": [4.0]}, ["factor", "finite number", "4.0"]),
    "factor of a scheme that has its own": ("llama", "dynamic_ntk", {"factor": 0.5}, ["factor", "at least 1", "0.5"]),
    "target too short": ("llama", "yarn", {"target_length": 16}, ["target_length=16", "32", "trained_length="]),
    "target too short, table": ("gpt2", "learned", {"target_length": 31}, ["target_length=31", "32", "at least 32"]),
    "target too short, bias": ("bert", "alibi", {"target_length": 31}, ["target_length=31", "32", "at least 32"]),
    "target float": ("llama", "yarn", {"target_length": 128.0}, ["target_length", "whole number", "128.0"]),
    "target string": ("llama", "yarn", {"target_length": "128"}, ["target_length", "whole number", "'128'"]),
    "target bool": ("gpt2", "learned", {"target_length": True}, ["target_length", "whole number", "True"]),
    "target zero": ("llama", "yarn", {"target_length": 0}, ["target_length", "positive", "0"]),
    "trained negative": ("llama", "yarn", {"trained_length": -1, **FAR}, ["trained_length", "positive", "-1"]),
    "trained float": ("llama", "yarn", {"trained_length": 1.5, **FAR}, ["trained_length", "whole number", "1.5"]),
    "trained above target": ("llama", "yarn", {"trained_length": 256, **FAR}, ["target_length=128", "256"]),
    "contradiction": ("llama", "yarn", {"factor": 2.0, **FAR}, ["target_length=128", "factor=2.0", "32", "factor 4"]),
    "contradiction, table": (
        "gpt2",
        "learned",
        {"factor": 2.0, **FAR},
        ["target_length=128", "factor=2.0", "factor 4"],
    ),
    "beta_fast equal": ("llama", "yarn", {"beta_fast": 1.0, **FAR}, ["beta_fast=1", "greater than beta_slow=1"]),
    "beta_fast below": ("gpt2", "yarn", {"beta_fast": 2, "beta_slow": 3, **FAR}, ["beta_fast=2", "beta_slow=3"]),
    "beta_slow negative": ("llama", "yarn", {"beta_slow": -1, **FAR}, ["beta_slow", "greater than 0", "-1"]),
    "one mscale": ("llama", "yarn", {"mscale": 1.0, **FAR}, ["mscale", "mscale_all_dim", "both or neither"]),
    "truncate not a flag": ("llama", "yarn", {"truncate": 1, **FAR}, ["truncate", "True or False", "1"]),
    "low above high": ("llama", "llama3", {"low_freq_factor": 5, **FAR}, ["high_freq_factor=4", "low_freq_factor=5"]),
    "alpha below 1": ("llama", "ntk", {"alpha": 0.9, **FAR}, ["alpha", "at least 1", "0.9"]),
    "theta of 1": ("gpt2", "rope", {"rope_theta": 1.0}, ["rope_theta", "greater than 1", "1.0"]),
    "portion above 1": (
        "llama",
        "proportional",
        {"partial_rotary_factor": 1.5},
        ["partial_rotary_factor", "at most 1"],
    ),
    "step zero": ("llama", "dynamic_ntk", {"step": 0}, ["step", "positive whole number", "0"]),
    "bias_max zero": ("gpt2", "alibi", {"alibi_bias_max": 0}, ["alibi_bias_max", "greater than 0"]),
    "bad layout": ("gpt2", "sinusoidal", {"layout": "interleave"}, ["'interleave'", "did you mean 'interleaved'"]),
    "layout not a name": ("gpt2", "sinusoidal", {"layout": 3}, ["layout=3", "interleaved", "concatenated"]),
    "bad resize": ("gpt2", "learned", {"resize": "cyclical", **FAR}, ["'cyclical'", "did you mean 'cyclic'"]),
    "hierarchical of one half": ("gpt2", "learned", {"alpha": 0.5}, ["alpha=0.5", "0.4"]),
    "bad existing": (
        "llama",
        "yarn",
        {"existing": "extends", **FAR},
        ["'extends'", "did you mean 'extend'", "replace"],
    ),
    "existing not a name": ("llama", "yarn", {"existing": True, **FAR}, ["existing=True", "extend", "replace"]),
    "longrope too few": ("llama", "longrope", {"long_factor": [1.0], **FAR}, ["long_factor has 1", "4 pairs"]),
    "longrope too many": ("gpt2", "longrope", {"short_factor": [1.0] * 5, **FAR}, ["short_factor has 5", "4 pairs"]),
    "longrope none": ("llama", "longrope", {"short_factor": [], **FAR}, ["short_factor has 0", "4 pairs"]),
    "longrope negative": ("llama", "longrope", {"long_factor": [1, -2, 3, 4], **FAR}, ["long_factor", "than 0", "-2"]),
    "longrope zero": ("llama", "longrope", {"short_factor": [1, 0, 3, 4], **FAR}, ["short_factor", "than 0", "0"]),
    "longrope NaN": ("llama", "longrope", {"long_factor": [1, NAN, 3, 4], **FAR}, ["long_factor", "finite", "nan"]),
    "longrope number": ("llama", "longrope", {"long_factor": 4.0, **FAR}, ["long_factor", "list", "4.0"]),
    "longrope string": ("llama", "longrope", {"long_factor": "1234", **FAR}, ["long_factor", "list", "'1234'"]),
    "buckets not of 4": ("gpt2", "t5", {"relative_attention_num_buckets": 6}, ["multiple of 4", "6"]),
    "buckets zero": ("gpt2", "t5", {"relative_attention_num_buckets": 0}, ["relative_attention_num_buckets", "0"]),
    "distance too near": ("llama", "t5", {"relative_attention_max_distance": 16}, ["max_distance=16", "32 buckets"]),
    "seed string": ("llama", "t5", {"seed": "x"}, ["seed", "'x'"]),
    "seed float": ("gpt2", "learned", {"seed": 0.5}, ["seed", "0.5"]),
    "hierarchical too long": (
        "gpt2",
        "learned",
        {"resize": "hierarchical", "target_length": LENGTH**2 + 1},
        ["32**2 = 1024", "1025"],
    ),
    "trained longer than the table": (
        "gpt2",
        "learned",
        {"trained_length": 64, "target_length": 128},
        ["trained_length=64", "32 rows", "at most 32"],
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case):
    kind, scheme, given, words = BAD_OPTIONS[case]
    assert_refused_also_when_patched(kind, scheme, *words, **given)


@pytest.mark.parametrize(
    "scheme, kind", [(s, k) for s, k in CELLS if SCHEMES[s].extends and k in ("llama", "gpt2", "bert")]
)
def test_extending_schemes_must_be_told_how_far(scheme, kind):
    assert_refused(tiny(kind), scheme, repr(scheme), "target_length=", "32", "factor=")


def test_a_scheme_object_together_with_options():
    assert_refused_also_when_patched("llama", Alibi(), "alibi_bias_max", "Alibi(...)", "'alibi'", alibi_bias_max=4.0)
    assert_refused_also_when_patched("gpt2", Alibi(), "target_length", "Alibi(...)", target_length=128)


NUMBERS = st.integers(-3, 200) | st.floats() | st.sampled_from([0, 1, 4, 4.0, 32.0, 1e300, -1e300, 5e-324, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | st.sampled_from(["linear", "cubic", "interleaved"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
SAMPLES = [sample_geometry(family) for family in FAMILIES.values()]
GEOMETRIES = [shape for i, shape in enumerate(SAMPLES) if shape not in SAMPLES[:i]]
"""One of those that are alike: most families have the same."""


def keys_of(scheme: str) -> list[str]:
    return list(SCHEMES[scheme].__dataclass_fields__)


def works(scheme: Scheme) -> None:
    """A scheme that was accepted says what it does on a model, or why not, and survives JSON."""
    stored = json.loads(json.dumps(scheme.options(), allow_nan=False))
    assert type(scheme).from_options(stored) == scheme
    for geometry in GEOMETRIES:
        try:
            effect, target = scheme.effect(geometry), scheme.span(geometry).target
        except PosencError:
            continue
        assert target >= geometry.trained_length or scheme.trained_length
        if effect.rotation is not None:
            by_axes = isinstance(effect.rotation, CoordinateRotation)
            pairs = effect.rotation.posenc_frequencies.flatten().tolist() if by_axes else effect.rotation.inv_freq
            assert all(math.isfinite(f) for f in pairs)
            assert math.isfinite(effect.rotation.attention_scaling)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_options_give_a_working_scheme_or_a_posenc_error(scheme):
    drawn = st.dictionaries(st.sampled_from(keys_of(scheme)) | st.text(max_size=5), VALUES, max_size=4)

    @settings(
        derandomize=True, max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(drawn)
    def fuzz(given_options):
        try:
            made = SCHEMES[scheme].from_options(given_options)
        except PosencError:
            return
        works(made)

    fuzz()


ODD = [None, INF, -INF, NAN, 1e308, 5e-324, 10**400, "x", "", [], [1.0], {}, True, -1, 0, 0.5]


@pytest.mark.parametrize("scheme, key", [(s, k) for s in SCHEMES for k in keys_of(s)])
def test_each_option_alone_with_each_odd_value(scheme, key):
    """The same, one by one, so that a fault names its option and all of its values."""
    told = options(scheme) if key not in ("factor", "target_length") else {}
    faults = {}
    for value in ODD:
        try:
            works(SCHEMES[scheme].from_options({**told, key: value}))
        except PosencError:
            continue
        except Exception as fault:
            faults[str(value)[:9]] = f"{type(fault).__name__}: {fault}"[:80]
    assert faults == {}
