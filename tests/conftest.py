import argparse
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

# Before what reads them: two workers on two cores have one thread each, and no test may wait for a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor does any write into a home, which may be read-only.
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), f"hf-posenc-datasets-{os.getuid()}"))
os.environ.setdefault("HF_MODULES_CACHE", os.path.join(tempfile.gettempdir(), f"hf-posenc-modules-{os.getuid()}"))
os.environ.setdefault("MTEB_CACHE", os.path.join(tempfile.gettempdir(), f"hf-posenc-mteb-{os.getuid()}"))

import pytest
import torch
from chromium import Chromium, find_chromium
from core import mark_core
from filelock import FileLock
from registering import register_from

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--register",
        action="append",
        default=[],
        metavar="FILE",
        help="a file or module that registers schemes or families, which tests over all of them then run over as well",
    )


def pytest_configure(config):
    for name in config.getoption("--register"):
        register_from(name)


def pytest_collection_modifyitems(config, items):
    """Tests over all schemes and kinds of models are for the cells that exist; the others are refused, by test."""
    from cells import CELLS, KINDS  # after what is registered

    from hf_posenc import SCHEMES

    def exists(item):
        given = getattr(getattr(item, "callspec", None), "params", {})
        scheme, kind = given.get("scheme"), given.get("kind")
        return scheme not in SCHEMES or kind not in KINDS or (scheme, kind) in CELLS

    gone = [item for item in items if not exists(item)]
    items[:] = [item for item in items if exists(item)]
    config.hook.pytest_deselected(items=gone)
    mark_core(items)


def pytest_collection_finish(session):
    """Thousands of tests and all that is imported stay to the end: nobody need look through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def settled():
    """Nor through what a file leaves behind, such as all the kinds of models that it has imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A folder by its name, and what fills it: whichever worker comes first does so, and the others wait."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def filled(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def text(once) -> str:
    """The setting of a text that takes no time to read."""
    source = Path(argparse.__file__).read_text()
    return f"--data.path={once('text', lambda folder: (folder / 'text.txt').write_text(source)) / 'text.txt'}"


@pytest.fixture(scope="session")
def whole(once) -> Path:
    """Good checkpoints, to be copied and damaged."""
    from good_checkpoints import save_good_checkpoints  # after what is registered

    return once("good_checkpoints", save_good_checkpoints)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One for all pages that are looked at."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium or Chrome on PATH: the page is not looked at in a browser")
    made = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def ruler_alone(monkeypatch):
    """lm-eval's own command line reads all of its thousands of tasks first; here those of RULER."""
    TaskIndex = pytest.importorskip("lm_eval.tasks._index").TaskIndex
    every = TaskIndex._iter_yaml_files
    few = staticmethod(lambda root: every(root / "ruler" if root.name == "tasks" else root))
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", few)


def _from_environment(variable: str, what: str) -> str:
    path = os.environ.get(variable)
    if not path or not os.path.isdir(path):
        pytest.skip(f"{what}: set {variable} to its directory")
    return path


@pytest.fixture(scope="session")
def stories() -> str:
    """A LLaMA of 15M parameters trained at 256 tokens."""
    return os.path.join(_from_environment("HF_POSENC_MODELS", "real checkpoints"), "stories15M")


@pytest.fixture(scope="session")
def novel() -> str:
    """The text of a novel."""
    folder = _from_environment("HF_POSENC_TEXT", "real text")
    with open(os.path.join(folder, "persuasion.txt"), encoding="utf-8") as file:
        return file.read()
