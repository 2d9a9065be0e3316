"""How many candidates a search judges in a minute, against patching the model and reading every window for each.

    python benchmarks/search_benchmark.py

A small LLaMA with a vocabulary of 49k and random weights, target four times the trained length. Seconds are those of
the CPU, so that a busy machine does not change the ratio.
"""

import random
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import patch_model
from hf_posenc.evaluation import Document
from hf_posenc.schemes import SCHEMES
from hf_posenc.search.budget import Budget
from hf_posenc.search.candidates import LiveRope, geometry_of
from hf_posenc.search.evolution import evolve
from hf_posenc.search.samples import sample_losses, text_samples
from hf_posenc.search.spaces import FactorSpace

VOCAB, TRAINED, TARGET, CANDIDATES, WINDOWS = 49_152, 128, 512, 16, 16


def toy() -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384,
        max_position_embeddings=TRAINED,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def naive(model, space, candidates, samples) -> float:
    """Seconds for each candidate: a patch, and transformers' own loss of each window."""
    begun = time.process_time()
    for genes in candidates:
        patch_model(model, space.scheme(genes))
        for sample in samples:
            labels = sample.ids.clone()
            labels[: -sample.scored] = -100
            model(sample.ids[None], labels=labels[None])
    return (time.process_time() - begun) / len(candidates)


def ours(model, space, samples) -> float:
    """Seconds for each candidate of a search, its starts included."""
    live = LiveRope(model)

    def judge(candidates, count):
        found = []
        for genes in candidates:
            with live.holding(genes[1:], genes[0]):
                found.append(sample_losses(model, samples[:count]))
        return found

    begun = time.process_time()
    rounds = evolve(space, judge, Budget(population=CANDIDATES, rounds=2, samples=WINDOWS), seed=0)
    return (time.process_time() - begun) / rounds[-1].tried


def main() -> None:
    model = toy()
    ids = torch.randint(0, VOCAB, (20_000,), generator=torch.Generator().manual_seed(0))
    samples = text_samples([Document("random", ids)], TARGET, WINDOWS, None)
    space = FactorSpace(geometry_of(model, SCHEMES["longrope"](target_length=TARGET)), TARGET)
    rng = random.Random(0)
    candidates = [space.mutate(genes, rng) for genes in list(space.starts().values())[:4]]
    quick = ours(model, space, samples)
    plain = naive(model, space, candidates, samples)
    print(f"search: {60 / quick:.0f} candidates a minute; one by one: {60 / plain:.0f}; ratio {plain / quick:.1f}")


if __name__ == "__main__":
    main()
