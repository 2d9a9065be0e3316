"""The controls of the explorer's page: one for each option of a scheme that changes a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Bound = float | Callable[[int], float]
"""A number, or a function of the trained length."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A slider (`low` to `high`), a choice or a switch. If there is no default, the scheme computes one."""

    name: str
    low: Bound = 0.0
    high: Bound = 1.0
    log: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()
    word: str | None = None
    """A word that the option accepts instead of a number."""
    switch: bool = False

    def on(self, trained: int, default: Any) -> dict[str, Any]:
        """The control for a trained length, in the form that the page reads."""
        low, high = (bound(trained) if callable(bound) else bound for bound in (self.low, self.high))
        return {**asdict(self), "low": low, "high": max(low, high), "default": default}


def _count(name: str, low: Bound = 1, high: Bound = lambda trained: trained - 1) -> Control:
    return Control(name=name, low=low, high=high, log=True, whole=True)


def _number(name: str, low: float, high: float, log: bool = True, word: str | None = None) -> Control:
    return Control(name=name, low=low, high=high, log=log, word=word)


CONTROLS: dict[str, tuple[Control, ...]] = {
    "rope": (_number("rope_theta", 100, 1e7),),
    "linear": (),
    "ntk": (_number("alpha", 1, 256, word="cover"),),
    "dynamic_ntk": (_number("factor", 1, 8), _count("step")),
    "yarn": (
        _number("beta_fast", 2, 128),
        _number("beta_slow", 0.25, 8),
        _number("attention_factor", 0.8, 1.8, log=False),
        Control(name="truncate", switch=True),
    ),
    "llama3": (_number("low_freq_factor", 0.25, 4), _number("high_freq_factor", 1, 16)),
    "longrope": (_number("attention_factor", 0.8, 1.8, log=False),),
    "proportional": (_number("partial_rotary_factor", 0, 1, log=False),),
    "clip": (Control(name="pairs", low=0, high=64, whole=True), Control(name="taper", switch=True)),
    "self_extend": (_count("window"), _count("group", 1, 64)),
    "rerope": (_count("window"), _number("slope", 1.1, 64)),
    "dca": (_count("chunk"), _count("local_window")),
    "string": (_count("shift", 2), _count("window")),
    "streaming": (_count("sinks", 1, 64), _count("window")),
    "lm_infinite": (_count("global_tokens", 1, 64), _count("window")),
    "window": (_count("window", 1, lambda trained: 4 * trained),),
    "sparse": (
        _count("window"),
        Control(name="global_tokens", high=64, whole=True),
        _count("stride", 2, 512),
        Control(name="random_blocks", high=8, whole=True),
        _count("block", 8, 256),
    ),
    "alibi": (_number("alibi_bias_max", 1, 32),),
    "t5": (_count("relative_attention_max_distance", 32, 4096),),
    "kerple": (Control(name="kernel", choices=("log", "power")),),
    "fire": (_count("threshold", 16, lambda trained: 8 * trained),),
    "sandwich": (),
    "fox": (_number("constant", -2, 16, log=False),),
    "cable": (_number("constant", -16, 2, log=False),),
    "sinusoidal": (_number("base", 10, 1e6), Control(name="layout", choices=("interleaved", "concatenated"))),
    "fourier": (
        Control(name="frequencies", choices=("log", "gaussian")),
        _number("base", 10, 1e6),
        _number("sigma", 0.01, 4),
        Control(name="layout", choices=("interleaved", "concatenated")),
    ),
    "learned": (
        Control(name="resize", choices=("linear", "cubic", "grouped", "cyclic", "hierarchical")),
        _number("alpha", 0.05, 0.45, log=False),
    ),
    "none": (),
}
"""By scheme, in the order of the page."""

GROUPS = {
    "RoPE, rescaled": ("yarn", "ntk", "linear", "llama3", "longrope", "dynamic_ntk"),
    "RoPE, otherwise": ("rope", "proportional", "clip"),
    "Other distances": ("self_extend", "dca", "rerope", "string"),
    "Which keys are seen": ("streaming", "lm_infinite", "window", "sparse"),
    "A bias on scores": ("alibi", "kerple", "t5", "fire", "sandwich", "fox", "cable"),
    "Added to the input": ("learned", "sinusoidal", "fourier"),
    "No positions": ("none",),
}
