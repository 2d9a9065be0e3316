"""Adapters carry the scheme of their base model, whoever saves them."""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "posenc.json"
"""Lies beside `adapter_config.json` and holds the base model's `config.posenc`."""


class SaveWithScheme:
    """`save_pretrained` of one PEFT config object, which also writes the scheme of the model it is on."""

    def __init__(self, config: Any, record: dict[str, Any]):
        self.config, self.record = config, record

    def __call__(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> Any:
        result = type(self.config).save_pretrained(self.config, save_directory, **kwargs)
        write_record(save_directory, self.record)
        return result


def before_state_dict(model: Any, prefix: str, keep_vars: bool) -> None:
    """Runs before the state dict of a patched model is made, so before any save of adapters on it.

    PEFT knows nothing of positions: its config objects are the one thing on the model that is told where it saves.
    """
    for config in (getattr(model, "peft_config", None) or {}).values():
        config.save_pretrained = SaveWithScheme(config, model.config.posenc)


def write_record(folder: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Write whole or not at all: a half-written scheme would be worse than none."""
    path = os.path.join(folder, FILE)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
        file.write("\n")
    os.replace(path + ".part", path)
