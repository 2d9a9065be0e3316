"""The rotation of a live model, from which all exports are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.effects import FollowingRotation
from ..errors import PosencError, UnsupportedCell
from ..patching.describe import describe
from ..patching.grades import SEALED
from ..patching.patch_state import record_of
from ..schemes import SCHEMES


@dataclass(frozen=True)
class LiveRotation:
    """The frequencies and the scale of a live model, and its `rope_parameters`."""

    inv_freq: tuple[float, ...]
    attention_scaling: float
    parameters: dict[str, Any]
    """`config.rope_parameters`."""

    @property
    def theta(self) -> float:
        return float(self.parameters["rope_theta"])

    @property
    def plain(self) -> tuple[float, ...]:
        """The frequencies of an unscaled RoPE with the same theta."""
        pairs = len(self.inv_freq)
        return tuple(self.theta ** (-i / pairs) for i in range(pairs))

    def factors(self) -> tuple[float, ...]:
        """The divisor of each plain frequency; 1e30 for a pair that does not rotate."""
        return tuple(p / f if f > p * 1e-30 else 1e30 for p, f in zip(self.plain, self.inv_freq, strict=True))


def live_rotation(model: Any) -> LiveRotation | None:
    """The rotation of a model, or None if it has none; raises if layers rotate differently."""
    modules = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), object) and _rotates(m)]
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    if not modules:
        return None
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        raise PosencError(
            f"The layers of this {model.config.model_type!r} model do not share one set of rope_parameters, and no "
            "export knows how to say that yet."
        )
    found = {(tuple(m.inv_freq.float().tolist()), float(getattr(m, "attention_scaling", 1.0))) for m in modules}
    if len(found) != 1:
        raise PosencError(f"This {model.config.model_type!r} model has {len(found)} different rotations.")
    inv_freq, scaling = found.pop()
    return LiveRotation(inv_freq, scaling, dict(rope))


def _rotates(module: Any) -> bool:
    # A wrapper and its inner module have the same frequencies.
    return "inv_freq" in dict(module.named_buffers(recurse=False)) or hasattr(module, "wraps_rotary")


def _has_rotary(model: Any) -> bool:
    return isinstance(getattr(model.config.get_text_config(), "rope_parameters", None), dict)


def follows_length(model: Any) -> bool:
    """Whether a patched model rotates by angles that depend on the length of each text."""
    record = record_of(model)
    effects = record.effects().values() if record is not None else ()
    return any(isinstance(effect.rotation, FollowingRotation) for effect in effects)


def refuse_sealed(model: Any, runtime: str) -> None:
    """Raise for a scheme that only hf_posenc computes, and name the nearest one that others can."""
    found: Any = describe(model)
    if not found.portability.startswith(SEALED):
        return
    known = SCHEMES.registered().get(found.scheme)  # a plan is none
    nearest = (known and known.nearest) or "yarn" if found.pairs or _has_rotary(model) else "learned"
    how = "chooses its angles by the length of each text" if follows_length(model) else "works inside attention"
    raise UnsupportedCell(
        f"{found.scheme!r} on {type(model).__name__} {how}, which {runtime} does not support: only hf_posenc "
        f"computes it. The nearest scheme that {runtime} can serve is {nearest!r}: patch the original model with it "
        f"(hf-posenc patch MODEL OUT --scheme {nearest}), and export that."
    )
