"""What config.json says to runtimes that do not read `rope_parameters` as transformers does.

Some runtimes read only the older keys `rope_theta` and `rope_scaling`. llama.cpp's converter skips what it does not
know, with a warning. Each runtime is given the keys that make it right. Where no key can make it right, it is given a
value that makes it stop, in a key that transformers does not read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.effects import Rotation
from ..schemes.frequencies import PRESENT, longrope_attention_factor, present_frequencies, yarn_attention_factor
from .edits import Entry

THETA, SCALING = "rope_theta", "rope_scaling"
SEE = "see rope_parameters"
"""Not a number, so that a runtime stops which reads theta from this key alone."""
LAYERS = "n_layers"
"""llama.cpp's converter reads the number of layers from this key before `num_hidden_layers`. With 0 layers it finds no
place for the weights, and refuses."""
NEAR = 2e-5
"""The largest relative difference between frequencies that agree."""


@dataclass(frozen=True)
class Reader:
    """Which types of RoPE a runtime can compute from a config, by model type."""

    common: frozenset[str]
    """The types for every model type that is not in `by_model`."""
    by_model: Mapping[str, frozenset[str]]

    def types(self, model_type: str) -> frozenset[str]:
        return self.by_model.get(model_type, self.common)


PLAIN = frozenset({"default"})
NOTHING = frozenset[str]()
CONVERTER = Reader(
    PLAIN | {"linear", "yarn"},
    {
        **dict.fromkeys(("llama", "mistral", "mixtral", "exaone", "exaone4"), PLAIN | {"linear", "yarn", "llama3"}),
        **dict.fromkeys(("phi", "phi3", "stablelm", "gpt_neox", "minicpm3"), PLAIN),
        **dict.fromkeys(("gemma", "gemma2", "glm", "falcon", "dbrx", "jamba"), NOTHING),
    },
)
"""llama.cpp's convert_hf_to_gguf.py, by its source of 2026-08-22: classes that write their keys by themselves write
only theta, or nothing about RoPE."""
SCALED = PLAIN | {"linear", "yarn", "llama3", "longrope", "proportional"}
PASSED_ON = (
    *("afmoe", "apertus", "bitnet", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "falcon_h1", "granite"),
    *("granitemoe", "gptj", "internlm2", "internlm3", "llama", "minicpm", "mistral", "olmo2", "olmo3", "olmoe"),
    *("qwen2", "qwen3", "qwen3_next", "seed_oss"),
)
LEGACY = Reader(PLAIN, dict.fromkeys(PASSED_ON, SCALED))
"""mlx-lm 0.32.2, by its source: these models pass `rope_scaling` on; the others read only theta."""


def foreign_keys(config_class: Any) -> tuple[str, ...]:
    """The keys that a patch may write into such a config for other runtimes: none that the class reads itself."""
    own_layers = LAYERS in config_class.attribute_map or hasattr(config_class, LAYERS)
    own_theta = hasattr(config_class, THETA)
    return (*(() if own_theta else (THETA, SCALING)), *(() if own_layers else (LAYERS,)))


def keys_for_others(config: Any, parameters: Mapping[str, Any], meant: Rotation | None, length: int) -> dict[str, Any]:
    """The keys to write beside `rope_parameters`, which mean the rotation `meant`. `length`: the config's length."""
    kind, model_type = parameters["rope_type"], config.model_type
    keys: dict[str, Any] = {}
    free = foreign_keys(type(config))
    if LAYERS in free and not (
        kind in CONVERTER.types(model_type) and _agrees(_frequencies_in_llama_cpp(parameters, meant), meant)
    ):
        keys[LAYERS] = 0
    if THETA not in free:
        return keys
    if kind in LEGACY.types(model_type) and _agrees(_frequencies_in_mlx(parameters, meant, length), meant):
        keys[THETA] = parameters[THETA]
        if kind != "default":
            keys[SCALING] = copy.deepcopy(dict(parameters))
    else:
        keys[THETA] = SEE
    return keys


def entries_for_others(config: Any, parameters: Mapping[str, Any], meant: Rotation | None, length: int) -> list[Entry]:
    return [Entry(config, key, value) for key, value in keys_for_others(config, parameters, meant, length).items()]


def entries_for_none(config: Any) -> list[Entry]:
    """Stops runtimes that read theta from a sealed config and then load all the weights."""
    return [Entry(config, THETA, SEE)] if THETA in foreign_keys(type(config)) else []


Angles = tuple[Sequence[float], float]
"""Frequencies, and the number that cos and sin are multiplied by."""


def _agrees(told: Angles, meant: Rotation | None) -> bool:
    frequencies, scaling = told
    wanted: Sequence[float] = meant.inv_freq if meant else [0.0] * len(frequencies)
    near = all(math.isclose(a, b, rel_tol=NEAR, abs_tol=1e-20) for a, b in zip(frequencies, wanted, strict=True))
    return near and math.isclose(scaling, meant.attention_scaling if meant else 1.0, rel_tol=NEAR)


def _frequencies_in_transformers(parameters: Mapping[str, Any], meant: Rotation | None) -> Angles:
    if meant is None:
        return [0.0], 1.0
    assert parameters["rope_type"] in PRESENT
    return present_frequencies(parameters, 2 * len(meant.inv_freq))


def _frequencies_in_llama_cpp(parameters: Mapping[str, Any], meant: Rotation | None) -> Angles:
    """The angles in llama.cpp, which computes YaRN with its own betas, rounding and attention factor."""
    if parameters["rope_type"] != "yarn":
        return _frequencies_in_transformers(parameters, meant)
    own = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
    return _frequencies_in_transformers({**_without_mscale(parameters), **own}, meant)


def _frequencies_in_mlx(parameters: Mapping[str, Any], meant: Rotation | None, length: int) -> Angles:
    """The angles in mlx-lm, which rounds in YaRN, and has its own attention factors for YaRN and LongRoPE."""
    kind = parameters["rope_type"]
    frequencies, scaling = _frequencies_in_transformers(
        {**parameters, "truncate": True} if kind == "yarn" else parameters, meant
    )
    if kind == "yarn":
        scaling = yarn_attention_factor(parameters["factor"])
        if "mscale" in parameters:
            scaling = 1 + (scaling - 1) * parameters["mscale"]
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        scaling = longrope_attention_factor(length / original, original)
    if kind == "proportional" and int(2 * len(frequencies) * parameters.get("partial_rotary_factor", 1.0)) % 2:
        return [math.inf] * len(frequencies), scaling  # mlx-lm rotates one more pair
    return frequencies, scaling


def _without_mscale(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if key not in ("mscale", "mscale_all_dim")}
