"""Lets `trust_remote_code=True` open a sealed checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel

from ..compat.models import auto_classes

MODULE = "modeling_hf_posenc"
CODE = '''"""Opens this checkpoint with its own position scheme. Needs: pip install hf-posenc"""

import transformers
from hf_posenc import load


class Patched:
    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        kwargs.pop("trust_remote_code", None)
        return load(path, model_class=transformers.{model_class}, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        pass
'''


def write_portable(folder: Path, model: PreTrainedModel) -> None:
    """Add the module and the `auto_map` that names it for the auto class of this model's head."""
    code = CODE.replace("{model_class}", type(model).__name__)  # auto classes expect this class
    (folder / f"{MODULE}.py").write_text(code, encoding="utf-8")
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["auto_map"] = {auto: f"{MODULE}.Patched" for auto in auto_classes(model)}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
