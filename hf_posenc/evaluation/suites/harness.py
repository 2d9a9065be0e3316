"""RULER, LongBench and BABILong through lm-evaluation-harness, on a live model."""

from __future__ import annotations

import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import PosencError, suggestion
from ...extras import install_command, require
from ...patching.lengths import refuse_beyond_reach
from ...patching.patch_state import unwrap_model
from ..measures.processes import ALONE, Processes
from ..measures.retrieval import accuracy
from ..measures.rows import Row
from ..measures.texts import refuse_missing
from ..runs.jobs import scheme_of
from ..runs.results import Results

if TYPE_CHECKING:
    from .harness_model import PatchedLM

OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Tasks of RULER that are generated; the others download essays or questions."""
ALIASES = {"ruler_offline": OFFLINE, "babilong": ("babilong_longctx",)}
"""Our own names. BABILong's questions 6 to 20 exist only without a long context."""
SUITES = ("ruler", "longbench", "babilong")
SHORTEST = {
    "ruler_vt": (1024, "never ends if its worked example and ten sentences do not fit"),
    "ruler_cwe": (2048, "repeats no word often enough, or asks for none at all"),
    "ruler_fwe": (512, "has too few words to rank"),
}
"""The shortest length at which a task of RULER is meaningful, and what it does below."""
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
"""The sentence that `ruler_vt` hides its variables among."""
BABILONG = tuple(1024 * k for k in (1, 2, 4, 8, 16, 32, 64, 128))
SEED = 0


def evaluate_harness(
    model: Any,
    tokenizer: Any,
    group: str,
    lengths: Sequence[int],
    *,
    samples: int = 50,
    batch_size: int = 1,
    results: Results | None = None,
    shared: Processes = ALONE,
) -> list[Row]:
    """A row for each task of `group` (a suite, a group of its tasks, or task names with commas) at each length.

    Every task and length draws its documents from the same seed, so all models and schemes get the same ones. No
    prompt is truncated: `details["tokens"]` has their lengths. LongBench's documents have lengths of their own and
    count for the smallest of `lengths` that holds them; longer ones are counted as `too_long`. Jobs in `results` are
    not run again, and new ones are added. Several processes share the documents of a task.
    """
    kept, sizes = results or Results(None, {}), {"samples": samples, "batch_size": batch_size}
    return list(harness_rows(model, tokenizer, group, lengths, **sizes, results=kept, shared=shared))


def harness_rows(
    model: Any,
    tokenizer: Any,
    group: str,
    lengths: Sequence[int],
    *,
    samples: int,
    batch_size: int,
    results: Results,
    shared: Processes = ALONE,
) -> Iterator[Row]:
    """The rows of `evaluate_harness`, one by one."""
    refuse_divided_batches(batch_size, shared)
    tasks, wanted = plan_harness(model, tokenizer, group, lengths, samples)
    lm = wrap_model(model, tokenizer, batch_size)
    scheme = scheme_of(model)
    with tokenizer_folder(tokenizer) as folder:
        for name in tasks:
            if name not in OFFLINE:
                load_task(name, wanted[0], folder)  # fail now, not after hours, if data is missing
        for name in tasks:
            for low, length in zip([0, *wanted], wanted, strict=False):
                key = f"{scheme}/harness/{name}/{low}-{length}/{samples}"
                if key not in results.done:
                    row = run_task(lm, name, (low, length), folder, samples, shared)
                    results.add(key, [] if row is None else [Row(**{**row, "scheme": scheme})])
                yield from results.done[key]


def plan_harness(
    model: Any, tokenizer: Any, group: str, lengths: Sequence[int], samples: int
) -> tuple[list[str], list[int]]:
    """The tasks and lengths in order; raises for all mistakes that can be found before anything runs."""
    wanted = sorted(set(lengths))
    if not wanted or samples < 1:
        raise PosencError(f"A harness needs lengths and at least one sample; got {list(lengths)} and {samples}.")
    refuse_missing(tokenizer)
    require("lm_eval", "eval", "What runs RULER, LongBench and BABILong")
    refuse_mute(model)
    tasks = task_names(group)
    refuse_meaningless(tasks, wanted)
    refuse_endless(tasks, wanted, tokenizer)
    return tasks, wanted


def refuse_divided_batches(batch_size: int, shared: Processes) -> None:
    """Raise if processes would batch other prompts than one process does: padding changes the last digits."""
    if shared.count > 1 and batch_size > 1:
        raise PosencError(
            f"{shared.count} processes share the prompts of a harness one by one, so batches of {batch_size} would "
            "differ from those of one process: leave --batch-size out, or use one process."
        )


def refuse_mute(model: Any) -> None:
    if not unwrap_model(model).can_generate():
        raise PosencError(
            f"{type(unwrap_model(model)).__name__} does not generate, and these suites score what a model writes: "
            "give them a causal language model. LongEmbed's tasks, 'lemb', are for encoders."
        )


def wrap_model(model: Any, tokenizer: Any, batch_size: int) -> PatchedLM:
    from .harness_model import PatchedLM

    with quiet():
        return PatchedLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def manager(metadata: dict[str, Any] | None = None) -> Any:
    """lm-eval's task manager for these suites only: indexing all its tasks takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(
        include_path=[root / suite for suite in SUITES], include_defaults=False, metadata=metadata or {}
    )


def task_names(group: str) -> list[str]:
    """The single tasks of a suite, a group or names with commas. Nothing is loaded."""
    index = manager().task_index
    names: list[str] = []
    queue = [name.strip() for name in group.split(",") if name.strip()]
    while queue:
        name = queue.pop(0)
        if name in ALIASES:
            queue = [*ALIASES[name], *queue]
        elif name not in index:
            raise PosencError(
                f"Unknown harness task {name!r}.{suggestion(name, [*SUITES, 'ruler_offline', *OFFLINE])}"
            )
        elif (entry := index[name]).tags and entry.cfg is None:
            queue = [*sorted(entry.tags), *queue]
        elif "group" in entry.cfg:
            queue = [*entry.cfg["task"], *queue]
        else:
            names.append(name)
    if not names:
        raise PosencError(f"No harness task is named by {group!r}; for example: ruler, ruler_offline, longbench.")
    return list(dict.fromkeys(names))


def refuse_meaningless(tasks: Sequence[str], lengths: Sequence[int]) -> None:
    """Raise for lengths at which a task would hang or score nothing."""
    for name in tasks:
        shortest, why = SHORTEST.get(name, (0, ""))
        if min(lengths) < shortest:
            raise PosencError(
                f"{name} at {min(lengths)} tokens {why}: ask for {shortest} or more, or leave the task out."
            )
        odd = [length for length in lengths if name.startswith("babilong") and length not in BABILONG]
        if odd:
            raise PosencError(f"BABILong has no length {odd[0]}; it has {', '.join(map(str, BABILONG))}.")


def refuse_endless(tasks: Sequence[str], lengths: Sequence[int], tokenizer: Any) -> None:
    """Raise if `ruler_vt` would never end, not even by Ctrl-C, since its sentences have too many tokens.

    Its prompt is an example of up to 500 tokens and at least ten sentences; the rest takes as much as eight more.
    """
    tokens = len(tokenizer(FILLER).input_ids)
    if "ruler_vt" in tasks and (tokens > 35 or 500 + 18 * tokens > min(lengths)):
        raise PosencError(
            f"ruler_vt has no prompt that fits {min(lengths)} tokens of this tokenizer, which makes {tokens} of one "
            "sentence, and would never end: use greater lengths, or leave the task out."
        )


def load_task(name: str, length: int, tokenizer: str) -> Any:
    """Load one task with documents of one length, always the same ones."""
    from ...compat.harness import import_functions

    nominal: Any = f"{length // 1024}k" if name.startswith("babilong") else [length]
    known = manager({"tokenizer": tokenizer, "max_seq_lengths": nominal})
    try:
        with quiet():
            import_functions(known.task_index[name].yaml_path)
            random.seed(SEED)
            np.random.seed(SEED)
            return known.load([name])["tasks"][name]
    except OSError as error:  # raised by hub clients, also for connection errors
        raise PosencError(
            f"{name} needs data that cannot be reached ({str(error).splitlines()[0]}). Without a network these run: "
            f"{', '.join(OFFLINE)}; together they are called ruler_offline."
        ) from None
    except ImportError as error:
        raise PosencError(f"{name} needs a package: {error}. To install it: {install_command('eval')}") from None
    except ValueError as error:
        raise PosencError(f"{name} cannot be made at {length} tokens: {error}") from None


def run_task(
    lm: PatchedLM, name: str, span: tuple[int, int], tokenizer: str, samples: int, shared: Processes = ALONE
) -> dict[str, Any] | None:
    """Run a task: the fields of its row, or None if no document of LongBench has such a length."""
    from lm_eval import evaluator

    task = load_task(name, span[1], tokenizer)
    task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
    task.set_fewshot_seed(seed=SEED)
    chosen, details = chosen_documents(lm, task, span, samples)
    if not chosen:
        return None
    lm.set_max_length(details["tokens"]["longest"])
    refuse_beyond_reach(lm.model, lm.max_length)

    def read(part: list[int]) -> list[dict[str, Any]]:
        with quiet():
            task_dict, own = {"tasks": {name: task}}, {name: part}
            done = evaluator.evaluate(lm=lm, task_dict=task_dict, samples=own, bootstrap_iters=0) if part else None
        return [answer(sample, span[1]) for sample in done["samples"][name]] if done else []

    parts = [chosen[first :: shared.count] for first in range(shared.count)]
    answers = sorted(chain(*shared.each(parts, read)), key=lambda found: found["document"])
    value, error = accuracy([each["score"] for each in answers])
    return {
        "task": name,
        "protocol": "lm-eval",
        "length": span[1],
        "metric": "score" if name.startswith("longbench") else "accuracy",
        "value": value,
        "stderr": error,
        "n": len(answers),
        "details": {**details, "seed": SEED, "version": task.VERSION, "answers": answers},
    }


def chosen_documents(
    lm: PatchedLM, task: Any, span: tuple[int, int], samples: int
) -> tuple[list[int], dict[str, Any]]:
    """The first documents of this length, and how many tokens they need with their answers."""
    own = task.config.task.startswith("longbench")  # its documents may have any length
    task.build_all_requests(limit=None if own else samples)
    needs = [lm.tokens_needed(request) for request in task.instances]
    fitting = [i for i, need in enumerate(needs) if not own or span[0] < need <= span[1]][:samples]
    counts = [needs[i] for i in fitting]
    details: dict[str, Any] = {"documents": len(task.eval_docs)}
    if counts:
        details["tokens"] = {"mean": statistics.fmean(counts), "shortest": min(counts), "longest": max(counts)}
    if own:
        details["too_long"] = sum(need > span[1] for need in needs)
    return fitting, details


def answer(sample: dict[str, Any], length: int) -> dict[str, Any]:
    """The answer, the target and the score, which RULER keeps under the name of the length."""
    key = next(key for key in (str(length), "score", "acc") if key in sample["metrics"])
    said = sample["filtered_resps"][0]
    return {
        "document": sample["doc_id"],
        "target": sample["target"],
        "answer": said[0] if isinstance(said, list) else said,
        "score": float(sample[key]),
    }


@contextmanager
def tokenizer_folder(tokenizer: Any) -> Iterator[str]:
    """A folder with the tokenizer: RULER loads one by name to measure its prompts."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        yield folder


@contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval's own output. Its progress bars on stderr stay."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
