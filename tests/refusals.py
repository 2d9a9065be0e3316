"""Calls that must raise a PosencError that helps, and leave the model as it was, to the last bit."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cells import LENGTH, tiny, tokens
from torch import nn

from hf_posenc import (
    PosencError,
    check_model,
    is_patched,
    patch_model,
    unpatch_model,
)

FAR = {"target_length": 4 * LENGTH}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@dataclass
class Snapshot:
    """All of a model that a failed patch could have touched."""

    weights: dict[str, torch.Tensor]
    config: dict[str, Any]
    attributes: dict[str, Any]
    hooks: dict[str, list[Any]]
    logits: torch.Tensor | None

    @classmethod
    def of(cls, model: nn.Module, forward: bool = True) -> "Snapshot":
        return cls(
            weights={name: t.clone() for name, t in model.state_dict().items()},
            config=copy.deepcopy({**vars(model.config), "to_dict()": model.config.to_dict()}),
            attributes={f"{path}.{k}": v for path, m in model.named_modules() for k, v in own_attributes(m).items()},
            hooks={f"{path}.{name}": hooks(m, name) for path, m in model.named_modules() for name in HOOKS},
            logits=logits(model) if forward else None,
        )

    def assert_same(self, other: "Snapshot") -> None:
        assert list(other.weights) == list(self.weights)
        for name, weight in self.weights.items():
            assert torch.equal(other.weights[name], weight), name
        assert other.config == self.config
        assert other.attributes.keys() == self.attributes.keys()
        for name, value in self.attributes.items():
            assert other.attributes[name] is value, name
        assert other.hooks == self.hooks
        if self.logits is not None:
            assert torch.equal(other.logits, self.logits)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Everything that hangs on one module: plain attributes, parameters, buffers and children, but for hooks."""
    plain = {k: v for k, v in vars(module).items() if k not in (*HOOKS, *HOOK_OPTIONS)}
    return {**plain, **module._parameters, **module._buffers, **module._modules}


def hooks(module: nn.Module, name: str) -> list[Any]:
    """The hooks of one kind, in order, each with whether it takes keywords; their ids are counters and differ."""
    with_kwargs = getattr(module, f"{name}_with_kwargs", {})
    return [(hook, key in with_kwargs) for key, hook in getattr(module, name).items()]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(tokens(2, 12)).logits


def assert_refused(model: Any, scheme: Any, *words: str, forward: bool = True, **given: Any) -> str:
    """Assert that the call raises with all of these words, changing nothing; also on a model patched before."""
    before = Snapshot.of(model, forward)
    with pytest.raises(PosencError) as caught:
        patch_model(model, scheme, **given)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert [w for w in words if w.lower() not in message.lower()] == [], message
    assert message.endswith(".") or message.endswith("?"), message
    before.assert_same(Snapshot.of(model, forward))
    return message


def assert_refused_also_when_patched(kind: str, scheme: Any, *words: str, **given: Any) -> None:
    """On a fresh model, and on models patched by config or weights, and by hooks and attention functions."""
    assert_refused(tiny(kind), scheme, *words, **given)
    for earlier in ("rope", "alibi", "sinusoidal"):
        model = patch_model(tiny(kind), earlier)
        plain = logits(tiny(kind))
        assert_refused(model, scheme, *words, **given)
        assert is_patched(model)
        assert model.config.posenc["scheme"] == earlier
        check_model(model)
        assert torch.equal(logits(unpatch_model(model)), plain)
