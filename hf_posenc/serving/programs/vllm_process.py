"""Asks vLLM: `vllm_process.py QUESTION.json ANSWERS.jsonl`. A program of its own; see `outside`."""

import os
from typing import Any

from process import main

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def probabilities(path: str, prompts: list[list[int]]) -> list[list[float]]:
    import vllm

    longest = max(map(len, prompts)) + 8
    engine: Any = vllm.LLM(
        model=path,
        dtype="float32",
        max_model_len=longest,
        enforce_eager=True,
        skip_tokenizer_init=not any(name.startswith("tokenizer") for name in os.listdir(path)),
        max_logprobs=-1,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    asked = vllm.SamplingParams(max_tokens=1, logprobs=-1, detokenize=False, temperature=0.0)
    found = []
    for prompt in prompts:
        answer = engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0].outputs[0].logprobs[0]
        found.append([answer[i].logprob for i in range(len(answer))])
    return found


if __name__ == "__main__":
    main(probabilities)
