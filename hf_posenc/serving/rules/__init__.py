"""How a checkpoint is told to each runtime, or why not: a JSON file each, by model type and kind of positions.

    architectures   model type ("*": all that are not listed) -> kind of positions (`engines.kinds`) -> how
    alike           the model types that a name among `architectures` stands for
    why             why not, by model type or kind; "*" for what has no words of its own
    nearest         the scheme to take instead of one that cannot be told
    known           what these rules were measured in, or read in

How: "saved", by the config as it is saved; "longrope", by a factor for each pair, from the live frequencies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import UnsupportedCell

ANY = "*"
RUNTIMES = ("vllm", "sglang", "mlx", "ct2")


@dataclass(frozen=True)
class Rules:
    """The rules of one runtime."""

    runtime: str
    known: str
    nearest: str
    why: dict[str, str]
    architectures: dict[str, dict[str, str]]
    alike: dict[str, list[str]]

    def how(self, model_type: str, kind: str, scheme: str) -> str:
        """The way to tell the runtime; raises where there is none, with the nearest scheme that has one."""
        group = next((name for name, types in self.alike.items() if model_type in types), model_type)
        known = self.architectures.get(group, self.architectures.get(ANY, {}))
        if kind in known:
            return known[kind]
        reason = self.why.get(model_type, self.why.get(kind, self.why.get(ANY, f"{self.runtime} has no terms for it")))
        instead = f" The nearest scheme that it can serve is {self.nearest!r}: patch the original model with it."
        raise UnsupportedCell(
            f"{scheme!r} on a {model_type!r} model cannot be written for {self.runtime}: {reason} ({self.known})."
            + (instead if any("theta" in kinds for kinds in (known,)) else "")
        )


@cache
def rules_of(runtime: str) -> Rules:
    data: dict[str, Any] = json.loads(files(__package__).joinpath(f"{runtime}.json").read_text(encoding="utf-8"))
    return Rules(**{"alike": {}, **data})
