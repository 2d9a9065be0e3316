"""What a measurement is: one figure with how it was made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `details` says how it was made: windows, tokens, seeds, depth, stride and so on."""

    task: str
    """perplexity, loss_by_position, passkey, multikey, multivalue, first_sentence, tax, or a harness task."""
    protocol: str
    """last, sliding, whole, yarn; likelihood or generation for retrieval; lm-eval for the harness."""
    scheme: str
    """As `describe` names it; `unpatched` where the model is as it came."""
    length: int
    metric: str
    """loss (nats per token), perplexity, accuracy."""
    value: float
    stderr: float | None
    n: int
    """Independent samples behind `value` and `stderr`: windows, documents or trials."""
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        return cls(**data)
