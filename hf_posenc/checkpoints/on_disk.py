"""Checkpoints patched and described on disk, without a model in memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import PosencError
from ..families import Places, Stack, family_of, places
from ..models import model_path
from ..patching.configs import places_to_patch
from ..patching.describe import Description, describe
from ..patching.layer_plans import divide_places
from ..patching.measure import measure
from ..patching.patch import check_existing
from ..patching.plan import fit, plan
from ..patching.records import Record
from ..patching.relative_keys import relative_keys_scheme
from ..patching.rotary_site import rotary_from
from ..patching.seal import is_sealed_config
from ..patching.sidecar import ADAPTER, FILE, adapter_settings
from ..patching.sizes import config_length
from ..patching.untrained import warn_untrained
from ..runtime.rotary import hush_transformers
from ..schemes import Scheme
from ..schemes.plans import scheme_or_plan
from .adapters import adapter_record
from .cards import PATCHED, card_to_keep, write_card
from .embedders import copy_modules
from .files import CONFIG, INDEX, PROOF, WEIGHTS, find, read_json, weight_files
from .hub import refuse_missing_folder
from .load import model_class_of, put_back_values, unpatched_config
from .restore import refuse_other_geometry, restore
from .staging import refuse_target, stage_files
from .tensors import rewrite_tensors


def patch_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: str | Scheme,
    *,
    existing: str | None = None,
    layer_types: Sequence[str] | str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Description:
    """Write a patched copy of the checkpoint in directory `source`, and describe what it does.

    Where the config can say the scheme, no weights are read. Otherwise only the shard with the position table is in
    memory, and the other files are copied. Tokenizer files are copied with their length updated. `overwrite` lets the
    copy replace a checkpoint in `target`, but never `source`.
    """
    request = scheme_or_plan(scheme, options)
    check_existing(existing)
    origin = model_path(source)
    refuse_missing_folder(origin)
    refuse_target(target, overwrite, source=origin)
    raw = _config_to_patch(origin)
    model, where = _skeleton(raw)
    files = weight_files(origin, {})
    keys = _table_keys(where, files)
    if keys and "posenc" in raw:
        raise PosencError(f"{origin} is patched already and its own table is gone: patch the original checkpoint.")
    for stack, key in keys:
        with safe_open(files[key], framework="pt") as stored:
            stack.table.module.weight = nn.Parameter(stored.get_tensor(key))  # type: ignore[union-attr]
    if "posenc" in raw:
        Record.from_dict(raw["posenc"]).refuse_edited()
    fitted, where, geometries = fit(request, where, existing, layer_types)
    journal = plan(where, fitted, geometries)
    warn_untrained(fitted, where.family, where.config.model_type)
    journal.apply()
    tensors = _own_parameters(model, files)
    for stack, key in keys:
        table: Any = getattr(stack.table.owner, stack.table.name)  # type: ignore[union-attr]
        tensors[key] = table.state_dict()["weight"]
    kept = card_to_keep(target)
    with stage_files(target, kept=kept) as folder:
        _copy_small_files(Path(origin), folder, config_length(where))
        copy_modules(Path(origin), folder, _requested_length(fitted, where))
        with hush_transformers():
            model.config.save_pretrained(folder)
        _write_weights(Path(origin), folder, files, tensors)
        if not kept:
            write_card(folder, origin, PATCHED)
    return describe(model)


def _config_to_patch(origin: str) -> dict[str, Any]:
    """The content of config.json. Raises where the folder holds something that cannot be patched on disk."""
    if find(origin, ADAPTER, {}) is not None:
        raise PosencError(
            f"{origin} holds an adapter, not a model. Merge it first: hf-posenc merge {origin} MERGED; or patch its "
            "base model and train an adapter on that."
        )
    raw = config_of(origin)
    family = family_of(raw.get("model_type"))
    if family is not None and len(family.axes) > 1:
        raise PosencError(
            f"{origin} is a vision model, and these are not patched on disk: load it, patch_model it, and save "
            "it with hf_posenc.save."
        )
    if family is not None and family.bias_flags:
        raise PosencError(
            f"{origin} has weights of relative positions that a patch takes out, which is not done on disk: load it, "
            "patch_model it, and save it with hf_posenc.save."
        )
    return raw


def _requested_length(scheme: Scheme, where: Places) -> int | None:
    """The length that the user asked the scheme to reach; None where no length was asked for."""
    return config_length(where) if scheme.target_length is not None or scheme.factor is not None else None


def describe_checkpoint(path: str | os.PathLike[str], **hub: Any) -> tuple[Description, dict[str, Any] | None]:
    """What the model at `path` would do, without loading weights; and, for an adapter, its own settings."""
    where = os.fspath(path)
    adapter = find(where, ADAPTER, hub)
    if adapter is None:
        return describe(model_of_config(config_of(where, hub))), None
    settings, file = adapter_settings(read_json(adapter)), find(where, FILE, hub)
    base = settings.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise PosencError(f"{where} does not say what its base model is ({base!r}).")
    raw = config_of(base, {})
    record = None if file is None else adapter_record(read_json(file))[0]
    if "posenc" in raw and record is not None and record != Record.from_dict(raw["posenc"]):
        raise PosencError(
            f"The adapter in {where} was trained with {record.scheme.name!r}, and its base is patched otherwise."
        )
    if record is None or "posenc" in raw:
        return describe(model_of_config(raw)), settings
    model, skeleton = _skeleton(raw)
    skeleton = divide_places(skeleton, record.scheme)
    refuse_other_geometry(skeleton, record)
    plan(skeleton, record.scheme, record.geometries).apply()
    record.refuse_edited()
    return describe(model), settings


def model_of_config(raw: dict[str, Any]) -> PreTrainedModel:
    """The model of a config.json, patched as that says, with frequencies and tables but without weights."""
    model, skeleton = _skeleton(raw)
    if "posenc" in raw:
        record = Record.from_dict(raw["posenc"])
        restore(model, record, raw)
        record.refuse_edited()
    elif (scheme := relative_keys_scheme(raw)) is not None:
        plan(skeleton, scheme, measure(skeleton, scheme, None)).apply()
    return model


def config_of(path: str, hub: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of config.json, from a folder, a hub or a model of this package."""
    file = find(path, CONFIG, hub or {})
    if file is None:
        raise PosencError(f"{path} holds no {CONFIG}: it is not a checkpoint of a model.")
    return read_json(file)


def _skeleton(raw: dict[str, Any]) -> tuple[PreTrainedModel, Places]:
    """The model of a config before any patch, with shapes but without weights; and its places."""
    record = Record.from_dict(raw["posenc"]) if "posenc" in raw else None
    family = family_of(raw.get("model_type"))
    effects = None if record is None or family is None or not family.table else record.effects()
    config, _ = unpatched_config(raw, record, family, is_sealed_config(raw), effects)
    cls = model_class_of(raw, None)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = cls(config)
    except Exception as error:  # models raise different errors on a config that they cannot use
        raise PosencError(
            f"No {cls.__name__} can be built from the {CONFIG} ({type(error).__name__}: {error}). It is damaged, or "
            "from another release of transformers."
        ) from error
    if record is not None:
        put_back_values(model.config, record, family)
    where = places(model)
    dtype = model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.float32
    for stack in where.stacks:
        for site in stack.rotaries:  # frequencies are not weights: they come from the config
            setattr(site.owner, site.name, rotary_from(stack.config, site.own))
        # What a patch makes takes its dtype and device from these.
        stack.weight.weight = nn.Parameter(torch.empty(0, *stack.weight.weight.shape[1:], dtype=dtype))
        if stack.table is not None and isinstance(stack.table.module, nn.Embedding):
            table = stack.table.module
            table.weight = nn.Parameter(torch.empty(table.weight.shape, dtype=dtype))
    return model, places_to_patch(model)


def _table_keys(where: Places, files: dict[str, str]) -> list[tuple[Stack, str]]:
    """The stacks with position tables, and the names of these tables in the files."""
    found = []
    for stack in where.stacks if where.has_table else []:
        tail = ".".join(filter(None, (stack.name, stack.family.table, "weight")))
        key = next((k for k in files if k == tail or k.endswith("." + tail)), None)
        if key is None:
            raise PosencError(f"The checkpoint holds no {tail!r}: it is not whole, or of another family.")
        found.append((stack, key))
    return found


def _own_parameters(model: PreTrainedModel, files: dict[str, str]) -> dict[str, Tensor]:
    """The parameters of the scheme, with the prefix of the base model if the files use it."""
    prefix = model.base_model_prefix + "."
    prefixed = any(key.startswith(prefix) for key in files)
    named = {name: tensor for name, tensor in model.state_dict().items() if "posenc_" in name}
    return {name if prefixed else name.removeprefix(prefix): p for name, p in named.items()}


def _copy_small_files(source: Path, folder: Path, length: int | None) -> None:
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name == INDEX
        if file.is_file() and not weights and file.name != CONFIG and not fnmatch(file.name, PROOF):
            shutil.copy2(file, folder / file.name)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists() and length is not None:
        settings = read_json(str(tokenizer))
        settings["model_max_length"] = length
        tokenizer.unlink()
        tokenizer.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(source: Path, folder: Path, files: dict[str, str], changed: dict[str, Tensor]) -> None:
    """Copy the shards. Only shards with a changed tensor are written again; new tensors go into the last shard."""
    last = max(files.values())
    homes = {key: files.get(key, last) for key in changed}
    for file in sorted(set(files.values())):
        here = {key: tensor.contiguous() for key, tensor in changed.items() if homes[key] == file}
        stale = [key for key, home in files.items() if home == file and "posenc_" in key and key not in here]
        if not here and not stale:
            shutil.copy2(file, folder / os.path.basename(file))
            continue
        rewrite_tensors(file, folder / os.path.basename(file), here, stale)
    if (source / INDEX).exists():
        index = read_json(str(source / INDEX))
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if "posenc_" not in k}
        index["weight_map"].update({key: os.path.basename(home) for key, home in homes.items()})
        index.get("metadata", {}).pop("total_size", None)
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    assert (folder / WEIGHTS).exists() or (folder / INDEX).exists()
