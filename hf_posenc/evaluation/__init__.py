"""How long a text a model can use: perplexity, retrieval, and the cost on short texts, the same for every scheme."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..core.lengths import parsed_length, parsed_lengths
    from .measures.losses import token_losses
    from .measures.needles import Retrieval
    from .measures.perplexity import PROTOCOLS, Reading, loss_by_position, perplexity
    from .measures.retrieval import retrieval
    from .measures.rows import Row
    from .measures.shift import shift
    from .measures.texts import Document, read_documents, tokenized
    from .runs.compare import compare
    from .runs.entries import Entry, parsed_schemes
    from .runs.evaluate import evaluate
    from .runs.options import TASKS, Options
    from .runs.standings import Standing, standings

__all__ = [
    "PROTOCOLS",
    "TASKS",
    "Document",
    "Entry",
    "Options",
    "Reading",
    "Retrieval",
    "Row",
    "Standing",
    "compare",
    "evaluate",
    "loss_by_position",
    "parsed_length",
    "parsed_lengths",
    "parsed_schemes",
    "perplexity",
    "read_documents",
    "retrieval",
    "shift",
    "standings",
    "token_losses",
    "tokenized",
]
_HOMES = {
    "..core.lengths": ("parsed_length", "parsed_lengths"),
    ".measures.losses": ("token_losses",),
    ".measures.needles": ("Retrieval",),
    ".measures.perplexity": ("PROTOCOLS", "Reading", "loss_by_position", "perplexity"),
    ".measures.retrieval": ("retrieval",),
    ".measures.rows": ("Row",),
    ".measures.shift": ("shift",),
    ".measures.texts": ("Document", "read_documents", "tokenized"),
    ".runs.compare": ("compare",),
    ".runs.entries": ("Entry", "parsed_schemes"),
    ".runs.evaluate": ("evaluate",),
    ".runs.options": ("TASKS", "Options"),
    ".runs.standings": ("Standing", "standings"),
}
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
