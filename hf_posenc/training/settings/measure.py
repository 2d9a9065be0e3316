"""`measure`: what is measured, before and after."""

from __future__ import annotations

from pydantic import Field, field_validator

from .values import Lengths, Section


class MeasureSettings(Section):
    """What is measured, before and after."""

    path: str | list[str] | None = None
    """Text to measure on, as `data.path`; what `data` holds out, unless given."""
    lengths: Lengths = []
    """`[256, 512]` or `256,512`. The trained length, twice, four times ... up to the target, unless given."""
    windows: int = Field(default=32, gt=0)
    """Of held-out text; for embedders, documents to search."""
    scored: int = Field(default=64, gt=0)
    """Tokens at the end of a window that count."""
    before: bool = True
    """Also the model as it came and as it is patched; false: only what comes of the run."""
    passkeys: int = Field(default=0, ge=0)
    """Trials of passkey retrieval at each length, by generation; a multiple of five."""

    @field_validator("passkeys")
    @classmethod
    def fives(cls, count: int) -> int:
        if count % 5:
            raise ValueError(f"five depths are tried alike, so a multiple of 5, not {count}")
        return count
