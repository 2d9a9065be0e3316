"""The recipes as they are run: real commands, in processes of their own where that is what is tried."""

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import typing
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import fork
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from hf_posenc import describe, load
from hf_posenc.models import NAMES
from hf_posenc.training.command import main
from hf_posenc.training.recipe import train
from hf_posenc.training.recipe_files import launchers, recipes
from hf_posenc.training.settings_file import read_settings

ROOT = Path(__file__).parent.parent
MODULE = ["-m", "hf_posenc.training"]
TINY = [name for name in recipes() if name.startswith("tiny_")]
CPU = ["--config_file", str(launchers()["cpu"])]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
SMALL = [
    "--data.length=128",
    "--measure={lengths: [64, 128], windows: 2, scored: 16}",
    "--train.logging_steps=1",
    "--train.warmup_steps=0",
]

pytestmark = pytest.mark.skipif("tiny" not in NAMES, reason="the package was built without its model")


def launched(*words: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *words]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


def losses(folder: Path) -> list[float]:
    return [loss for _, loss in json.loads((folder / "metrics.json").read_text())["facts"]["losses"]]


WHOLE = ("tiny_drope", "tiny_swan")
"""Those that tune all weights, so that nothing is merged."""
STARTED = {"tiny_yarn": launched(), "tiny_alibi": [sys.executable]}
"""In processes of their own, whose commands stand in cards; the others do without the seconds that a start takes."""


@pytest.mark.parametrize("name", TINY)
def test_small_recipes_run(name, tmp_path, text):
    output = tmp_path / "out"
    words = [text, "--train.max_steps=2", "--train.warmup_steps=0", "--data.length=256", SMALL[1]]
    if "control" not in name and "gpt2" not in name and "bert" not in name and name not in WHOLE:
        words.append("--merge")
    command = [name, f"--output={output}", *words]
    run([*STARTED[name], *MODULE, *command]) if name in STARTED else main(command)
    made = output / ("adapter" if (output / "adapter").exists() else "model")
    card = (made / "README.md").read_text()
    assert ("accelerate launch" in card) == (name == "tiny_yarn") and "transformers" in card
    assert name in card or name not in STARTED
    facts = json.loads((output / "metrics.json").read_text())
    states = list(dict.fromkeys(figure["scheme"] for figure in facts["figures"]))
    assert states[0] == "unpatched" and states[-1].endswith(", tuned")
    assert (output / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    assert facts["facts"]["steps"] == 2 and facts["facts"]["processes"] == 1
    if (output / "merged").exists():
        adapted, merged = (load(folder, dtype=torch.float32) for folder in (made, output / "merged"))
        scheme = json.loads((output / "merged" / "config.json").read_text()).get("posenc", {}).get("scheme")
        assert json.loads((made / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
        assert scheme == describe(adapted.get_base_model()).scheme == name.removeprefix("tiny_")
        ids = torch.arange(3, 40)[None]
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif("HF_POSENC_MODELS" not in os.environ, reason="HF_POSENC_MODELS names no real checkpoints")
@pytest.mark.parametrize("name", ["minilm_learned", "bert_learned"])
def test_only_new_rows_of_an_encoder_are_tuned(name, tmp_path, text):
    output, base = tmp_path / "out", Path(os.environ["HF_POSENC_MODELS"]) / "minilm-l6"
    words = [
        "--train.max_steps=2",
        "--train.per_device_train_batch_size=2",
        "--train.bf16=false",
        "--train.warmup_steps=0",
        f"--output={output}",
    ]
    few = "--measure={lengths: [64], windows: 2, scored: 16}"
    if name == "bert_learned":  # MiniLM came without the head of its pretraining: an old one is made up
        model = AutoModelForMaskedLM.from_pretrained(base)
        model.save_pretrained(tmp_path / "base")
        AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "base")
        base = tmp_path / "base"
    main([name, text, few, f"--model.path={base}", *words])
    figures = json.loads((output / "metrics.json").read_text())["figures"]
    assert name == "bert_learned" or {figure["n"] for figure in figures} == {2}  # as many queries as windows
    before, after = weights(base), weights(output / "model")
    key = next(k for k in after if k.endswith("position_embeddings.weight"))
    old = next(v for k, v in before.items() if k.endswith("position_embeddings.weight"))
    assert after[key].shape == (4096, 384) and torch.equal(after[key][:512], old)
    assert not torch.equal(after[key][512:], old.repeat(7, 1))
    others = {k.removeprefix("bert."): v for k, v in before.items() if "position_" not in k}
    for k, v in after.items():
        if "position_" not in k and k.removeprefix("bert.") in others:
            assert torch.equal(v, others[k.removeprefix("bert.")]), k


SHARED = [*SMALL, "--train.max_steps=3", "--data.passkey=0.0", "--measure.before=false"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *MODULE]
LAUNCHES = {
    "torchrun": (TORCHRUN, "torchrun --standalone --nproc_per_node 2 -m"),
    "accelerate": (launched(*CPU, *MODULE), "accelerate launch --config_file"),
}


@pytest.fixture(scope="module")
def alone(once, text) -> list[float]:
    """Losses of one process with a batch of two."""
    words = ["tiny_yarn", text, *SHARED, "--train.per_device_train_batch_size=2"]
    return losses(once("alone", lambda folder: main([*words, f"--output={folder / 'run'}"])) / "run")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_processes_train_as_one_with_twice_the_batch(tmp_path, text, launch, alone):
    start, typed = LAUNCHES[launch]
    both = ["--train.per_device_train_batch_size=1", "--train.processes=2", f"--output={tmp_path}"]
    run([*start, "tiny_yarn", text, *SHARED, *both])
    facts = json.loads((tmp_path / "metrics.json").read_text())["facts"]
    assert facts["processes"] == 2 and facts["distributed"].endswith("MULTI_CPU")
    assert facts["command"].startswith(typed)
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-5)


@pytest.fixture(scope="module")
def whole(once, text) -> Path:
    """A run of six steps that nothing happened to."""
    made = once("whole", lambda folder: main(["tiny_yarn", *resumable(folder / "run", text)]))
    return made / "run"


def resumable(output: Path, text: str) -> list[str]:
    more = ["--train.max_steps=6", "--train.save_steps=2", "--tune.lora.lora_dropout=0.1"]
    return [text, *SMALL, *more, "--train.per_device_train_batch_size=2", f"--output={output}"]


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, text, whole, capsys):
    output = tmp_path / "run"
    words = ["tiny_yarn", *resumable(output, text)]
    process, until = fork(partial(main, words)), time.monotonic() + 240
    while not (output / "checkpoint-2" / "manifest.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert (output / "checkpoint-2").exists() and not (output / "adapter").exists()
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "holds checkpoints of a run" in "".join(capsys.readouterr())
    main([*words, "--resume"])
    assert "Resuming from" in "".join(capsys.readouterr())
    ours, theirs = weights(output / "adapter"), weights(whole / "adapter")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert losses(output) == losses(whole)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, text, whole, capsys):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for name in ("adapter", "metrics.json"):
        shutil.rmtree(output / name) if (output / name).is_dir() else (output / name).unlink()
    optimizer = output / "checkpoint-6" / "optimizer.pt"
    content = bytearray(optimizer.read_bytes())
    content[len(content) // 2] ^= 255
    optimizer.write_bytes(content)
    main(["tiny_yarn", *resumable(output, text), "--resume"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert "checkpoint-6 is not complete: optimizer.pt was altered" in said and "checkpoint-4" in said
    ours, theirs = weights(output / "adapter"), weights(whole / "adapter")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_resumed_with_other_settings_is_refused(text, whole, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tiny_yarn", *resumable(whole, text), "--train.learning_rate=1e-4", "--resume"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert ended.value.code == 2 and "train.learning_rate was 0.002 and is 0.0001" in said


def test_norms_and_embeddings_beside_lora_read_better_than_lora_alone(tmp_path):
    """As the papers say, of interpolation, which asks most of tuning."""
    for module in (argparse, inspect, subprocess, typing):
        (tmp_path / f"{module.__name__}.txt").write_text(inspect.getsource(module))
    measured = {}
    for name, words in {"alone": ["--tune.norms=false", "--tune.embeddings=false"], "both": []}.items():
        settings = read_settings(
            "tiny_linear",
            [
                f"--data.path={tmp_path}/*.txt", "--data.length=512", "--train.max_steps=16",
                "--data.passkey=0.0", "--measure={lengths: [512], windows: 32}", f"--output={tmp_path / name}", *words,
            ],
        )  # fmt: skip
        figures = train(settings, resume=False, merged=False, compared=False)
        measured[name] = next(figure.value for figure in figures if figure.metric == "loss")
    assert measured["both"] < measured["alone"] - 0.03, measured


MISTAKES = {
    "--train.processes=2": "train.processes is 2, and 1 are running",  # as accelerate does of --cpu --num_processes 2
    "--data.lenght=3": "Did you mean 'length'?",
    "--data.held_out=0.001": "The text that is held out is too short: it is measured at 128 tokens",
    "--data.length=2048 --measure.lengths=[64]": "made for 1280",
    "--model.path=/nowhere": "is not a directory",
    "--model.objective=masked --data.passkey=0.0": "cannot be loaded",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_told(tmp_path, text, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tiny_yarn", text, *SMALL, *words.split(), f"--output={tmp_path / 'out'}"])
    assert ended.value.code == 2 and MISTAKES[words] in " ".join(capsys.readouterr().err.split())
