"""Right or refused: what transformers without this package makes of every checkpoint, in a process of its own."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import CELLS as ALL_CELLS
from cells import LENGTH, OUTSIDE, TABLES, tiny, tokens
from safetensors.torch import save_file
from stored_models import LLAMA3, LONG, logits, patched_model
from test_temperature import smollm3
from transformers import AutoModel

from hf_posenc import is_patched, patch_model, save
from hf_posenc.patching.grades import CONFIG, SEALED, WEIGHTS, cells

SCRIPT = Path(__file__).with_name("plain_load.py")
FORCED = {"forced_sdpa": {"attn_implementation": "sdpa"}, "forced_eager": {"attn_implementation": "eager"}}
WAYS = {"as_is": {}, **FORCED, "bf16": {"dtype": "bfloat16"}, "headless": {}}
"""How a stranger may load."""
PAST = ("as_is", "bf16")
"""Those also tried past the trained length."""
COMPOSED = ["yarn", "linear", "ntk", "llama3"]
EXACT = {
    f"{scheme}_drope": (scheme, dict(temperature="drope c=0.5", factor=4.0)) for scheme in ("none", "ntk", "yarn")
}
LISTED = "part_listed"
"""A plan that the list of layers of a SmolLM3 says."""
REFUSED = {
    "yarn_log": ("yarn", dict(temperature="log", factor=4.0)),
    "ssmax": ("none", dict(temperature="ssmax")),
    "part_none": ({1: "none"}, {}),
    "part_window": ({0: ("window", {"window": 9})}, {}),
}
"""Temperatures and plans that a config says, and others."""
CELLS = [(scheme, kind) for scheme, kind in ALL_CELLS if kind not in OUTSIDE]
"""A stranger knows the model types of transformers."""


def plain_verdicts(jobs, folder):
    """What one clean process says of each job (see plain_load.py)."""
    file = Path(folder) / "jobs.json"
    file.write_text(json.dumps(jobs))
    command = [sys.executable, "-I", str(SCRIPT), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def auto_class(kind):
    return "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"


def answer(model, ids, way):
    """What a model says when a stranger loads it that way."""
    if model.config._attn_implementation.startswith("hf_posenc"):
        return torch.zeros(1)  # sealed: it is not to answer at all
    twin = copy.deepcopy(model)
    if way in FORCED:
        twin.set_attn_implementation(FORCED[way]["attn_implementation"])
    if way == "headless":
        with torch.no_grad():
            return twin.base_model(ids).last_hidden_state
    return logits(twin.to(torch.bfloat16) if way == "bf16" else twin, ids)


def jobs_for(name, model, kind, folder):
    """Save a model and what it says, within the trained length and up to what its config promises."""
    save(model, folder / name)
    lengths = {LENGTH: tuple(WAYS)}
    if model.config.max_position_embeddings >= LONG:
        lengths[LONG] = PAST
    jobs = {}
    for length, ways in lengths.items():
        ids, expected = tokens(2, length), str(folder / f"{name}.{length}.safetensors")
        save_file({"ids": ids, **{way: answer(model, ids, way) for way in ways}}, expected)
        for way in ways:
            jobs[f"{name} {way} {length}"] = {
                "path": str(folder / name),
                "auto": "AutoModel" if way == "headless" else auto_class(kind),
                "arguments": WAYS[way],
                "expected": expected,
                "key": way,
            }
    return jobs


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """One process for all: every cell, scalings on top of a scaled model, and one that is wrong on purpose."""
    folder, jobs = tmp_path_factory.mktemp("cells"), {}
    for scheme, kind in CELLS:
        jobs |= jobs_for(f"{scheme}-{kind}", patched_model(scheme, kind), kind, folder)
    for scheme in COMPOSED:
        model = tiny("llama", rope_parameters=dict(LLAMA3), max_position_embeddings=64)
        patch_model(model, scheme, factor=4.0, existing="extend")
        jobs |= jobs_for(f"{scheme}-composed", model, "llama", folder)
    for name, (scheme, options) in {**EXACT, **REFUSED}.items():
        jobs |= jobs_for(name, patch_model(tiny("llama"), scheme, **options), "llama", folder)
    jobs |= jobs_for(LISTED, patch_model(smollm3(no_rope_layers=[1, 1]), {0: "none"}), "smollm3", folder)
    jobs |= jobs_for("spoilt", patched_model("yarn", "llama"), "llama", folder)
    config = json.loads((folder / "spoilt" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    del config["rope_scaling"]  # which says the same, to older readers
    (folder / "spoilt" / "config.json").write_text(json.dumps(config))
    return plain_verdicts(jobs, folder)


def of(verdicts, name):
    return {job.partition(" ")[2]: found for job, found in verdicts.items() if job.startswith(name + " ")}


@pytest.mark.parametrize(("scheme", "kind"), CELLS)
def test_a_stranger_gets_the_same_or_nothing(scheme, kind, verdicts):
    own = "a table" if kind in TABLES else "RoPE"
    grade, found = cells()[scheme, own], of(verdicts, f"{scheme}-{kind}")
    assert len(found) >= len(WAYS)
    if grade in (CONFIG, WEIGHTS):
        assert set(found.values()) == {"exact"}, found
        return
    assert grade == SEALED
    assert all(verdict.startswith("refused") for verdict in found.values()), found
    for way, verdict in found.items():
        if not way.startswith("forced"):  # who forces an attention has read the message already
            assert "hf_posenc.load" in verdict, (way, verdict)


@pytest.mark.parametrize("scheme", COMPOSED)
def test_a_composed_map_is_exact_everywhere(scheme, verdicts):
    found = of(verdicts, f"{scheme}-composed")
    assert len(found) == len(WAYS) + len(PAST)
    assert set(found.values()) == {"exact"}, found


@pytest.mark.parametrize("name", [*EXACT, LISTED, *REFUSED])
def test_temperatures_and_plans(name, verdicts):
    found = of(verdicts, name)
    assert len(found) >= len(WAYS)
    assert all(verdict.startswith("exact" if name in (*EXACT, LISTED) else "refused") for verdict in found.values()), (
        found
    )


def test_nothing_is_silently_wrong(verdicts):
    assert {job for job, found in verdicts.items() if found.startswith("wrong")} == {
        "spoilt " + w for w in of(verdicts, "spoilt")
    }
    assert sum(found == "exact" for found in verdicts.values()) > 100
    assert sum(found.startswith("refused") for found in verdicts.values()) > 100


def test_the_script_sees_what_is_wrong(verdicts):
    """A checkpoint whose scheme was taken out of its config is told from a right one."""
    found = of(verdicts, "spoilt")
    assert len(found) == len(WAYS) + len(PAST)
    assert all(verdict.startswith("wrong") for verdict in found.values()), found


def test_reading_a_sealed_config_changes_nothing_for_others(tmp_path):
    """With the package imported, an unpatched model is still an ordinary one."""
    save(patched_model("alibi", "llama"), tmp_path / "sealed")
    tiny("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(Exception, match="hf_posenc"):
        AutoModel.from_pretrained(tmp_path / "sealed")
    assert not is_patched(AutoModel.from_pretrained(tmp_path / "plain"))
