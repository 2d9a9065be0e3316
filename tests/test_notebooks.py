"""The notebooks: well-formed, without outputs, and run as they stand, in a process of their own without Jupyter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from hf_posenc.cli.main import app

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXTEND, WRITE = "extend_a_model", "write_your_own_scheme"
OURS = "https://github.com/hf-posenc/hf-posenc/blob/main/"
PATCHED = 'patch_model(model, "yarn", target_length=1024)'
BIASED = "return -self.slope[:, None] * distances.abs().clamp(max=self.knee)"
FIGURE = r"(\d+\.\d)"


def cells(file: Path, kind: str) -> list[str]:
    notebook = json.loads(file.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def code(name: str) -> str:
    return "\n\n".join(cells(ROOT / "notebooks" / f"{name}.ipynb", "code"))


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-"]
    return subprocess.run(
        command, input=text, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=600
    )


def output_of(name: str, folder: Path) -> str:
    """What a notebook prints, once all of its own assertions have held."""
    done = run(code(name), folder)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_both_are_there():
    assert [file.stem for file in NOTEBOOKS] == [EXTEND, WRITE]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_well_formed_and_has_no_outputs(file):
    text = file.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"  # as nbformat writes it
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", one) for one in ids)
    assert len(ids) == len(set(ids))
    common = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        assert "".join(cell["source"]).strip() and cell["metadata"] == {}
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "markdown":
            assert set(cell) == common
        else:
            assert cell["cell_type"] == "code" and set(cell) == common | {"execution_count", "outputs"}
            assert cell["execution_count"] is None and cell["outputs"] == []


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_links_and_commands_of_a_notebook_are_known(file):
    prose = "\n".join(cells(file, "markdown"))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert len(targets) >= 3
    for target in targets:
        found = ROOT / target.removeprefix(OURS) if target.startswith(OURS) else file.parent / target
        assert found.exists(), target
    assert set(re.findall(r"hf-posenc ([a-z][a-z-]+)", prose)) <= set(get_command(app).commands)


@pytest.mark.parametrize("page", ["index.md", "extending.md"])
def test_the_docs_lead_to_both(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for file in NOTEBOOKS:
        assert f"]({OURS}notebooks/{file.name})" in text


@pytest.mark.slow
def test_a_model_is_extended(tmp_path):
    printed = output_of(EXTEND, tmp_path)
    assert "trained at 256 tokens" in printed and "portability           config" in printed
    pattern = rf"^(unpatched|yarn): perplexity at (\d+): {FIGURE} ± {FIGURE}$"
    found = {(one, int(n)): float(value) for one, n, value, _ in re.findall(pattern, printed, flags=re.M)}
    assert len(found) == 10
    inside = found["unpatched", 256]
    assert 4 < inside < 12 and found["unpatched", 1024] > 3 * inside
    assert all(found["yarn", n] < 1.3 * inside for n in (128, 256, 512, 768, 1024))
    lost, kept = map(int, re.search(r"in 768 tokens: unpatched (\d+)%, yarn (\d+)%", printed).groups())
    assert lost <= 10 and kept >= 60
    assert "undone: the same weights and logits to the last bit" in printed
    assert "loaded: the same logits to the last bit, in plain transformers too" in printed


@pytest.mark.slow
def test_a_scheme_is_written(tmp_path):
    printed = output_of(WRITE, tmp_path)
    assert "KneeBias(slope=(4,))" in printed and "sealed" in printed
    assert float(re.search(r"off the reference by at most (\S+)", printed)[1]) < 1e-4
    pattern = rf"^(unpatched|before training|after training): perplexity at 256: {FIGURE}, at 512: {FIGURE}$"
    found = {when: (float(one), float(two)) for when, one, two in re.findall(pattern, printed, flags=re.M)}
    assert len(found) == 3
    assert found["unpatched"][1] > 2 * found["unpatched"][0]  # what the text says of it
    assert found["unpatched"][0] < found["after training"][0] < 30 < 40 < found["before training"][0]
    for end in (
        "loaded: the same logits to the last bit",
        "plain transformers: ",
        "decoding over a cache equals a full pass",
        "unpatching restores every bit",
    ):
        assert f"\n{end}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [(EXTEND, PATCHED, "pass"), (WRITE, BIASED, BIASED.replace("self.slope[", "0 * self.slope["))],
    ids=[EXTEND, WRITE],
)
def test_a_notebook_notices_a_patch_that_does_nothing(name, line, instead, tmp_path):
    text = code(name)
    assert line in text
    done = run(text.replace(line, instead), tmp_path)
    assert done.returncode != 0 and "AssertionError" in done.stderr
