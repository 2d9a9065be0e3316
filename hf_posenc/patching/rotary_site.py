"""The rotary site: modules that rotate q and k before attention, and how `config.rope_parameters` describes them."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.effects import CoordinateRotation, Effect, Geometry, Rotation, Span
from ..errors import UnsupportedCell, UnsupportedModel
from ..families import Group, Stack
from ..families.places import RotarySite
from ..runtime.rotary import SEALED, STILL, UNROTATED, Rotary, hush_transformers
from ..schemes.frequencies import MSCALES, longrope_parameters
from .edits import Edit, Swap
from .layers import Changes, changes_between, first_change, layer_edits, layer_faults
from .other_readers import entries_for_others
from .own_temperature import parameters_with_beta

Effects = dict[str, Effect]
"""By name of a group of layers."""
Rotations = Mapping[str, Rotation | None]
"""By type of layer; the key is "" where all layers share one."""
Parameters = dict[str, dict[str, Any]]
"""Rope parameters by type of layer."""

SCALING_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("short_factor", "long_factor", *MSCALES, "low_freq_factor", "high_freq_factor"),
)
"""The keys of `rope_parameters` that say how RoPE is scaled; the other keys say what it rotates."""
LARGEST_THETA = 1e30
SCALED = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
"""Rope parameters that change everything which a layer could read from them by itself."""
MOVING = ("dynamic", "longrope")
"""The types of RoPE in transformers whose frequencies change with each call."""


# --- what a config says ----------------------------------------------------------------------------------------------


def rope_of(config: Any, layer_type: str) -> Any:
    """The rope parameters of a config for one type of layer."""
    rope = getattr(config, "rope_parameters", None)
    return rope.get(layer_type) if layer_type and isinstance(rope, dict) else rope


def own_rope(group: Group) -> dict[str, Any]:
    """A copy of the rope parameters of a group of layers. Raises where the config has none that make sense."""
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


def parameters_to_keep(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters that a patch keeps: theta, and those about other things than scaling."""
    skipped = set(SCALING_KEYS)
    if rope.get("rope_type") == "proportional":  # here the part of a head that rotates is the scaling
        skipped.add("partial_rotary_factor")
    if "llama_4_scaling_beta" in rope:  # this temperature counts from that length
        skipped.discard("original_max_position_embeddings")
    kept = {key: copy.deepcopy(value) for key, value in rope.items() if key not in skipped}
    return {"rope_theta": rope["rope_theta"], **kept}


def pinned_keys(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The kept rope parameters that must not change, since something else reads them too."""
    return {k: v for k, v in kept.items() if k == "original_max_position_embeddings"}


def rope_parameters_with(rope: dict[str, Any], new: Parameters) -> dict[str, Any]:
    """The `rope_parameters` of a config with new parameters for some types of layers."""
    return new[""] if "" in new else {**copy.deepcopy(rope), **new}


def config_with(config: Any, new: Parameters) -> Any:
    """A copy of a config with new rope parameters; or, as text, the reason why the config refuses them."""
    changed = copy.deepcopy(config)
    changed.rope_parameters = copy.deepcopy(rope_parameters_with(config.rope_parameters, new))
    try:
        with hush_transformers("must be less than max_position_embeddings"):  # the new length comes later
            changed.validate()
    except Exception as error:  # each class of configs raises what it likes
        return str(error.__cause__ or error).splitlines()[0]
    return changed


def sealed_parameters(stack: Stack, layer_types: Iterable[str]) -> Parameters:
    """Rope parameters from which nobody can build a model. Phi's configs refuse these, so theirs stay as they are.

    The other marks of a seal are enough. These parameters stop a user who removes all other marks.
    """
    unknown = {t: {**parameters_to_keep(rope_of(stack.config, t)), "rope_type": SEALED} for t in layer_types}
    return {} if isinstance(config_with(stack.config, unknown), str) else unknown


# --- rotary modules --------------------------------------------------------------------------------------------------


def live_frequencies(site: RotarySite, layer_type: str) -> Tensor:
    live: Tensor = getattr(site.own, site.buffers[layer_type])
    return live


def scaling_of(own: Any, layer_type: str) -> float:
    """What a family's rotary module multiplies cos and sin by; 1 for modules without such an attribute."""
    return float(getattr(own, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", 1.0))


def rotary_from(config: Any, own: Any) -> Any:
    """A rotary module of the same class as a family's own one, made from a config as the model makes its own."""
    arguments = {"config": config}
    for name in list(inspect.signature(type(own).__init__).parameters)[1:]:
        if name not in ("config", "device") and hasattr(own, name):
            arguments[name] = getattr(own, name)
    return type(own)(**arguments)


def keep_frequencies(module: Any, layer_types: Iterable[str]) -> None:
    """Stop a rotary module from changing its frequencies with the length of each pass, as some types of RoPE do."""
    for layer_type in layer_types:
        if isinstance(module.rope_type, dict):
            module.rope_type[layer_type] = "default"
        else:
            module.rope_type = "default"


def fixed_rotation(effect: Effect) -> Rotation | None:
    """The rotation that rotary modules do; None for one that attention does, and for no rotation."""
    rotation = effect.rotation
    if rotation is None or rotation.follows_length or isinstance(rotation, CoordinateRotation):
        return None
    return rotation


# --- how a config says a rotation ------------------------------------------------------------------------------------


def with_temperature(stack: Stack, parameters: Parameters, rotations: Rotations) -> Parameters:
    """Rope parameters with the scheme's options for a temperature, if some layers read these from there."""
    told = {t: r.read_by_layers for t, r in rotations.items() if r is not None and r.read_by_layers}
    if not told:
        return parameters
    new = {t: {**rope, **told.get(t, {})} for t, rope in parameters.items()}
    one, other = (config_with(stack.config, each) for each in (parameters, new))
    if isinstance(one, str) or isinstance(other, str) or not changes_between(stack, one, other):
        return parameters
    return new


def _parameters_for(
    way: int, tempered: bool, group: Group, effect: Effect, geometry: Geometry, reach: Span
) -> dict[str, Any] | None:
    """The rope parameters that mean a group's rotation, written in one of the ways; None where it cannot.

    `way` counts the ways to say no rotation (`UNROTATED`) and, after them, a factor for each pair. `tempered` keeps
    the temperature that the layers of a scaled model have noted.
    """
    rotation, noted = fixed_rotation(effect), _temperature_keys(geometry.rope or {})
    if tempered and (not noted or (rotation and rotation.read_by_layers)):
        return None
    kept = parameters_to_keep(rope_of(group.stack.config, group.layer_type))
    pinned = pinned_keys(kept)
    parameters: Mapping[str, Any] | None
    if way == len(UNROTATED):
        parameters = _longrope_parameters(rotation, group, geometry, reach, pinned)
    else:
        parameters = UNROTATED[way] if rotation is None else rotation.rope_parameters or {}
    if parameters is None or any(parameters.get(key, value) != value for key, value in pinned.items()):
        return None
    return {**kept, **parameters, **(noted if tempered else {})}


def _longrope_parameters(
    rotation: Rotation | None, group: Group, geometry: Geometry, reach: Span, pinned: dict[str, Any]
) -> dict[str, Any] | None:
    """Rope parameters of the type `longrope`, with a factor for each pair; None where some pairs do not rotate."""
    pairs, scaling = (1e-30,) * (geometry.rotary_dim // 2), 1.0
    if rotation is not None:
        pairs, scaling = rotation.inv_freq, rotation.attention_scaling
    if min(pairs) <= 0:
        return None
    original = getattr(group.stack.config, "original_max_position_embeddings", None)  # Phi's config needs it
    own = {"original_max_position_embeddings": original} if original else {}
    return {**longrope_parameters(geometry, pairs, scaling, reach), **own, **pinned}


def _temperature_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys from which layers have read a temperature."""
    return {key: rope[key] for key in ("mscale_all_dim", "factor")} if rope.get("mscale_all_dim") else {}


class Built(NamedTuple):
    """What a family's own code makes of rope parameters."""

    parameters: Parameters
    config: Any
    """The config with these parameters."""
    modules: list[Any]
    """New rotary modules, one for each of the stack's own."""
    changes: Changes
    """Attention layers, and the values that they hold when they are built from these parameters."""


def build_rotary(
    stack: Stack,
    groups: list[Group],
    effects: Effects,
    geometries: Mapping[str, Geometry],
    reach: Span,
    extended: bool,
) -> Built:
    """The family's own rotary modules, made from new parameters as everybody who loads the config will make them.

    Several ways to write the rotations are tried, the plainest first, and the first one that gives the right modules
    is taken. A factor for each pair comes last, for models that know no other type than `longrope`. Then all ways are
    tried again with the temperature that the layers of a scaled model have noted.
    """
    rotations = {group.layer_type: fixed_rotation(effects[group.name]) for group in groups}
    reasons = []
    for tempered, way in product((False, True), range(len(UNROTATED) + 1)):
        parameters: Parameters = {}
        for group in groups:
            said = _parameters_for(way, tempered, group, effects[group.name], geometries[group.name], reach)
            if said is not None:
                parameters[group.layer_type] = said
        if len(parameters) < len(groups):
            continue
        try:
            return _build(stack, rotations, with_temperature(stack, parameters, rotations), extended)
        except UnsupportedCell as reason:
            reasons.append(str(reason).rstrip("."))
    first = reasons[0] if reasons else "something else reads its rope_parameters too"
    raise UnsupportedCell(f"This scheme cannot be said in the config of a {stack.config.model_type!r} model: {first}.")


def _build(stack: Stack, rotations: Rotations, parameters: Parameters, extended: bool) -> Built:
    """The rotary modules that these parameters give. Raises where they do not do what is meant."""
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
    for module in modules:
        keep_frequencies(module, rotations)
    changes = changes_between(stack, stack.config, config)
    if changes and extended:
        raise UnsupportedCell(
            f"{first_change(changes)}, which is not what the scaling has that it extends; existing='replace' drops "
            "that first"
        )
    return Built(parameters, config, modules, changes)


def _misfit(site: RotarySite, new: Any, rotations: Rotations) -> str:
    """Why a new rotary module does not do what is meant; empty where it does."""
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


# --- edits -----------------------------------------------------------------------------------------------------------


def rotary_edits(
    stack: Stack,
    groups: list[Group],
    effects: Effects,
    geometries: Mapping[str, Geometry],
    reach: Span,
    rescales: bool,
) -> list[Edit]:
    """Puts rotary modules that rotate as the scheme means, and rope parameters from which anyone builds the same.

    Layers that read those parameters themselves get the values of layers that are built from them. But where a scheme
    `rescales` a RoPE that is scaled already, such layers must stay as they are.
    """
    ropes = [geometries[group.name].rope or {} for group in groups]
    extends = rescales and any([rope.get("rope_type", "default") != "default" for rope in ropes])
    built = build_rotary(stack, groups, effects, geometries, reach, extends)
    edits = layer_edits(stack, built.changes, built.config)
    parameters = parameters_with_beta(built.parameters, groups, effects)
    edits.append(Swap(stack.config, "rope_parameters", rope_parameters_with(stack.config.rope_parameters, parameters)))
    if list(parameters) == [""]:
        rotation = fixed_rotation(effects[groups[0].name])
        edits += entries_for_others(stack.config, parameters[""], rotation, reach.target)
    return edits + module_edits(stack, built.modules, False)


def module_edits(stack: Stack, modules: list[Any], tells: bool) -> list[Edit]:
    """Puts these modules in the places of a stack's own rotary modules. `tells`: whether they also tell positions."""
    edits: list[Edit] = []
    for site, module in zip(stack.rotaries, modules, strict=True):
        device = next(iter(site.module.buffers())).device
        # Our module stays in fp32 when the model is cast, so the family's own one follows the stack's weight instead.
        edits.append(
            Swap(site.owner, site.name, Rotary(module.to(device), carries_positions=tells), beside=stack.weight)
        )
    return edits


# --- checks ----------------------------------------------------------------------------------------------------------


def rotary_faults(
    stack: Stack, groups: list[Group], effects: Effects, sealed: bool, original: Mapping[str, Any]
) -> list[str]:
    """Where the rotary modules of a stack do not do what the scheme and the config mean.

    `groups`: all groups of the stack. `effects`: those of the patched groups; empty where the model is not patched.
    `original`: the values in the config that the patch replaced.
    """
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
    """Which layers hold other values than the config means, or than the original means where it is sealed."""
    config = copy.deepcopy(stack.config)
    if original is not None:
        config.rope_parameters = copy.deepcopy(original)
    types = sorted({t for site in stack.rotaries for t in site.buffers})
    plain = {t: {**parameters_to_keep(rope_of(config, t)), "rope_type": "default"} for t in types}
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
        rotation = fixed_rotation(effect)
        wanted = torch.zeros(len(live)) if rotation is None else torch.tensor(rotation.inv_freq)
    if not torch.allclose(live, wanted, rtol=1e-5, atol=STILL):
        return ["the rotation is not switched off" if sealed else "the live frequencies are not those of the scheme"]
    if sealed:  # transformers can build nothing from such a config to compare with
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
