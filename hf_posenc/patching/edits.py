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
    """Something about a model that has two states. By default these are there or not there, and hold no tensors."""

    def goal(self) -> Any:
        """The state that the edit is to bring about."""
        return True

    def look(self) -> Any:
        """The state now."""
        raise NotImplementedError

    def put(self, state: Any, /) -> None:
        """Bring about a state, whatever the state is now. It can be done again, even after an interruption."""
        raise NotImplementedError

    def placement(self, live: Any, /) -> Placement | None:
        """The device and dtype of the tensors in a live state; None if there are none."""
        return None

    def follow_move(self, parked: Any, before: Any, now: Any, /) -> Any:
        """A parked state as it would be if it had been moved and cast along with the live one."""
        return parked


class Held(NamedTuple):
    """What an attribute holds, or held."""

    value: Any
    plain: bool = False
    """Whether a module holds it as a plain attribute, not as a parameter, a buffer or a submodule."""


@dataclass
class Swap(Edit):
    """Puts a value into an attribute."""

    target: Any
    name: str
    value: Any
    beside: nn.Module | None = None
    """A module that is moved and cast as the parked value should be, where the value that replaces it is not."""

    def goal(self) -> Held:
        return Held(self.value)

    def look(self) -> Held:
        """What is there now. A method of the class counts as missing: it comes back when the attribute is deleted."""
        value = getattr(self.target, self.name, MISSING)
        own = vars(self.target) if isinstance(self.target, nn.Module) or ismethod(value) else {}
        if ismethod(value) and self.name not in own:
            value = MISSING
        return Held(value, self.name in own)

    def put(self, held: Held) -> None:
        """Let the attribute hold this, whatever it holds now.

        A module that has registered a name (for a parameter or a submodule) keeps it registered when that is set to
        None. So where the attribute was plain None before, or missing, it is deleted first.
        """
        gone = _is_missing(held.value)
        if (gone or (held.value is None and held.plain)) and not _is_missing(self.look().value):
            delattr(self.target, self.name)
        if not gone:
            setattr(self.target, self.name, held.value)

    def placement(self, live: Held) -> Placement | None:
        """The device and dtype of the value, or of the module `beside` it."""
        guide = self.beside or live.value
        return _placement(guide) if _holds_numbers(guide) else None

    def follow_move(self, held: Held, before: Placement | None, now: Placement | None) -> Held:
        """A parked value as it would be if it had been on the model when that was moved or cast."""
        if now is None or before is None or now == before or not _holds_numbers(held.value):
            return held
        return held._replace(value=_move(held.value, *now))


@dataclass
class Entry(Edit):
    """Puts a key into a config that its class does not know; the config writes it with its other keys."""

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
    """A module that holds a config, and the copy that is to replace the config."""

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
    """Which of a model's two states is live, and what belongs to the other one, edit by edit."""

    applied: bool
    parked: Sequence[Any]
    placements: Sequence[Placement | None]
    """The device and dtype of the live values when they were put there. If these change, the parked values follow."""


@dataclass
class Journal:
    """The edits of one patch, in order, with the values that are not on the model now.

    For example, a model's `wpe` is exchanged for a table of sines, and its config is told a length:

    >>> journal = Journal([Swap(model, "wpe", sines), Swap(model.config, "n_positions", 4096)])
    >>> journal.apply()  # now model.wpe is sines, the config says 4096; parked are the model's own table, and 1024
    >>> model.to("cuda")  # moves sines; the parked table does not know of it
    >>> journal.undo()  # parked are sines, and 4096; the own table is back, on the GPU as sines were
    >>> journal.apply()  # and the other way round

    First all edits look at what is there, and change nothing. Then each one puts its value, which does no harm when it
    is done twice. At the end one assignment notes for all edits what was there. So an exception at any moment (Ctrl-C,
    for example) finds either the old note, and everything is put back as that says; or the new one, and all is done.
    """

    edits: Sequence[Edit] = field(default_factory=list)
    final: str | None = None
    """Why this patch cannot be undone; None where it can."""
    state: State | None = None
    """None until the journal is applied for the first time."""

    @property
    def applied(self) -> bool:
        return self.state is not None and self.state.applied

    def apply(self) -> None:
        if not self.applied:
            self._exchange(True)
            for edit in self.edits:  # these values are on the model now, and must not be kept alive here
                if isinstance(edit, Swap):
                    edit.value = None

    def undo(self) -> None:
        if self.applied:
            self._exchange(False)

    def forget(self) -> None:
        """Release all parked values after the last undo. A reference cycle would keep them alive for a while."""
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
        """The values that the edits are to put, moved and cast to where the live values are."""
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
    # Compared by equality, since pickle makes a copy of the marker.
    return isinstance(value, str) and value == MISSING


def _holds_numbers(value: Any) -> bool:
    return isinstance(value, (nn.Module, Tensor))


def _move(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A module, parameter or buffer, moved and cast. Modules and parameters stay the same objects."""
    if isinstance(value, nn.Parameter):
        value.data = value.data.to(device, dtype)
        return value
    return value.to(device=device, dtype=dtype)


def _placement(value: Any) -> Placement | None:
    if isinstance(value, Tensor):
        return value.device, value.dtype
    # Buffers come first: frequencies that are parameters do not follow the dtype of the model.
    tensors = chain(value.buffers(), value.parameters())
    return next(((t.device, t.dtype) for t in tensors if t.is_floating_point()), None)
