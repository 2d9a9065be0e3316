"""`save` and `load`: a patched checkpoint comes back exactly, or not at all."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING, PreTrainedModel

from .adapters import load_adapter
from .describe import check_model
from .families import FAMILIES
from .files import HUB, find, read_json
from .grades import is_sealed
from .patch import is_patched, refuse_unpatchable
from .portable import write_portable
from .positions import SEAL
from .records import Record
from .registry import PosencError
from .restore import restore
from .sidecar import write_record
from .staging import staged

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save(model: Any, path: str | os.PathLike[str], *, portable: bool = False, **kwargs: Any) -> None:
    """Write a model, or the adapters of a PEFT model, so that `load` gives it back.

    The directory appears whole, in place of an older one. `portable` adds a module of a few lines through which
    `from_pretrained(..., trust_remote_code=True)` loads a sealed model wherever this package is installed. `kwargs`
    go to `save_pretrained`.
    """
    adapted = hasattr(model, "get_base_model")  # asked so, since importing peft takes seconds
    base = model.get_base_model() if adapted else model
    if not isinstance(base, PreTrainedModel):
        raise PosencError(f"save takes a transformers model or a PeftModel, got {type(model).__qualname__}.")
    record = getattr(base.base_model.config, "posenc", None)
    if not adapted and is_patched(base):
        check_model(base)
    with staged(path) as folder:
        model.save_pretrained(folder, **kwargs)
        if adapted and record is not None:
            for config in folder.glob("**/adapter_config.json"):
                write_record(config.parent, record)
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

    `path` is a directory or a hub name, of a model or of a PEFT adapter (then `base` may name another place of its
    base model, or be that model, patched alike). `model_class` is a transformers class other than the one that was
    saved. `kwargs` go to `from_pretrained`.
    """
    where = os.fspath(path)
    hub = {key: kwargs[key] for key in HUB if key in kwargs}
    if find(where, "adapter_config.json", hub) is not None:
        return load_adapter(where, load, base, hub, model_class=model_class, **kwargs)
    if base is not None:
        raise PosencError(f"base= is for adapters, and {where} holds no adapter_config.json.")
    file = find(where, "config.json", hub)
    if file is None:
        raise PosencError(f"{where} holds neither config.json nor adapter_config.json: it is not a checkpoint.")
    raw = read_json(file)
    if "posenc" not in raw:
        if raw.get("attn_implementation") == SEAL:
            raise PosencError(
                f"{file} is sealed and has lost its 'posenc' record: how it knew positions is not known."
            )
        return model_class_of(raw, model_class).from_pretrained(where, use_safetensors=True, **kwargs)
    return _load_patched(where, raw, model_class, hub, kwargs)


def _load_patched(where: str, raw: dict[str, Any], model_class: Any, hub: dict[str, Any], kwargs: Any) -> Any:
    record = Record.from_dict(raw["posenc"])
    config = unpatched_config(raw, record)
    cls = model_class_of(raw, model_class)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its report of unexpected keys would name our parameters
    try:
        arguments = {**kwargs, "config": config, "use_safetensors": True, "output_loading_info": True}
        model, report = cls.from_pretrained(where, **arguments)
    finally:
        transformers.logging.set_verbosity(verbosity)
    _warn_of(report, cls)
    refuse_unpatchable(model)
    model.config.max_position_embeddings = record.original["max_position_embeddings"]
    restore(model, record, raw)
    _load_parameters(model, where, hub)
    check_model(model)
    return model


def unpatched_config(raw: dict[str, Any], record: Record | None) -> Any:
    """The config as it was before the patch, but for a table, which is as long as the file's."""
    values = copy.deepcopy(raw)
    for key in ("posenc", "attn_implementation", "auto_map"):
        values.pop(key, None)
    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise PosencError(f"config.json names the model type {kind!r}, which this transformers does not know.")
    cls = CONFIG_MAPPING[kind]
    if record is not None:
        length = cls.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        if "rope_parameters" in record.original:
            values["rope_parameters"] = copy.deepcopy(record.original["rope_parameters"])
        values[length] = _stored_length(kind, record)
    try:
        return cls.from_dict(values)
    except Exception as error:  # whatever a hand-edited config makes transformers stumble over
        raise PosencError(f"config.json does not make a {kind!r} config: {error}") from None


def _stored_length(kind: str, record: Record) -> int:
    """What the weights in a checkpoint were made for: a sealed table has one row, another one as many as promised."""
    if not any(family.table for family in FAMILIES.values() if kind in family.model_types):
        return int(record.original["max_position_embeddings"])
    sealed = is_sealed(record.scheme.effect(record.geometry), False)
    return 1 if sealed else record.scheme.span(record.geometry).target


def _load_parameters(model: PreTrainedModel, where: str, hub: dict[str, Any]) -> None:
    """The parameters that the scheme itself brought, which transformers does not know of."""
    wanted = {name: p for name, p in model.named_parameters() if "posenc_" in name}
    if not wanted:
        return
    files = weight_files(where, hub)
    for name, parameter in wanted.items():
        tail = name[name.index("posenc_") :]
        key = next((k for k in files if k in (name, tail) or k.endswith("." + tail)), None)
        if key is None:
            raise PosencError(f"{where} lacks {name!r}, which its scheme needs: the checkpoint is not whole.")
        with safe_open(files[key], framework="pt") as stored:
            tensor = stored.get_tensor(key)
        if tensor.shape != parameter.shape:
            raise PosencError(f"{name!r} in {where} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}.")
        with torch.no_grad():
            parameter.copy_(tensor)


def weight_files(where: str, hub: dict[str, Any]) -> dict[str, str]:
    """Every tensor of a checkpoint and the file that holds it."""
    index = find(where, INDEX, hub)
    if index is not None:
        names = read_json(index)["weight_map"]
        files = {shard: find(where, shard, hub) for shard in set(names.values())}
        missing = [shard for shard, file in files.items() if file is None]
        if missing:
            raise PosencError(f"{where} lacks {', '.join(sorted(missing))}: the checkpoint is not whole.")
        return {key: str(files[shard]) for key, shard in names.items()}
    single = find(where, WEIGHTS, hub)
    if single is None:
        raise PosencError(f"{where} holds no {WEIGHTS}. Pickled weights are not loaded; convert them first.")
    with safe_open(single, framework="pt") as stored:
        return dict.fromkeys(stored.keys(), single)


def _warn_of(report: dict[str, Any], cls: Any) -> None:
    unexpected = sorted(k for k in report.get("unexpected_keys", ()) if "posenc_" not in k)
    missing = sorted(report.get("missing_keys", ()))
    if missing or unexpected:
        warnings.warn(
            f"{cls.__name__} was loaded with {len(missing)} weights newly made ({', '.join(missing[:5])}) and "
            f"{len(unexpected)} of the checkpoint's left out ({', '.join(unexpected[:5])}).",
            stacklevel=4,
        )


def model_class_of(raw: dict[str, Any], given: Any) -> Any:
    if given is not None:
        return given
    names = raw.get("architectures") or []
    cls = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
    if cls is None:
        raise PosencError(
            f"config.json names the architecture {names!r}, which this transformers does not have. Pass model_class=, "
            "for example transformers.AutoModelForCausalLM."
        )
    return cls


def merge(adapter: str | os.PathLike[str], out: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Write the base model with an adapter merged into it as one self-contained checkpoint, and return it."""
    adapted = load(adapter, **kwargs)
    if not hasattr(adapted, "merge_and_unload"):
        raise PosencError(f"{adapter} holds no adapter to merge.")
    model: PreTrainedModel = adapted.merge_and_unload()
    save(model, out)
    return model
