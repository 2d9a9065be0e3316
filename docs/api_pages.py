"""`make docs`: the reference of the public names, made from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import hf_posenc

FILE = Path(__file__).parent / "api.md"
HEAD = """<!-- Made by `make docs` from signatures and docstrings: edit those. -->
# Reference

Everything that `from hf_posenc import ...` offers. Options of schemes are on [their pages](schemes/README.md).
"""


def entry(name: str, value: Any) -> str:
    words = inspect.getdoc(value) or ""
    if not callable(value):
        return f"## `{name}`\n\nThe schemes that are known, by name."
    kind = "class" if inspect.isclass(value) else "def"
    if kind == "class" and issubclass(value, (Exception, Warning)):
        return f"## `{name}`\n\n{words}"
    shown = re.sub(r"<function (\S+) at 0x\w+>", r"\1", str(inspect.signature(value))).replace("'", "")
    return f"## `{name}`\n\n```text\n{kind} {name}{shown}\n```\n\n{words}"


def make_page() -> str:
    names = [name for name in hf_posenc.__all__ if not name.startswith("__")]
    functions = sorted((n for n in names if n[0].islower()), key=str.lower)
    classes = sorted((n for n in names if not n[0].islower()), key=str.lower)
    return "\n\n".join([HEAD.rstrip(), *(entry(n, getattr(hf_posenc, n)) for n in (*functions, *classes))]) + "\n"


if __name__ == "__main__":
    FILE.write_text(make_page(), encoding="utf-8")
