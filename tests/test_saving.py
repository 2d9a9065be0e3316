"""Saving into a folder that is somebody's: what the checkpoint replaces goes, file by file, and nothing else."""

import json
import os
import shutil
import stat
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from cells import LENGTH, tiny, tokens
from forked import result_of
from killed_saves import CASES, contestants, kill_saves
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from stored_models import logits, patched_model
from test_plain_load import plain_verdicts
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_posenc import PosencError, load, patch_model, save
from hf_posenc.checkpoints.staging import STAGE, stage_files
from hf_posenc.cli.main import app

SHARDS = {"max_shard_size": "15KB"}
IDS = tokens(2, LENGTH)


def command(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def is_saved(model, folder):
    return torch.equal(logits(load(folder), IDS), logits(model, IDS))


def state(folder):
    """Everything in a folder: what it is, its mode and what is in it."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (stat.S_IFMT(about.st_mode), stat.S_IMODE(about.st_mode), content)
    return found


@pytest.fixture
def strangers(tmp_path):
    """A folder with other things in it, and what they are."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    names = ["train.bin", "optimizer.bin", "adapter_model.safetensors", "data.safetensors", "pytorch_model.bin"]
    for name in [*names, "notes.part", "model.part", "model-backup.safetensors", "logs/events", "posenc.json"]:
        (folder / name).write_bytes(name.encode())
    (tmp_path / "elsewhere").write_text("theirs")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "folder").symlink_to(tmp_path)
    return folder, state(folder)


@pytest.mark.parametrize("first", [{}, SHARDS], ids=["whole", "shards"])
def test_what_is_not_of_the_checkpoint_stays(first, strangers, tmp_path):
    folder, before = strangers
    numbers = {name: (folder / name).lstat().st_ino for name in before}
    with (folder / "train.log").open("a") as log:
        for settings in (first, SHARDS, {}):
            model = patched_model("t5", "llama")
            save(model, folder, **settings)
            log.write("saved\n")
            log.flush()
    assert is_saved(model, folder)
    found = state(folder)
    assert {name: found.get(name) for name in before} == before
    assert {name: (folder / name).lstat().st_ino for name in before} == numbers
    assert (folder / "train.log").read_text() == "saved\n" * 3
    own = {"README.md", "config.json", "generation_config.json", "model.safetensors", "train.log"}
    assert set(os.listdir(folder)) == {name for name in before if "/" not in name} | own
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "run"]
    assert (tmp_path / "elsewhere").read_text() == "theirs"


def test_only_its_own_shards_go(tmp_path):
    """An index that was written by hand, or by an enemy, does not make us delete what is no shard."""
    save(patched_model("t5", "llama"), tmp_path / "a", **SHARDS)
    index = tmp_path / "a" / "model.safetensors.index.json"
    (tmp_path / "outside.safetensors").write_text("mine")
    (tmp_path / "a" / "train.bin").write_text("mine")
    (tmp_path / "a" / "deep").mkdir()
    (tmp_path / "a" / "deep" / "x.safetensors").write_text("mine")
    data = json.loads(index.read_text())
    others = ["../outside.safetensors", "train.bin", "deep/x.safetensors", str(tmp_path / "outside.safetensors"), 5]
    data["weight_map"] |= {str(n): other for n, other in enumerate(others)}
    index.write_text(json.dumps(data))
    shards = {name for name in data["weight_map"].values() if str(name).startswith("model-")}
    assert len(shards) > 2
    save(patched_model("yarn", "llama"), tmp_path / "a")
    left = set(os.listdir(tmp_path / "a"))
    assert not left & shards
    assert {"train.bin", "deep"} <= left
    assert (tmp_path / "outside.safetensors").exists()
    assert (tmp_path / "a" / "deep" / "x.safetensors").exists()


def test_a_damaged_index_does_not_stop_a_save(tmp_path):
    save(patched_model("t5", "llama"), tmp_path / "a", **SHARDS)
    (tmp_path / "a" / "model.safetensors.index.json").write_text("{")
    model = patched_model("yarn", "llama")
    save(model, tmp_path / "a")
    assert is_saved(model, tmp_path / "a")
    assert not (tmp_path / "a" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o755, 0o1777])
def test_modes_stay(mode, tmp_path):
    folder = tmp_path / "a"
    save(patched_model("t5", "llama"), folder)
    folder.chmod(mode)
    (folder / "config.json").chmod(0o640)
    (folder / "model.safetensors").chmod(0o660)
    save(patched_model("yarn", "llama"), folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert stat.S_IMODE((folder / "config.json").stat().st_mode) == 0o640
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o660


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may give a folder to another group"
)
def test_files_belong_to_the_group_of_a_folder_that_wants_it(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    os.chown(folder, -1, 12345)
    folder.chmod(0o2770)
    save(patched_model("t5", "llama"), folder, **SHARDS)
    assert {file.stat().st_gid for file in folder.iterdir()} == {12345}


def test_new_folders_are_made_as_others_are(tmp_path):
    before = os.umask(0o027)
    try:
        save(patched_model("t5", "llama"), tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o750


def test_the_working_directory_stays(tmp_path, monkeypatch):
    model, folder = patched_model("alibi", "llama"), tmp_path / "a"
    save(patched_model("t5", "llama"), folder, **SHARDS)
    monkeypatch.chdir(folder)
    save(model, ".")
    assert os.path.samefile(".", folder)
    assert sorted(os.listdir(".")) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert is_saved(model, ".")


def test_a_link_to_a_file_is_replaced_and_not_followed(tmp_path):
    """In the cache of a hub the files of a checkpoint are links to blobs, which other versions share."""
    (tmp_path / "blob").write_bytes(b"another version's")
    (tmp_path / "a").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "blob")
    model = patched_model("yarn", "llama")
    save(model, tmp_path / "a")
    assert (tmp_path / "blob").read_bytes() == b"another version's"
    assert not (tmp_path / "a" / "config.json").is_symlink()
    assert is_saved(model, tmp_path / "a")


@pytest.fixture
def mounted(tmp_path):
    """A folder that is a file system of its own, as volumes of containers are."""
    folder = tmp_path / "volume"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # its files may still be mapped


def test_a_mount_point_can_be_saved_to(mounted):
    model = patched_model("t5", "llama")
    for settings in (SHARDS, {}):
        save(model, mounted, **settings)
        assert is_saved(model, mounted)
    assert sorted(os.listdir(mounted)) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]


def test_a_card_that_lies_there_stays(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text("mine")
    for _ in range(2):
        save(get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"])), tmp_path / "a")
        assert (tmp_path / "a" / "README.md").read_text() == "mine"
    save(get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"])), tmp_path / "b")
    assert (tmp_path / "b" / "README.md").exists()


# ---------------------------------------------------------------------------------------------------------------------
# What would be wrong or lost is refused, and leaves everything as it was


def test_an_adapter_is_not_hidden_by_a_model_nor_a_model_by_an_adapter(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    base = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "yarn", factor=4.0)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    save(adapted, tmp_path / "a")
    before = state(tmp_path / "a")
    with pytest.raises(PosencError, match="holds an adapter"):
        save(patched_model("t5", "llama"), tmp_path / "a")
    assert state(tmp_path / "a") == before
    for link in (tmp_path / "base", tmp_path / "link"):
        if link.name == "link":
            link.symlink_to(tmp_path / "base")
        with pytest.raises(PosencError, match="is the base itself"):
            save(adapted, link)
    shutil.copytree(tmp_path / "a", tmp_path / "base", dirs_exist_ok=True)
    with pytest.raises(PosencError, match="itself as its base"):
        load(tmp_path / "base")


@pytest.mark.parametrize("blocked", ["config.json", "model.safetensors"])
def test_a_folder_where_a_file_is_to_come(blocked, tmp_path):
    (tmp_path / "a" / blocked).mkdir(parents=True)
    (tmp_path / "a" / blocked / "mine").write_text("mine")
    before = state(tmp_path / "a")
    with pytest.raises(PosencError, match="move it away"):
        save(patched_model("t5", "llama"), tmp_path / "a")
    assert state(tmp_path / "a") == before


def test_a_file_where_a_folder_is_to_come(tmp_path):
    (tmp_path / "deep").write_text("mine")
    with pytest.raises(PosencError, match="move it away"), stage_files(tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "config.json").write_text("{}")
    assert state(tmp_path).keys() == {"deep"}


def test_weights_that_could_not_be_loaded_are_not_saved(tmp_path):
    save(patched_model("yarn", "llama"), tmp_path / "a")
    before = state(tmp_path / "a")
    with pytest.raises(PosencError, match=r"no model\.safetensors"):
        save(patched_model("t5", "llama"), tmp_path / "a", variant="fp16")
    assert state(tmp_path / "a") == before


@pytest.mark.parametrize("first", [{}, SHARDS], ids=["whole", "shards"])
def test_an_error_at_any_step_undoes_all(first, tmp_path, monkeypatch):
    save(patched_model("yarn", "llama"), tmp_path / "a", **first)
    before, rename, model = state(tmp_path / "a"), os.rename, patched_model("t5", "llama")
    for step in range(100):
        count = iter(range(1000))

        def broken(source, place, count=count, step=step):
            if next(count) == step:
                raise OSError(16, "Device or resource busy")
            rename(source, place)

        monkeypatch.setattr("hf_posenc.checkpoints.staging.os.rename", broken)
        try:
            save(model, tmp_path / "a", max_shard_size="40KB")
        except OSError:
            assert state(tmp_path / "a") == before
        else:
            break
        finally:
            monkeypatch.undo()
    assert step > 5
    assert is_saved(model, tmp_path / "a")


def test_what_cannot_be_moved_back_is_not_deleted(tmp_path, monkeypatch):
    save(patched_model("yarn", "llama"), tmp_path / "a")
    weights, rename = (tmp_path / "a" / "model.safetensors").read_bytes(), os.rename

    def failing(source, place):
        if Path(place).parent == tmp_path / "a":
            raise OSError(30, "Read-only file system")
        rename(source, place)

    monkeypatch.setattr("hf_posenc.checkpoints.staging.os.rename", failing)
    with pytest.raises(OSError, match="Read-only"):
        save(patched_model("t5", "llama"), tmp_path / "a")
    monkeypatch.undo()
    kept = [file for file in (tmp_path / "a").rglob("model.safetensors") if file.read_bytes() == weights]
    assert len(kept) == 1


def test_what_a_killed_save_left_is_swept_and_what_a_living_one_makes_is_not(tmp_path):
    save(patched_model("yarn", "llama"), tmp_path / "a")
    (tmp_path / "a" / f"{STAGE}dead").mkdir()
    (tmp_path / "a" / f"{STAGE}dead" / "model.safetensors").write_text("half")
    with stage_files(tmp_path / "a") as folder:  # another process's
        save(patched_model("t5", "llama"), tmp_path / "a")
        assert not (tmp_path / "a" / f"{STAGE}dead").exists()
        (folder / "config.json").write_text("{}")
    assert not list((tmp_path / "a").glob(STAGE + "*"))
    assert (tmp_path / "a" / "config.json").read_text() == "{}"


# ---------------------------------------------------------------------------------------------------------------------
# Kills


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_one_checkpoint_or_none(tmp_path):
    """Read by hf_posenc and by transformers alone, and saved again."""
    steps, models = result_of(partial(kill_saves, tmp_path)), contestants()
    jobs = {}
    for index, model in enumerate(models):
        save_file({"ids": IDS, "logits": logits(model, IDS)}, tmp_path / f"{index}.safetensors")
    for case, count in steps.items():
        assert count > 8
        for step in range(count):
            for index in (0, 1):
                jobs[f"{case}/{step}/{index}"] = {
                    "path": str(tmp_path / case / str(step)),
                    "auto": "AutoModelForCausalLM",
                    "arguments": {},
                    "expected": str(tmp_path / f"{index}.safetensors"),
                    "key": "logits",
                }
    plain, seen = plain_verdicts(jobs, tmp_path), []
    for case, count in steps.items():
        for step in range(count):
            verdicts = [plain[f"{case}/{step}/{index}"] for index in (0, 1)]
            seen.append(check_killed(tmp_path / case / str(step), models, verdicts, CASES[case]))
    assert {found for found, _ in seen} == {"old", "new", "refused"}
    assert any(told for found, told in seen if found == "refused")


def check_killed(folder, models, verdicts, case):
    """What is left: the old checkpoint, the new one or none, for both readers the same; another save repairs it."""
    answers = [logits(model, IDS) for model in models]
    told = False
    try:
        found = logits(load(folder), IDS)
    except PosencError as error:
        assert all(verdict.startswith("refused") for verdict in verdicts), (folder, verdicts)
        told = "save again" in str(error)
        result = "refused"
    else:
        same = [torch.equal(found, answer) for answer in answers]
        assert [verdict == "exact" for verdict in verdicts] == same
        assert sum(same) == 1
        result = "old" if same[0] else "new"
    before, (index, settings) = case
    assert before is None or (folder / "train.bin").read_bytes() == b"mine"
    save(models[index], folder, **settings)
    assert is_saved(models[index], folder)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return result, told


def test_two_processes_that_save_at_once_leave_one_of_both(tmp_path):
    """Each rank of a careless script."""
    models, children = contestants(), []
    for model in models:
        child = os.fork()
        if not child:
            with suppress(BaseException):
                for _ in range(5):
                    save(model, tmp_path / "a", **SHARDS)
                os._exit(0)
            os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    found = logits(load(tmp_path / "a"), IDS)
    assert sum(torch.equal(found, logits(model, IDS)) for model in models) == 1
    assert not list((tmp_path / "a").glob(".*"))


# ---------------------------------------------------------------------------------------------------------------------
# Patching and merging on disk
