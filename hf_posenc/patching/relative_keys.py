"""BERT's relative keys, which transformers 5 no longer has: it builds such a model without them, and does not warn.

Up to transformers 4, `position_embedding_type` could be `relative_key` (Shaw's terms) or `relative_key_query` (the
same vectors for keys as well). Such a model added no vectors of positions to its input.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..errors import UntrainedWarning
from ..schemes import Shaw
from .patch import patch_model
from .patch_state import journal_of

KEY = "position_embedding_type"
KINDS = {"relative_key": False, "relative_key_query": True}
"""Whether keys are multiplied with the vectors too."""
MODEL_TYPES = (
    *("bert", "albert", "electra", "ernie", "megatron-bert", "roc_bert"),
    *("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl"),
)
FINAL = "this model's own positions are its relative keys, which plain transformers cannot run any more"


def relative_keys_scheme(config: Mapping[str, Any]) -> Shaw | None:
    """The scheme that a config of transformers 4 means and transformers 5 would ignore; None for other configs."""
    if config.get(KEY) not in KINDS or config.get("model_type") not in MODEL_TYPES or "posenc" in config:
        return None
    most = config.get("max_position_embeddings", 512) - 1
    return Shaw(max_distance=most, relative_queries=KINDS[config[KEY]])


def patch_relative_keys(model: PreTrainedModel, scheme: Shaw) -> PreTrainedModel:
    """Give the model its relative keys as its own positions, with parameters for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        patch_model(model, scheme)
    journal = journal_of(model)
    assert journal is not None
    journal.final = FINAL
    return model
