"""`hf-posenc schemes` and `hf-posenc families`: which schemes there are, and on which models they work."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from .tables import fits, paragraph, table

WIDE = 130
"""Terminal width from which the summary of a scheme fits on the same line."""


def schemes(
    why: Annotated[bool, typer.Option("--why", help="Give the reasons why schemes are refused.")] = False,
) -> None:
    """List every scheme, the models it works on, and who can load the result.

    \b
    hf-posenc schemes
    hf-posenc schemes --why
    """
    from ..patching.grades import KINDS, MEANING, cells
    from ..patching.untrained import training_needs
    from ..schemes import SCHEMES
    from ..schemes.temperature import KINDS as TEMPERATURES

    grades, needs = cells(), training_needs()
    if why:
        return print_reasons(grades)
    summaries = [scheme.summary for scheme in SCHEMES.values()]
    rows = [[name, *(grades[name, kind].partition(":")[0] for kind in KINDS), needs[name]] for name in SCHEMES]
    if fits(WIDE):
        columns = ["scheme", *(f"on {kind}" for kind in KINDS), "needs training", "what it does"]
        print(table(columns, [[*row, summary] for row, summary in zip(rows, summaries, strict=True)]))
    else:
        columns = ["scheme", *(kind.removeprefix("a ") for kind in KINDS), "needs training", ""]
        shorter = [[*row[:-1], row[-1].replace("on a ", "on ").replace(", ", "/"), ""] for row in rows]
        header, *lines = table(columns, shorter).splitlines()
        print(header)
        for line, summary in zip(lines, summaries, strict=True):
            print(line, paragraph(summary, " " * 4), sep="\n")
    print()
    for grade, meaning in MEANING.items():
        print(paragraph(f"{grade}: {meaning}"))
    print(paragraph("refused: has no meaning there, or no exact form; `hf-posenc schemes --why` gives the reasons"))
    kinds = "; ".join(f"{name}: {kind.summary}" for name, kind in TEMPERATURES.items())
    print(paragraph(f"temperature, an option of every scheme (n: the text that a query can look at): {kinds}"))
    print(
        paragraph(
            "needs training: yes, where the weights have never seen such positions; patch_model warns of it, and "
            "`hf-posenc train` trains them"
        )
    )


def print_reasons(grades: dict[tuple[str, str], str]) -> None:
    """Print every refusal, grouped by reason."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for (name, kind), grade in grades.items():
        if grade.startswith("refused: "):
            reason = grade.removeprefix("refused: ").replace(repr(name), "it")
            reasons.setdefault(reason, {}).setdefault(name, []).append(kind)
    for reason, cells in reasons.items():
        together: dict[str, list[str]] = {}
        for name, kinds in cells.items():
            together.setdefault(", ".join(kinds), []).append(name)
        for on, names in together.items():
            print(paragraph(f"{', '.join(names)}: on {on}"))
        print(paragraph(reason[0].upper() + reason[1:], "    "))


def families(
    verified: Annotated[
        bool, typer.Option("--verified", help="List every model type that was tested, and the result.")
    ] = False,
) -> None:
    """List every family and the model types in it.

    \b
    hf-posenc families
    hf-posenc families --verified
    """
    if verified:
        return print_verified()
    from ..families import FAMILIES

    rest = "every other that follows the conventions"
    rows = []
    for family in FAMILIES.values():
        own = family.positions + (", of images" if len(family.axes) > 1 else "")
        rows.append([family.name, own, ", ".join(family.model_types) or rest])
    print(table(["family", "own positions", "model types"], rows))


def print_verified() -> None:
    from ..families.verified import summary, verified_families

    found, counts, rows = verified_families(), Counter[str](), []
    for name, verdicts in found["families"].items():
        word, done, reason = summary(verdicts)
        counts[word] += 1
        rows.append([name, word, done, reason])
    print(table(["model type", "verdict", "schemes", "why not"], rows))
    about = ", ".join(f"{name} {version}" for name, version in found["about"].items())
    print(f"{sum(counts.values())} model types: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    print(f"Tried on tiny random models with {about}.")
