"""What a run measures, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import PosencError, suggestion
from ..measures.haystacks import HAYSTACKS, Haystacks
from ..measures.needles import MAKERS, Retrieval
from ..measures.perplexity import Reading, protocol_of

TEXT_TASKS = ("perplexity", "loss_by_position", "shift")
"""Losses of text."""
READING_TASKS = (*TEXT_TASKS, *MAKERS)
"""For models that predict the next token."""
TASKS = (*READING_TASKS, *HAYSTACKS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = ("perplexity",)
    protocol: str = "last"
    reading: Reading = field(default_factory=Reading)
    asked: Retrieval = field(default_factory=Retrieval)
    haystacks: Haystacks = field(default_factory=Haystacks)
    bos: bool | None = None
    """Whether windows start with BOS; by default as the tokenizer does."""

    def __post_init__(self) -> None:
        if not self.lengths or not self.tasks:
            raise PosencError("At least one length and one task are needed.")
        for task in self.tasks:
            if task not in TASKS:
                raise PosencError(f"Unknown task {task!r}.{suggestion(task, list(TASKS))}")
        if self.embeds and not set(self.tasks) <= set(HAYSTACKS):
            raise PosencError(
                f"{', '.join(HAYSTACKS)} search by embeddings, and {', '.join(READING_TASKS)} predict the next token: "
                "no model is made for both. Run them one after the other."
            )
        if protocol_of(self.protocol, self.reading).opens and self.bos is False:
            raise PosencError(f"The protocol {self.protocol!r} starts each window with BOS: leave --no-bos out.")

    @property
    def embeds(self) -> bool:
        """Whether embeddings are measured, not predictions."""
        return any(task in HAYSTACKS for task in self.tasks)

    def identity(self) -> dict[str, Any]:
        """The settings that results depend on, without batch sizes."""
        values = asdict(self)
        for name in ("batch_size", "chunk", "step"):
            values["reading"].pop(name)
        return values
