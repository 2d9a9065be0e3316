"""Cases drawn from a seed: a cell, a dtype, a mask, a cache and what is done to it, judged by the reference.

`outcome(seed)` runs one. Its kinds are what a report counts: right, refused (with an error of this package), theirs
(transformers refuses the unpatched model alike), WRONG, crashed.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

from attack.bits import drawn_bits
from attack.caches import drawn_cache
from attack.compiled import drawn_compilation, drawn_decoding, drawn_export, drawn_inductor
from attack.drawing import NATIVE, Drawn, Wrong, blocks_of
from attack.generation import drawn_generation
from attack.gradients import drawn_gradients
from attack.handled import drawn_handled
from attack.pairs import drawn_pair
from attack.parts import drawn_parts
from attack.passes import drawn_pass
from attack.stored import drawn_store
from attack.terms import drawn_terms

from hf_posenc import PosencError

MODES = {
    "pass": (drawn_pass, 390),
    "cache": (drawn_cache, 240),
    "gradients": (drawn_gradients, 80),
    "generate": (drawn_generation, 60),
    "pair": (drawn_pair, 60),
    "handled": (drawn_handled, 50),
    "store": (drawn_store, 50),
    "parts": (drawn_parts, 40),
    "terms": (drawn_terms, 26),
    "compile": (drawn_compilation, 2),
    "decode": (drawn_decoding, 1),
    "export": (drawn_export, 1),
    "inductor": (drawn_inductor, 0),
    "bits": (drawn_bits, 0),
}
"""And how often of a thousand. To compile takes seconds, with inductor tens of them, and weights of few bits need
packages of their own: those are asked for by name."""
OURS = ("parts", "store", "terms", "bits")
"""Where this package's own code runs on unpatched models as well: that these are as wrong excuses nothing."""
SLOW = ("compile", "decode", "export", "inductor")
WORDS = ("right", "refused", "theirs", "crashed", "WRONG")


def drawn(seed: int, mode: str | None = None) -> Drawn:
    draw = random.Random(seed)
    found = draw.choices(list(MODES), [weight for _, weight in MODES.values()])[0]
    return MODES[mode or found][0](draw)


def outcome(seed: int, mode: str | None = None) -> tuple[str, Drawn, str]:
    """What became of a case: one of WORDS, the case, and what was found."""
    case = drawn(seed, mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(case)
        except PosencError as error:
            return "refused", case, str(error)
        except Exception as error:
            if said_by_us(error):
                return "refused", case, str(error).splitlines()[0]
            told = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}".splitlines()[0]
            word = "WRONG" if isinstance(error, Wrong) else "crashed"
            excused = word == "crashed" or case.mode not in OURS
            word = "theirs" if excused and _is_theirs(case, error) else word
            return word, case, told[:300]
    return "right", case, ""


def run(case: Drawn) -> None:
    with blocks_of(case.block):
        case.run(case.made(case.cell), case.cell)


def said_by_us(error: BaseException | None) -> bool:
    """Whether our error is behind that of a compiler, which may only quote it, or transformers names our attention."""
    if isinstance(error, PosencError) or "Implementation hf_posenc" in str(error):
        return True
    if "raise UnsupportedCell" in str(error):
        return True
    return error is not None and said_by_us(error.__cause__)


def _is_theirs(case: Drawn, error: Exception) -> bool:
    """Whether the unpatched model fails alike: is as wrong by the reference, or raises the same."""
    try:
        run(replace(case, cell=replace(case.cell, scheme=NATIVE, variant=0, heated=None)))
    except Exception as other:
        return type(other) is type(error)
    return False
