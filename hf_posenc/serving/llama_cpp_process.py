"""Runs llama.cpp: `llama_cpp_process.py QUESTION.json ANSWER.json`. Started by `llama_cpp`."""

import json
import os
import sys
import urllib.request
from typing import Any


def server(question: dict[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = question["model"]
    longest = max([len(p) for name in ("prompts", "texts_of_tokens") for p in question.get(name, [])], default=64)
    params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = longest + 8, 1, 2048, 512
    # fp32 throughout, so that differences are not due to the runtime's rounding.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def probabilities(running: Any, prompt: list[int], vocabulary: int, visible: int) -> list[tuple[int, float]]:
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": vocabulary, "samplers": [], "cache_prompt": False}
    # The bias only chooses the token, since an end token has no probabilities. Those returned are the model's own.
    answer = running.handle_completions({**asked, "logit_bias": [[visible, 1e4]]})
    if "choices" not in answer:
        raise ValueError(answer.get("error", {}).get("message", str(answer)[:300]))
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [(entry["id"], entry["logprob"]) for entry in top]


def losses(running: Any, tokens: list[int], first: int) -> list[float]:
    """The loss of each token from `first` on. Earlier tokens stay in the cache between requests."""
    found = []
    for end in range(first, len(tokens)):
        asked = {"prompt": tokens[:end], "n_predict": 1, "n_probs": 1, "samplers": [], "cache_prompt": True}
        answer = running.handle_completions({**asked, "logit_bias": [[tokens[end], 1e4]]})
        if "choices" not in answer or not answer["choices"][0]["logprobs"]:
            raise ValueError(str(answer)[:300])
        told = answer["choices"][0]["logprobs"]["content"][0]
        if told["id"] != tokens[end]:
            raise ValueError(f"asked for token {tokens[end]}, got {told['id']}")
        found.append(-told["logprob"])
    return found


def tokenize(running: Any, text: str) -> Any:
    body = json.dumps({"content": text, "add_special": True}).encode()
    url = f"{running.listening_address}/tokenize"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    try:
        running = server(question)
        size, visible = question.get("vocabulary"), question.get("visible")
        answer: dict[str, Any] = {
            "probabilities": [probabilities(running, p, size, visible) for p in question.get("prompts", [])],
            "losses": [losses(running, t, question["first"]) for t in question.get("texts_of_tokens", [])],
            "ids": [tokenize(running, text) for text in question.get("texts", [])],
        }
    except (RuntimeError, ValueError) as error:
        answer = {"error": str(error)}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
