"""Rules for choosing a scheme, with their sources. The docs print them as "choose a scheme"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEASURED = "measured here on stories15M and `tiny` (docs/evaluation.md)"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A scheme, and when to use it."""

    scheme: str
    options: dict[str, Any]
    own: str
    """The model's own kind of positions: RoPE, table or bias."""
    factors: tuple[float, float]
    """The range of target lengths, as multiples of the trained length."""
    trains: bool
    """Whether the model must be trained with it."""
    why: str
    source: str

    @property
    def label(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.scheme}:{given}" if given else self.scheme

    def fits(self, own: str, factor: float, training: bool) -> bool:
        return own == self.own and self.factors[0] < factor <= self.factors[1] and (training or not self.trains)


RULES = (
    Rule(
        scheme="yarn", options={}, own="RoPE", factors=(1, 8), trains=False,
        why="keeps fast pairs as they are and slows the slow ones: the best fixed map without training",
        source=MEASURED + "; Peng et al. 2023",
    ),
    Rule(
        scheme="ntk", options={"alpha": "cover"}, own="RoPE", factors=(1, 8), trains=False,
        why="one other theta, which every runtime reads; alpha covers the whole target",
        source=MEASURED,
    ),
    Rule(
        scheme="self_extend", options={}, own="RoPE", factors=(1, 16), trains=False,
        why="no angle that was not trained, and the order of near tokens exact: retrieval without training",
        source="Jin et al. 2024",
    ),
    Rule(
        scheme="dca", options={}, own="RoPE", factors=(4, 32), trains=False,
        why="chunks of the trained length: far targets without training",
        source="An et al. 2024",
    ),
    Rule(
        scheme="dynamic_ntk", options={}, own="RoPE", factors=(1, 4), trains=False,
        why="texts within the trained length cost nothing at all",
        source=MEASURED,
    ),
    Rule(
        scheme="yarn", options={}, own="RoPE", factors=(8, 64), trains=True,
        why="far targets need a short training, and YaRN needs the least of it",
        source="Peng et al. 2023",
    ),
    Rule(
        scheme="linear", options={}, own="RoPE", factors=(1, 8), trains=True,
        why="the simplest map once it is trained: hopeless without",
        source=MEASURED + "; Chen et al. 2023",
    ),
    Rule(
        scheme="learned", options={}, own="table", factors=(1, 8), trains=True,
        why="a longer table that begins as the old one: train its new rows",
        source="LongEmbed, Zhu et al. 2024",
    ),
    Rule(
        scheme="alibi", options={}, own="table", factors=(1, 64), trains=True,
        why="no table to outgrow, once it is trained",
        source="Press et al. 2022",
    ),
)  # fmt: skip


def rules_markdown() -> str:
    """The rules as a table of the documentation."""
    rows = ["| model has | times the trained length | training | take | because | from |", "|---|---|---|---|---|---|"]
    for rule in RULES:
        low, high = rule.factors
        training = "needed" if rule.trains else "none"
        rows.append(f"| {rule.own} | {low:g} to {high:g} | {training} | `{rule.label}` | {rule.why} | {rule.source} |")
    return "\n".join(rows)
