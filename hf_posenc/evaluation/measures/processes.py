"""Work split between the processes of a launch; without a launch, one process does all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...errors import PosencError
from ...extras import require

T = TypeVar("T")
R = TypeVar("R")


class Processes:
    """Processes that each hold the whole model; one process unless accelerate's state is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    @property
    def first(self) -> bool:
        return self.state is None or self.state.process_index == 0

    @property
    def count(self) -> int:
        return 1 if self.state is None else int(self.state.num_processes)

    def from_first(self, value: T) -> T:
        """The value of the first process, in every process."""
        if self.state is None:
            return value
        from accelerate.utils import broadcast_object_list

        found: list[T] = broadcast_object_list([value])
        return found[0]

    def by_first(self, work: Callable[[], T]) -> T:
        """The result of the first process, in every process. Its error is raised in all, which would else wait."""
        done = attempt(work) if self.first else None
        made, error = self.from_first(done)  # type: ignore[misc]
        return unwrap(made, error)

    def each(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        """The result of every item, in order, in every process. An error of one process is raised in all."""
        if self.state is None:
            return [work(item) for item in items]
        from accelerate.utils import gather_object

        count, own = self.state.num_processes, self.state.process_index
        mine = [(i, attempt(lambda i=i: work(items[i]))) for i in range(own, len(items), count)]  # type: ignore[misc]
        done = sorted(gather_object(mine), key=lambda pair: pair[0])
        return [unwrap(made, error) for _, (made, error) in done]


ALONE = Processes()


def launched_processes() -> Processes:
    """The processes that `accelerate launch` or `torchrun` started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        return ALONE
    on_cpu = not torch.accelerator.is_available()  # otherwise accelerate would take each process for the only one
    state = require("accelerate", "adapters", "Several processes").PartialState(cpu=on_cpu)
    if state.num_processes != started:
        raise PosencError(
            f"{started} processes were started, but accelerate knows of {state.num_processes}, so each would do all "
            "of the work. Start them with `accelerate launch` or `torchrun`."
        )
    return Processes(state)


def attempt(work: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return work(), None
    except PosencError as error:
        return None, error


def unwrap(made: R | None, error: Exception | None) -> R:
    if error is not None:
        raise error
    return made  # type: ignore[return-value]
