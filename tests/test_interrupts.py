"""An exception at any moment of a patch, Ctrl-C say, leaves a model that is patched or not: nothing between."""

import linecache
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cells import options, tiny
from image_cells import pixels, states, tiny_images
from refusals import Snapshot
from refusals import logits as logits_of
from transformers import AutoModelForCausalLM, CohereConfig

import hf_posenc
from hf_posenc import check_model, is_patched, patch_model, unpatch_model

PACKAGE = str(Path(hf_posenc.__file__).parent)
EDITS = (f"{PACKAGE}/patching/edits.py", f"{PACKAGE}/patching/patch.py", f"{PACKAGE}/patching/layout.py")
"""Where a model is changed."""


def cohere():
    """Which pairs its channels otherwise than others do, and so is watched before it is patched."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = CohereConfig(**sizes, max_position_embeddings=32, initializer_range=0.3, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).eval()


MODELS = {"cohere": cohere, **{kind: partial(tiny, kind) for kind in ("llama", "gpt2")}}
MODELS |= {family: partial(tiny_images, family) for family in ("vit",)}
CASES = [
    ("llama", "yarn"),
    ("llama", "alibi"),
    ("gpt2", "t5"),
    ("cohere", "dynamic_ntk"),
    ("vit", "axial_rope"),
]


def options_for(kind, scheme):
    return {} if kind == "vit" else options(scheme)


class Stopped(BaseException):
    pass


class Interrupts:
    """Raises before the n-th line that is run in the package.

    Lines that begin a `with` are left out. They run once more when it ends, and Python does not leave a context,
    such as that of `torch.no_grad()`, if it is interrupted at that moment.
    """

    def __init__(self, at=-1):
        self.at, self.lines = at, []

    def trace(self, frame, event, argument):
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) and not file.endswith("torch/nn/modules/module.py"):
            return None
        if event == "line" and not linecache.getline(file, frame.f_lineno).lstrip().startswith("with "):
            self.lines.append(file)
            if len(self.lines) == self.at:
                raise Stopped
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind, value, traceback):
        sys.settrace(None)
        return kind is Stopped


def moments(run):
    """Some of all lines, and more where a model is changed: the same lines run for edit after edit."""
    with Interrupts() as seen:
        run()
    changing = [n for n, file in enumerate(seen.lines, 1) if file in EDITS]
    lines = len(seen.lines)
    return sorted({*changing[:: len(changing) // 10 + 1], *changing[-5:], *range(1, lines, lines // 6 + 1)})


def output(model):
    return states(model, pixels()) if hasattr(model.config, "image_size") else logits_of(model)


def snapshot(model):
    return Snapshot.of(model, forward=False)


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_patching_and_unpatching(kind, scheme):
    model = MODELS[kind]()
    fresh, plain = snapshot(model), output(model)
    patch_model(model, scheme, **options_for(kind, scheme))
    patched = output(model)
    unpatch_model(model)
    seen = {"patched": 0, "not": 0}
    for n in moments(lambda: patch_model(model, scheme, **options_for(kind, scheme))):
        if is_patched(model):
            unpatch_model(model)
        with Interrupts(n):
            patch_model(model, scheme, **options_for(kind, scheme))
        seen["patched" if is_patched(model) else "not"] += 1
        if is_patched(model):
            check_model(model)
            assert torch.equal(output(model), patched), n
            unpatch_model(model)
        fresh.assert_same(snapshot(model))
    assert seen["not"] > 5 and seen["patched"] > 0, seen
    patch_model(model, scheme, **options_for(kind, scheme))
    for n in moments(lambda: unpatch_model(model)):
        if not is_patched(model):
            patch_model(model, scheme, **options_for(kind, scheme))
        before = snapshot(model)
        with Interrupts(n):
            unpatch_model(model)
        if is_patched(model):
            before.assert_same(snapshot(model))
            assert torch.equal(output(model), patched), n
        else:
            fresh.assert_same(snapshot(model))
    assert torch.equal(output(unpatch_model(model) if is_patched(model) else model), plain)


@pytest.mark.parametrize(("kind", "first", "second"), [("gpt2", "learned", "rope")])
def test_patching_anew(kind, first, second):
    model = MODELS[kind]()
    fresh, outputs = snapshot(model), {}
    for scheme in (second, first):
        outputs[scheme] = output(patch_model(model, scheme, **options(scheme)))
    seen = {first: 0, second: 0}
    for n in moments(lambda: patch_model(model, second, **options(second))):
        patch_model(model, first, **options(first))
        with Interrupts(n):
            patch_model(model, second, **options(second))
        check_model(model)
        scheme = model.config.posenc["scheme"]
        seen[scheme] += 1
        assert torch.equal(output(model), outputs[scheme]), n
        unpatch_model(model)
        fresh.assert_same(snapshot(model))
    assert all(seen.values()), seen
