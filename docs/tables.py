"""`make docs`: write the tables of the documentation anew from what they speak of."""

from collections.abc import Callable
from pathlib import Path

from hf_posenc.engines.shown import runtimes_markdown
from hf_posenc.patching.grades import table_markdown
from hf_posenc.search.rules import rules_markdown

ROOT = Path(__file__).parent.parent
TABLES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("docs/schemes/README.md", "table", table_markdown),
    ("docs/search.md", "rules", rules_markdown),
    ("docs/serving.md", "runtimes", runtimes_markdown),
)
"""Files, the mark of a table in each, and what makes it."""


def write_table(file: Path, mark: str, table: str) -> None:
    """Put a table between its marks in a file."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    file.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def main() -> None:
    for name, mark, made in TABLES:
        if (ROOT / name).exists():
            write_table(ROOT / name, mark, made())


if __name__ == "__main__":
    main()
