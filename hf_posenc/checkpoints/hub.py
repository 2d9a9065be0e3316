"""Models on a hub. Errors distinguish a missing folder, a missing model and a network that is down."""

from __future__ import annotations

import os
import time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..compat.models import file_of
from ..errors import PosencError
from ..models import NAMES

PATIENCE = 10.0
"""How many seconds to wait for a hub."""
MEMORY = 30.0
"""For how many seconds a hub that could not be reached is not asked again: a load looks for a dozen files."""
MARKS = ("config.json", "adapter_config.json", "modules.json")
"""A model is in the cache if one of these files is."""
NO_HUB_NAME = "it is not the name of a model on a hub (owner/name)"
_troubles: dict[tuple[str, Any], tuple[float, str]] = {}


def hub_file(path: str, name: str, hub: dict[str, Any]) -> str | None:
    """The path of a file of a model on a hub, which is fetched; None if the model has no such file."""
    here = offline(path, hub)
    if here and not _is_cached(path, hub):
        raise PosencError(offline_message(path, _trouble(path, hub) or "local_files_only is set"))
    try:
        return file_of(path, name, **{**hub, **here})
    except (OSError, ValueError) as error:
        raise PosencError(
            f"{path!r} is neither a folder here{_near(path)} nor a model that can be had from the hub: {error}"
        ) from None


def offline(path: str, hub: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which `from_pretrained` does not wait for a hub that cannot be reached."""
    if os.path.isdir(path):
        return {}
    local = hub.get("local_files_only") or _trouble(path, hub) is not None
    return {"local_files_only": True} if local else {}


def _trouble(path: str, hub: dict[str, Any]) -> str | None:
    """Why the hub does not answer; None where it answers anything."""
    if hub.get("local_files_only"):
        return None
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    key = (path, hub.get("revision"))
    since, trouble = _troubles.get(key, (-MEMORY, ""))
    if time.monotonic() - since < MEMORY:
        return trouble or None
    trouble = _ask_hub(path, hub)
    _troubles[key] = (time.monotonic(), trouble)
    return trouble or None


def _ask_hub(path: str, hub: dict[str, Any]) -> str:
    try:
        HfApi().model_info(path, revision=hub.get("revision"), token=hub.get("token"), timeout=PATIENCE)
    except HfHubHTTPError:
        pass  # it answers; what it says comes up when a file is fetched
    except HFValidationError:
        return NO_HUB_NAME
    except Exception as error:  # HTTP clients raise different errors where there is no network
        return str(error) or type(error).__name__
    return ""


def _is_cached(path: str, hub: dict[str, Any]) -> bool:
    where = {key: hub[key] for key in ("cache_dir", "revision") if hub.get(key)}
    try:
        return any(isinstance(try_to_load_from_cache(path, name, **where), str) for name in MARKS)
    except HFValidationError:
        return False


def offline_message(path: str, why: str) -> str:
    """The message for a name that is no folder when the hub cannot be reached."""
    if not _is_hub_name(path):
        return f"There is no folder {path!r} here{_near(path)}, and {NO_HUB_NAME}. Check the spelling."
    return (
        f"There is no folder {path!r} here{_near(path)}, and whether the hub has such a model cannot be asked: {why}. "
        f"Check the spelling or the network, or fetch the model where there is one: hf download {path}"
    )


def refuse_missing_folder(path: str) -> None:
    """Raise for a checkpoint that must be on this disk and is not."""
    if os.path.isdir(path):
        return
    message = f"There is no folder {path!r}{_near(path)}, and a checkpoint to patch on disk must be on this disk."
    if not _is_hub_name(path):
        raise PosencError(f"{message} Check the spelling.")
    raise PosencError(
        f"{message} If it is a model on the hub, fetch it first, and patch the folder that this prints: "
        f"hf download {path}"
    )


def _is_hub_name(path: str) -> bool:
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _near(path: str) -> str:
    """A hint at a folder with a similar name, or nothing."""
    given = Path(path)
    folders = [found.name for found in given.parent.iterdir() if found.is_dir()] if given.parent.is_dir() else []
    if given.parent == Path():
        folders.extend(NAMES)
    close = get_close_matches(given.name, folders, n=1)
    return f" (did you mean {str(given.parent / close[0])!r}?)" if close else ""
