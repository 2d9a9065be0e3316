"""Attacks by the thousand, each from a seed, judged by a reference that shares no code: `make attack`.

`python tests/attack --cases 20000 --first 0` tries seeds from `first` on and reports; `--only SEED` tells of one.
"""

from __future__ import annotations

import argparse
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
    found += [f"temperature {cell.heat['kind']}"] if cell.heat else []
    for trait, value in case.traits.items():
        found += [f"{trait} {one}" for one in (set(value) if isinstance(value, list) else [value])]
    return found


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--cases", type=int, default=20_000)
    asked.add_argument("--first", type=int, default=0)
    asked.add_argument("--only", type=int, help="one seed, told in full")
    given = asked.parse_args()

    import torch
    from attack.cases import WORDS, drawn, outcome, patched

    torch.set_num_threads(1)
    if given.only is not None:
        case = drawn(given.only)
        print(case.mode, case.cell, case.traits)
        case.run(patched(case.cell), case.cell)
        print("right")
        return 0
    tally: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    bad, begun = 0, time.process_time()
    for seed in range(given.first, given.first + given.cases):
        if seed % 500 == 0:
            print(f"seed {seed}: {time.process_time() - begun:.0f} s of CPU time", flush=True)
        word, case, found = outcome(seed)
        for kind in kinds(case):
            tally.setdefault(kind, Counter())[word] += 1
        if word in ("refused", "theirs"):
            reasons[f"{word}: {found[:150]}"] += 1
        if word in ("WRONG", "crashed"):
            bad += 1
            print(f"{word} python tests/attack --only {seed}  # {case.cell} {case.traits}: {found}", flush=True)
    print(f"{'':34}" + "".join(f"{word:>9}" for word in WORDS))
    for kind in sorted(tally):
        print(f"{kind:34}" + "".join(f"{tally[kind][word]:9}" for word in WORDS))
    for reason, count in reasons.most_common(25):
        print(f"{count:7} {reason}")
    print(f"{given.cases} cases, {bad} bad, {time.process_time() - begun:.0f} s of CPU time")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
