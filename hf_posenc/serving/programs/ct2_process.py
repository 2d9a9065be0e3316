"""Asks CTranslate2: `ct2_process.py QUESTION.json ANSWERS.jsonl`. A program of its own; see `outside`.

`ct2_process.py --convert SOURCE TARGET [CHANGES]` converts a checkpoint, as `ct2-transformers-converter` does; CHANGES
is a JSON object of attributes that the config of the loaded model is given before it is read.
"""

import json
import os
import sys
import tempfile
from typing import Any

from process import main


class Nameless:
    """Stands for the tokenizer of a checkpoint that has none."""

    bos_token, eos_token, unk_token = "<s>", "</s>", "<unk>"

    def __init__(self, size: int):
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {**{f"<{i}>": i for i in range(3, self.size)}, "<unk>": 0, "<s>": 1, "</s>": 2}


def convert(source: str, target: str, changes: dict[str, Any]) -> None:
    import transformers
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            for name, value in changes.items():
                setattr(model.config, name, value)
            return model

        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            if any(name.startswith("tokenizer") for name in os.listdir(source)):
                return super().load_tokenizer(*args, **kwargs)
            return Nameless(transformers.AutoConfig.from_pretrained(source).vocab_size)

    Converter(source).convert(target, force=True)


def probabilities(path: str, prompts: list[list[int]]) -> list[list[float]]:
    import ctranslate2
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        if not os.path.exists(os.path.join(path, "model.bin")):
            convert(path, folder, {})
            path = folder
        generator = ctranslate2.Generator(path, compute_type="float32")
        found = []
        for prompt in prompts:
            ids = ctranslate2.StorageView.from_array(np.array([prompt], dtype=np.int32))
            lengths = ctranslate2.StorageView.from_array(np.array([len(prompt)], dtype=np.int32))
            row = np.array(generator.forward_batch(ids, lengths, return_log_probs=True))[0, -1]
            found.append(row.astype(np.float64).tolist())
        return found


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        convert(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
    else:
        main(probabilities)
