"""What a measurement is: one figure with how it was made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `details` says how it was made: windows, tokens, seeds, depth, stride and so on."""

    task: str
    """perplexity, loss_by_position, shift, tax, a retrieval task such as passkey, or a task of a harness."""
    protocol: str
    """last, sliding, whole, yarn; gap of shift; likelihood or generation for retrieval; lm-eval for the harness."""
    scheme: str
    """As `describe` names it; `unpatched` where the model is as it came."""
    length: int
    metric: str
    """loss (nats per token), climb (nats above the shortest length), perplexity, accuracy."""
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
