"""Asks MLX: `mlx_process.py QUESTION.json ANSWERS.jsonl`. A program of its own; see `outside`."""

from typing import Any

from process import main


def probabilities(path: str, prompts: list[list[int]]) -> list[list[float]]:
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.utils import load_model

    model: Any = load_model(Path(path))[0]
    found = []
    for prompt in prompts:
        logits = model(mx.array([prompt]))[0, -1].astype(mx.float32)
        found.append((logits - mx.logsumexp(logits)).tolist())
    return found


if __name__ == "__main__":
    main(probabilities)
