"""`make docs`: write the tables of the documentation anew from what they speak of."""

from collections.abc import Callable
from pathlib import Path

from hf_posenc.engines.shown import runtimes_markdown
from hf_posenc.patching.grades import table_markdown
from hf_posenc.search.rules import rules_markdown

ROOT = Path(__file__).parent.parent
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "README.md": ("table", table_markdown),
    "docs/search.md": ("rules", rules_markdown),
    "docs/serving.md": ("runtimes", runtimes_markdown),
}
"""Files, the mark of the table in each, and what makes it."""


def main() -> None:
    for name, (mark, made) in TABLES.items():
        file, begin, end = ROOT / name, f"<!-- {mark} -->", f"<!-- /{mark} -->"
        if not file.exists():
            continue
        before, _, rest = file.read_text(encoding="utf-8").partition(begin)
        after = rest.partition(end)[2]
        file.write_text(f"{before}{begin}\n{made()}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
