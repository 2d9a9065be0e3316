"""The rooms of the package, in the order of the data: what is above may import what is below, never the other way."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_posenc

PACKAGE = Path(hf_posenc.__file__).parent
ORDER = (
    ("errors", "lazy", "version"),
    ("extras",),
    ("registry",),
    ("engines",),
    ("compat",),
    ("core",),
    ("schemes", "families"),  # neither knows the other
    ("runtime",),
    ("patching",),
    ("models",),
    ("checkpoints",),
    ("serving",),
    ("evaluation",),
    ("search", "explorer"),
    ("training",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FACE = {"", "__main__"}
"""What gathers the public names, and what starts the command line: they may import anything."""


def modules() -> dict[str, Path]:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """The modules of the package that a module imports, wherever in its code: a function does not hide a cycle."""
    here = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
        elif (node.module or "").split(".")[0] == "hf_posenc":
            base = str(node.module).split(".")[1:]
        else:
            continue
        target = ".".join(part for part in base if part)
        for alias in node.names:
            inner = f"{target}.{alias.name}".lstrip(".")
            found.add(inner if inner in MODULES else target)
    return found - {name}


def room(name: str) -> str:
    return name.partition(".")[0]


def test_every_module_has_a_room():
    strangers = sorted({room(name) for name in MODULES} - set(LEVEL) - FACE)
    assert not strangers, f"say in ORDER where {strangers} stand"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if room(name) not in FACE))
def test_imports_point_down(name):
    for target in imports(name):
        one, other = room(name), room(target)
        assert other in LEVEL, f"{name} imports the package's face: import from the room that defines the name"
        assert one == other or LEVEL[other] < LEVEL[one], f"{name} imports {target}, which is above it"


def test_no_cycle_hides_anywhere():
    packages = {name for name, file in MODULES.items() if file.name == "__init__.py"}
    graph = {name: imports(name) - packages for name in MODULES if name not in packages}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names it


def test_the_rule_notices_an_edge_that_points_up(tmp_path, monkeypatch):
    wrong = tmp_path / "effects.py"
    wrong.write_text("def late():\n    from ..patching.plan import plan\n    return plan\n")
    monkeypatch.setitem(MODULES, "core.effects", wrong)
    with pytest.raises(AssertionError, match=r"core.effects imports patching.plan"):
        test_imports_point_down("core.effects")
