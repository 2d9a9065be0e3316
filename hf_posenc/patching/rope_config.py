"""`config.rope_parameters`: how a rotation is written into a config, and what a family's own code makes of it."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.effects import CoordinateRotation, Effect, Geometry, Rotation, Span
from ..errors import UnsupportedCell, UnsupportedModel
from ..families import Group, Stack
from ..families.finding import RotarySite
from ..runtime.rotary import SEALED, STILL, UNROTATED, Rotary, hushed
from ..schemes.frequencies import MSCALES, as_longrope
from .edits import Edit, Swap
from .layers import Changes, changes_between, layer_edits, layer_faults, told
from .other_readers import entries_for_none, entries_for_others
from .own_temperature import tempered_parameters

Effects = dict[str, Effect]
"""By group of layers."""
Rotations = Mapping[str, Rotation | None]
"""By type of layer; "" where all share one."""
Parameters = dict[str, dict[str, Any]]
"""Rope parameters by type of layer."""

SCALING_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("short_factor", "long_factor", *MSCALES, "low_freq_factor", "high_freq_factor"),
)
"""The keys of `rope_parameters` that say how RoPE is scaled; the others say what it rotates."""
SCALED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Scaled as far as any layer that reads it by itself could care."""
LARGEST_THETA = 1e30
MOVING = ("dynamic", "longrope")
"""transformers' own types of RoPE whose frequencies change with each call."""


# --- what a config says ----------------------------------------------------------------------------------------------


def rope_of(config: Any, layer_type: str) -> Any:
    """The rope parameters of a config for one type of layer."""
    rope = getattr(config, "rope_parameters", None)
    return rope.get(layer_type) if layer_type and isinstance(rope, dict) else rope


def own_rope(group: Group) -> dict[str, Any]:
    """A copy of the rope parameters of a group of layers, which are checked to be some."""
    config = group.stack.config
    rope = rope_of(config, group.layer_type)
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    if not isinstance(rope, dict) or not isinstance(theta, (int, float)) or not 0 < theta <= LARGEST_THETA:
        raise UnsupportedModel(
            f"config.rope_parameters of this {config.model_type!r} model should be one set with a rope_theta"
            f"{f' for {group.layer_type!r}' if group.layer_type else ''}, and is {rope!r}."
        )
    if not isinstance(rope.get("rope_type", "default"), str):
        raise UnsupportedModel(f"rope_type in the config should be a name, and is {rope['rope_type']!r}.")
    return {"rope_type": "default", **copy.deepcopy(rope)}


def unrelated_to_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of rope parameters that a patch keeps, such as which part of a head rotates; and theta."""
    skipped = set(SCALING_KEYS)
    if rope.get("rope_type") == "proportional":  # there the part that rotates is the scaling
        skipped.add("partial_rotary_factor")
    if "llama_4_scaling_beta" in rope:  # which counts from there
        skipped.discard("original_max_position_embeddings")
    kept = {key: copy.deepcopy(value) for key, value in rope.items() if key not in skipped}
    return {"rope_theta": rope["rope_theta"], **kept}


def pinned_keys(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What of the kept rope parameters must stay as it is, since something else reads it too."""
    return {k: v for k, v in kept.items() if k == "original_max_position_embeddings"}


def rope_parameters_with(rope: dict[str, Any], new: Parameters) -> dict[str, Any]:
    """A config's `rope_parameters` with new ones for some types of layers."""
    return new[""] if "" in new else {**copy.deepcopy(rope), **new}


def config_with(config: Any, new: Parameters) -> Any:
    """A copy of a config with new rope parameters, or why it does not take them."""
    changed = copy.deepcopy(config)
    changed.rope_parameters = copy.deepcopy(rope_parameters_with(config.rope_parameters, new))
    try:
        with hushed():
            changed.validate()
    except Exception as error:  # every model's config has its own ways to refuse
        return str(error.__cause__ or error).splitlines()[0]
    return changed


# --- rotary modules --------------------------------------------------------------------------------------------------


def live_frequencies(site: RotarySite, layer_type: str) -> Tensor:
    live: Tensor = getattr(site.own, site.buffers[layer_type])
    return live


def scaling_of(own: Any, layer_type: str) -> float:
    """What a family's rotary module multiplies cos and sin by. Modules that never do have no such attribute."""
    return float(getattr(own, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", 1.0))


def rotary_from(config: Any, own: Any) -> Any:
    """A rotary module of the same class as a family's own one, made from a config as its model would make it."""
    arguments = {"config": config}
    for name in list(inspect.signature(type(own).__init__).parameters)[1:]:
        if name not in ("config", "device") and hasattr(own, name):
            arguments[name] = getattr(own, name)
    return type(own)(**arguments)


def rotary_with(rotations: Rotations, site: RotarySite, stack: Stack) -> Any:
    """A copy of a family's rotary module that rotates layers of these types so, or not at all, whatever its config
    says, which is that of the stack."""
    own = site.own
    copied = copy.deepcopy(own, {id(stack.root.config): stack.config})
    for layer_type, rotation in rotations.items():
        live = live_frequencies(site, layer_type)
        values = torch.tensor(rotation.inv_freq) if rotation else torch.zeros(len(live))
        prefix = f"{layer_type}_" if layer_type else ""
        for buffer in (site.buffers[layer_type], f"{prefix}original_inv_freq"):
            if hasattr(copied, buffer):
                setattr(copied, buffer, values.to(live.device, copy=True))
        if hasattr(copied, f"{prefix}attention_scaling"):
            setattr(copied, f"{prefix}attention_scaling", rotation.attention_scaling if rotation else 1.0)
        elif rotation is not None and rotation.attention_scaling != 1.0:
            raise UnsupportedCell(f"{type(own).__name__} cannot scale attention, which this scheme does.")
    if hasattr(copied, "rope_type"):
        keep_frequencies(copied, rotations)
    if hasattr(copied, "rope_init_fn"):
        copied.rope_init_fn, copied.config = OwnFrequencies(copied), copy.copy(own.config)
        copied.config.rope_parameters = {**own.config.rope_parameters, "rope_type": "default"}
    return copied


class OwnFrequencies:
    """Answers a rotary module that asks its config for frequencies in each pass (PhiMoE) with those that it holds."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        return self.module.inv_freq, self.module.attention_scaling


def keep_frequencies(module: Any, layer_types: Iterable[str]) -> None:
    """Let a rotary module keep its frequencies: the types that look at the length in each pass are not needed."""
    for layer_type in layer_types:
        if isinstance(module.rope_type, dict):
            module.rope_type[layer_type] = "default"
        else:
            module.rope_type = "default"


def is_older_writing(found: Any, meant: Any) -> bool:
    """Whether rope parameters are those that 0.1.0 wrote for the same rotation: by type of layer, or for all."""
    if not isinstance(found, dict) or not isinstance(meant, dict):
        return bool(found == meant)
    if "rope_type" not in meant:
        return found.keys() == meant.keys() and all(is_older_writing(found[key], meant[key]) for key in meant)
    if any(
        found == {**_apart_from(meant, way), **other} for way in UNROTATED for other in UNROTATED if _says(meant, way)
    ):
        return True
    return bool(found == _apart_from(meant, (*MSCALES, "mscale", "mscale_all_dim")))


def _says(rope: Mapping[str, Any], way: Mapping[str, Any]) -> bool:
    return all(rope.get(key) == value for key, value in way.items())


def _apart_from(rope: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key not in set(keys)}


# --- what a patch does -----------------------------------------------------------------------------------------------


def rotary_edits(
    stack: Stack,
    groups: list[Group],
    effects: Effects,
    geometries: Mapping[str, Geometry],
    reach: Span,
    sealed: bool,
    rescales: bool,
) -> list[Edit]:
    """Rotary modules that rotate as the scheme means, and the rope parameters that say so: the same, to whoever loads
    them. Where those cannot say it, a `rope_type` that nobody knows.

    Layers that read those parameters by themselves do as layers that are built from them. But where a scheme
    `rescales` a RoPE that is scaled already, they stay as they are, and the parameters must say so.
    """
    rotations = {group.layer_type: _fixed_rotation(effects[group.name]) for group in groups}
    edits: list[Edit] = []
    if sealed:
        _refuse_temperature(stack, rotations)
        parameters = sealed_parameters(stack, rotations)
        modules = [rotary_with(rotations, site, stack) for site in stack.rotaries]
    else:
        ways = rope_parameters_for(stack, groups, effects, geometries, reach)
        ropes = [geometries[group.name].rope or {} for group in groups]
        extended = rescales and any(rope.get("rope_type", "default") != "default" for rope in ropes)
        parameters, modules, changes = _modules_from(stack, rotations, ways, extended)
        edits += layer_edits(stack, changes, config_with(stack.config, parameters))
    parameters = tempered_parameters(parameters, groups, effects)
    edits += [Swap(stack.config, "rope_parameters", rope_parameters_with(stack.config.rope_parameters, parameters))]
    if list(parameters) == [""] and sealed:
        edits += entries_for_none(stack.config)
    elif list(parameters) == [""]:
        edits += entries_for_others(stack.config, parameters[""], rotations[""], reach.target)
    for site, module in zip(stack.rotaries, modules, strict=True):
        device = next(iter(site.module.buffers())).device
        # Ours stays in fp32 when the model is cast, and so cannot tell the family's own one that it was.
        edits.append(Swap(site.owner, site.name, Rotary(module.to(device), tells=sealed), beside=stack.weight))
    return edits


def _refuse_temperature(stack: Stack, rotations: Rotations) -> None:
    """Raise where layers would read from a scheme's parameters what a sealed config does not tell them."""
    meant = {t: r.rope_parameters for t, r in rotations.items() if r is not None and r.rope_parameters}
    new = {t: {**unrelated_to_scaling(rope_of(stack.config, t)), **rope} for t, rope in meant.items()}
    if _with_temperature(stack, new, rotations) != new:
        raise UnsupportedCell(
            f"Attention of this {stack.config.model_type!r} model reads mscale_all_dim by itself, and this scheme is "
            "none that its config can say. Leave mscale and mscale_all_dim out."
        )


def _with_temperature(stack: Stack, parameters: Parameters, rotations: Rotations) -> Parameters:
    """Rope parameters with what a scheme was told of a temperature, where there are layers that read it."""
    told = {t: r.read_by_layers for t, r in rotations.items() if r is not None and r.read_by_layers}
    if not told:
        return parameters
    new = {t: {**rope, **told.get(t, {})} for t, rope in parameters.items()}
    one, other = (config_with(stack.config, each) for each in (parameters, new))
    if isinstance(one, str) or isinstance(other, str) or not changes_between(stack, one, other):
        return parameters
    return new


def sealed_parameters(stack: Stack, layer_types: Iterable[str]) -> Parameters:
    """Rope parameters that nobody can build. Phi's configs take none that they do not know; theirs stay as they were.

    The other marks of a seal are enough: these are for who forces his way past all of them.
    """
    unknown = {t: {**unrelated_to_scaling(rope_of(stack.config, t)), "rope_type": SEALED} for t in layer_types}
    return {} if isinstance(config_with(stack.config, unknown), str) else unknown


def _fixed_rotation(effect: Effect) -> Rotation | None:
    """The rotation that rotary modules do; those that follow the length, or pairs of tokens, are done in attention."""
    rotation = effect.rotation
    if rotation is None or rotation.follows_length or isinstance(rotation, CoordinateRotation):
        return None
    return rotation


def rope_parameters_for(
    stack: Stack, groups: list[Group], effects: Effects, geometries: Mapping[str, Geometry], reach: Span
) -> list[Parameters]:
    """Ways to say what the groups' rotations are in `rope_parameters`, the plainest first.

    The last one, a factor for each pair, fits models that know no other type but `longrope`; and then all of them
    with the temperature that the layers of a scaled model have noted.
    """
    ways: list[Parameters] = [{}, {}, {}]
    tempered: list[Parameters] = [{}, {}, {}]
    for group in groups:
        rotation, geometry = _fixed_rotation(effects[group.name]), geometries[group.name]
        kept = unrelated_to_scaling(rope_of(stack.config, group.layer_type))
        if rotation is None:
            said: list[Mapping[str, Any]] = list(UNROTATED)
            pairs: Sequence[float] = (1e-30,) * (geometry.rotary_dim // 2)
            scaling = 1.0
        else:
            said = [rotation.rope_parameters or {}] * 2
            pairs, scaling = rotation.inv_freq, rotation.attention_scaling
        if min(pairs) > 0:
            original = getattr(stack.config, "original_max_position_embeddings", None)  # which Phi's config insists on
            own = {"original_max_position_embeddings": original} if original else {}
            said.append({**as_longrope(geometry, pairs, scaling, reach), **own, **pinned_keys(kept)})
        for n, parameters in enumerate(said):
            if all(parameters.get(key, value) == value for key, value in pinned_keys(kept).items()):
                ways[n][group.layer_type] = {**kept, **parameters}
                noted = _temperature(geometry.rope or {})
                if noted and not (rotation and rotation.read_by_layers):
                    tempered[n][group.layer_type] = {**kept, **parameters, **noted}
    return [way for way in (*ways, *tempered) if len(way) == len(groups)]


def _temperature(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys from which layers have taken a temperature."""
    return {key: rope[key] for key in ("mscale_all_dim", "factor")} if rope.get("mscale_all_dim") else {}


def _modules_from(
    stack: Stack, rotations: Rotations, ways: list[Parameters], extended: bool
) -> tuple[Parameters, list[Any], Changes]:
    """The family's own rotary modules made from new parameters, as anyone who loads the config will make them; from
    the first of these ways to say them that gives what is meant. And what layers read from them."""
    reasons = []
    for way in ways:
        try:
            parameters = _with_temperature(stack, way, rotations)
            return parameters, *_modules_of(stack, rotations, parameters, extended)
        except UnsupportedCell as reason:
            reasons.append(str(reason).rstrip("."))
    raise UnsupportedCell(
        f"This scheme cannot be said in the config of a {stack.config.model_type!r} model: {reasons[0]}."
    )


def _modules_of(
    stack: Stack, rotations: Rotations, parameters: Parameters, extended: bool
) -> tuple[list[Any], Changes]:
    """Rotary modules made from these parameters, which are checked to do what is meant."""
    config = config_with(stack.config, parameters)
    if isinstance(config, str):
        raise UnsupportedCell(config)
    try:
        modules = [rotary_from(config, site.own) for site in stack.rotaries]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedCell(f"{type(error).__name__}: {error}") from None
    faults = [_misfit(site, new, rotations) for site, new in zip(stack.rotaries, modules, strict=True)]
    if any(faults):
        raise UnsupportedCell(next(filter(None, faults)))
    changes = changes_between(stack, stack.config, config)
    if changes and extended:
        raise UnsupportedCell(
            f"{told(changes)}, which is not what the scaling has that it extends; existing='replace' drops that first"
        )
    for module in modules:
        keep_frequencies(module, rotations)
    return modules, changes


def _misfit(site: RotarySite, new: Any, rotations: Rotations) -> str:
    """Why a rotary module made anew is not what was meant; empty if it is."""
    for layer_type, buffer in site.buffers.items():
        meant, scaling = live_frequencies(site, layer_type).float().cpu(), scaling_of(site.own, layer_type)
        if layer_type in rotations:
            rotation = rotations[layer_type]
            meant = torch.tensor(rotation.inv_freq) if rotation else torch.zeros(len(meant))
            scaling = rotation.attention_scaling if rotation else 1.0
        found = getattr(new, buffer, torch.zeros(0)).float().cpu()
        if found.shape != meant.shape or not torch.allclose(found, meant, rtol=1e-5, atol=STILL):
            return f"{type(new).__name__} computes other frequencies from it"
        if not math.isclose(scaling_of(new, layer_type), scaling, rel_tol=1e-6):
            return f"{type(new).__name__} scales attention by {scaling_of(new, layer_type):g}, not by {scaling:g}"
    return ""


# --- whether it is still done ----------------------------------------------------------------------------------------


def rotary_faults(
    stack: Stack, groups: list[Group], effects: Effects, sealed: bool, original: Mapping[str, Any]
) -> list[str]:
    """`groups`: all of the stack; `effects`: by group of layers that is patched, empty on a model that is not;
    `original`: the values of the config that a patch replaced."""
    if not stack.rotaries:
        return []
    faults: list[str] = []
    by_type = {group.layer_type: group for group in groups}
    for site in stack.rotaries:
        if effects and not isinstance(site.module, Rotary):
            faults.append("the rotary module of the patch was replaced")
        for layer_type in site.buffers:
            group = by_type[layer_type]
            faults += _frequency_faults(group, site, effects.get(group.name), sealed)
    faults += _layer_faults(stack, original.get("rope_parameters") if sealed else None)
    return list(dict.fromkeys(faults))


def _layer_faults(stack: Stack, original: dict[str, Any] | None) -> list[str]:
    """Layers that have not read the rope parameters of their config, or of the original where those are sealed."""
    config = copy.deepcopy(stack.config)
    if original is not None:
        config.rope_parameters = copy.deepcopy(original)
    types = sorted({t for site in stack.rotaries for t in site.buffers})
    plain = {t: {**unrelated_to_scaling(rope_of(config, t)), "rope_type": "default"} for t in types}
    scaled = {t: {**rope, **SCALED} for t, rope in plain.items()}
    others = [copy.deepcopy(config), copy.deepcopy(config)]
    for other, new in zip(others, (plain, scaled), strict=True):
        other.rope_parameters = rope_parameters_with(config.rope_parameters, new)
    return layer_faults(stack, config, others)


def _frequency_faults(group: Group, site: RotarySite, effect: Effect | None, sealed: bool) -> list[str]:
    layer_type, kind, buffer = group.layer_type, own_rope(group)["rope_type"], site.buffers[group.layer_type]
    if effect is None and kind in MOVING:
        buffer = f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq"
    live = getattr(site.own, buffer).float().cpu()
    wanted = live
    if effect is not None:
        rotation = _fixed_rotation(effect)
        wanted = torch.zeros(len(live)) if rotation is None else torch.tensor(rotation.inv_freq)
    if not torch.allclose(live, wanted, rtol=1e-5, atol=STILL):
        return ["the rotation is not switched off" if sealed else "the live frequencies are not those of the scheme"]
    if sealed:  # such a config cannot be built anew by transformers; layers that are left alone are as they were
        marked = effect is None or kind == SEALED or not sealed_parameters(group.stack, [layer_type])
        return [] if marked else ["the config does not say that its rotation is sealed"]
    fresh = rotary_from(group.stack.config, site.own)
    half = live_frequencies(site, layer_type).dtype != torch.float32
    faults, new = [], getattr(fresh, site.buffers[layer_type], torch.zeros(0)).to(live.device)
    if new.shape != live.shape or not torch.allclose(new, live, rtol=1e-2 if half else 1e-5, atol=STILL):
        faults.append(
            f"config.rope_parameters ({kind!r}) means other frequencies than the live rotary module has; a config "
            "edited after construction changes nothing, use patch_model"
        )
    meant, scaling = scaling_of(fresh, layer_type), scaling_of(site.own, layer_type)
    if not math.isclose(meant, scaling, rel_tol=1e-5):
        faults.append(f"the config means an attention scale of {meant:g}, the live module has {scaling:g}")
    return faults
