"""What others add: the walk of docs/extending.md, run as it stands, and every law over a scheme and a family."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_laws

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.(?:py|toml))\n")


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in a checkout that is not this one, and whose pip installs into a folder beside it."""
    bin = str(Path(sys.executable).parent)
    paths = [str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([bin, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        "PIP_TARGET": str(folder / "site"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which pip reads as: no isolation
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **more,
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


@pytest.fixture(scope="module")
def walked(checkout):
    """The folder in which every block of the guide has been run, in order, and what each said."""
    said = []
    for language, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        name = FILE.match(text)
        if name:
            file = checkout / name[1]
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            continue
        command = {"sh": ["bash", "-euc", text], "python": [sys.executable, "-c", text]}[language]
        done = run(command, checkout)
        assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        said.append(done.stdout)
    return checkout, said


@pytest.mark.slow
def test_the_guide_does_what_it_says(walked):
    folder, said = walked
    assert len(said) == 5
    installed, used, judged, _, swept = said
    assert "Successfully installed my-bell-0.1.0" in installed
    assert "BellBias(width=(" in used and "sealed" in used
    assert int(re.search(r"(\d+) passed", judged)[1]) > 40
    assert "none: weights" in swept and "sinusoidal: weights" in swept and "wrong: none" in swept
    assert (folder / "site" / "my_bell.py").exists()


@pytest.mark.slow
def test_load_names_the_package_that_is_not_installed(walked):
    folder, _ = walked
    code = "import sys; sys.path.remove(sys.argv[1]); from hf_posenc import load; load('tiny-bell')"
    done = run([sys.executable, "-c", code, str(folder / "site")], folder)
    assert done.returncode != 0
    assert "'bell' of the package 'my-bell' is needed, which is not installed (version 0.1.0 was used)" in done.stderr
    assert "pip install my-bell" in done.stderr


def laws() -> set[str]:
    """The tests that run over every cell."""
    found = set()
    for name, test in vars(test_laws).items():
        for mark in getattr(test, "pytestmark", []):
            if mark.args[0] == ("scheme", "kind") and test_laws.CAUSAL_CELLS[0] in mark.args[1]:
                found.add(name)
    return found


CHOSEN = (
    "(logarithmic or wave or odd) and not (mistral or qwen2 or qwen3 or bert_decoder)"
    " and not (rope-odd or longrope-odd or dynamic_ntk-odd)"
)
"""What is registered, without kinds that are much like another: the laws have schemes of every sort on those. The odd
model is a GPT-2, on which they have every scheme."""


@pytest.mark.slow
def test_every_law_runs_over_what_is_registered_from_a_file(checkout):
    report = checkout / "report.xml"
    files = ("laws", "describe", "check_model", "checkpoint", "loaded_models")
    tests = [f"tests/test_{name}.py" for name in files]
    chosen = ["--register", "tests/outside.py", "-k", CHOSEN, f"--junitxml={report}"]
    done = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, *chosen], checkout)
    assert done.returncode == 0, done.stdout[-5000:]
    ran = {case.get("name") for case in ElementTree.parse(report).iter("testcase")}
    assert len(laws()) >= 17
    for law in laws():
        for scheme, kind in [("logarithmic", "llama"), ("wave", "gpt2"), ("alibi", "odd")]:
            assert any(name.startswith(law) and f"{scheme}-{kind}" in name for name in ran), (law, scheme, kind)


@pytest.mark.slow
def test_the_sweep_fails_where_it_cannot_judge(checkout):
    done = run([sys.executable, "tests/sweep", "splinter", "nonsense"], checkout)
    assert done.returncode == 1
    assert "could not be judged: splinter, nonsense" in done.stdout
