"""`measure`: what is measured before and after training."""

from __future__ import annotations

from pydantic import Field, field_validator

from .values import Lengths, Section


class MeasureSettings(Section):
    """What is measured before and after training."""

    path: str | list[str] | None = None
    """Text to measure on, in the form of `data.path`; by default the held-out text of `data`."""
    lengths: Lengths = []
    """`[256, 512]` or `256,512`. By default the trained length and its doubles, up to the target."""
    windows: int = Field(default=32, gt=0)
    """Number of windows of held-out text; for embedders, of documents to search."""
    scored: int = Field(default=64, gt=0)
    """Scored tokens at the end of each window."""
    before: bool = True
    """Also measure the model before training, unpatched and patched; false: only after."""
    passkeys: int = Field(default=0, ge=0)
    """Trials of passkey retrieval at each length, by generation; a multiple of five."""

    @field_validator("passkeys")
    @classmethod
    def fives(cls, count: int) -> int:
        if count % 5:
            raise ValueError(f"each of five depths has as many trials: take a multiple of 5, not {count}")
        return count
