"""How far a model can really read: perplexity, retrieval and the price in the short, for every scheme alike."""

from .measures.losses import token_losses
from .measures.needles import Retrieval
from .measures.perplexity import PROTOCOLS, Reading, loss_by_position, perplexity
from .measures.retrieval import retrieval
from .measures.rows import Row
from .measures.texts import Document, parsed_length, parsed_lengths, read_documents, tokenized
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
    "standings",
    "token_losses",
    "tokenized",
]
