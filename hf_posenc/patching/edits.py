"""Changes to a live model that can be taken back, all or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import ismethod
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..compat.pytorch import drop_pre_hook, has_pre_hook

MISSING = "hf_posenc: no such attribute"
Placement = tuple[torch.device, torch.dtype]


class Edit:
    """Something about a model that has two states. As it stands: one that is there or not, and holds no tensors."""

    def goal(self) -> Any:
        """The state that the edit is there for."""
        return True

    def look(self) -> Any:
        """The state that it is in now."""
        raise NotImplementedError

    def put(self, state: Any, /) -> None:
        """Let it be in a state, whatever it is in now; to do it again, also after half of it, changes nothing."""
        raise NotImplementedError

    def placement(self, live: Any, /) -> Placement | None:
        """Where the tensors of a state that is live are, and their dtype, if it has some."""
        return None

    def follow_move(self, parked: Any, before: Any, now: Any, /) -> Any:
        """A state that was put away, as it would be now if it had stayed when the live one was moved or cast."""
        return parked


class Held(NamedTuple):
    """What an attribute holds, or once held."""

    value: Any
    plain: bool = False
    """Whether a module holds it as Python does, not as a parameter, a buffer or a module."""


@dataclass
class Swap(Edit):
    """An attribute, and a value to put there."""

    target: Any
    name: str
    value: Any
    beside: nn.Module | None = None
    """A module that is moved and cast as the value would be, where what takes its place meanwhile is not."""

    def goal(self) -> Held:
        return Held(self.value)

    def look(self) -> Held:
        """What is there now; a method of a class is not the target's own, and comes back when what hides it goes."""
        value = getattr(self.target, self.name, MISSING)
        own = vars(self.target) if isinstance(self.target, nn.Module) or ismethod(value) else {}
        if ismethod(value) and self.name not in own:
            value = MISSING
        return Held(value, self.name in own)

    def put(self, held: Held) -> None:
        """Let the attribute hold this, whatever it holds now: to do it twice, or again after half of it, is the same.

        A module that registers a name (a parameter, a submodule) goes on doing so with None; so one that was plain
        None before, or not there, must be taken out first.
        """
        gone = _is_missing(held.value)
        if (gone or (held.value is None and held.plain)) and not _is_missing(self.look().value):
            delattr(self.target, self.name)
        if not gone:
            setattr(self.target, self.name, held.value)

    def placement(self, live: Held) -> Placement | None:
        """Where the tensors of the value that is there are, and their dtype; of the module beside it, if there is."""
        guide = self.beside or live.value
        return _placement(guide) if _holds_numbers(guide) else None

    def follow_move(self, held: Held, before: Placement | None, now: Placement | None) -> Held:
        """A value that was taken out, as it would be now if it had stayed there when the model was moved or cast."""
        if now is None or before is None or now == before or not _holds_numbers(held.value):
            return held
        return held._replace(value=_move(held.value, *now))


@dataclass
class Entry(Edit):
    """A key of a config that its class does not know, or does not write; it is written with the others."""

    config: Any
    name: str
    value: Any

    def goal(self) -> Any:
        return self.value

    def look(self) -> Any:
        return vars(self.config).get(self.name, MISSING)

    def put(self, value: Any) -> None:
        if _is_missing(value):
            vars(self.config).pop(self.name, None)
        else:
            vars(self.config)[self.name] = value


@dataclass
class Hooks(Edit):
    """A function that runs before the forward of some modules, or before their state dicts are made."""

    modules: Sequence[nn.Module]
    function: Callable[..., Any]
    before: str = "forward"

    def goal(self) -> list[bool]:
        return [True] * len(self.modules)

    def look(self) -> list[bool]:
        return [has_pre_hook(module, self.function, self.before) for module in self.modules]

    def put(self, states: list[bool]) -> None:
        for module, there in zip(self.modules, states, strict=True):
            if not there:
                drop_pre_hook(module, self.function, self.before)
            elif has_pre_hook(module, self.function, self.before):
                continue
            elif self.before == "forward":
                module.register_forward_pre_hook(self.function, with_kwargs=True)
            else:
                module.register_state_dict_pre_hook(self.function)


class Reference(NamedTuple):
    """A module that holds a config."""

    module: nn.Module
    name: str
    shared: PreTrainedConfig
    own: PreTrainedConfig


@dataclass
class OwnConfigs(Edit):
    """Exchanges the configs that a model's modules hold for copies. It comes before all edits that write to a config.

    A copy that somebody has changed after the patch (the vocabulary has grown, for example) stays on the model when
    the edit is undone.
    """

    references: list[Reference]

    def look(self) -> bool:
        return all([vars(r.module).get(r.name) is r.own for r in self.references])

    def put(self, own: bool) -> None:
        if own or all([_is_same_config(r.own, r.shared) for r in self.references]):
            for module, name, shared, copied in self.references:
                setattr(module, name, copied if own else shared)


class State(NamedTuple):
    """Which of the two states of a model is live, and what belongs to the other one, edit by edit."""

    applied: bool
    parked: Sequence[Any]
    placements: Sequence[Placement | None]
    """Where the live values were when they were put there: if they are elsewhere now, the parked ones follow."""


@dataclass
class Journal:
    """The edits of one patch, in order, and what they put out of the model or will put into it.

    For example, a model's `wpe` is exchanged for a table of sines, and its config is told a length:

    >>> journal = Journal([Swap(model, "wpe", sines), Swap(model.config, "n_positions", 4096)])
    >>> journal.apply()  # now model.wpe is sines, the config says 4096; parked are the model's own table, and 1024
    >>> model.to("cuda")  # moves sines; the parked table does not know of it
    >>> journal.undo()  # parked are sines, and 4096; the own table is back, on the GPU as sines were
    >>> journal.apply()  # and the other way round

    First all edits look at what is there and change nothing. Then each puts its value, which can be done twice; and
    what was there is noted as parked, for all edits in one step. So an exception that comes at any moment (Ctrl-C,
    say) finds the notes as they were, and everything is put back that they call live; or finds it done.
    """

    edits: Sequence[Edit] = field(default_factory=list)
    final: str | None = None
    """Why this patch cannot be undone, where the original is not at hand."""
    state: State | None = None
    """None before the first time that it is applied."""

    @property
    def applied(self) -> bool:
        return self.state is not None and self.state.applied

    def apply(self) -> None:
        if not self.applied:
            self._exchange(True)
            for edit in self.edits:  # what was planned is live now, and may be replaced by others: not to be kept here
                if isinstance(edit, Swap):
                    edit.value = None

    def undo(self) -> None:
        if self.applied:
            self._exchange(False)

    def forget(self) -> None:
        """Let go of all that was put away, once it is undone for good: a cycle would keep it for a while."""
        self.edits, self.state = [], None

    def _exchange(self, applied: bool) -> None:
        live = [edit.look() for edit in self.edits]
        coming = self._values_to_put(live)
        placements = [edit.placement(held) for edit, held in zip(self.edits, coming, strict=True)]
        done = State(applied, live, placements)
        order: list[tuple[Any, Any, Any]] = list(zip(self.edits, coming, live, strict=True))
        try:
            for edit, new, _ in order if applied else reversed(order):
                edit.put(new)
            self.state = done
        except BaseException:
            for edit, _, old in [] if self.state is done else reversed(order) if applied else order:
                edit.put(old)
            raise

    def _values_to_put(self, live: Sequence[Any]) -> list[Any]:
        """What the edits are to put, moved and cast to where the live values are."""
        if self.state is None:
            return [edit.goal() for edit in self.edits]
        parts = zip(self.edits, self.state.parked, self.state.placements, live, strict=True)
        return [edit.follow_move(parked, before, edit.placement(now)) for edit, parked, before, now in parts]


def _is_same_config(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(vars(one) == vars(other))
    except Exception:  # a config may hold values that cannot be compared
        return False


def _is_missing(value: Any) -> bool:
    # By equality, since a model that went through pickle has a copy of the marker.
    return isinstance(value, str) and value == MISSING


def _holds_numbers(value: Any) -> bool:
    return isinstance(value, (nn.Module, Tensor))


def _move(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A module, parameter or buffer on another device and in another dtype; the first two stay the same object."""
    if isinstance(value, nn.Parameter):
        value.data = value.data.to(device, dtype)
        return value
    return value.to(device=device, dtype=dtype)


def _placement(value: Any) -> Placement | None:
    if isinstance(value, Tensor):
        return value.device, value.dtype
    # Buffers first: frequencies that are parameters do not follow the dtype of the model.
    tensors = chain(value.buffers(), value.parameters())
    return next(((t.device, t.dtype) for t in tensors if t.is_floating_point()), None)
