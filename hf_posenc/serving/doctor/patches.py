"""Checks of what this package wrote into a checkpoint, and of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...engines.kinds import number
from ...errors import PosencError
from ...families import family_of
from ...patching.records import Record
from ...patching.seal import MARKS, check_seal, has_seal, is_sealed_config
from .findings import NOTE, SUSPICIOUS, WRONG, Finding, check
from .reading import Checkpoint
from .ropes import length_of, raw_ropes, theta_of, type_of

ANEW = "Restore the files as they were saved, or patch the original anew: hf-posenc patch."


@check("checkpoint", "record")
def record_is_kept(it: Checkpoint) -> Iterator[Finding]:
    """config.json says a patch twice, for those who read its record and those who do not."""
    if "posenc" in it.raw:
        try:
            it.description()
        except PosencError as error:
            yield Finding(WRONG, f"hf_posenc refuses this checkpoint: {error}", ANEW)


@check("checkpoint", "seal")
def seal_is_whole(it: Checkpoint) -> Iterator[Finding]:
    try:
        names = list(it.tensors)
    except PosencError as error:
        yield Finding(WRONG, str(error), "Fetch the weights again.")
        return
    if "posenc" not in it.raw:
        if has_seal(names) or any(it.raw.get(name) == mark for name, mark in MARKS.items()):
            text = "The checkpoint is sealed and has lost its 'posenc' record: how it knew positions is not known."
            yield Finding(WRONG, text, ANEW)
        return
    try:
        record = Record.from_dict(it.raw["posenc"])
    except PosencError:
        return  # the check of the record says it
    if names:
        try:
            check_seal(str(it.folder), it.raw, record, names)
        except PosencError as error:
            yield Finding(WRONG, str(error), ANEW)
    if is_sealed_config(it.raw) and record.format == 1:
        text = "An earlier version sealed this checkpoint in its config alone: llama.cpp and MLX pass over that."
        yield Finding(SUSPICIOUS, text, f"hf-posenc reseal {it.folder}")


@check("checkpoint", "only here")
def only_here(it: Checkpoint) -> Iterator[Finding]:
    if is_sealed_config(it.raw):
        yield Finding(
            NOTE,
            "Only hf_posenc computes this scheme: servers compute attention by themselves, and cannot run it.",
            "hf-posenc serve-args PATH --for RUNTIME names the nearest scheme that one can.",
        )


@check("checkpoint", "rows of the table")
def rows_of_the_table(it: Checkpoint) -> Iterator[Finding]:
    family, length = family_of(it.raw.get("model_type")), length_of(it.section)
    if family is None or not family.table or is_sealed_config(it.raw):
        return
    if len(family.axes) > 1:
        yield from _rows_for_patches(it, family.table)
        return
    if not length:
        return
    tail = f"{family.table}.weight"
    for name, tensor in it.tensors.items():
        if (name == tail or name.endswith("." + tail)) and len(tensor.shape) == 2:
            rows = tensor.shape[0]
            if rows < length or rows > length + 8:  # some families begin at row 1, 2 or 3
                text = f"The position table {name} has {rows} rows, and the config promises {length:g} positions."
                yield Finding(
                    WRONG, text, "Write the true length, or resize the table: hf-posenc patch --scheme learned."
                )


def _rows_for_patches(it: Checkpoint, table: str) -> Iterator[Finding]:
    """A model of images knows itself how many rows its image wants."""
    meant = {name: tuple(tensor.shape) for name, tensor in it.model().state_dict().items()}
    for name, tensor in it.tensors.items():
        if table in name and meant.get(name, tensor.shape) != tensor.shape:
            text = f"The position table {name} has the shape {tensor.shape}, and the config wants {meant[name]}."
            yield Finding(WRONG, text, "Write the image_size that it was saved with, or restore the weights.")


@check("checkpoint", "stored frequencies")
def stored_frequencies(it: Checkpoint) -> Iterator[Finding]:
    """Older checkpoints hold RoPE's frequencies among their weights: read by some, ignored by others."""
    rope = next(iter(raw_ropes(it.section).values()), {})
    theta = theta_of(it.section, rope) or 10_000.0
    for name, tensor in it.tensors.items():
        if not name.endswith("inv_freq"):
            continue
        stored = tensor.floats()
        meant = [theta ** (-i / max(len(stored), 1)) for i in range(len(stored))]
        plain = type_of(rope) == "default"
        broken = not all(map(math.isfinite, stored)) or any(f < 0 or f > 1.001 for f in stored)
        if broken or (plain and any(abs(a - b) > 1e-3 * b for a, b in zip(stored, meant, strict=True))):
            text = (
                f"The weights hold {name}, which is not what theta={theta:g} means: who loads it computes otherwise."
            )
            yield Finding(WRONG, text, "Remove the tensor, or correct rope_theta: only one of them can be right.")
            return


@check("checkpoint", "length")
def length_is_sound(it: Checkpoint) -> Iterator[Finding]:
    for key in ("max_position_embeddings", "n_positions"):
        value = it.section.get(key)
        found = number(value)
        if value is not None and (found is None or found < 1 or found != int(found)):
            yield Finding(WRONG, f"{key} is {value!r}, which is no length.", "Restore config.json.")
