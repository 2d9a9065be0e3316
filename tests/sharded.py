"""Runs recipes on CPU processes under launchers that are made for GPUs: FSDP2 and context parallelism.

    accelerate launch --config_file FILE tests/sharded.py RECIPE WORDS --then RECIPE WORDS --after=CHECKPOINT ...

accelerate runs DDP instead where it finds no GPU, and torch has no sharded attention for CPUs: both are told otherwise
here, for tests only. `--after` goes on from a copy of another run's checkpoint. Beside each run every process writes
what it saw, `seen-0.json`, and why it was refused, if so.
"""

import json
import os
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from hf_posenc import PosencError
from hf_posenc.training import recipe as finetune
from hf_posenc.training.settings_file import read_settings

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def as_if_on_gpus() -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]


def as_ring(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """torch's own ring, which it runs for the kernels of GPUs, around the kernel of CPUs."""
    if kwargs.get("attn_mask") is not None:
        raise NotImplementedError("attn_mask is not supported yet")  # as for those
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("attn_mask", None)
    mesh = given["query"].device_mesh
    given = {name: v.to_local() if isinstance(v, DTensor) else v for name, v in given.items()}
    if op is FORWARD:
        found = ring._templated_ring_attention(mesh.get_group(), 2, op, **given)
    else:
        found = ring._templated_ring_attention_backward(mesh.get_group(), 2, op, grad_out_name="grad_out", **given)
    return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in found)


class Watched(finetune.ContextTrainer):
    """Notes what this process is given, and what it holds."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.seen = {
            "distributed": str(self.accelerator.distributed_type),
            "positions": inputs["position_ids"].tolist(),
            "whole": [n for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)],
            "sharded": sum(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad),
        }
        return super().compute_loss(model, inputs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        note(self.settings, self.seen)
        return result


def note(settings: Any, what: dict[str, Any]) -> None:
    Path(settings.output).mkdir(parents=True, exist_ok=True)  # what is refused at once has none
    (Path(settings.output) / f"seen-{PartialState().process_index}.json").write_text(json.dumps(what))


def main(words: list[str]) -> None:
    as_if_on_gpus()
    ring.custom_ops.update({FORWARD: as_ring, BACKWARD: as_ring})
    finetune.ContextTrainer = Watched
    for last, run in groupby(words, lambda word: word == "--then"):
        if last:
            continue
        recipe, *others = run
        after = [Path(word.removeprefix("--after=")) for word in others if word.startswith("--after=")]
        settings = read_settings(recipe, [word for word in others if not word.startswith("--after=")])
        if after and PartialState().is_main_process:
            shutil.copytree(after[0], Path(settings.output) / after[0].name)
        PartialState().wait_for_everyone()
        try:
            finetune.train(settings, resume=bool(after), merged=False, compared=False)
        except PosencError as error:
            note(settings, {"refused": str(error)})
        PartialState().wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1:])
