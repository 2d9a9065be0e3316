"""Gradients of every weight, by the reference's own: torch differentiates the formulas in fp64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attack.drawing import Cell, Drawn, Wrong, drawn_block, drawn_cell, drawn_ids, judge
from attack.passes import PASSES

MASKS = ("none", "left", "right", "packed", "packed_4d", "prefix", "holes", "tree")
OFF = 2e-3
"""The largest difference that is right, as a part of the largest gradient of a weight."""
LEAST = 1e-4


def drawn_gradients(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2", "bert"))
    mask = draw.choice(MASKS if cell.kind != "bert" else ("none", "right", "holes"))
    trained = draw.random() < 0.5 and cell.kind in ("llama", "qwen3")  # the others have dropout
    recomputed = trained and draw.random() < 0.5
    twice = draw.random() < 0.1
    rows = [drawn_ids(draw, draw.randint(2, 60)) for _ in range(draw.randint(1, 3))]
    traits = dict(mask=mask, trained=trained, recomputed=recomputed, twice=twice)
    case = Drawn("gradients", cell, traits, block=drawn_block(draw))
    chosen, seed = draw.random(), draw.randrange(1 << 30)

    def run(model: Any, cell: Cell) -> None:
        inputs, expected = PASSES[mask](cell, rows, chosen)
        inputs |= {"use_cache": False} if cell.kind != "bert" else {}
        with trains(model, trained, recomputed):
            logits = model(**inputs).logits
            loss, meant = 0.0, 0.0
            with weights_that_learn(cell) as weights:
                for row, (where, told) in enumerate(expected()):
                    generator = torch.Generator().manual_seed(seed + row)
                    wish = torch.randn(told.shape, generator=generator, dtype=torch.float64) / len(told)
                    loss = loss + (logits[row, where].double() * wish).sum()
                    meant = meant + (told * wish).sum()
                if twice:
                    return judge_twice(model, weights, loss, meant)
                loss.backward()
                meant.backward()
                judge_gradients(model, weights)

    case.run = run
    return case


@contextmanager
def trains(model: Any, trained: bool, recomputed: bool) -> Iterator[None]:
    model.zero_grad(set_to_none=True)
    model.train(trained)
    if recomputed:
        model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        if recomputed:
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()  # a hook that transformers leaves behind, and that cannot be pickled
        model.eval()
        model.zero_grad(set_to_none=True)


@contextmanager
def weights_that_learn(cell: Cell) -> Iterator[dict[str, torch.Tensor]]:
    """The reference's weights, of which torch takes the gradients."""
    weights = judge(cell).w
    for weight in weights.values():
        weight.requires_grad_(weight.is_floating_point())
    try:
        yield weights
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)
            weight.grad = None


def judge_gradients(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Names that share a weight in the model share its gradient, which the reference has for each."""
    kept = model.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        alike = {name} | {other for other, tensor in kept.items() if tensor is parameter}
        told = sum((weights[other].grad for other in alike if weights[other].grad is not None), torch.zeros(()))
        told = told[: len(parameter)] if told.ndim else told  # a sealed table has a row more in a state dict
        found = torch.zeros(()) if parameter.grad is None else parameter.grad.double()
        off = float((found - told).abs().max())
        if not off <= OFF * float(told.abs().max()) + LEAST:
            raise Wrong(f"the gradient of {name} is {off:.2g} off, of {float(told.abs().max()):.2g}")


def judge_twice(model: Any, weights: dict[str, torch.Tensor], loss: torch.Tensor, meant: torch.Tensor) -> None:
    """The gradient, by the embeddings, of how large the gradient of the first layer's values is."""
    of_values = {"gpt2": "attn.c_attn", "bert": "self.value"}.get(model.config.model_type, "v_proj")
    own = dict(model.named_parameters())
    value = next(name for name in own if of_values in name)
    words = next(name for name, weight in own.items() if weight is model.get_input_embeddings().weight)
    alike = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor is own[words]]
    found, told = (
        torch.autograd.grad(
            torch.autograd.grad(total, known[value], create_graph=True)[0].square().sum(), [known[n] for n in names]
        )
        for total, known, names in ((loss, own, [words]), (meant, weights, alike))
    )
    off, most = float((found[0] - sum(told)).abs().max()), float(sum(told).abs().max())
    if not off <= OFF * most + LEAST:
        raise Wrong(f"the gradient of a gradient is {off:.2g} off, of {most:.2g}")
