"""The model card of a checkpoint, made from its files: what was changed, who can load it, and how."""

from __future__ import annotations

import hashlib
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers

from ..models import NAMES
from ..patching.records import Record
from ..patching.seal import is_sealed_config
from ..patching.sidecar import ADAPTER, FILE
from ..schemes import Scheme
from ..schemes.plans import Plan
from .adapters import adapter_record
from .embedders import MODULES
from .files import CONFIG, PROOF, read_json
from .portable import MODULE

CARD, FORMER = "README.md", "README.base.md"
"""The card of a checkpoint, and the file that keeps the card of the model which it was made from."""
MARK = "<!-- Written by hf_posenc, which replaces it as long as nobody edits it: {} -->"
LICENCE = ("license", "license_name", "license_link", "language")
"""The metadata that a patched copy takes from the card of its source."""
PATCHED, MERGED, SAVED = "patched", "merged", "saved"
LIBRARY = "sentence-transformers"


def card_to_keep(path: str | os.PathLike[str]) -> list[str]:
    """The name of the card in this folder if it must stay, since it is not exactly as we wrote it."""
    card = Path(path) / CARD
    return [CARD] if os.path.lexists(card) and not is_ours(card) else []


def is_ours(file: Path) -> bool:
    """Whether we wrote this card and nobody has changed it. A changed card belongs to who changed it."""
    if file.name != CARD:
        return False
    try:
        text = "" if file.is_symlink() else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return is_our_text(text)


def stays_behind(file: Path) -> bool:
    """Whether a file speaks of the folder that it lies in, and not of a copy: our card, or what `verify` measured."""
    return is_ours(file) or fnmatch(file.name, PROOF)


def is_our_text(text: str) -> bool:
    """Whether this is the text of one of our cards, exactly as we wrote it."""
    found = re.search(MARK.format("([0-9a-f]{16})"), text)
    return found is not None and _digest(text.replace(found[1], "", 1)) == found[1]


def mark_card(head: list[str], lines: list[str]) -> str:
    """The text of a card, with the mark by which we recognise it later."""
    text = "\n".join([*head, MARK.format(""), "", *lines])
    mark = MARK.format("")
    return text.replace(mark, MARK.format(_digest(text)), 1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hub_id(name: str | None) -> str | None:
    """The name on a hub of a model that was loaded by this name; None for a folder or a model of this package."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # not in its __all__

    cached = re.search(r"models--([^/\\]+)[/\\]snapshots", name or "")
    if cached is not None:  # the hub's cache names its folders so
        return cached[1].replace("--", "/", 1)
    if not name or os.path.isdir(name) or name in NAMES:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def base_words(name: str | None) -> str | None:
    """What to call a base model: its name on a hub, or the last part of its path."""
    return hub_id(name) or re.split(r"[/\\]", (name or "").rstrip("/\\"))[-1] or None


def front_matter(library: str, base: str | None, tags: list[str], more: dict[str, Any] | None = None) -> list[str]:
    """The metadata that the hub reads."""
    from huggingface_hub import ModelCardData

    values = {"base_model": hub_id(base), "library_name": library, "tags": tags, **(more or {})}
    data = ModelCardData(**{key: value for key, value in values.items() if value is not None})
    return ["---", data.to_yaml(), "---"]


def write_card(folder: Path, base: str | None, how: str = SAVED) -> None:
    """Write the card of the checkpoint in a folder. It replaces one that a library has just written."""
    adapter = next(iter(sorted(folder.glob(f"**/{ADAPTER}"), key=lambda file: len(file.parts))), None)
    raw = read_json(str(adapter or folder / CONFIG))
    record = _record(raw, adapter)
    embedder = (folder / MODULES).exists()
    sealed = record is not None if adapter else is_sealed_config(raw)
    name = folder.name if adapter is None else (Path(folder.name) / adapter.parent.relative_to(folder)).as_posix()
    library = LIBRARY if embedder else "peft" if adapter else "transformers"
    lines = [_describe_change(record, base, how, adapter is not None), ""]
    lines += _load_instructions(name, raw, base, sealed, library)
    if how == SAVED and embedder and (folder / CARD).exists():
        _add_to_embedder(folder / CARD, _tags(record), lines)
        return
    more = _licence_and_language(folder / CARD) if how == PATCHED else {}
    if how == PATCHED and (folder / CARD).exists() and not is_ours(folder / CARD):
        (folder / CARD).replace(folder / FORMER)
    if how == PATCHED and (folder / FORMER).exists():
        lines += [f"The card of the model that this was made from: [{FORMER}]({FORMER}).", ""]
    (folder / CARD).unlink(missing_ok=True)  # it may be a link
    head = front_matter(library, base, _tags(record), more)
    (folder / CARD).write_text(mark_card(head, [f"# {folder.name}", "", *lines]), encoding="utf-8")


def _add_to_embedder(file: Path, tags: list[str], lines: list[str]) -> None:
    """Add what was changed to the card that sentence-transformers writes, which says more, about training too."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(file)
    card.data.tags = [*(card.data.tags or []), *tags]
    title, _, rest = card.text.strip().partition("\n")
    text = mark_card(["---", card.data.to_yaml(), "---"], [title, "", "## Positions", "", *lines, rest.strip(), ""])
    file.write_text(text, encoding="utf-8")


def _record(raw: dict[str, Any], adapter: Path | None) -> Record | None:
    if adapter is None:
        return Record.from_dict(raw["posenc"]) if "posenc" in raw else None
    file = adapter.with_name(FILE)
    return adapter_record(read_json(str(file)))[0] if file.exists() else None


def _parts(record: Record | None) -> list[Scheme]:
    if record is None:
        return []
    return [part.scheme for part in record.scheme.parts] if isinstance(record.scheme, Plan) else [record.scheme]


def _tags(record: Record | None) -> list[str]:
    reach = None if record is None or record.geometry.grid else record.scheme.span(record.geometry)
    longer = ["long-context"] if reach is not None and reach.target > reach.trained else []
    return ["hf-posenc", *dict.fromkeys(scheme.name for scheme in _parts(record)), *longer]


def _describe_change(record: Record | None, base: str | None, how: str, adapter: bool) -> str:
    """One paragraph on what the checkpoint is."""
    known = base_words(base)
    of = f"`{known}`" if known else "its base model" if adapter or how == MERGED else "a model"
    what = f"An adapter for {of}" if adapter else f"{of[0].upper()}{of[1:]}"
    what += ", with an adapter merged into it" if how == MERGED else ""
    if record is None:
        return f"{what}. Positions are as they were."
    text = f"{what}, with {_scheme_words(record.scheme)}, by hf_posenc."
    if not record.geometry.grid:
        reach = record.scheme.span(record.geometry)
        text += f" The model was trained on {reach.trained} tokens"
        text += f", and is set to reach {reach.target}." if reach.target > reach.trained else "."
    return text + (" It was patched on disk: nothing was trained with these positions." if how == PATCHED else "")


def _scheme_words(scheme: Scheme) -> str:
    if isinstance(scheme, Plan):
        parts = (f"{_scheme_words(part.scheme)} in layers {', '.join(map(str, part.layers))}" for part in scheme.parts)
        return "; ".join(parts)
    options = ", ".join(f"{key}={value}" for key, value in scheme.options().items())
    return f"the position scheme `{scheme.name}`" + (f" ({options})" if options else "")


def _load_instructions(name: str, raw: dict[str, Any], base: str | None, sealed: bool, library: str) -> list[str]:
    """Who can load the checkpoint, and the code that does so."""
    loader = "PEFT" if library == "peft" else library
    who = (
        f"Only hf_posenc (`pip install hf-posenc`) loads it: {loader} without it refuses."
        if sealed
        else f"Any {loader} loads it right."
    )
    adapter = library == "peft"
    known = base_words(base)
    at = known if known in NAMES else f"path/to/{known}"
    elsewhere = f', base="{at}"' if adapter and base and hub_id(base) is None else ""
    code = ["import hf_posenc", "", f'model = hf_posenc.load("{name}"{elsewhere})  # this folder, or its hub name']
    kind = (raw.get("architectures") or [None])[0]
    if not sealed and library == LIBRARY:
        code = ["from sentence_transformers import SentenceTransformer", "", f'model = SentenceTransformer("{name}")']
    elif not sealed and not adapter and isinstance(kind, str) and hasattr(transformers, kind):
        code = [f"from transformers import {kind}", "", f'model = {kind}.from_pretrained("{name}")']
    lines = [who, "", "```python", *code, "```", ""]
    if any(str(value).startswith(MODULE) for value in (raw.get("auto_map") or {}).values()):
        lines += ["Where hf_posenc is installed, `trust_remote_code=True` opens it too.", ""]
    return lines


def _licence_and_language(file: Path) -> dict[str, Any]:
    """The licence and the language in the card of a source, where they can be read."""
    from huggingface_hub import ModelCard

    try:
        found = ModelCard.load(file).data.to_dict() if file.exists() else {}
    except Exception:  # a stranger's card, with whatever is wrong in it
        return {}
    return {key: found[key] for key in LICENCE if key in found}
