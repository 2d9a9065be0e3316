"""What is needed for what: little to patch a model, and nothing slow to answer a mistake."""

import ast
import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import hf_posenc
from hf_posenc import evaluation
from hf_posenc.errors import MissingPackage
from hf_posenc.extras import EXTRAS, require, require_all

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED = {"pyyaml": "yaml", "lm-eval": "lm_eval", "sentence-transformers": "sentence_transformers"}
"""Distributions whose modules are called otherwise."""
SLOW = ("torch", "transformers", "numpy", "rich")


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower()


def modules_of_extra(extra: str) -> set[str]:
    """The modules that an extra brings, those of extras that it names included."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        nested = re.fullmatch(r"hf-posenc\[(.*)\]", requirement)
        if nested:
            found |= {module for inner in nested[1].split(",") for module in modules_of_extra(inner)}
        else:
            found.add(IMPORTED.get(name_of(requirement), name_of(requirement)))
    return found


# What is installed


def test_a_patch_needs_three_packages():
    assert {name_of(requirement) for requirement in PROJECT["dependencies"]} == {
        "torch",
        "transformers",
        "safetensors",
    }


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_is_asked_of_it(extra):
    assert set(EXTRAS[extra]) <= modules_of_extra(extra)


def test_every_package_that_is_asked_for_is_in_the_extra_that_is_named():
    calls = []
    for file in (ROOT / "hf_posenc").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("require", "missing"):
                package, extra = node.args[:2]
                if isinstance(package, ast.Constant):
                    calls.append((package.value, extra.value))
    assert len(calls) >= 7
    assert [call for call in calls if call[0].partition(".")[0] not in EXTRAS[call[1]]] == []


def test_modules_import_only_what_is_always_there_or_their_own_extra():
    """At their top, that is: what is imported in a function is asked for there."""
    always = {"torch", "transformers", "safetensors", "huggingface_hub", *sys.stdlib_module_names}
    rooms = {"cli": EXTRAS["cli"], "training": EXTRAS["train"], "evaluation/suites": EXTRAS["eval"]}
    rooms |= {"evaluation/report/picture.py": ("matplotlib",), "compat/harness.py": EXTRAS["eval"]}
    rooms["serving/gguf"] = EXTRAS["export"]
    rooms["training/axolotl_plugin.py"] = ("axolotl",)  # which imports it
    rooms["serving/programs"] = (
        "process",
    )  # which lies beside them: they run in other environments, without this one
    for file in (ROOT / "hf_posenc").rglob("*.py"):
        where = file.relative_to(ROOT / "hf_posenc").as_posix()
        allowed = always.union(*(extra for room, extra in rooms.items() if where.startswith(room)))
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            foreign = {name.partition(".")[0] for name in names} - allowed - {"pydantic_core"}
            assert not foreign, f"{where} imports {foreign}: import it where it is used, with extras.require"


def closure(*names: str) -> set[str]:
    """Installed distributions that these need."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform or Python
            continue
        if name not in found:
            found.add(name)
            left += [name_of(requirement) for requirement in needed if "extra ==" not in requirement]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> list[str]:
    """A Python with torch, transformers, safetensors and what they need, and no other package of this environment."""
    site = tmp_path_factory.mktemp("site")
    for name in closure("torch", "transformers", "safetensors"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(site)!r}]; "]


def run(command: list[str], code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*command[:-1], command[-1] + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_without_any_extra_a_model_is_patched_saved_and_loaded(bare, tmp_path):
    code = f"""
import importlib.util, json, warnings
absent = [n for n in ("accelerate", "peft", "datasets", "psutil", "matplotlib") if importlib.util.find_spec(n) is None]
assert len(absent) == 5, absent
import torch
from hf_posenc import describe, is_patched, load, patch_model, save, unpatch_model
ids = torch.arange(3, 40)[None]
model = load("tiny", dtype=torch.float32)
plain = model(ids).logits
patch_model(model, "yarn", target_length=1024)
patched = model(ids).logits
save(model, {str(tmp_path / "yarn")!r})
again = load({str(tmp_path / "yarn")!r})
assert torch.equal(again(ids).logits, patched) and not torch.equal(plain, patched)
assert torch.equal(unpatch_model(model)(ids).logits, plain)
import hf_posenc.evaluation
hf_posenc.evaluation.perplexity, hf_posenc.evaluation.compare
print(describe(again).scheme)
"""
    done = run(bare, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "yarn"


def test_what_is_missing_is_named_with_how_to_install_it(bare, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    about = {"base_model_name_or_path": "tiny", "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    (adapter / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    done = run(
        bare,
        f"""
from hf_posenc import MissingPackage, load
try:
    load({str(adapter)!r})
except MissingPackage as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "An adapter needs peft, which is not installed: pip install 'hf-posenc[adapters]'" in done.stdout
    assert "pip install '.[adapters]'" in done.stdout  # of a clone, as long as no index has the package


def test_a_command_line_without_typer_says_so():
    code = "import sys; sys.modules['typer'] = None; from hf_posenc.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "needs typer" in done.stderr and "pip install 'hf-posenc[cli]'" in done.stderr


def test_require_gives_the_module_or_says_what_lacks(monkeypatch):
    assert require("json", "cli", "This") is json
    monkeypatch.setitem(sys.modules, "psutil", None)
    for ask in (lambda: require("psutil", "cli", "Memory"), lambda: require_all("cli", "Memory")):
        with pytest.raises(MissingPackage, match=r"Memory needs psutil, which is not installed: pip install"):
            ask()


# What is imported when


def test_importing_the_package_imports_nothing_slow():
    code = f"import hf_posenc, sys; print([m for m in {SLOW!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("package", [hf_posenc, evaluation], ids=lambda package: package.__name__)
def test_public_names_are_the_same_for_type_checkers_and_at_run_time(package):
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    written = {f"{'.' * node.level}{node.module}": {a.name for a in node.names} for node in block.body}
    assert written == {module: set(names) for module, names in package._HOMES.items()}
    assert set().union(*written.values()) | {"__version__"} == {*package.__all__, "__version__"}
    for name in package.__all__:
        assert getattr(package, name) is not None and name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense


MISTAKES = {
    "help": ["--help"],
    "help of a command": ["compare", "--help"],
    "version": ["--version"],
    "command": ["evla"],
    "option": ["eval", "tiny", "--lenghts", "2k"],
    "argument": ["patch", "somewhere"],
    "length": ["eval", "tiny", "--lengths", "2q", "--tasks", "passkey"],
    "target": ["patch", "tiny", "out", "--scheme", "yarn", "--target-length", "1x"],
    "scheme": ["patch", "tiny", "out", "--scheme", "yarm", "--target-length", "1k"],
    "schemes": ["compare", "tiny", "--schemes", "yarn,ntkk", "--target-length", "1k"],
    "spaces": ["compare", "tiny", "--schemes", "yarn", "ntk", "--target-length", "1k"],
    "task": ["eval", "tiny", "--lengths", "2k", "--tasks", "paskey"],
    "protocol": ["eval", "tiny", "--lengths", "2k", "--protocol", "lst", "--tasks", "passkey"],
    "dtype": ["eval", "tiny", "--lengths", "2k", "--dtype", "bf16", "--tasks", "passkey"],
    "depths": ["eval", "tiny", "--lengths", "2k", "--depths", "half", "--tasks", "passkey"],
    "no text": ["eval", "tiny", "--lengths", "2k"],
    "text": ["eval", "tiny", "--lengths", "2k", "--text", "nowhere.txt"],
    "report": ["eval", "tiny", "--lengths", "2k", "--tasks", "passkey", "--report", "a.pdf"],
    "count": ["eval", "tiny", "--lengths", "2k", "--windows", "0", "--tasks", "passkey"],
    "depth": ["eval", "tiny", "--lengths", "2k", "--depths", "0,1.5", "--tasks", "passkey"],
    "folder": ["export", "tiny", "nowhere/tiny.gguf"],
    "help of training": ["train", "--help"],
    "no recipe": ["train"],
    "recipe": ["train", "tiny_yern"],
    "key of a recipe": ["train", "tiny_yarn", "--output", "x"],
    "flag of training": ["train", "tiny_yarn", "--mege"],
}
CODES = {"help": 0, "help of a command": 0, "help of training": 0, "version": 0, "no recipe": 1}


@pytest.mark.parametrize("what", MISTAKES)
def test_help_and_mistakes_are_answered_at_once(what, tmp_path):
    """In less than a second of CPU time, and without what takes longer."""
    watched = [sys.executable, "-X", "importtime", "-m", "hf_posenc", *MISTAKES[what]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(watched, capture_output=True, text=True, env=environment, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == CODES.get(what, 2), done.stderr
    assert "Traceback" not in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert imported.isdisjoint(SLOW)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.0
    assert not list(tmp_path.iterdir())
