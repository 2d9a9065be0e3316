"""Checkpoints: saved, loaded, patched on disk, adapted and merged, and loaded by a process without this package."""

from __future__ import annotations

import atexit
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attack.drawing import (
    NATIVE,
    Cell,
    Drawn,
    Wrong,
    asked,
    compare,
    drawn_cell,
    drawn_ids,
    judged_by,
    meant,
    original,
    patched,
)
from attack.passes import _left
from cells import LENGTH
from safetensors.torch import load_file, save_file

from hf_posenc import PosencError, is_patched, load, merge, patch_checkpoint, patch_model, save, unpatch_model

WAYS = ("saved", "saved", "again", "sharded", "repatched", "unpatched", "disk", "adapter", "merged", "stranger")
HERE = Path(__file__).parent


def drawn_store(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2", "bert"), ("float32",) * 4 + ("bfloat16",))
    way = draw.choice(WAYS)
    rows = [drawn_ids(draw, draw.randint(1, cell.longest)) for _ in range(draw.randint(1, 2))]
    case = Drawn("store", cell, dict(way=way))
    seed = draw.randrange(1 << 30)

    def run(model: Any, cell: Cell) -> None:
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            inputs, expected = _left(cell, rows, 0.0)
            found = STORES[way](model, cell, Path(folder), inputs, seed)
            if found is None:  # refused where that is right
                return
            logits, weights = found
            for row, (where, told) in enumerate(expected() if weights is None else judged(cell, rows, weights)):
                compare(cell, logits[row, where], told, f"row {row}")

    case.run = run
    return case


def judged(cell: Cell, rows: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> Any:
    """By weights that are not those of the patched model."""
    width = max(map(len, rows))
    with judged_by(cell, weights):
        for row in rows:
            yield slice(width - len(row), width), meant(cell, row)


def answered(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    return logits


def _saved(model, cell, folder, inputs, seed):
    save(model, folder / "a")
    return answered(load(folder / "a", dtype="auto"), inputs), None


def _again(model, cell, folder, inputs, seed):
    """Saved, loaded, and saved into the folder where another checkpoint lies."""
    save(model, folder / "a")
    save(original(cell.kind, cell.dtype, cell.kernel), folder / "b")
    save(load(folder / "a", dtype="auto"), folder / "b")
    return answered(load(folder / "b", dtype="auto"), inputs), None


def _sharded(model, cell, folder, inputs, seed):
    save(model, folder / "a", max_shard_size="8KB")
    assert len(list((folder / "a").glob("*.safetensors"))) > 1
    return answered(load(folder / "a", dtype="auto"), inputs), None


def _repatched(model, cell, folder, inputs, seed):
    """Patched with something else before, and saved in between."""
    before = random.Random(seed).choice(("none", "alibi", "rope", "dynamic_ntk", "t5"))
    other = patch_model(copy.deepcopy(original(cell.kind, cell.dtype, cell.kernel)), before, trained_length=LENGTH)
    save(other, folder / "a")
    other = load(folder / "a", dtype="auto")
    other.set_attn_implementation("hf_posenc_eager" if seed % 2 and before in ("alibi", "t5") else cell.kernel)
    return answered(patched_anew(other, cell), inputs), None


def _unpatched(model, cell, folder, inputs, seed):
    """What is loaded is unpatched, saved as what it was, and patched anew."""
    save(model, folder / "a")
    other = unpatch_model(load(folder / "a", dtype="auto"))
    save(other, folder / "b")
    return answered(patched_anew(load(folder / "b", dtype="auto"), cell), inputs), None


def patched_anew(model: Any, cell: Cell) -> Any:
    """As the cell says, with the weights of the cell's own model where the scheme has some."""
    if cell.scheme == NATIVE:
        return unpatch_model(model) if is_patched(model) else model
    given, options = asked(cell)
    made = patch_model(model, given, **options)
    own = {name: weight for name, weight in patched(cell).state_dict().items() if "posenc" in name}
    made.load_state_dict(own, strict=False)
    return made


def _disk(model, cell, folder, inputs, seed):
    """Parameters that a scheme begins with are those in the file; the weights of the model are those of the source."""
    source = original(cell.kind, cell.dtype, cell.kernel)
    save(source, folder / "a")
    if cell.scheme == NATIVE:
        return answered(load(folder / "a", dtype="auto"), inputs), None
    given, options = asked(cell)
    patch_checkpoint(folder / "a", folder / "b", given, **options)
    made = load(folder / "b", dtype="auto")
    weights = made.state_dict()
    for name, weight in source.state_dict().items():
        of_model = name in weights and "position" not in name and "wpe" not in name
        if of_model and not torch.equal(weights[name], weight):
            raise Wrong(f"{name} is not what it was")
    return answered(made, inputs), weights


def adapted(model: Any, cell: Cell, folder: Path, seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """An adapter on a base that lies on disk, and the weights that the two amount to, by the formula of LoRA."""
    from peft import LoraConfig, get_peft_model

    save(original(cell.kind, cell.dtype, cell.kernel), folder / "base")
    base = patched_anew(load(folder / "base", dtype="auto"), cell)
    plain = {name: weight.clone() for name, weight in base.state_dict().items()}
    torch.manual_seed(seed)
    names = {"gpt2": ["c_attn"], "bert": ["query", "value"]}.get(cell.kind, ["q_proj", "v_proj", "o_proj"])
    own = ["posenc_bias"] if any("posenc_bias" in name for name in plain) and cell.scheme != "plan" else None
    turned = cell.kind == "gpt2"
    config = LoraConfig(
        r=2, lora_alpha=6, target_modules=names, modules_to_save=own, init_lora_weights=False, fan_in_fan_out=turned
    )
    tuned = get_peft_model(base, config).eval()
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(0.2)
    learned = dict(tuned.named_parameters())
    for name in plain:
        a, b = (f"base_model.model.{name.removesuffix('.weight')}.lora_{c}.default.weight" for c in "AB")
        if a in learned:
            more = 3.0 * learned[b].data @ learned[a].data
            plain[name] = plain[name] + (more.T if turned else more)
    return tuned, plain


def _adapter(model, cell, folder, inputs, seed):
    tuned, weights = adapted(model, cell, folder, seed)
    save(tuned, folder / "adapter")
    return answered(load(folder / "adapter", dtype="auto"), inputs), weights


def _merged(model, cell, folder, inputs, seed):
    tuned, weights = adapted(model, cell, folder, seed)
    save(tuned, folder / "adapter")
    merge(folder / "adapter", folder / "merged", dtype="auto")
    return answered(load(folder / "merged", dtype="auto"), inputs), weights


def _stranger(model, cell, folder, inputs, seed):
    """A process without this package gives the same logits, or an error."""
    save(model, folder / "a")
    save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, folder / "inputs")
    auto = "AutoModelForMaskedLM" if cell.kind == "bert" else "AutoModelForCausalLM"
    job = {"path": str(folder / "a"), "auto": auto, "inputs": str(folder / "inputs")}
    told = stranger(os.getpid())(job)
    if "refused" not in told:
        return load_file(told["logits"])["logits"], None
    if cell.scheme == NATIVE:
        raise PosencError(told["refused"])
    return None


@cache
def stranger(_process: int) -> Any:
    """A process that lives as long as this one."""
    child = subprocess.Popen(
        [sys.executable, "-I", str(HERE / "stranger.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(child.kill)

    def ask(job: dict[str, str]) -> dict[str, str]:
        assert child.stdin is not None and child.stdout is not None
        print(json.dumps(job), file=child.stdin, flush=True)
        told: dict[str, str] = json.loads(child.stdout.readline())
        return told

    return ask


STORES = {
    "saved": _saved,
    "again": _again,
    "sharded": _sharded,
    "repatched": _repatched,
    "unpatched": _unpatched,
    "disk": _disk,
    "adapter": _adapter,
    "merged": _merged,
    "stranger": _stranger,
}
