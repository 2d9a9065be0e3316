"""A config object as an argument of `load`: where it differs from config.json, it stands for single arguments."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

from ..compat.models import ORIGIN, attention_of
from ..errors import PosencError
from ..patching.other_readers import foreign_keys
from ..patching.seal import MARKS

NOT_OF_THE_MODEL = (*ORIGIN, "architectures", "auto_map", *MARKS)


def arguments_from(config: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `load` that mean the same as a config object for the checkpoint whose config.json is `raw`.

    A config object cannot change the scheme, or values in a section of the config.
    """
    kind = getattr(config, "model_type", None)
    if not isinstance(config, PreTrainedConfig) or kind != raw.get("model_type"):
        found = repr(kind) if isinstance(config, PreTrainedConfig) else f"a {type(config).__name__}"
        raise PosencError(f"config= must be a config of a {raw.get('model_type')!r} model, got {found}.")
    values, own = config.to_dict(), type(config).from_dict(copy.deepcopy(raw)).to_dict()
    left_out = {*NOT_OF_THE_MODEL, *foreign_keys(type(config))}
    changed = {k: v for k, v in values.items() if k not in left_out and (k not in own or own[k] != v)}
    sections = sorted({"posenc", *config.sub_configs} & set(changed))
    if sections or "posenc" not in values:
        raise PosencError(
            f"config= says otherwise than the checkpoint in {', '.join(sections or ['posenc'])}, which cannot be "
            "given so: change the model after it was loaded, or save another one."
        )
    attention = attention_of(config)
    if attention is not None and not attention.startswith("hf_posenc"):  # not ours
        changed["attn_implementation"] = attention
    return changed
