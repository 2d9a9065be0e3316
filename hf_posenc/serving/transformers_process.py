"""Asks transformers alone: `transformers_process.py QUESTION.json ANSWER.safetensors`. See `plain_transformers`."""

import json
import os
import sys

sys.modules["hf_posenc"] = None  # type: ignore[assignment]  # from here on, importing it fails
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


def model_of(path: str) -> transformers.PreTrainedModel:
    """As its own class where the config names one, as a decoder else; in fp32."""
    file = os.path.join(path, "config.json")
    named: list[str] = []
    if os.path.exists(file):
        with open(file, encoding="utf-8") as stream:
            named = json.load(stream).get("architectures") or []
    cls = getattr(transformers, named[0], None) if named else None
    loader = cls or transformers.AutoModelForCausalLM
    model: transformers.PreTrainedModel = loader.from_pretrained(path, dtype=torch.float32).eval()
    return model


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    try:
        model = model_of(question["path"])
        with torch.no_grad():
            rows = [model(torch.tensor([p])).logits[0, -1].float().log_softmax(-1) for p in question["prompts"]]
    except Exception as error:  # whatever it is, it is why this checkpoint cannot be had here
        first = str(error).strip().splitlines() or [""]
        raise SystemExit(f"{type(error).__name__}: {first[0]}") from None
    save_file({"probabilities": torch.stack(rows)}, sys.argv[2])


if __name__ == "__main__":
    main()
