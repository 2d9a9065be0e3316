"""How benchmark.py times its candidates and shows what it found."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

Run = Callable[[], object]


@dataclass
class Row:
    """One figure. `target` is the most it may be."""

    what: str
    against: str
    value: float
    target: float | None
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


def medians(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Seconds of each candidate. They take turns, after one call to warm up where a call is short."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + (repeats > 2)):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn or repeats <= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def ratios(runs: dict[str, Run], base: str, repeats: int) -> dict[str, float]:
    found = medians(runs, repeats)
    return {name: seconds / found[base] for name, seconds in found.items() if name != base}


def show(rows: list[Row]) -> None:
    table = Table("what", "against", "measured", "at most", "", "note")
    for row in rows:
        value = f"{row.value:.2g}" if row.value < 0.01 else f"{row.value:.2f}"
        most = "" if row.target is None else f"{row.target:.2g}"
        table.add_row(
            row.what,
            row.against,
            f"{value} {row.unit}",
            most,
            {True: "met", False: "MISSED", None: ""}[row.met],
            row.note,
        )
    Console(width=170).print(table)


def draw(rows: list[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.unit == "x" and row.target is not None]
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(shown) + 1))
    colours = ["#2a7" if row.met else "#c43" for row in shown]
    axes.barh(range(len(shown)), [row.value for row in shown], color=colours)
    axes.set_yticks(range(len(shown)), [f"{row.what} / {row.against}" for row in shown])
    axes.set_ylim(-1, len(shown))
    axes.plot([row.target for row in shown], range(len(shown)), "k|", markersize=9, label="target")
    axes.invert_yaxis()
    axes.axvline(1, color="#999", linewidth=0.8)
    axes.set_xlabel("ratio (lower is better)")
    axes.legend(frameon=False)
    axes.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
