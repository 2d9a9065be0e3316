"""What the loss of a training step costs, against the model's own, which holds all logits at once.

python benchmarks/benchmark.py --only training
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import long_rows
import torch
from report import Row, ratios
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc.training.loss import LossHead, Wanted, shift_labels

VOCAB, LENGTH = 49_152, 8192


def step(model: torch.nn.Module, head: LossHead | None, ids: torch.Tensor) -> float:
    """Forward and backward; the loss."""
    model.zero_grad()
    if head is None:
        loss = model(ids, labels=ids, use_cache=False).loss
    else:
        with head.expecting(Wanted(shift_labels(ids))):
            loss = model(ids, use_cache=False).logits.sum() / (ids.shape[1] - 1)
    loss.backward()
    return loss.item()


def memory_case(name: str) -> Callable[[], object]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=256,
        num_key_value_heads=1, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    head = None if name == "plain" else LossHead(model)
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.enable_grad():
        step(model, head, ids[:, :64])
    return partial(step, model, head, ids)


def gradients(name: str) -> tuple[float, torch.Tensor]:
    run = memory_case(name)
    loss = run()
    return loss, torch.cat([p.grad.flatten() for p in run.args[0].parameters()])


def whole_step_rows() -> list[Row]:
    """A step of a recipe with all that is in it, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        found = long_rows.report(Path(folder), [LENGTH], [long_rows.PLAIN, "ours"])["ours"][str(LENGTH)]
    what, against = f"a recipe's step, {LENGTH} tokens, vocabulary {long_rows.VOCAB}", "plain Trainer + PEFT"
    return [
        Row(f"{what}: memory in all", against, found["megabytes / plain"], 0.5, note=f"{found['megabytes']:.0f} MB"),
        Row(f"{what}: time", against, found["seconds / plain"], 0.9, note=f"{found['seconds']:.0f} s of CPU"),
        Row(f"{what}: gradients apart", "the largest gradient", found["gradients apart"], 1e-5),
    ]


def training_rows(peak: Callable[[str], float]) -> list[Row]:
    ours, plain = peak("training:ours"), peak("training:plain")
    time = ratios({"plain": memory_case("plain"), "ours": memory_case("ours")}, "plain", 1)["ours"]
    (loss, own), (other, theirs) = gradients("ours"), gradients("plain")
    what = f"training step, {LENGTH} tokens, vocabulary {VOCAB}"
    apart = float((own - theirs).abs().max() / theirs.abs().max())
    return [
        *whole_step_rows(),
        Row(f"{what}: memory", "the model's own loss", ours / plain, 0.1, note=f"{ours:.0f} of {plain:.0f} MB"),
        Row(f"{what}: time", "the model's own loss", time, None),
        Row(f"{what}: loss apart", "the model's own loss", abs(loss - other) / other, 1e-5),
        Row(f"{what}: gradients apart", "the largest gradient", apart, 1e-5),
    ]
