"""Whatever is wrong raises a PosencError that helps, and leaves the model as it was, to the last bit."""

import copy
import json
import math
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
import transformers
from cells import CELLS, KINDS, LENGTH, VOCAB, effect, options, tiny, tokens
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hf_posenc import (
    SCHEMES,
    PosencError,
    UnsupportedCell,
    UnsupportedModel,
    check_model,
    is_patched,
    patch_model,
    unpatch_model,
)
from hf_posenc.core.effects import CoordinateRotation, FollowingRotation
from hf_posenc.families import FAMILIES
from hf_posenc.patching.edits import Hook, Swap
from hf_posenc.patching.grades import sample_geometry
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.base import Scheme

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@dataclass
class Snapshot:
    """All of a model that a failed patch could have touched."""

    weights: dict[str, torch.Tensor]
    config: dict[str, Any]
    attributes: dict[str, Any]
    hooks: dict[str, list[Any]]
    logits: torch.Tensor | None

    @classmethod
    def of(cls, model: nn.Module, forward: bool = True) -> "Snapshot":
        return cls(
            weights={name: t.clone() for name, t in model.state_dict().items()},
            config=copy.deepcopy({**vars(model.config), "to_dict()": model.config.to_dict()}),
            attributes={f"{path}.{k}": v for path, m in model.named_modules() for k, v in own_attributes(m).items()},
            hooks={f"{path}.{name}": hooks(m, name) for path, m in model.named_modules() for name in HOOKS},
            logits=logits(model) if forward else None,
        )

    def assert_same(self, other: "Snapshot") -> None:
        assert list(other.weights) == list(self.weights)
        for name, weight in self.weights.items():
            assert torch.equal(other.weights[name], weight), name
        assert other.config == self.config
        assert other.attributes.keys() == self.attributes.keys()
        for name, value in self.attributes.items():
            assert other.attributes[name] is value, name
        assert other.hooks == self.hooks
        if self.logits is not None:
            assert torch.equal(other.logits, self.logits)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Everything that hangs on one module: plain attributes, parameters, buffers and children, but for hooks."""
    plain = {k: v for k, v in vars(module).items() if k not in (*HOOKS, *HOOK_OPTIONS)}
    return {**plain, **module._parameters, **module._buffers, **module._modules}


def hooks(module: nn.Module, name: str) -> list[Any]:
    """The hooks of one kind, in order, each with whether it takes keywords; their ids are counters and differ."""
    with_kwargs = getattr(module, f"{name}_with_kwargs", {})
    return [(hook, key in with_kwargs) for key, hook in getattr(module, name).items()]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(tokens(2, 12)).logits


def refused(model: Any, scheme: Any, *words: str, forward: bool = True, **given: Any) -> str:
    """Assert that the call raises with all of these words, changing nothing; also on a model patched before."""
    before = Snapshot.of(model, forward)
    with pytest.raises(PosencError) as caught:
        patch_model(model, scheme, **given)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert [w for w in words if w.lower() not in message.lower()] == [], message
    assert message.endswith(".") or message.endswith("?"), message
    before.assert_same(Snapshot.of(model, forward))
    return message


def refused_also_when_patched(kind: str, scheme: Any, *words: str, **given: Any) -> None:
    """On a fresh model, and on models patched by config or weights, and by hooks and attention functions."""
    refused(tiny(kind), scheme, *words, **given)
    for earlier in ("rope", "alibi", "sinusoidal"):
        model = patch_model(tiny(kind), earlier)
        plain = logits(tiny(kind))
        refused(model, scheme, *words, **given)
        assert is_patched(model)
        assert model.config.posenc["scheme"] == earlier
        check_model(model)
        assert torch.equal(logits(unpatch_model(model)), plain)


INF, NAN = float("inf"), float("nan")
FAR = {"target_length": 4 * LENGTH}
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
        ["trained_length=64", "32 rows", "less"],
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case):
    kind, scheme, given, words = BAD_OPTIONS[case]
    refused_also_when_patched(kind, scheme, *words, **given)


@pytest.mark.parametrize(
    "scheme, kind", [(s, k) for s, k in CELLS if SCHEMES[s].extends and k in ("llama", "gpt2", "bert")]
)
def test_extending_schemes_must_be_told_how_far(scheme, kind):
    refused(tiny(kind), scheme, repr(scheme), "target_length=", "32", "factor=")


def test_a_scheme_object_together_with_options():
    refused_also_when_patched("llama", Alibi(), "alibi_bias_max", "Alibi(...)", "'alibi'", alibi_bias_max=4.0)
    refused_also_when_patched("gpt2", Alibi(), "target_length", "Alibi(...)", target_length=128)


@pytest.mark.parametrize("scheme", ["rope", "yarn", "dynamic_ntk", "longrope", "proportional"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_odd_heads_cannot_be_rotated(kind, scheme):
    model = tiny(kind, hidden_size=36)
    refused(model, scheme, "9", "even", "alibi", **options(scheme))
    refused(patch_model(model, "alibi"), scheme, "9", "even", **options(scheme))


def test_transformers_itself_builds_no_rope_with_odd_heads():
    """So that there is no such model for patch_model to refuse."""
    with pytest.raises(StrictDataclassError, match="even rotary dimension"):
        tiny("llama", head_dim=9)


def needs_two_pairs(scheme: str, kind: str) -> bool:
    """Whether a scheme tells fast pairs from slow ones: such a one may refuse to make sense of a single pair."""
    rotation = effect(scheme, kind).rotation
    if rotation is None or not all(rotation.inv_freq):
        return False
    own = [10_000 ** (-2 * i / 8) for i in range(4)]
    ratios = [mine / theirs for mine, theirs in zip(rotation.inv_freq, own, strict=True)]
    return isinstance(rotation, FollowingRotation) or max(ratios) > min(ratios) * (1 + 1e-6)


@pytest.mark.parametrize("scheme, kind", [(s, k) for s, k in CELLS if k in ("llama", "gpt2")])
def test_heads_of_two_channels_have_one_pair(scheme, kind):
    sizes = {"head_dim": 2} if kind == "llama" else {"hidden_size": 8}
    if needs_two_pairs(scheme, kind):
        try:
            patch_model(tiny(kind, **sizes), scheme, **options(scheme))
        except UnsupportedCell as refusal:
            assert "two pairs" in str(refusal)
            return
    assert logits(patch_model(tiny(kind, **sizes), scheme, **options(scheme))).isfinite().all()


@pytest.mark.parametrize("kind, size", [("llama", {"head_dim": 2}), ("gpt2", {"hidden_size": 8})])
def test_llama3_tells_by_wavelength_and_takes_one_pair(kind, size):
    assert logits(patch_model(tiny(kind, **size), "llama3", factor=4.0)).isfinite().all()


@pytest.mark.parametrize("scheme", ["ntk", "dynamic_ntk", "yarn", "longrope"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_fast_and_slow_pairs_take_two(kind, scheme):
    """The one pair is the fastest, which ntk keeps: theta * alpha^(2/0) has no value."""
    model = tiny(kind, **({"head_dim": 2} if kind == "llama" else {"hidden_size": 8}))
    refused(model, scheme, "two pairs", "2 channels", "linear", **options(scheme))


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_odd_hidden_size_has_no_sinusoids(kind):
    sizes = {"head_dim": 8, "num_key_value_heads": 3} if kind == "llama" else {}
    model = tiny(kind, hidden_size=27, num_attention_heads=3, **sizes)
    refused(model, "sinusoidal", "27", "odd", "pairs")
    refused(patch_model(model, "alibi"), "sinusoidal", "27", "odd")


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], **more)


def test_a_peft_model_is_refused():
    base = tiny("llama")
    wrapped = peft.get_peft_model(base, lora())
    refused(wrapped, "alibi", "PeftModel", "PEFT adapters", "first, then wrap")
    refused(base, "yarn", "PEFT adapters", "first, then wrap", **FAR)


def test_a_model_with_an_added_adapter_is_refused():
    model = tiny("llama")
    model.add_adapter(lora())
    refused(model, "alibi", "PEFT adapters", "first, then wrap")


def test_a_patched_model_with_adapters_is_neither_patched_anew_nor_unpatched():
    base = patch_model(tiny("llama"), "alibi")
    wrapped = peft.get_peft_model(base, lora())
    refused(wrapped, "yarn", "PEFT adapters", **FAR)
    before = Snapshot.of(wrapped)
    with pytest.raises(UnsupportedModel, match="PEFT adapters"):
        unpatch_model(wrapped)
    before.assert_same(Snapshot.of(wrapped))


def test_a_compiled_model_is_refused():
    model = tiny("llama")
    compiled = torch.compile(model)
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModel, match=r"compiled model.*first, then torch\.compile"):
        patch_model(compiled, "alibi")
    before.assert_same(Snapshot.of(model))


class Wrapper(nn.Module):
    """What DistributedDataParallel and its like look like."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def test_a_wrapped_model_is_refused_with_the_way_to_the_inner_one():
    model = tiny("llama")
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModel, match=r"PreTrainedModel.*Wrapper.*model\.module before"):
        patch_model(Wrapper(model), "alibi")
    before.assert_same(Snapshot.of(model))


@pytest.mark.parametrize("thing", ["llama", None, 3, nn.Linear(2, 2), transformers.LlamaForCausalLM, {"a": 1}])
def test_what_is_no_model_is_refused(thing):
    for call in (lambda: patch_model(thing, "alibi"), lambda: unpatch_model(thing), lambda: check_model(thing)):
        with pytest.raises(UnsupportedModel, match=r"PreTrainedModel.*got"):
            call()


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = tiny("llama")
    keys = list(model.state_dict())
    with pytest.raises(UnsupportedModel, match=r"meta device.*Load the weights first"):
        patch_model(model, "alibi")
    assert not is_patched(model)
    assert list(model.state_dict()) == keys
    assert "posenc" not in model.config.to_dict()


def test_an_unsupported_type_is_named_with_what_was_looked_for():
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8)
    model = transformers.ViTMSNModel(transformers.ViTMSNConfig(patch_size=4, **sizes)).eval()
    supported = [t for f in FAMILIES.values() for t in f.model_types]
    refused(model, "alibi", "'vit_msn'", "inv_freq", "rope_parameters", *supported, forward=False)


def test_a_type_that_cannot_be_patched_says_why():
    config = transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=VOCAB, n_positions=32)
    refused(transformers.GPTJForCausalLM(config).eval(), "alibi", "'gptj'", "table of its own")


NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, NESTED], ids=["None", "empty", "bare", "nested"])
@pytest.mark.parametrize("scheme", ["yarn", "alibi", "none"])
def test_rope_parameters_missing_or_nested(scheme, rope):
    model = tiny("llama")
    model.config.rope_parameters = copy.deepcopy(rope)
    refused(model, scheme, "rope_parameters", "'llama'", "rope_theta", **options(scheme))


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, NESTED], ids=["None", "empty", "bare", "nested"])
def test_check_model_says_what_is_wrong_with_rope_parameters(rope):
    model = tiny("llama")
    model.config.rope_parameters = copy.deepcopy(rope)
    with pytest.raises(PosencError, match="rope_parameters"):
        check_model(model)


@pytest.mark.parametrize(
    "scheme, kind", [("alibi", "llama"), ("t5", "bert"), ("dynamic_ntk", "llama"), ("rope", "gpt2")]
)
@pytest.mark.parametrize("kernel", ["flex_attention", "flash_attention_2"])
def test_sealed_schemes_need_a_kernel_that_they_know(scheme, kind, kernel):
    model = tiny(kind)
    model.config._attn_implementation = kernel
    refused(model, scheme, repr(kernel), "sdpa", "eager", "set_attn_implementation", forward=False)
    assert model.config._attn_implementation == kernel


@pytest.mark.parametrize(
    "scheme, kind", [("yarn", "llama"), ("none", "llama"), ("sinusoidal", "gpt2"), ("none", "bert")]
)
def test_other_schemes_take_any_kernel(scheme, kind):
    model = tiny(kind)
    model.config._attn_implementation = "flex_attention"
    patch_model(model, scheme, **options(scheme))
    assert model.config._attn_implementation == "flex_attention"
    unpatch_model(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("kind", KINDS)
def test_unpatching_an_unpatched_model(kind):
    model = tiny(kind)
    before = Snapshot.of(model)
    with pytest.raises(PosencError, match="not patched"):
        unpatch_model(model)
    before.assert_same(Snapshot.of(model))


def scaled(**rope: Any) -> transformers.PreTrainedModel:
    return tiny("llama", max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope})


def test_replacing_a_scaling_whose_original_length_is_unknown():
    model = scaled(rope_type="linear", factor=4.0)
    words = ["'linear'", "existing='replace'", "trained_length="]
    refused(model, "yarn", *words, existing="replace", target_length=256)
    patch_model(model, "yarn", existing="replace", trained_length=32, target_length=256)
    assert model.config.rope_parameters["factor"] == 8.0
    refused(model, "yarn", *words, existing="replace", target_length=256)
    assert model.config.rope_parameters["factor"] == 8.0


def test_theta_beside_a_scaling_that_is_extended():
    model = scaled(rope_type="linear", factor=4.0)
    words = ["rope_theta=5000", "'linear'", "existing='replace'"]
    refused(model, "yarn", *words, existing="extend", target_length=256, rope_theta=5000.0)


def test_a_rope_type_that_cannot_be_extended():
    model = scaled(rope_type="dynamic", factor=4.0)
    refused(model, "yarn", "'dynamic'", "existing='replace'", existing="extend", target_length=256)
    short, long = [1.0] * 4, [2.0] * 4
    model = scaled(
        rope_type="longrope", short_factor=short, long_factor=long, factor=4.0, original_max_position_embeddings=32
    )
    # Without a forward, which replaces buffers of transformers' own longrope each time.
    refused(model, "yarn", "'longrope'", "existing='replace'", existing="extend", target_length=256, forward=False)


def test_lists_of_numbers_may_be_tuples_and_ints():
    """The other side of the refusals above."""
    patch_model(tiny("llama"), "longrope", long_factor=(1, 2, 3, 4), **FAR)
    patch_model(tiny("llama"), "longrope", long_factor=[1, 2.0, 3, 4], **FAR)
    patch_model(tiny("llama"), "yarn", factor=4)


# A fault in the middle.


class Fault(Exception):
    """Not of this package: the disk is full, the user pressed Ctrl-C, a hook of somebody else raised."""


class Faults:
    """Lets edits through, but for the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen, self.at = 0, -1
        for kind in (Swap, Hook):
            monkeypatch.setattr(kind, "put", self.counted(kind.put))

    def counted(self, put: Any) -> Any:
        def counting(edit: Any, held: Any) -> None:
            self.seen += 1
            if self.seen == self.at:
                raise Fault
            put(edit, held)

        return counting

    def set(self, at: int) -> None:
        self.seen, self.at = 0, at


SITES = {
    "llama": ["yarn", "sinusoidal", "alibi", "dynamic_ntk"],
    "gpt2": ["learned", "rope", "t5"],
    "bert": ["sinusoidal", "yarn", "alibi"],
}
CASES = [(kind, scheme) for kind, schemes in SITES.items() for scheme in schemes]


@pytest.mark.parametrize("kind, scheme", CASES)
def test_a_fault_at_any_edit_leaves_a_fresh_model_as_it_was(kind, scheme, monkeypatch):
    model, faults = tiny(kind), Faults(monkeypatch)
    before = Snapshot.of(model)
    patch_model(model, scheme, **options(scheme))
    edits = faults.seen
    assert edits >= 4
    unpatch_model(model)
    for n in range(1, edits + 1):
        faults.set(n)
        with pytest.raises(Fault):
            patch_model(model, scheme, **options(scheme))
        assert faults.seen > n or n == 1, "nothing was taken back"
        before.assert_same(Snapshot.of(model))


@pytest.mark.parametrize("kind, scheme", CASES)
def test_a_fault_at_any_edit_leaves_a_patched_model_patched_as_it_was(kind, scheme, monkeypatch):
    """Here the faults also fall into the undoing of the earlier patch."""
    model, faults = tiny(kind), Faults(monkeypatch)
    plain = logits(model)
    earlier = "alibi" if scheme != "alibi" else "sinusoidal"
    patch_model(model, earlier)
    before = Snapshot.of(model)
    faults.set(-1)
    patch_model(model, scheme, **options(scheme))
    edits = faults.seen
    patch_model(model, earlier)
    before = Snapshot.of(model)
    for n in range(1, edits + 1):
        faults.set(n)
        with pytest.raises(Fault):
            patch_model(model, scheme, **options(scheme))
        before.assert_same(Snapshot.of(model))
        check_model(model)
    faults.set(-1)
    assert torch.equal(logits(unpatch_model(model)), plain)


@pytest.mark.parametrize("kind", SITES)
def test_a_fault_while_unpatching_leaves_the_model_patched(kind, monkeypatch):
    model, faults = tiny(kind), Faults(monkeypatch)
    patch_model(model, "alibi")
    before, edits = Snapshot.of(model), faults.seen
    for n in range(1, edits + 1):
        faults.set(n)
        with pytest.raises(Fault):
            unpatch_model(model)
        before.assert_same(Snapshot.of(model))


# Anything as an option.

NUMBERS = st.integers(-3, 200) | st.floats() | st.sampled_from([0, 1, 4, 4.0, 32.0, 1e300, -1e300, 5e-324, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | st.sampled_from(["linear", "cubic", "interleaved"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
GEOMETRIES = [sample_geometry(family) for family in FAMILIES.values()]


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
