"""Asks CTranslate2: `ct2_process.py QUESTION.json ANSWERS.jsonl`. A program of its own; see `outside`.

`ct2_process.py --convert SOURCE TARGET [ROTATION]` converts a checkpoint, as `ct2-transformers-converter` does.
ROTATION, a JSON object, is what that leaves out of a RoPE with a factor for each pair: `factors`, and `scaling`, what
cos and sin are multiplied by.
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


def convert(source: str, target: str, rotation: dict[str, Any] | None = None) -> None:
    import transformers
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            if any(name.startswith("tokenizer") for name in os.listdir(source)):
                return super().load_tokenizer(*args, **kwargs)
            return Nameless(transformers.AutoConfig.from_pretrained(source).vocab_size)

        def _load(self) -> Any:
            spec = super()._load()
            if rotation is not None:
                config = transformers.AutoConfig.from_pretrained(source)
                width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                for layer in spec.decoder.layer:
                    tell(layer.self_attention, rotation["factors"], rotation["scaling"], width)
            return spec

    Converter(source).convert(target, force=True)


def tell(attention: Any, factors: list[float], scaling: float, width: int) -> None:
    """Give a layer its frequencies. Its lengths stay 0, so that it takes the long factors at once; a scale of cos and
    sin, which it would compute from them, is squared in the scores."""
    import numpy as np

    attention.rotary_scaling_long_factor = np.array(factors, dtype=np.float32)
    attention.rotary_scaling_short_factor = np.array(factors, dtype=np.float32)
    attention.queries_scale = np.float32(scaling**2 / width**0.5)


def probabilities(path: str, prompts: list[list[int]]) -> list[list[float]]:
    import ctranslate2
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        if not os.path.exists(os.path.join(path, "model.bin")):
            convert(path, folder)
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
        convert(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]) if len(sys.argv) > 4 else None)
    else:
        main(probabilities)
