"""`save` and `load`: a patched checkpoint comes back exactly, or not at all."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..compat.models import carries_adapters, decode_floats
from ..compat.quantized import keep_packing
from ..errors import PosencError
from ..families import Family, family_of
from ..models import model_path
from ..patching.checks import check_model, check_patch
from ..patching.embedders import inner_model
from ..patching.live import is_patched, refuse_unpatchable
from ..patching.other_readers import WRITTEN
from ..patching.records import Record, section_of
from ..patching.seal import MARKS, NAME, sealed_config, sealed_weights
from ..patching.sidecar import ADAPTER, seal_adapter
from ..patching.sizes import stored_size
from ..runtime.rotary import hush_transformers
from .adapters import load_adapter
from .cards import kept_card, write_card
from .embedders import around, holds_embedder
from .files import CONFIG, HUB, INDEX, WEIGHTS, find, read_json
from .given import values_of
from .hub import offline
from .portable import write_portable
from .pushing import push, told_to_push
from .relative_keys import VECTORS, is_old, with_relative_keys
from .restore import restore
from .staging import cut_off, refuse_target, staged

FAILURES = (OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError, ArithmeticError)
"""What transformers raises on a checkpoint that it cannot load, or on a config that it cannot build a model from."""


def save(model: Any, path: str | os.PathLike[str], *, portable: bool = False, **kwargs: Any) -> None:
    """Write a model, a SentenceTransformer or the adapters of a PEFT model, so that `load` gives it back.

    It takes the place of an older checkpoint in that directory, and of nothing else there. `portable` adds a module of
    a few lines through which `from_pretrained(..., trust_remote_code=True)` loads a sealed model wherever this package
    is installed. `kwargs` go to `save_pretrained`; `push_to_hub=True` and `repo_id` push what was written, as it is.
    """
    adapted = hasattr(model, "get_base_model")  # asked so, since importing peft takes seconds
    base = inner_model(model.get_base_model() if adapted else model)
    if not isinstance(base, PreTrainedModel):
        raise PosencError(
            f"save takes a transformers model, a SentenceTransformer or a PeftModel, got {type(model).__qualname__}."
        )
    if not adapted and is_patched(base):
        check_model(base)
    if adapted or carries_adapters(base):
        refuse_target(path, True, base=base.name_or_path)  # it would name itself as its base
    where = told_to_push(kwargs)
    if not kwargs.get("is_main_process", True):  # takes part in gathering the weights, and writes nothing
        model.save_pretrained(path, **kwargs)
        return
    kept = kept_card(path)
    with staged(path, kept=kept) as folder:
        write(model, base, folder, portable, kwargs)
        if not kept:
            write_card(folder, base.name_or_path)
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    if where is not None:
        push(path, names, where)


def write(model: Any, base: PreTrainedModel, folder: Path, portable: bool, kwargs: dict[str, Any]) -> None:
    """Fill a folder with a checkpoint of `model`, whose transformers model is `base`."""
    adapted = model is not base and hasattr(model, "get_base_model")
    with warnings.catch_warnings(), hush_transformers():
        if adapted:  # of adapters that do not carry their scheme by themselves; these do
            warnings.filterwarnings("ignore", message="If this saves a PEFT")
        model.save_pretrained(folder, **kwargs)
    if adapted and is_patched(base):
        for config in folder.glob(f"**/{ADAPTER}"):
            seal_adapter(config.parent, base)
    if (folder / CONFIG).exists():
        weight_files(str(folder), {})  # or what was asked for could not be loaded
    if portable and not adapted:
        write_portable(folder, base)


def load(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | PreTrainedModel | None = None,
    model_class: Any = None,
    **kwargs: Any,
) -> Any:
    """The model at `path` with the positions that it was saved with; raises if that cannot be had.

    `path` is a directory or a hub name, of a model, of a SentenceTransformer or of a PEFT adapter (then `base` may
    name another place of its base model, or be that model, patched alike). `model_class` is a transformers class other
    than the one that was saved, without a SentenceTransformer around it. `kwargs` go to `from_pretrained`.

    What happens to a patched checkpoint, in order:

    1. `records`: the `posenc` record in config.json is read, strictly.
    2. `unpatched_config`: a config is made that says what the model was before its patch, but for the size of a table,
       which is that in the file.
    3. `from_pretrained`: the original model is built, and its weights are loaded, every one accounted for.
    4. `reset_length`: its config says the original size as well.
    5. `restore`: the record is compared with the model, the patch is planned anew from it and compared with what
       config.json says to those who cannot read the record, then applied.
    6. `_load_parameters`: what the scheme itself brought is loaded from the same files.
    7. `check_patch`: the live model does what its record says.
    """
    where = model_path(path)
    hub = {key: kwargs[key] for key in HUB if key in kwargs}
    kwargs |= offline(where, hub)
    if find(where, ADAPTER, hub) is not None:
        return load_adapter(where, load, base, hub, model_class=model_class, **kwargs)
    if base is not None:
        raise PosencError(f"base= is for adapters, and {where} holds no {ADAPTER}.")
    file = find(where, CONFIG, hub)
    if file is None:
        why = "a save into it was cut off, save again" if cut_off(where) else "it is not a checkpoint"
        raise PosencError(f"{where} holds neither {CONFIG} nor {ADAPTER}: {why}.")
    inner = _load_model(where, file, model_class, hub, kwargs)
    return inner if model_class is not None or not holds_embedder(where, hub) else around(inner, where, hub)


def _load_model(where: str, file: str, model_class: Any, hub: dict[str, Any], kwargs: Any) -> PreTrainedModel:
    raw = read_json(file)
    if "posenc" not in raw:
        files = {} if sealed_config(raw) else weight_files(where, hub)
        if not files or sealed_weights(files):
            raise PosencError(
                f"{file} is sealed and has lost its 'posenc' record: how it knew positions is not known."
            )
        model = _loaded(where, model_class_of(raw, model_class), raw, kwargs)
        return with_relative_keys(model, raw, files, where) if is_old(raw) else model
    return _load_patched(where, raw, model_class, hub, kwargs)


def _load_patched(where: str, raw: dict[str, Any], model_class: Any, hub: dict[str, Any], kwargs: Any) -> Any:
    record = Record.from_dict(raw["posenc"])
    files = weight_files(where, hub)
    kwargs = {**values_of(kwargs.pop("config", None), raw), **kwargs}
    refuse_unsealed(where, raw, record, files)
    kernel = kwargs.get("attn_implementation")
    if sealed_config(raw) and kernel not in (None, "sdpa", "eager"):
        raise PosencError(
            f"{where} works inside attention, through the 'sdpa' and 'eager' kernels, not {kernel!r}: name one of "
            "them, or none."
        )
    family = family_of(raw.get("model_type"))
    # A config would hold the word as a type; `from_pretrained` finds out what it stands for.
    auto = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if kwargs.get(key) == "auto"}
    config, rest = unpatched_config(raw, record, family, **kwargs)
    model = _loaded(where, model_class_of(raw, model_class), raw, {**rest, **auto, "config": config})
    refuse_unpatchable(model)
    reset_length(model.config, record, family)
    restore(model, record, raw)
    _load_parameters(model, where, files)
    check_patch(model, record)
    record.refuse_edited()
    return model


def refuse_unsealed(where: str, raw: dict[str, Any], record: Record, names: Iterable[str]) -> None:
    """Raise where config and weights do not agree on whether others may run them."""
    said, found = sealed_config(raw), sealed_weights(names)
    if said and not found and record.format > 1:
        raise PosencError(
            f"The weights in {where} lack their seal ({NAME}): they are not those that were saved with its "
            f"{CONFIG}, or another tool has rewritten them. Save or patch the original anew."
        )
    if found and not said:
        raise PosencError(
            f"The weights in {where} are sealed, and its {CONFIG} has attn_implementation="
            f"{raw.get('attn_implementation')!r}, which is no seal: they do not belong together."
        )


def _loaded(where: str, cls: Any, raw: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedModel:
    """`from_pretrained`, with every weight accounted for. That there are files, and no pickles, has been seen."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its report of unexpected keys would name our parameters
    asked = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, report = cls.from_pretrained(where, **{**kwargs, **asked})
    except (*FAILURES, SafetensorError) as error:
        raise PosencError(f"{where} cannot be loaded: {error}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    keep_packing(model)
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in report.get("mismatched_keys", ())]
    if mismatched:
        raise PosencError(f"Weights in {where} have other shapes than its config says: {', '.join(mismatched[:5])}.")
    same_class = raw.get("architectures") == [type(model).__name__]
    prefix = model.base_model_prefix + "."
    missing = sorted(report.get("missing_keys", ()))
    # A BERT saved without its pooler is whole; transformers makes a new one for the heads that want it.
    lost = [key for key in missing if "pooler" not in key and (same_class or key.startswith(prefix))]
    if lost:
        raise PosencError(f"{where} lacks {len(lost)} weights ({', '.join(lost[:5])}): the checkpoint is not whole.")
    ours = ("posenc_", VECTORS) if is_old(raw) else ("posenc_",)
    left = sorted(k for k in report.get("unexpected_keys", ()) if not any(part in k for part in ours))
    if missing or left:
        warnings.warn(
            f"{type(model).__name__} was loaded with {len(missing)} weights newly made ({', '.join(missing[:5])}) and "
            f"{len(left)} of the checkpoint's left out ({', '.join(left[:5])}).",
            stacklevel=5,
        )
    return model


def unpatched_config(
    raw: dict[str, Any], record: Record | None, family: Family | None, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The config as it was before the patch, but for a table, which is as long as the file's; and unused arguments."""
    values = decode_floats(copy.deepcopy(raw))
    for key in ("posenc", "attn_implementation", "auto_map", *(MARKS if sealed_config(raw) else ())):
        values.pop(key, None)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise PosencError(f"config.json names the model type {kind!r}, which this transformers does not know.")
    cls = CONFIG_MAPPING[kind]
    if record is not None:
        _put_back(section_of(values, family), cls, family, record, kwargs)
    del values["model_type"]
    try:
        config, rest = cls.from_dict(values, return_unused_kwargs=True, **kwargs)
    except Exception as error:  # whatever a hand-edited config makes transformers stumble over
        raise PosencError(f"config.json does not make a {kind!r} config: {error}") from None
    if record is not None and family is not None and family.table:
        part, effects = _positions_part(config, family), list(record.effects().values())
        size = stored_size(family, part, effects, record.geometry, record.scheme.span(record.geometry))
        if size is not None:
            setattr(part, family.length, size)
    return config, rest


def _positions_part(config: Any, family: Family | None) -> Any:
    """The config that speaks of positions: the whole, or that of the text or vision part."""
    return getattr(config, family.part[1]) if family is not None and family.part else config.get_text_config()


def _put_back(
    section: dict[str, Any], cls: Any, family: Family | None, record: Record, kwargs: dict[str, Any]
) -> None:
    """Write the values that a patch replaced into the section of a config that they were in.

    But for those by which the weights are built, where the file says what there are.
    """
    own = {key: cls.attribute_map.get(key, key) for key in record.original}
    given = sorted({*own, *own.values(), "rope_parameters", "rope_scaling"} & set(kwargs))
    if given:
        raise PosencError(f"{', '.join(given)} cannot be given here: the checkpoint's own scheme says it.")
    if "rope_parameters" in section and "rope_parameters" not in record.original:
        raise PosencError("The original of the posenc record lacks rope_parameters: it is damaged.")
    if "rope_parameters" in record.original:
        for key in WRITTEN:  # which would be taken for the original's
            section.pop(key, None)
    built: tuple[str | None, ...] = () if family is None else (*family.bias_flags, family.table_flag)
    if family is not None and len(family.axes) > 1:
        built = (*family.flags, family.length)
    for key, value in record.original.items():
        if key not in built:
            section[own[key]] = copy.deepcopy(value)


def reset_length(config: Any, record: Record, family: Family | None) -> None:
    """Let the config of a model just loaded say what it said before the patch."""
    part = _positions_part(config, family)
    for key, value in record.original.items():
        if key != "rope_parameters":
            setattr(part, key, copy.deepcopy(value))


def _load_parameters(model: PreTrainedModel, where: str, files: dict[str, str]) -> None:
    """The parameters that the scheme itself brought, which transformers does not know of."""
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
    """A parameter's name in the files, which may lack the prefix of the base model, or have one more."""
    tail = name[name.index("posenc_") :]
    fitting = [k for k in files if k == tail or k.endswith("." + tail)]
    # An encoder and a decoder each have one: the name that agrees furthest from its end is meant.
    parts = name.split(".")[::-1]
    shared = {k: [a == b for a, b in zip(k.split(".")[::-1], parts, strict=False)] for k in fitting}
    return max(fitting, key=lambda k: (shared[k] + [False]).index(False), default=None)


def weight_files(where: str, hub: dict[str, Any]) -> dict[str, str]:
    """Every tensor of a checkpoint and the file that holds it."""
    index = find(where, INDEX, hub)
    if index is not None:
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise PosencError(f"{index} should map weights to files in 'weight_map', and does not.")
        files = {shard: find(where, shard, hub) for shard in set(names.values())}
        missing = [shard for shard, file in files.items() if file is None]
        if missing:
            raise PosencError(f"{where} lacks {', '.join(sorted(missing))}: the checkpoint is not whole.")
        return {key: str(files[shard]) for key, shard in names.items()}
    single = find(where, WEIGHTS, hub)
    if single is None:
        raise PosencError(f"{where} holds no {WEIGHTS}. Pickled weights are not loaded; convert them first.")
    try:
        with safe_open(single, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), single)
    except (OSError, SafetensorError) as error:
        raise PosencError(f"{single} cannot be read: {error}. It is damaged, or not what its name says.") from None


def model_class_of(raw: dict[str, Any], given: Any) -> Any:
    if given is not None:
        return given
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
    """A class of this name that its owner has made known to transformers' Auto classes; None if there is none."""
    config = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    for label, heads in vars(modeling_auto).items():
        if config is not None and label.endswith("_MAPPING") and config in heads:
            found = heads[config]
            if getattr(found, "__name__", None) == name:
                return found
    return None
