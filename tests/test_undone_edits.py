"""A fault in the middle of a patch leaves the model as it was, to the last bit."""

from typing import Any

import pytest
import torch
from cells import options, tiny
from refusals import Snapshot, logits

from hf_posenc import (
    check_model,
    patch_model,
    unpatch_model,
)
from hf_posenc.patching.edits import Hooks, Swap


class Fault(Exception):
    """Not of this package: the disk is full, the user pressed Ctrl-C, a hook of somebody else raised."""


class Faults:
    """Lets edits through, but for the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen, self.at = 0, -1
        for kind in (Swap, Hooks):
            monkeypatch.setattr(kind, "put", self.counted(kind.put))

    def counted(self, put: Any) -> Any:
        def counting(edit: Any, held: Any) -> None:
            self.seen += 1
            if self.seen == self.at:
                raise Fault
            put(edit, held)

        return counting

    def set(self, at: int) -> None:
        self.seen, self.at = 0, at


SITES = {
    "llama": ["yarn", "sinusoidal", "alibi", "dynamic_ntk"],
    "gpt2": ["learned", "rope", "t5"],
    "bert": ["sinusoidal", "yarn", "alibi"],
}
CASES = [(kind, scheme) for kind, schemes in SITES.items() for scheme in schemes]


@pytest.mark.parametrize("kind, scheme", CASES)
def test_a_fault_at_any_edit_leaves_a_fresh_model_as_it_was(kind, scheme, monkeypatch):
    model, faults = tiny(kind), Faults(monkeypatch)
    before = Snapshot.of(model)
    patch_model(model, scheme, **options(scheme))
    edits = faults.seen
    assert edits >= 4
    unpatch_model(model)
    for n in range(1, edits + 1):
        faults.set(n)
        with pytest.raises(Fault):
            patch_model(model, scheme, **options(scheme))
        assert faults.seen > n or n == 1, "nothing was taken back"
        before.assert_same(Snapshot.of(model))


@pytest.mark.parametrize("kind, scheme", CASES)
def test_a_fault_at_any_edit_leaves_a_patched_model_patched_as_it_was(kind, scheme, monkeypatch):
    """Here the faults also fall into the undoing of the earlier patch."""
    model, faults = tiny(kind), Faults(monkeypatch)
    plain = logits(model)
    earlier = "alibi" if scheme != "alibi" else "sinusoidal"
    patch_model(model, earlier)
    before = Snapshot.of(model)
    faults.set(-1)
    patch_model(model, scheme, **options(scheme))
    edits = faults.seen
    patch_model(model, earlier)
    before = Snapshot.of(model)
    for n in range(1, edits + 1):
        faults.set(n)
        with pytest.raises(Fault):
            patch_model(model, scheme, **options(scheme))
        before.assert_same(Snapshot.of(model))
        check_model(model)
    faults.set(-1)
    assert torch.equal(logits(unpatch_model(model)), plain)


@pytest.mark.parametrize("kind", SITES)
def test_a_fault_while_unpatching_leaves_the_model_patched(kind, monkeypatch):
    model, faults = tiny(kind), Faults(monkeypatch)
    patch_model(model, "alibi")
    before, edits = Snapshot.of(model), faults.seen
    for n in range(1, edits + 1):
        faults.set(n)
        with pytest.raises(Fault):
            unpatch_model(model)
        before.assert_same(Snapshot.of(model))
