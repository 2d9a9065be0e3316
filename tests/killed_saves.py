"""Kills saves at every step that writes: every save is a process of its own, forked, which ends itself by SIGKILL."""

import itertools
import os
import shutil
import signal
import sys

from cells import tiny

from hf_posenc import patch_model, save

SHARDS = {"max_shard_size": "40KB"}
CASES = {
    "into shards": ((0, {}), (1, SHARDS)),
    "out of shards": ((0, SHARDS), (1, {})),
    "shards": ((0, SHARDS), (1, SHARDS)),
    "new": (None, (1, {})),
}
"""What lies there before and what is saved: which of the two models, and how."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def contestants():
    """Two models that plain transformers loads, of other positions and other weights."""
    return patch_model(tiny("llama"), "yarn", factor=4.0), patch_model(tiny("llama", seed=1), "linear", factor=2.0)


def writes(event, arguments):
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & WRITING)
    return event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")


def save_until(step, model, folder, settings):
    """Save in a process that dies just before its `step`-th write; whether it came so far."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    count = itertools.count()

    def watch(event, arguments):
        if writes(event, arguments) and next(count) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(watch)
        save(model, folder, **settings)
    finally:
        os._exit(0)


def kill_saves(root):
    """Makes root/<case>/<step> for each case and each step at which a process that saves can die; how many steps."""
    models, steps = contestants(), {}
    for case, (before, (index, settings)) in CASES.items():
        if before is not None:
            save(models[before[0]], root / case / "before", **before[1])
            (root / case / "before" / "train.bin").write_bytes(b"mine")
        for step in itertools.count():
            folder = root / case / str(step)
            if before is not None:
                shutil.copytree(root / case / "before", folder)
            if not save_until(step, models[index], folder, settings):
                break
        steps[case] = step
    return steps
