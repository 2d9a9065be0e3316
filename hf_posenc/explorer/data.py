"""The data of the page: the sizes of a model, and the initial values of each scheme. The page computes the rest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..core.effects import Geometry
from ..errors import PosencError, UnsupportedModel
from ..families import Family, Places, places
from ..patching.grades import MEANING, grade, refuse_lost_bias
from ..patching.measure import measure
from ..patching.patch_state import is_patched
from ..patching.untrained import needs_training
from ..schemes import SCHEMES, Scheme
from ..schemes.fire import ProgressiveBias
from ..schemes.fourier import gaussian_frequencies
from ..schemes.frequencies import base_frequencies
from ..schemes.kerple import KernelBias
from ..schemes.t5 import BucketBias
from .controls import CONTROLS, GROUPS

TIMES = 4.0
"""The initial factor."""
CHANNELS = 64
"""How many channels of a table are drawn."""
COUNTED = ("hidden_size", "num_heads", "head_dim", "rotary_dim", "trained_length", "causal", "layers")


def explorer_data(model: PreTrainedModel, path: str) -> dict[str, Any]:
    """Everything that the page needs, as JSON values. The model is not changed."""
    if is_patched(model):
        raise PosencError("The explorer starts from a model's own positions, and this one is patched: unpatch it.")
    where = places(model)
    if len(where.family.axes) > 1:
        raise UnsupportedModel(
            f"The explorer draws positions in a text, and this {where.config.model_type!r} model reads images."
        )
    found = {name: scheme_data(where, name) for name in CONTROLS}
    usable = [entry["geometry"] for entry in found.values() if "geometry" in entry]
    if not usable:
        raise UnsupportedModel(next(entry["refused"] for entry in found.values()))
    return {
        "path": path,
        "model": f"{type(model).__name__} ({where.config.model_type})",
        "own": where.family.positions,
        "family_rope": where.family.rotary,
        "groups": GROUPS,
        "meaning": MEANING,
        "schemes": found,
        "first": "yarn" if where.has_rotary else "learned" if where.has_table else "alibi",
    }


def scheme_data(where: Places, name: str) -> dict[str, Any]:
    """The initial values of a scheme on this model, or why it is refused."""
    cls = SCHEMES[name]
    about = {"summary": cls.summary, "trains": needs_training(cls, where.family)}
    try:
        geometry = next(iter(measure(where, _sample(cls), "extend").values()))
        effect = _sample(cls).effect_on(geometry)
        refuse_lost_bias(effect, where.family)
        starts = _starts(name, geometry)
    except PosencError as error:
        return {**about, "refused": str(error), "controls": []}
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    trained = geometry.trained_length
    return {
        **about,
        "grade": grade(effect, where.family),
        "geometry": {key: getattr(geometry, key) for key in COUNTED},
        "controls": [control.on(trained, defaults[control.name]) for control in CONTROLS[name]],
        **_rope(geometry, where.family),
        **starts,
    }


def _sample(cls: type[Scheme]) -> Scheme:
    return cls.from_options({"factor": TIMES} if cls.extends else {})


def _rope(geometry: Geometry, family: Family) -> dict[str, Any]:
    """The frequencies before rescaling; the page computes those of plain RoPE itself."""
    inv_freq, scaling = base_frequencies(geometry) if geometry.rotary_dim % 2 == 0 else ((), 1.0)
    rope: Mapping[str, Any] = geometry.rope or {}
    return {
        "inv_freq": list(inv_freq),
        "scaling": scaling,
        "theta": float(rope.get("rope_theta", 10_000.0)),
        "plain": rope.get("rope_type", "default") == "default",
        "original": rope.get("original_max_position_embeddings") or geometry.trained_length,
    }


def _starts(name: str, geometry: Geometry) -> dict[str, Any]:
    """Random initial parameters of schemes, which the page cannot reproduce."""
    heads = geometry.num_heads
    if name == "t5":
        bias = BucketBias(heads, 32, 128, not geometry.causal, geometry.hidden_size**-0.5, 0)
        return {"weight": bias.weight.detach().mT.tolist()}
    if name == "kerple":
        kernels = {kernel: KernelBias(heads, kernel, 0) for kernel in ("log", "power")}
        return {"kernels": {kernel: [b.r1.tolist(), b.r2.tolist()] for kernel, b in kernels.items()}}
    if name == "fire":
        network = ProgressiveBias(heads, 32, 512.0, 0)
        return {"inner": network.inner.tolist(), "outer": network.outer.tolist()}
    if name == "fourier":
        return {"normal": gaussian_frequencies(geometry.hidden_size, 1, 1.0, 0)[0, : CHANNELS // 2].tolist()}
    return {}


def as_script(data: Mapping[str, Any]) -> str:
    """JSON escaped so that it cannot end the script element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
