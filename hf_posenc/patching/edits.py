"""Changes to a live model that can be taken back, all or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import ismethod
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

MISSING = "hf_posenc: no such attribute"


@dataclass
class Swap:
    """An attribute and the value that it has not got at the moment. Exchanging twice changes nothing."""

    target: Any
    name: str
    value: Any
    beside: nn.Module | None = None
    """A module that is moved and cast as the value would be, where nothing takes its place meanwhile."""
    _placed: Any = None
    _plain: bool = False
    """Whether the value is held as Python does, not as a parameter or a module."""

    def exchange(self) -> None:
        current = _current(self.target, self.name)
        incoming, guide = self.value, self.beside or current
        if _holds_numbers(guide) and (_holds_numbers(incoming) or self.beside is not None):
            now = _placement(guide)
            moved = now is not None and self._placed is not None and now != self._placed
            if now is not None and moved and _holds_numbers(incoming):  # the model was moved or cast in the meantime
                incoming = _moved(incoming, *now)
            self._placed = now if self.beside is not None else _placement(incoming)
        plain = isinstance(self.target, nn.Module) and self.name in vars(self.target)
        if _same(incoming, MISSING) or (incoming is None and self._plain):
            delattr(self.target, self.name)
        if not _same(incoming, MISSING):
            setattr(self.target, self.name, incoming)
        self.value, self._plain = current, plain


@dataclass
class Entry:
    """A key of a config that its class does not know, or does not write; it is written with the others."""

    config: Any
    name: str
    value: Any

    def exchange(self) -> None:
        held = vars(self.config)
        current = held.pop(self.name, MISSING)
        if not _same(self.value, MISSING):
            held[self.name] = self.value
        self.value = current


@dataclass
class Hook:
    """A hook that is there or not: before a module's forward, or before its state dict is made."""

    module: nn.Module
    function: Callable[..., Any]
    before: str = "forward"
    handle: Any = None

    def exchange(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        elif self.before == "forward":
            self.handle = self.module.register_forward_pre_hook(self.function, with_kwargs=True)
        else:
            self.handle = self.module.register_state_dict_pre_hook(self.function)


Edit = Swap | Entry | Hook


@dataclass
class Journal:
    """The edits of one patch, in order."""

    edits: Sequence[Edit] = field(default_factory=list)
    final: str | None = None
    """Why this patch cannot be undone, where the original is not at hand."""

    def apply(self) -> None:
        _exchange_all(self.edits)

    def undo(self) -> None:
        _exchange_all(list(reversed(self.edits)))


def _exchange_all(edits: Sequence[Edit]) -> None:
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.exchange()
            done.append(edit)
    except BaseException:
        for edit in reversed(done):
            edit.exchange()
        raise


def _same(value: Any, other: str) -> bool:
    # By equality, since a model that went through pickle has a copy of the marker.
    return isinstance(value, str) and value == other


def _current(target: Any, name: str) -> Any:
    """What a target has of its own: a method of its class comes back by itself when what hides it is gone."""
    value = getattr(target, name, MISSING)
    return MISSING if ismethod(value) and name not in vars(target) else value


def _holds_numbers(value: Any) -> bool:
    return isinstance(value, (nn.Module, Tensor))


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A module, parameter or buffer on another device and in another dtype; the first two stay the same object."""
    if isinstance(value, nn.Parameter):
        value.data = value.data.to(device, dtype)
        return value
    return value.to(device=device, dtype=dtype)


def _placement(value: Any) -> tuple[torch.device, torch.dtype] | None:
    if isinstance(value, Tensor):
        return value.device, value.dtype
    # Buffers first: frequencies that are parameters do not follow the dtype of the model.
    tensors = chain(value.buffers(), value.parameters())
    return next(((t.device, t.dtype) for t in tensors if t.is_floating_point()), None)
