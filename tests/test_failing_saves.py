"""Saves that are stopped halfway leave the old checkpoint whole, and no litter."""

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from cells import LENGTH, tokens
from forked import fork
from peft import LoraConfig, get_peft_model
from stored_models import logits, patched_model

from hf_posenc import PosencError, load, save
from hf_posenc.checkpoints.on_disk import patch_checkpoint


def snapshot(folder):
    return {file.relative_to(folder): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def full_disk(after):
    """A `safetensors.torch.save_file` that writes some bytes of the n-th file and stops."""
    real, count = safetensors.torch.save_file, [0]

    def save_some(tensors, filename, *args, **kwargs):
        count[0] += 1
        if count[0] <= after:
            return real(tensors, filename, *args, **kwargs)
        Path(filename).write_bytes(b"\0" * 1000)
        raise OSError(28, "No space left on device")

    return save_some


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("what", ["model", "adapter", "export"])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(what, after, whole, tmp_path, monkeypatch):
    target = tmp_path / "a"
    shutil.copytree(whole / "alibi", target)
    before = snapshot(target)
    model = patched_model("t5", "llama")
    if what == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        model.add_adapter("b", LoraConfig(target_modules=["q_proj"]))
        model.add_adapter("c", LoraConfig(target_modules=["q_proj"]))
    broken = full_disk(after if what != "export" else 0)
    for name in ("transformers.modeling_utils.safe_save_file", "peft.peft_model.safe_save_file"):
        monkeypatch.setattr(name, broken)
    monkeypatch.setattr("hf_posenc.checkpoints.tensors.shutil.copyfileobj", lambda old, new, _: broken({}, new.name))
    with pytest.raises(OSError, match="No space left"):
        if what == "export":
            patch_checkpoint(whole / "llama", target, "t5", overwrite=True)
        elif what == "adapter":
            save(model, target)
        else:
            save(model, target, max_shard_size="15KB")
    assert os.listdir(tmp_path) == ["a"]
    assert snapshot(target) == before
    monkeypatch.undo()
    expected = logits(patched_model("alibi", "llama"), tokens(2, LENGTH))
    assert torch.equal(logits(load(target), tokens(2, LENGTH)), expected)


def test_an_interrupt_leaves_no_litter(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(patched_model("t5", "llama"), tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """An adapter saved by PEFT itself, without our staging."""
    model = get_peft_model(patched_model("yarn", "llama"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "a")
    before = (tmp_path / "a" / "posenc.json").read_bytes()

    def broken(record, file, **kwargs):
        file.write('{"form')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_posenc.patching.sidecar.json.dump", broken)
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(tmp_path / "a")
    monkeypatch.undo()
    assert (tmp_path / "a" / "posenc.json").read_bytes() == before


def save_in_turns(first, second, target):
    while True:
        save(first, target, max_shard_size="15KB")
        save(second, target)


def contestants():
    """Two models that differ in scheme, in weights and in their files."""
    return patched_model("t5", "llama"), patched_model("yarn", "llama", seed=1)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_saving_leaves_one_or_the_other(tmp_path):
    """At some moment, the kernel's doings included; `test_saving.py` has every step that changes names."""
    target, ids = tmp_path / "a", tokens(2, LENGTH)
    models = contestants()
    answers = [logits(model, ids) for model in models]
    save(models[0], target)
    moments, seen = random.Random(0), set()
    for _ in range(2):
        process = fork(partial(save_in_turns, *models, target))
        try:
            for _ in range(5):  # stopped in the midst of it, what lies there is as whole as after a kill
                time.sleep(moments.uniform(0.02, 0.3))
                os.kill(process.pid, signal.SIGSTOP)
                seen.add(check_one_of(target, ids, answers))
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(moments.uniform(0.0, 0.1))
        finally:
            process.kill()
            process.join()
        seen.add(check_one_of(target, ids, answers))
    assert seen - {None} == {0, 1}


def check_one_of(target, ids, answers):
    try:
        found = logits(load(target), ids)
    except PosencError as error:  # between the two
        assert "save again" in str(error)
        return None
    same = [torch.equal(found, answer) for answer in answers]
    assert sum(same) == 1
    return same.index(True)
