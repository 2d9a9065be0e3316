"""A checkpoint is used only if every byte of it is what was written."""

import json

import pytest

from hf_posenc import PosencError
from hf_posenc.training.manifest import checkpoints, damage, newest_whole, refuse_other_settings, write_manifest

SETTINGS = {"train": {"seed": 0, "max_steps": 5}, "data": {"length": 8}}


@pytest.fixture
def run(tmp_path):
    for step in (2, 4, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "inner").mkdir(parents=True)
        (folder / "weights.bin").write_bytes(bytes(range(200)) * step)
        (folder / "inner" / "state.json").write_text("{}")
        write_manifest(folder, SETTINGS)
    (tmp_path / "checkpoint-last").mkdir()
    return tmp_path


def truncate(folder):
    (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:-1])


def alter(folder):
    content = bytearray((folder / "weights.bin").read_bytes())
    content[17] ^= 1
    (folder / "weights.bin").write_bytes(content)


DAMAGES = {
    "is missing": lambda folder: (folder / "inner" / "state.json").unlink(),
    "bytes instead of": truncate,
    "was altered": alter,
    "has no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": lambda folder: (folder / "manifest.json").write_text('{"files": {'),
}


def test_numbers_are_compared_as_numbers(run):
    assert [path.name for path in checkpoints(run)] == ["checkpoint-10", "checkpoint-4", "checkpoint-2"]
    found = newest_whole(run)
    assert found.checkpoint == run / "checkpoint-10" and found.damaged == {}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_seen_and_the_one_before_is_used(run, said):
    DAMAGES[said](run / "checkpoint-10")
    found = newest_whole(run)
    assert found.checkpoint == run / "checkpoint-4"
    assert said in found.damaged["checkpoint-10"]


def test_all_may_be_damaged(run):
    for folder in checkpoints(run):
        truncate(folder)
    found = newest_whole(run)
    assert found.checkpoint is None and len(found.damaged) == 3


def test_no_run_is_no_damage(tmp_path):
    found = newest_whole(tmp_path / "nowhere")
    assert found.checkpoint is None and not found.damaged


def test_a_manifest_leaves_nothing_behind(run):
    names = {path.name for path in (run / "checkpoint-10").iterdir()}
    assert names == {"weights.bin", "inner", "manifest.json"}
    assert set(json.loads((run / "checkpoint-10" / "manifest.json").read_text())["files"]) == {
        "weights.bin", "inner/state.json",
    }  # fmt: skip
    assert damage(run / "checkpoint-10") is None


def test_other_settings_are_refused_by_name(run):
    refuse_other_settings(run / "checkpoint-4", SETTINGS)
    other = {"train": {"seed": 1, "max_steps": 5}, "data": {"length": 8}}
    with pytest.raises(PosencError, match=r"train\.seed was 0 and is 1"):
        refuse_other_settings(run / "checkpoint-4", other)
