"""Patching and merging on disk: neither the source nor what somebody else put there is lost."""

import logging
import shutil

import pytest
from cells import tiny
from peft import LoraConfig, get_peft_model
from test_saving import command, is_saved, state
from transformers import AutoModelForCausalLM

from hf_posenc import PosencError, load, merge, patch_model, save
from hf_posenc.checkpoints.on_disk import patch_checkpoint


@pytest.fixture
def source(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("name", ["source", "link", "source/../source", "./source/."])
@pytest.mark.parametrize("flag", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_a_source_is_never_overwritten(name, flag, source, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    before = state(source)
    done = command("patch", "source", name, "--scheme", "t5", *flag)
    assert done.exit_code == 2
    assert "source itself" in done.output
    with pytest.raises(PosencError, match="source itself"):
        patch_checkpoint(tmp_path / name, source, "yarn", factor=2.0, overwrite=bool(flag))
    assert state(source) == before


def test_what_was_measured_of_a_source_does_not_speak_of_a_copy(source, tmp_path):
    (source / "proof.vllm.json").write_text("{}")
    (source / "notes.txt").write_text("mine")
    assert command("patch", source, tmp_path / "out", "--scheme", "none").exit_code == 0
    assert not (tmp_path / "out" / "proof.vllm.json").exists() and (tmp_path / "out" / "notes.txt").exists()
    (tmp_path / "out" / "proof.mlx.json").write_text("{}")  # of the old weights
    assert command("patch", source, tmp_path / "out", "--scheme", "alibi", "--overwrite").exit_code == 0
    assert not (tmp_path / "out" / "proof.mlx.json").exists() and (tmp_path / "out" / "notes.txt").exists()


def test_a_target_is_overwritten_only_if_that_is_said(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    assert command("patch", source, target, "--scheme", "none").exit_code == 0  # an empty one is nobody's
    (target / "train.bin").write_text("mine")
    before = state(target)
    done = command("patch", source, target, "--scheme", "yarn", "--factor", 2)
    assert done.exit_code == 2
    assert "--overwrite" in done.output
    with pytest.raises(PosencError, match="overwrite=True"):
        patch_checkpoint(source, target, "yarn", factor=2.0)
    assert state(target) == before
    done = command("patch", source, target, "--scheme", "yarn", "--factor", 2, "--overwrite")
    assert done.exit_code == 0, done.output
    assert is_saved(patch_model(tiny("llama"), "yarn", factor=2.0), target)
    assert (target / "train.bin").read_text() == "mine"


def test_a_folder_with_an_adapter_is_no_source(source, tmp_path):
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(PosencError, match="holds an adapter"):
        patch_checkpoint(source, tmp_path / "out", "none")
    assert not (tmp_path / "out").exists()


def test_a_merge_overwrites_neither_adapter_nor_base(source, tmp_path):
    """An adapter on what it was merged into would be applied twice."""
    base = patch_model(AutoModelForCausalLM.from_pretrained(source), "yarn", factor=4.0)
    save(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])), tmp_path / "a")
    (tmp_path / "link").symlink_to(source)
    before = state(source), state(tmp_path / "a")
    for overwrite in (True, False):
        for out in (source, tmp_path / "link", tmp_path / "a"):
            with pytest.raises(PosencError, match="itself" if overwrite else "itself|overwrite=True"):
                merge(tmp_path / "a", out, overwrite=overwrite)
        shutil.copytree(source, tmp_path / "moved", dirs_exist_ok=True)
        with pytest.raises(PosencError, match="itself" if overwrite else "itself|overwrite=True"):
            merge(tmp_path / "a", tmp_path / "moved", base=tmp_path / "moved", overwrite=overwrite)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    done = command("merge", tmp_path / "a", tmp_path / "out")
    assert done.exit_code == 2
    assert "--overwrite" in done.output
    done = command("merge", tmp_path / "a", tmp_path / "out", "--overwrite")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (state(source), state(tmp_path / "a")) == before


@pytest.mark.parametrize("scheme", ["llama3", "alibi"])
def test_transformers_does_not_warn_of_what_needs_no_action(scheme, source, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        patch_checkpoint(source, tmp_path / "out", scheme, target_length=256)
        load(tmp_path / "out")
    assert [record.getMessage() for record in caplog.records] == []
