"""How far a model can really read: perplexity, retrieval and the price in the short, for every scheme alike."""

from .compare import Entry, Standing, compare, parsed_schemes, standings
from .losses import token_losses
from .needles import Retrieval
from .perplexity import PROTOCOLS, Reading, loss_by_position, perplexity
from .retrieval import retrieval
from .rows import Row
from .runs import TASKS, Options, evaluate
from .texts import Document, parsed_length, parsed_lengths, read_documents, tokenized

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
