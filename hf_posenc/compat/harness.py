"""lm-eval: its command line, its tasks, and the model class that ours is made of. Importing this imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM


class CountedLM(HFLM):
    """HFLM that says how many tokens it is about to read, before it cuts off what is too long."""

    def about_to_read(self, needed: Iterable[int]) -> None:
        """Gets the tokens that each request needs, answer and all."""

    def set_max_length(self, length: int) -> None:
        """How many tokens it takes; without, what the config promises."""
        self._max_length = length

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self.about_to_read(len(context) + len(answer) - 1 for _, context, answer in requests)
        scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **kwargs)
        return scores


def command_line() -> Any:
    """lm-eval's own command, with `parse_args()` and `execute(arguments)`."""
    from lm_eval._cli import HarnessCLI

    return HarnessCLI()


def import_functions(task_file: Any) -> None:
    """Import what a task's YAML file calls: code beside it, which may draw random numbers as it is imported."""
    from lm_eval.tasks._yaml_loader import load_yaml

    load_yaml(task_file)


@contextmanager
def results_through(change: Callable[[Any], Any]) -> Iterator[None]:
    """While this lasts, what lm-eval's command line prints and writes goes through `change`."""
    evaluate = lm_eval.simple_evaluate
    lm_eval.simple_evaluate = lambda *args, **kwargs: change(evaluate(*args, **kwargs))
    try:
        yield
    finally:
        lm_eval.simple_evaluate = evaluate
