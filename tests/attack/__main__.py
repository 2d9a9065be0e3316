"""Attacks by the thousand, each from a seed, judged by a reference that shares no code: `make attack`.

`python tests/attack --cases 20000 --first 0` tries seeds from `first` on and reports; `--only SEED` tells of one;
`--mode inductor` draws cases of one kind alone; `--until 21:30` ends at a time of the day (UTC) at the latest;
`--together` is DDP, every scheme.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]


def kinds(case: Any) -> list[str]:
    """What a report counts a case as."""
    cell = case.cell
    found = [f"mode {case.mode}", f"scheme {cell.scheme}", f"family {cell.kind}", "all", f"dtype {cell.dtype}"]
    found += [f"blocks of {case.block}"] if case.block else []
    found += [f"temperature {cell.heat['kind']}"] if cell.heat else []
    for trait, value in case.traits.items():
        found += [f"{case.mode}, {trait} {one}" for one in (set(value) if isinstance(value, list) else [value])]
    return found


def arguments() -> argparse.Namespace:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--cases", type=int, default=20_000)
    asked.add_argument("--first", type=int, default=0)
    asked.add_argument("--only", type=int, help="one seed, told in full")
    asked.add_argument("--mode", help="cases of this kind alone")
    asked.add_argument("--until", default="", help="HH:MM in UTC, when to end at the latest")
    asked.add_argument("--together", action="store_true", help="every scheme in two processes that train together")
    return asked.parse_args()


def tell(seed: int, mode: str | None) -> None:
    from attack.outcomes import drawn, run

    case = drawn(seed, mode)
    print(case.mode, case.cell, case.traits, f"blocks of {case.block}")
    run(case)
    print("right")


def attack(given: argparse.Namespace) -> int:
    """How many were bad."""
    from attack.outcomes import WORDS, outcome

    tally: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    bad, tried, begun = 0, 0, time.process_time()
    for seed in range(given.first, given.first + given.cases):
        if given.until and time.strftime("%H:%M", time.gmtime()) >= given.until:
            break
        tried += 1
        if seed % 500 == 0:
            print(f"seed {seed}: {time.process_time() - begun:.0f} s of CPU time", flush=True)
        word, case, found = outcome(seed, given.mode)
        for kind in kinds(case):
            tally.setdefault(kind, Counter())[word] += 1
        if word in ("refused", "theirs"):
            reasons[f"{word}: {found[:150]}"] += 1
        if word in ("WRONG", "crashed"):
            bad += 1
            mode = f" --mode {given.mode}" if given.mode else ""
            print(f"{word} python tests/attack --only {seed}{mode}  # {case.cell} {case.traits}: {found}", flush=True)
    print(f"{'':34}" + "".join(f"{word:>9}" for word in WORDS))
    for kind in sorted(tally):
        print(f"{kind:34}" + "".join(f"{tally[kind][word]:9}" for word in WORDS))
    for reason, count in reasons.most_common(25):
        print(f"{count:7} {reason}")
    print(f"{tried} cases, {bad} bad, {time.process_time() - begun:.0f} s of CPU time")
    return bad


def main() -> int:
    given = arguments()
    if given.together:
        from attack.together import main as train_together

        return train_together()
    from attack.bits import KINDS

    if given.mode == "bits" and not KINDS:
        print("No case was run: neither bitsandbytes nor torchao is installed.")
        return 0
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    if given.only is not None:
        tell(given.only, given.mode)
        return 0
    return min(attack(given), 1)


if __name__ == "__main__":
    sys.exit(main())
