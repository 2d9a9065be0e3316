"""lm-eval: its command line, its tasks, and the base class of our model class. Importing this imports lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM


class CountedLM(HFLM):
    """An HFLM that reports how many tokens each request needs, before it truncates those that are too long."""

    def about_to_read(self, needed: Iterable[int]) -> None:
        """Called with the number of tokens of each request, including its answer."""

    def set_max_length(self, length: int) -> None:
        """Set the longest input. Without this call it is what the config says."""
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
    """Import the Python code that a task's YAML file uses, which may draw random numbers on import."""
    from lm_eval.tasks._yaml_loader import load_yaml

    load_yaml(task_file)


@contextmanager
def results_through(change: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context, `change` is applied to the results that lm-eval's command line prints and writes."""
    evaluate = lm_eval.simple_evaluate
    lm_eval.simple_evaluate = lambda *args, **kwargs: change(evaluate(*args, **kwargs))
    try:
        yield
    finally:
        lm_eval.simple_evaluate = evaluate
