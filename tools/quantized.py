"""What smaller weights cost in llama.cpp: `python tools/quantized.py MODEL TEXT --scheme yarn --factor 4`.

Perplexity of a model and of its patched self on windows of a text, at the trained length and at the promised one: in
transformers in fp32, there with weights rounded and given back, and in llama.cpp with each dtype. Such figures
are in docs/serving.md. llama.cpp is asked token by token, up to a minute for a window of 1000 tokens.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from hf_posenc import load, patch_model  # noqa: E402
from hf_posenc.models import model_path  # noqa: E402
from hf_posenc.serving import llama_cpp  # noqa: E402
from hf_posenc.serving.gguf.vocabulary import read_vocabulary  # noqa: E402
from hf_posenc.serving.gguf.write import DTYPES, import_gguf, type_of, write_gguf  # noqa: E402
from hf_posenc.serving.proof import MARGIN  # noqa: E402

Windows = list[list[int]]


def windows_of(text: str, tokenizer: Any, length: int, most: int) -> Windows:
    """Of so many tokens each, the first of which begins a text."""
    ids, inner = tokenizer(text, add_special_tokens=False).input_ids, length - 1
    return [[tokenizer.bos_token_id, *ids[i * inner : (i + 1) * inner]] for i in range(min(most, len(ids) // inner))]


@torch.no_grad()
def losses(model: Any, windows: Windows, last: int | None) -> torch.Tensor:
    """Of each window, in nats a token, over its last tokens."""
    rows = []
    for window in map(torch.tensor, windows):
        rows.append(cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none"))
    return torch.stack([row[-(last or len(row)) :].double().mean() for row in rows])


def rounded(model: Any, dtype: str) -> Any:
    """The model with the numbers that its weights stand for in a GGUF file."""
    gguf, twin = import_gguf(), copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        kind = gguf.GGMLQuantizationType[type_of(name, dtype)]
        if parameter.ndim > 1 and dtype != "f32":
            stored = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(stored, kind)).reshape(parameter.shape)
    return twin


def shown(found: torch.Tensor, before: torch.Tensor) -> str:
    risen = found - before
    error = float(risen.std() / len(risen) ** 0.5) if len(risen) > 1 else math.nan
    return f"{math.expm1(float(risen.mean())):+.3%} +- {error:.3%}"


def report(model: Any, folder: Path, windows: Windows, dtypes: list[str], last: int | None) -> None:
    expected, first = losses(model, windows, last), len(windows[0]) - last if last else 1
    print(f"  perplexity {math.exp(float(expected.mean())):.2f}, {len(windows)} windows of {len(windows[0])} tokens")
    vocabulary = read_vocabulary(folder, model.config.vocab_size)
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "model.gguf"
            write_gguf(model, vocabulary, file, dtype)
            theirs = torch.stack([llama_cpp.token_losses(file, w, first).double().mean() for w in windows])
        alone = shown(losses(rounded(model, dtype), windows, last), expected)
        print(f"  {dtype}: llama.cpp {shown(theirs, expected)}, rounded weights alone {alone}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--scheme", default="yarn")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "q8_0"], choices=list(DTYPES))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--patched", action="store_true", help="leave out the unpatched model")
    parser.add_argument("--last", type=int, help="tokens of each window that count; all where it is left out")
    given = parser.parse_args()
    folder = Path(model_path(given.model))
    model, tokenizer = load(folder).float().eval(), AutoTokenizer.from_pretrained(folder)
    text = given.text.read_text(encoding="utf-8")
    for scheme in (given.scheme,) if given.patched else (None, given.scheme):
        if scheme is not None:
            patch_model(model, scheme, factor=given.factor)
        length = model.config.max_position_embeddings - MARGIN
        print(scheme or "unpatched")
        report(model, folder, windows_of(text, tokenizer, length, given.windows), given.dtypes, given.last)


if __name__ == "__main__":
    main()
