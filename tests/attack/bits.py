"""Weights of 4 bits (bitsandbytes) and of 8 (torchao), patched before and after, with LoRA on top (QLoRA).

The judge computes in fp64 with the numbers that the bits stand for, by these packages' own account of them.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attack.caches import Held
from attack.drawing import NATIVE, Cell, Drawn, Wrong, compare, drawn_cell, drawn_ids, judged_by, original, patched
from attack.passes import _left
from attack.stored import patched_anew
from transformers import BitsAndBytesConfig, DynamicCache, TorchAoConfig

from hf_posenc import load, save

PACKAGES = {"nf4": "bitsandbytes", "fp4": "bitsandbytes", "int8": "torchao"}
KINDS = tuple(kind for kind, package in PACKAGES.items() if importlib.util.find_spec(package) is not None)
"""Those whose package is installed."""
WAYS = ("pass", "pass", "cache", "cache", "gradients", "adapter")
SCALE = 3.0
OFF, LEAST = 2e-3, 1e-4


def drawn_bits(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "llama", "qwen3"))
    held, way, early = draw.choice(KINDS), draw.choice(WAYS), draw.random() < 0.4
    rows = [drawn_ids(draw, draw.randint(2, 70)) for _ in range(2)]
    case = Drawn("bits", cell, dict(held=held, way=way, early=early), made=lambda cell: None)
    seed = draw.randrange(1 << 30)

    def run(model: Any, cell: Cell) -> None:
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            WAYS_OF[way](quantised(cell, held, early, Path(folder)), cell, rows, Path(folder), seed)

    case.run = run
    return case


def config_of(held: str) -> Any:
    if held == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    about = dict(bnb_4bit_quant_type=held, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    return BitsAndBytesConfig(load_in_4bit=True, **about)


def quantised(cell: Cell, held: str, early: bool, folder: Path) -> Any:
    """Loaded with few bits, from a patched checkpoint or to be patched then."""
    source = patched(cell) if early else original(cell.kind, cell.dtype, cell.kernel)
    save(source, folder / "base")
    about = dict(quantization_config=config_of(held), attn_implementation=cell.kernel, dtype=torch.float32)
    model = load(folder / "base", **about)
    return model if early or cell.scheme == NATIVE else patched_anew(model, cell)


def numbers(model: Any) -> dict[str, torch.Tensor]:
    """What the weights of a model stand for."""
    found = {
        name: tensor for name, tensor in model.state_dict().items() if "quant" not in name and "absmax" not in name
    }
    packed = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            found[f"{name}.weight"], packed = dequantize_4bit(weight.data, weight.quant_state), packed + 1
        elif hasattr(weight, "dequantize") and type(weight.data) is not torch.Tensor:
            found[f"{name}.weight"], packed = weight.dequantize(), packed + 1
    if not packed:
        raise Wrong("no weight is held in few bits")
    return {name: tensor.detach() for name, tensor in found.items()}


def judge_rows(model: Any, cell: Cell, rows: list[torch.Tensor]) -> None:
    inputs, expected = _left(cell, rows, 0.0)
    with torch.no_grad():
        found = model.eval()(**inputs).logits
    for row, (where, told) in enumerate(expected()):
        compare(cell, found[row, where], told, f"row {row}")


def _pass(model, cell, rows, folder, seed):
    with judged_by(cell, numbers(model)):
        judge_rows(model, cell, rows)


def _cache(model, cell, rows, folder, seed):
    with judged_by(cell, numbers(model)):
        held = Held(cell, model.eval(), DynamicCache(config=model.config), rows, random.Random(seed))
        held.feed()
        held.feed(1)
        held.feed()


def adapted(model: Any, seed: int, also: list[str] | None = None) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    names = ["q_proj", "v_proj", "o_proj"]
    about = dict(r=2, lora_alpha=2 * SCALE, init_lora_weights=False, task_type="CAUSAL_LM", modules_to_save=also)
    tuned = get_peft_model(model, LoraConfig(target_modules=names, **about))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(0.2)
    return tuned


@contextmanager
def judged_with(cell: Cell, plain: dict[str, torch.Tensor], tuned: Any) -> Iterator[dict[str, torch.Tensor]]:
    """By what an adapter and its base amount to; the adapter's own weights come back, to be differentiated."""
    learned = {n: p.detach().double().requires_grad_() for n, p in tuned.named_parameters() if "lora_" in n}
    whole = dict(plain)
    for name, weight in plain.items():
        a, b = (f"base_model.model.{name.removesuffix('.weight')}.lora_{c}.default.weight" for c in "AB")
        if a in learned:
            whole[name] = weight.double() + SCALE * learned[b] @ learned[a]
    with judged_by(cell, whole):
        yield learned


def _gradients(model, cell, rows, folder, seed):
    plain = numbers(model)
    tuned = adapted(model, seed).train()
    inputs, expected = _left(cell, rows, 0.0)
    logits = tuned(**inputs, use_cache=False).logits
    with judged_with(cell, plain, tuned) as learned:
        loss, meant = 0.0, 0.0
        for row, (where, told) in enumerate(expected()):
            wish = torch.randn(told.shape, generator=torch.Generator().manual_seed(seed + row)).double() / len(told)
            loss, meant = loss + (logits[row, where].double() * wish).sum(), meant + (told * wish).sum()
        loss.backward()
        meant.backward()
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            off, most = float((weight.grad - learned[name].grad).abs().max()), float(learned[name].grad.abs().max())
            if not off <= OFF * most + LEAST:
                raise Wrong(f"the gradient of {name} is {off:.2g} off, of {most:.2g}")


def _adapter(model, cell, rows, folder, seed):
    plain = numbers(model)
    brought = any("posenc_bias" in name for name in plain) and cell.scheme != "plan"
    tuned = adapted(model, seed, ["posenc_bias"] if brought and seed % 4 else None)
    save(tuned, folder / "adapter")
    again = load(folder / "adapter", dtype=torch.float32)
    with judged_with(cell, plain, tuned):
        judge_rows(tuned, cell, rows)
        judge_rows(again, cell, rows)


WAYS_OF = {"pass": _pass, "cache": _cache, "gradients": _gradients, "adapter": _adapter}
