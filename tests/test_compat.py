"""What this package takes for granted of names that other libraries keep private, one contract for each.

When a release breaks one of these, the message says what no longer holds and who depends on it.
"""

import ast
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from cells import options, tiny, tokens
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, Trainer
from transformers.cache_utils import DynamicLayer

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.compat import models, pytorch

PACKAGE = Path(hf_posenc.__file__).parent
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent.name != "compat"]
NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
"""Python's own, and public."""

# --- the rule: bounds say what was run ---


def test_the_bounds_are_the_releases_that_were_run():
    root = PACKAGE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("an installed package has no pyproject.toml beside it")
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = next(line for line in wanted if line.startswith("transformers"))
    rows = re.findall(r"^\| (5\.\d+)\.\d+ \|.*\| (\d+) of (\d+) \| (\d+) of (\d+) \|", _text("docs/versions.md"), re.M)
    oldest, newest = rows[0][0], rows[-1][0]
    assert bounds == f"transformers>={oldest},<5.{int(newest.split('.')[1]) + 1}"
    assert all(row[1] == row[2] and row[3] == row[4] for row in rows), "not everything passed there"
    assert re.findall(r'"(5\.\d+)\.\d+"', _text("tools/compat.py")) == [row[0] for row in rows]


def _text(name: str) -> str:
    return (PACKAGE.parent / name).read_text(encoding="utf-8")


# --- the rule: private names of others are used in `compat` and nowhere else ---


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def own_names() -> set[str]:
    """Private names that the package gives to things of its own."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def foreign_names() -> set[str]:
    """Private names that classes of others have, which ours are made of: such a method overrides one of theirs."""
    classes = (nn.Module, nn.Embedding, Trainer, DynamicLayer, DynamicCache, PreTrainedConfig)
    theirs = {name for cls in classes for name in dir(cls)} | set(vars(nn.Linear(1, 1)))
    attributes = {models.ATTENTION, "_loss_shifts_labels", "_max_length", "_orig_mod", "_loglikelihood_tokens"}
    return theirs | attributes | {"_load_model", "_load_with_module_classes"}


def private_uses(source: str) -> set[str]:
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword):
            found.add(node.arg)
        elif isinstance(node, ast.ClassDef):
            found |= {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found |= {word.value for word in node.args[1:2] if isinstance(word, ast.Constant)}
    return {name for name in found if private(name)}


def test_private_names_of_others_are_used_in_compat_alone():
    ours, theirs = own_names(), foreign_names()
    for file in FILES:
        used = private_uses(file.read_text(encoding="utf-8"))
        strangers = sorted(name for name in used if name not in ours or name in theirs)
        assert not strangers, f"{file.relative_to(PACKAGE)} uses {strangers}: put it behind a function in compat"


@pytest.mark.parametrize(
    "source",
    [
        "x.config._attn_implementation",
        "from lm_eval._cli import HarnessCLI",
        "getattr(model, '_orig_mod', model)",
        "nn.Embedding(1, 2, _weight=w)",
        "class T(nn.Module):\n    def _apply(self, fn): ...",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q)",
    ],
)
def test_the_rule_notices(source):
    ours, theirs = own_names(), foreign_names()
    assert [name for name in private_uses(source) if name not in ours or name in theirs]


def test_compat_brings_no_optional_library_along():
    code = (
        "import sys; import hf_posenc.compat.pytorch, hf_posenc.compat.models, hf_posenc.compat.caches\n"
        "import hf_posenc.compat.adapters\n"
        "print(*{'lm_eval', 'peft', 'sentence_transformers', 'mteb', 'datasets'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


# --- torch ---


def reference(query, key, value, scaling, mask=None, causal=False):
    scores = query.float() @ key.float().transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value.float(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cpu_kernel_takes_a_mask_with_causal_and_gives_the_sums(dtype, masked):
    assert dtype in pytorch.CPU_ATTENTION, "torch's CPU kernel is gone or differs: alibi and zones run a slower way"
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 70, 16, generator=generator).to(dtype) for _ in range(3))
    mask = torch.randn(2, 3, 1, 70, generator=generator).to(dtype).expand(-1, -1, 70, -1) if masked else None
    output, sums = pytorch.cpu_attention(query, key, value, causal=True, scaling=0.3, mask=mask)
    wanted = reference(query, key, value, 0.3, mask, causal=True)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.float(), wanted[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(sums.float(), wanted[1], atol=tolerance, rtol=tolerance)


def test_a_kernel_that_is_missing_or_means_something_else_is_not_used(monkeypatch):
    kernel = pytorch.cpu_attention
    monkeypatch.setattr(pytorch, "KERNEL", "_no_such_kernel")
    assert pytorch.find_right_dtypes() == ()
    monkeypatch.undo()
    monkeypatch.setattr(
        pytorch, "cpu_attention", lambda *args, **kwargs: tuple(x * 1.1 for x in kernel(*args, **kwargs))
    )
    assert pytorch.find_right_dtypes() == ()
    monkeypatch.setattr(pytorch, "cpu_attention", lambda q, k, v, **given: kernel(q, k, v, **{**given, "mask": None}))
    assert pytorch.find_right_dtypes() == ()


@pytest.mark.parametrize("scheme", ["alibi", "self_extend", "dca", "lm_infinite", "streaming"])
def test_without_that_kernel_models_run_a_slower_way(scheme, monkeypatch):
    model, ids = patch_model(tiny("llama"), scheme, **options(scheme)), tokens(2, 96)
    calls, kernel = [], pytorch.cpu_attention
    monkeypatch.setattr(pytorch, "cpu_attention", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    with torch.no_grad():
        fast = model(ids).logits
        assert calls, f"{scheme} did not take the fast way: this test shows nothing"
        calls.clear()
        monkeypatch.setattr(pytorch, "CPU_ATTENTION", ())
        slow = model(ids).logits
    assert not calls
    torch.testing.assert_close(slow, fast, atol=2e-4, rtol=0)


def test_hooks_are_found():
    def hook(module, args):
        return None

    layer = nn.Linear(1, 1)
    assert not pytorch.has_pre_hook(layer, hook)
    handle = layer.register_forward_pre_hook(hook)
    assert pytorch.has_pre_hook(layer, hook), "torch keeps pre-hooks elsewhere: check_model would miss lost hooks"
    handle.remove()
    assert not pytorch.has_pre_hook(layer, hook)
    layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    assert not pytorch.has_pre_hook(layer, hook)


@pytest.mark.parametrize("before", ["forward", "state dict"])
def test_hooks_are_dropped_without_their_handle(before):
    calls = []

    def hook(*args):
        calls.append(args)

    layer = nn.Linear(1, 1)
    if before == "forward":
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        layer.register_state_dict_pre_hook(hook)
    assert pytorch.has_pre_hook(layer, hook, before)
    pytorch.drop_pre_hook(layer, hook, before)
    assert not pytorch.has_pre_hook(layer, hook, before)
    layer(torch.ones(1)), layer.state_dict()
    assert not calls


def test_a_compiled_model_leads_back_to_the_model():
    layer = nn.Linear(1, 1)
    compiled = torch.compile(layer)
    assert pytorch.is_compiled(compiled) and not pytorch.is_compiled(layer)
    assert pytorch.unwrap_compiled(compiled) is layer and pytorch.unwrap_compiled(layer) is layer


def test_a_device_refuses_what_does_not_hold():
    pytorch.assert_later(torch.tensor(True), "said")
    with pytest.raises(RuntimeError, match="said"):
        pytorch.assert_later(torch.tensor(False), "said")


def test_changes_of_a_tensor_are_counted():
    mask = torch.zeros(2)
    before = pytorch.changes_of(mask)
    mask[0] = 1
    assert pytorch.changes_of(mask) > before


def test_a_parameter_is_found_behind_a_property():
    class Rounds(nn.Linear):
        weight = property(lambda self: pytorch.parameter_of(self, "weight").bfloat16())

    layer = nn.Linear(1, 1)
    held, layer.__class__ = layer.weight, Rounds
    assert layer.weight.dtype == torch.bfloat16 and pytorch.parameter_of(layer, "weight") is held


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("meta"),
        lambda m: m.float(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
    ],
)
def test_modules_have_a_say_when_they_are_moved(move):
    class Counts(pytorch.MovableModule):
        moves = 0

        def on_move(self, move):
            self.moves += 1
            move()

    inner = Counts()
    inner.weight = nn.Buffer(torch.zeros(1))
    outer = nn.Sequential(nn.Sequential(inner))
    move(outer)
    assert inner.moves == 1, "torch casts modules by another way than `_apply`: positions would be cast to bf16"


def test_modules_have_a_say_in_their_state():
    class Doubles(pytorch.SavableModule, nn.Embedding):
        def after_saving(self, state, prefix):
            state[prefix + "weight"] = 2 * state[prefix + "weight"]

        def before_loading(self, state, prefix):
            state[prefix + "weight"] = state[prefix + "weight"] / 2

    one, other = nn.Sequential(Doubles(2, 3)), nn.Sequential(Doubles(2, 3))
    state = one.state_dict()
    assert torch.equal(state["0.weight"], 2 * one[0].weight)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, one[0].weight)
