"""Every scheme in two processes that train together (DDP), compiled or not: gradients are those of both rows in one.

    python tests/attack --together

The judge is the same model in one process on both rows, so that only what DDP and compiling add is judged here.
"""

from __future__ import annotations

import copy
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attack.drawing import SCHEMES, TWO_POSITIONS, Cell, drawn_ids, patched
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import PosencError

OFF = 1e-4
"""The largest difference that is right, as a part of the largest gradient of a weight."""
KINDS = ("llama", "gpt2")


def cells() -> list[Cell]:
    return [
        Cell(name, variant, kind)
        for kind in KINDS
        for name, variants in SCHEMES.items()
        for variant in range(len(variants))
        if kind == "llama" or name not in TWO_POSITIONS
    ]


def loss_of(model: torch.nn.Module, row: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(row[None], labels=row[None], use_cache=False).loss
    return loss


def worst(cell: Cell, rank: int, compiled: bool) -> float:
    """The largest difference of a gradient, as a part of the largest gradient of its weight."""
    rows = [drawn_ids(random.Random(n), 48) for n in range(2)]
    alone = copy.deepcopy(patched(cell))
    (sum(loss_of(alone, row) for row in rows) / 2).backward()
    model = copy.deepcopy(patched(cell))
    both = DistributedDataParallel(torch.compile(model, backend="aot_eager") if compiled else model)
    loss_of(both, rows[rank]).backward()
    off = 0.0
    for (name, meant), (_, found) in zip(alone.named_parameters(), model.named_parameters(), strict=True):
        if meant.grad is None or found.grad is None:
            if meant.grad is not None and bool(meant.grad.any()):
                raise AssertionError(f"{name} has no gradient")
            continue
        most = float(meant.grad.abs().max())
        off = max(off, float((meant.grad - found.grad).abs().max()) / (most + 1e-3))
    return off


def work(rank: int, port: int, bad: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for compiled in (False, True):
        tried = refused = wrong = 0
        for cell in cells():
            if compiled and (cell.kind == "gpt2" or cell.variant):  # seconds each
                continue
            torch._dynamo.reset()
            try:
                off = worst(cell, rank, compiled)
            except PosencError:
                refused += 1
                continue
            tried += 1
            if not off <= OFF:
                wrong += 1
                bad.put(f"{cell}, {'compiled' if compiled else 'as it is'}: {off:.2g} off")
        if rank == 0:
            print(
                f"{'compiled' if compiled else 'as it is'}: {tried} cells, {wrong} wrong, {refused} refused",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> int:
    context = mp.get_context("spawn")
    bad = context.SimpleQueue()
    mp.spawn(work, (random.randrange(20_000, 40_000), bad), nprocs=2)
    found = []
    while not bad.empty():
        found.append(bad.get())
    print("\n".join(sorted(set(found))) or "none is off")
    return min(len(found), 1)
