"""Work that is shared out among the processes of a launch; a single process does all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import PosencError
from ..extras import require

T = TypeVar("T")
R = TypeVar("R")


class Shared:
    """The processes that `accelerate launch` or `torchrun` started, each with all of the model."""

    def __init__(self) -> None:
        self.state: Any = None
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1:
            on_cpu = not torch.accelerator.is_available()  # else accelerate takes each process for the only one
            self.state = require("accelerate", "adapters", "Several processes").PartialState(cpu=on_cpu)
            if self.state.num_processes != started:
                raise PosencError(
                    f"{started} processes were started, and accelerate knows of {self.state.num_processes}: each "
                    "would do all of the work. Start them by `accelerate launch` or `torchrun`."
                )

    @property
    def first(self) -> bool:
        return self.state is None or self.state.process_index == 0

    def from_first(self, value: T) -> T:
        """What the first process has, in all of them."""
        if self.state is None:
            return value
        from accelerate.utils import broadcast_object_list

        found: list[T] = broadcast_object_list([value])
        return found[0]

    def each(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        """The result of every item, in order, in every process."""
        if self.state is None:
            return [work(item) for item in items]
        from accelerate.utils import gather_object

        count, own = self.state.num_processes, self.state.process_index
        done: list[tuple[int, R]] = gather_object([(i, work(items[i])) for i in range(own, len(items), count)])
        return [result for _, result in sorted(done, key=lambda pair: pair[0])]
