"""What comes with the package: recipes by name, and the same after an installation as in a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_posenc import PosencError
from hf_posenc.cli.main import app
from hf_posenc.training.recipe_files import description, file_path, launchers, recipe_path, recipes
from hf_posenc.training.settings_file import read_settings

ROOT = Path(__file__).parent.parent
SMALL = [
    "--data.length=64", "--train.max_steps=1", "--train.warmup_steps=0", "--data.passkey=0.0",
    "--measure={lengths: [32], windows: 1, scored: 8}",
]  # fmt: skip


def installed(folder: Path) -> None:
    """The package as a wheel brings it, in a folder of its own."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "hf_posenc", folder / "hf_posenc", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheel", "."]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")


@pytest.fixture(scope="session")
def site(once) -> Path:
    pytest.importorskip("setuptools")
    return once("installed", installed) / "site"


def run(site: Path, folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installation_holds_every_recipe_of_the_checkout(site):
    here, there = ROOT / "hf_posenc" / "training" / "recipes", site / "hf_posenc" / "training" / "recipes"
    names = sorted(path.relative_to(here) for path in here.rglob("*.yaml"))
    assert len(names) > 20
    assert names == sorted(path.relative_to(there) for path in there.rglob("*") if path.is_file())
    assert all((here / name).read_bytes() == (there / name).read_bytes() for name in names)


@pytest.mark.skipif(not (ROOT / "recipes").exists(), reason="not a checkout")
def test_the_checkout_shows_the_very_files_that_are_shipped():
    shown, shipped = ROOT / "recipes", recipes()["tiny_yarn"].parent
    if shown.is_symlink():
        assert shown.resolve() == shipped
        return
    names = sorted(path.relative_to(shown) for path in shown.rglob("*.yaml"))  # copies, in a source distribution
    assert names == sorted(path.relative_to(shipped) for path in shipped.rglob("*.yaml"))
    assert all((shown / name).read_bytes() == (shipped / name).read_bytes() for name in names)


def test_a_recipe_runs_by_name_after_an_installation(site, tmp_path, text):
    run(site, tmp_path, "-m", "hf_posenc", "train", "tiny_yarn", text, *SMALL)
    assert (tmp_path / "runs" / "tiny_yarn" / "adapter" / "posenc.json").exists()
    config = run(site, tmp_path, "-m", "hf_posenc", "recipes", "cpu").strip()
    assert config.startswith(str(site))
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "1"]
    run(site, tmp_path, *launch, "-m", "hf_posenc.training", "tiny_ntk", text, *SMALL)
    assert (tmp_path / "runs" / "tiny_ntk" / "adapter" / "posenc.json").exists()


def test_names_and_files_are_told_apart(tmp_path, monkeypatch):
    assert read_settings("tiny_yarn") == read_settings(recipes()["tiny_yarn"])
    own = tmp_path / "own.yaml"
    shutil.copy(recipes()["tiny_yarn"], own)
    assert recipe_path(own) == own and read_settings(own) == read_settings("tiny_yarn")
    with pytest.raises(PosencError, match=r"neither a file nor one of those .* Did you mean 'tiny_yarn'"):
        recipe_path("tiny_yern")
    with pytest.raises(PosencError, match="no recipe 'cpus'"):
        file_path("cpus")
    with pytest.raises(PosencError, match="neither a file"):
        recipe_path(tmp_path)


def test_the_command_lists_them_and_tells_where_one_lies():
    listed = CliRunner().invoke(app, ["recipes"]).stdout
    assert all(name in listed for name in [*recipes(), *launchers()])
    told = [description(path) for path in (*recipes().values(), *launchers().values())]
    assert all(told) and not [words for words in told if "accelerate launch" in words or "hf_posenc.training" in words]
    told = CliRunner().invoke(app, ["recipes", "ddp"])
    assert Path(told.stdout.strip()) == launchers()["ddp"]


def test_train_without_a_recipe_tells_how_to_use_it():
    told = CliRunner().invoke(app, ["train"])
    assert told.exit_code == 1 and "hf-posenc train RECIPE" in told.output
    told = CliRunner().invoke(app, ["train", "--help"])
    assert told.exit_code == 0 and "--section.key=value" in told.output
