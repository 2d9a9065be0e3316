"""`load`: a patched checkpoint comes back exactly, or not at all."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..compat.models import decode_floats
from ..compat.quantized import keep_packing
from ..core.effects import Effect
from ..errors import PosencError
from ..families import Family, family_of
from ..models import model_path
from ..patching.checks import check_patch
from ..patching.other_readers import foreign_keys
from ..patching.patch_state import refuse_unpatchable
from ..patching.records import Record, section_of
from ..patching.seal import MARKS, check_seal, has_seal, is_sealed_config
from ..patching.sidecar import ADAPTER
from ..patching.sizes import checkpoint_size
from .adapters import load_adapter
from .config_argument import arguments_from
from .embedders import embedder_with, holds_embedder
from .files import CONFIG, HUB, find, read_json, weight_files
from .hub import offline
from .relative_keys import VECTORS, has_relative_keys, with_relative_keys
from .restore import restore
from .staging import lost_its_checkpoint

FAILURES = (OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError, ArithmeticError)
"""What transformers raises on a checkpoint that it cannot load, or on a config that it cannot build a model from."""


def load(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | PreTrainedModel | None = None,
    model_class: Any = None,
    **kwargs: Any,
) -> Any:
    """The model at `path` with the positions that it was saved with. Raises where these cannot be had.

    `path` is a directory or a hub name, of a model, of a SentenceTransformer or of a PEFT adapter. For an adapter,
    `base` may name another place of its base model, or be that model, patched alike. `model_class` is a transformers
    class other than the one that was saved; it also leaves out the SentenceTransformer around the model. `kwargs` go
    to `from_pretrained`.
    """
    hub = {key: kwargs[key] for key in HUB if key in kwargs}
    where = model_path(path)
    kwargs |= offline(where, hub)
    if find(where, ADAPTER, hub) is not None:
        return load_adapter(where, load, base, hub, model_class=model_class, **kwargs)
    if base is not None:
        raise PosencError(f"base= is for adapters, and {where} holds no {ADAPTER}.")
    file = find(where, CONFIG, hub)
    if file is None:
        why = "a save into it was interrupted, save again" if lost_its_checkpoint(where) else "it is not a checkpoint"
        raise PosencError(f"{where} holds neither {CONFIG} nor {ADAPTER}: {why}.")
    raw = read_json(file)
    if "posenc" in raw:
        model = load_patched(where, raw, model_class, hub, kwargs)
    else:
        model = load_unpatched(where, file, raw, model_class, hub, kwargs)
    if model_class is None and holds_embedder(where, hub):
        return embedder_with(model, where, hub)
    return model


def load_patched(
    where: str, raw: dict[str, Any], model_class: Any, hub: dict[str, Any], kwargs: dict[str, Any]
) -> PreTrainedModel:
    """The patched model of a checkpoint whose config.json is `raw`.

    What happens, step by step:

    1. The `posenc` record in config.json is read, strictly.
    2. The seals of config and weights are compared.
    3. A config is made that says what the model was before its patch. Only its table has the size that it has in the
       file.
    4. The original model is built, and its weights are loaded, every one accounted for.
    5. The values that the patch replaced are put back into its config, the size of the table included.
    6. The record is compared with the model. The patch is planned again from it, compared with what config.json
       says to programs that cannot read the record, and applied.
    7. The parameters that the scheme itself brought are loaded from the same files.
    8. The live model is checked to do what its record says.
    9. The record's checksum is checked last, since the other checks say more about what is wrong.
    """
    record = Record.from_dict(raw["posenc"])
    files = weight_files(where, hub)
    own_config = kwargs.pop("config", None)
    if own_config is not None:
        kwargs = {**arguments_from(own_config, raw), **kwargs}
    sealed = check_seal(where, raw, record, files)
    if sealed:
        check_kernel(where, kwargs.get("attn_implementation"))
    family = family_of(raw.get("model_type"))
    effects = record.effects() if family is not None and family.table else None
    # A config would keep "auto" as if it were a dtype; `from_pretrained` finds out what it stands for.
    auto = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if kwargs.get(key) == "auto"}
    config, rest = unpatched_config(raw, record, family, sealed, effects, **kwargs)
    cls = model_class_of(raw, model_class)
    model = from_pretrained(where, cls, raw, {**rest, **auto, "config": config}, extra=("posenc_",))
    refuse_unpatchable(model)
    put_back_values(model.config, record, family)
    restore(model, record, raw, effects)
    load_parameters(model, where, files)
    check_patch(model, record)
    record.refuse_edited()
    return model


def load_unpatched(
    where: str, file: str, raw: dict[str, Any], model_class: Any, hub: dict[str, Any], kwargs: dict[str, Any]
) -> PreTrainedModel:
    """The model of a checkpoint without a `posenc` record, whose config.json is `raw`."""
    files = {} if is_sealed_config(raw) else weight_files(where, hub)
    if not files or has_seal(files):
        raise PosencError(f"{file} is sealed and has lost its 'posenc' record: how it knew positions is not known.")
    old = has_relative_keys(raw)
    extra = ("posenc_", VECTORS) if old else ("posenc_",)
    model = from_pretrained(where, model_class_of(raw, model_class), raw, kwargs, extra)
    return with_relative_keys(model, raw, files, where) if old else model


def check_kernel(where: str, kernel: str | None) -> None:
    """Raise where a sealed model is to run on a kernel that its attention cannot use."""
    if kernel not in (None, "sdpa", "eager"):
        raise PosencError(
            f"{where} works inside attention, through the 'sdpa' and 'eager' kernels, not {kernel!r}: name one of "
            "them, or none."
        )


def from_pretrained(
    where: str, cls: Any, raw: dict[str, Any], kwargs: dict[str, Any], extra: tuple[str, ...]
) -> PreTrainedModel:
    """`from_pretrained`, with every weight accounted for.

    Weights whose names contain one of `extra` may be in the files without being in the model. The caller has made
    sure that there are files, and that these are no pickles.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # or it would report our parameters as unexpected
    fixed = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, report = cls.from_pretrained(where, **{**kwargs, **fixed})
    except (*FAILURES, SafetensorError) as error:
        raise PosencError(f"{where} cannot be loaded: {error}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in report.get("mismatched_keys", ())]
    if mismatched:
        raise PosencError(f"Weights in {where} have other shapes than its config says: {', '.join(mismatched[:5])}.")
    same_class = raw.get("architectures") == [type(model).__name__]
    prefix = model.base_model_prefix + "."
    missing = sorted(report.get("missing_keys", ()))
    # A BERT that was saved without its pooler is whole: transformers makes a new pooler for the heads that need one.
    lost = [key for key in missing if "pooler" not in key and (same_class or key.startswith(prefix))]
    if lost:
        raise PosencError(f"{where} lacks {len(lost)} weights ({', '.join(lost[:5])}): the checkpoint is not whole.")
    left = sorted([key for key in report.get("unexpected_keys", ()) if not any([part in key for part in extra])])
    if missing or left:
        warnings.warn(
            f"{type(model).__name__} was loaded with {len(missing)} weights newly made ({', '.join(missing[:5])}) and "
            f"{len(left)} of the checkpoint's left out ({', '.join(left[:5])}).",
            stacklevel=4,
        )
    keep_packing(model)
    return model


def unpatched_config(
    raw: dict[str, Any],
    record: Record | None,
    family: Family | None,
    sealed: bool,
    effects: dict[str, Effect] | None,
    **kwargs: Any,
) -> tuple[Any, dict[str, Any]]:
    """The config as it was before the patch, and the arguments that it did not use.

    `effects`: those of the record, where the family has a table. The config then gives the table the size that it has
    in the file.
    """
    values = decode_floats(copy.deepcopy(raw))
    for key in ("posenc", "attn_implementation", "auto_map", *(MARKS if sealed else ())):
        values.pop(key, None)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise PosencError(f"config.json names the model type {kind!r}, which this transformers does not know.")
    cls = CONFIG_MAPPING[kind]
    if record is not None:
        _put_back_section(section_of(values, family), cls, family, record, kwargs)
    del values["model_type"]
    try:
        config, rest = cls.from_dict(values, return_unused_kwargs=True, **kwargs)
    except Exception as error:  # a config that was edited by hand may fail in any way
        raise PosencError(f"config.json does not make a {kind!r} config: {error}") from None
    if record is not None and family is not None and effects is not None:
        part, geometry = _positions_part(config, family), record.geometry
        size = checkpoint_size(family, part, list(effects.values()), geometry, record.scheme.span(geometry))
        if size is not None:
            setattr(part, family.length, size)
    return config, rest


def _positions_part(config: Any, family: Family | None) -> Any:
    """The config that describes positions: the whole config, or that of the text or vision part."""
    return getattr(config, family.part[1]) if family is not None and family.part else config.get_text_config()


def _put_back_section(
    section: dict[str, Any], cls: Any, family: Family | None, record: Record, kwargs: dict[str, Any]
) -> None:
    """Write the values that a patch replaced back into their section of a config.

    Values that decide which weights are built stay as they are, since they describe the weights in the file.
    """
    kind = section.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:  # the section of a part has a class of its own
        cls = CONFIG_MAPPING[kind]
    own = {key: cls.attribute_map.get(key, key) for key in record.original}
    named = sorted({*own, *own.values(), "rope_parameters", "rope_scaling"} & set(kwargs))
    if named:
        raise PosencError(f"{', '.join(named)} cannot be given here: the checkpoint's own scheme says it.")
    if "rope_parameters" in section and "rope_parameters" not in record.original:
        raise PosencError("The original of the posenc record lacks rope_parameters: it is damaged.")
    if "rope_parameters" in record.original:
        for key in foreign_keys(cls):  # or they would be taken for values of the original
            section.pop(key, None)
    built: tuple[str | None, ...] = () if family is None else (*family.bias_flags, family.table_flag)
    if family is not None and len(family.axes) > 1:
        built = (*family.flags, family.length)
    for key, value in record.original.items():
        if key not in built:
            section[own[key]] = copy.deepcopy(value)


def put_back_values(config: Any, record: Record, family: Family | None) -> None:
    """Put the values that a patch replaced back into the config of a model that was just loaded."""
    part = _positions_part(config, family)
    for key, value in record.original.items():
        if key != "rope_parameters":
            setattr(part, key, copy.deepcopy(value))


def load_parameters(model: PreTrainedModel, where: str, files: dict[str, str]) -> None:
    """Load the parameters that the scheme itself brought, which transformers does not know."""
    wanted = {name: p for name, p in model.named_parameters() if "posenc_" in name}
    for name, parameter in wanted.items():
        key = _stored_name(name, files)
        if key is None:
            raise PosencError(f"{where} lacks {name!r}, which its scheme needs: the checkpoint is not whole.")
        with safe_open(files[key], framework="pt") as stored:
            tensor = stored.get_tensor(key)
        if tensor.shape != parameter.shape:
            raise PosencError(f"{name!r} in {where} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}.")
        with torch.no_grad():
            parameter.copy_(tensor)


def _stored_name(name: str, files: dict[str, str]) -> str | None:
    """A parameter's name in the files, where the prefix of the base model may be missing or come twice."""
    tail = name[name.index("posenc_") :]
    fitting = [k for k in files if k == tail or k.endswith("." + tail)]
    # An encoder and a decoder may both have one: take the name that agrees with this one for longest from its end.
    parts = name.split(".")[::-1]
    shared = {k: [a == b for a, b in zip(k.split(".")[::-1], parts, strict=False)] for k in fitting}
    return max(fitting, key=lambda k: (shared[k] + [False]).index(False), default=None)


def model_class_of(raw: dict[str, Any], chosen: Any = None) -> Any:
    """The class of a checkpoint's model: the one that the user chose, or the one that config.json names."""
    if chosen is not None:
        return chosen
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None:
        cls = _registered_class(raw.get("model_type"), name)
    kind = getattr(getattr(cls, "config_class", None), "model_type", None)
    if cls is None or kind is None or kind != raw.get("model_type"):
        raise PosencError(
            f"config.json names the architecture {names!r}, which is no {raw.get('model_type')!r} model of this "
            "transformers. Pass model_class=, for example transformers.AutoModelForCausalLM."
        )
    return cls


def _registered_class(kind: Any, name: Any) -> Any:
    """The class of this name that was registered with transformers' Auto classes; None if there is none."""
    config = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    for label, heads in vars(modeling_auto).items():
        if config is not None and label.endswith("_MAPPING") and config in heads:
            found = heads[config]
            if getattr(found, "__name__", None) == name:
                return found
    return None
