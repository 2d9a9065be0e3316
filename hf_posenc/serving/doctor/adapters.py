"""Checks of PEFT adapters: whether they and their base agree on positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.adapters import adapter_record
from ...checkpoints.files import CONFIG
from ...errors import PosencError
from ...models import model_path
from ...patching.records import Record
from ...patching.sidecar import ADAPTER, FILE, KIND, adapter_settings
from ...runtime.positions import SEAL
from .findings import NOTE, SUSPICIOUS, WRONG, Finding, check
from .reading import Checkpoint, read_checkpoint, read_small_json


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder and its base, where that is on this disk."""

    folder: Path
    settings: dict[str, Any]
    base: Checkpoint | None
    sealed: bool
    damage: str = ""
    """What is wrong with its own file, where it cannot be read as it was meant."""

    @property
    def named(self) -> str:
        return str(self.settings.get("base_model_name_or_path"))

    def record(self) -> Record | None:
        """The scheme that it carries; raises where that is damaged."""
        file = self.folder / FILE
        return adapter_record(read_small_json(file))[0] if file.exists() else None


def read_adapter(folder: Path) -> Adapter:
    written = read_small_json(folder / ADAPTER)
    try:
        settings, damage = adapter_settings(written), ""
    except PosencError as error:
        settings, damage = written, str(error)
    named = settings.get("base_model_name_or_path")
    base = None
    if isinstance(named, str) and named and "\0" not in named:
        place = Path(model_path(named))
        base = read_checkpoint(place) if (place / CONFIG).is_file() else None
    return Adapter(folder, settings, base, sealed=written.get(KIND) == SEAL, damage=damage)


@check("adapter", "record of the adapter")
def record_is_sound(it: Adapter) -> Iterator[Finding]:
    try:
        record = it.record()
        if record is not None:
            record.refuse_edited()
    except PosencError as error:
        yield Finding(WRONG, f"{FILE} is damaged: {error}", "Restore it from where the adapter was saved.")


@check("adapter", "seal of the adapter")
def seal_is_whole(it: Adapter) -> Iterator[Finding]:
    if it.damage:
        yield Finding(WRONG, it.damage, "Restore it from where the adapter was saved.")
    elif it.sealed and not (it.folder / FILE).exists():
        text = f"It is sealed, and {FILE}, which says how its base knew positions, is lost: nobody loads it."
        yield Finding(WRONG, text, "Restore it from where the adapter was saved.")


@check("adapter", "scheme in the adapter alone")
def scheme_in_the_adapter_alone(it: Adapter) -> Iterator[Finding]:
    record = _sound(it)
    if record is not None and not it.sealed and it.base is not None and "posenc" not in it.base.raw:
        yield Finding(
            SUSPICIOUS,
            f"The adapter was trained with {record.scheme.name!r} positions and its base {it.named} is not patched: "
            "PEFT alone, or a server that adds the adapter to the base, computes it with other positions.",
            f"`hf-posenc reseal {it.folder}` lets others refuse it; load it with hf_posenc.load, or serve what "
            f"`hf-posenc merge {it.folder} OUT` writes.",
        )


@check("adapter", "scheme in the base alone")
def scheme_in_the_base_alone(it: Adapter) -> Iterator[Finding]:
    if it.base is not None and "posenc" in it.base.raw and not (it.folder / FILE).exists():
        yield Finding(
            SUSPICIOUS,
            f"The base {it.named} is patched, and the adapter does not say which positions it was trained with.",
            f"If it was trained on this base, save it again with hf_posenc.save, which writes {FILE}.",
        )


@check("adapter", "two schemes")
def two_schemes(it: Adapter) -> Iterator[Finding]:
    record = _sound(it)
    if record is None or it.base is None or "posenc" not in it.base.raw:
        return
    theirs = Record.from_dict(it.base.raw["posenc"])
    if theirs != record:
        yield Finding(
            WRONG,
            f"The adapter was trained with {record.scheme.name!r} {record.scheme.options()}, and its base is patched "
            f"with {theirs.scheme.name!r} {theirs.scheme.options()}: load refuses it, others do not.",
            "Put the adapter on the base that it was trained on.",
        )


@check("adapter", "base out of sight")
def base_out_of_sight(it: Adapter) -> Iterator[Finding]:
    if it.base is None:
        text = f"Its base {it.named!r} is not on this disk: whether they agree on positions was not looked at."
        yield Finding(NOTE, text, "Fetch the base, and ask again.")


def _sound(it: Adapter) -> Record | None:
    try:
        return it.record()
    except PosencError:
        return None
