"""Records and checkpoints that are mutated, cut short or nothing but noise: read exactly, or refused with a reason."""

import contextlib
import copy
import json
import shutil

import pytest
import torch
from cells import LENGTH, options, tiny, tokens
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stored_models import logits

from hf_posenc import PosencError, load, patch_model
from hf_posenc.checkpoints.on_disk import describe_checkpoint
from hf_posenc.patching.records import FORMAT, PLAN_FORMAT, Record

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 1, 10**400, 2**63, 1e308, "yarn", "t5", "linear", "none", ""])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths_in(data, prefix=()):
    """Where every value of a JSON object is."""
    found = []
    for key in data:
        found.append((*prefix, key))
        if isinstance(data[key], dict):
            found += paths_in(data[key], (*prefix, key))
    return found


def parent_of(data, path):
    for key in path[:-1]:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else None


@st.composite
def mutations(draw, data, below=()):
    """The JSON object with a few of its values gone, replaced or joined by others."""
    data = copy.deepcopy(data)
    places = paths_in(parent_of(data, (*below, None)), below)
    for _ in range(draw(st.integers(1, 3))):
        path, how = draw(st.sampled_from(places)), draw(st.sampled_from(["delete", "replace", "add"]))
        parent = parent_of(data, path)
        if parent is None:
            continue
        if how == "delete":
            parent.pop(path[-1], None)
        else:
            parent[path[-1] if how == "replace" else draw(st.text(max_size=8))] = draw(json_values)
    return data


def example_records():
    found = []
    for scheme, kind in [("yarn", "llama"), ("t5", "gpt2"), ("learned", "llama"), ("longrope", "bert")]:
        found.append(patch_model(tiny(kind), scheme, **options(scheme)).config.posenc)
    return [json.loads(json.dumps(record)) for record in found]


EXAMPLES = example_records()
READ = (1, FORMAT, PLAN_FORMAT)
fuzzed = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(st.sampled_from(EXAMPLES).flatmap(mutations))
@example(EXAMPLES[0])
@settings(fuzzed, max_examples=300)
def test_a_mutated_record_is_read_or_refused(data):
    with contextlib.suppress(PosencError):
        record = Record.from_dict(data)
        again = Record.from_dict(record.to_dict())
        assert again == record
        assert record.to_dict()["scheme"] == data["scheme"]
        # Formats of the past are read, and written as today's.
        assert data["format"] in READ and record.to_dict()["format"] == FORMAT


@given(st.sampled_from(EXAMPLES), st.data())
@settings(fuzzed, max_examples=60)
def test_a_truncated_record_is_refused(record, draw):
    text = json.dumps(record)
    cut = draw.draw(st.integers(0, len(text) - 1))
    with pytest.raises((PosencError, json.JSONDecodeError)):
        Record.from_dict(json.loads(text[:cut]))


def outcome(path, read):
    """What `read` makes of the checkpoint, None if it refuses; a PosencError is the only way to refuse."""
    try:
        return read(path)
    except PosencError as error:
        assert str(error)
        return None


@given(st.data())
@settings(fuzzed, max_examples=150)
@pytest.mark.parametrize("name", ["yarn", "t5", "learned-gpt2", "dynamic_ntk"])
def test_describe_takes_or_refuses_a_config_with_a_mutated_record(name, whole, tmp_path, draw):
    config = json.loads((whole / name / "config.json").read_text())
    config = draw.draw(mutations(config, below=("posenc",)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome(tmp_path, describe_checkpoint)


@given(st.data())
@settings(fuzzed, max_examples=25)
@pytest.mark.parametrize("name", ["yarn", "t5"])
def test_load_gives_the_same_or_refuses_a_mutated_config(name, whole, tmp_path, draw):
    """Only what says something of positions is changed: the rest is transformers' to check."""
    shutil.copytree(whole / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((whole / name / "config.json").read_text())
    keys = ["posenc", "rope_parameters", "max_position_embeddings", "attn_implementation", "architectures"]
    part = draw.draw(mutations({key: config.get(key) for key in keys}))
    changed = {**{key: value for key, value in config.items() if key not in keys}, **part}
    if "posenc" not in changed:
        return  # a checkpoint without a record is transformers' own business, unless it is sealed
    (tmp_path / "config.json").write_text(json.dumps(changed))
    model = outcome(tmp_path, load)
    if model is not None and name == "yarn":  # all of which is told twice
        assert torch.equal(logits(model, tokens(1, LENGTH)), logits(load(whole / name), tokens(1, LENGTH)))


@given(st.data())
@settings(fuzzed, max_examples=40)
@pytest.mark.parametrize(("name", "file"), [("yarn", "config.json"), ("adapter", "posenc.json")])
def test_load_refuses_truncated_files(name, file, whole, tmp_path, draw):
    shutil.copytree(whole / name, tmp_path, dirs_exist_ok=True)
    text = (whole / name / file).read_bytes().rstrip()
    (tmp_path / file).write_bytes(text[: draw.draw(st.integers(0, len(text) - 1))])
    assert outcome(tmp_path, load) is None


@given(st.binary(max_size=60))
@settings(fuzzed, max_examples=40)
def test_load_refuses_noise(whole, tmp_path, noise):
    shutil.copytree(whole / "yarn", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_bytes(noise)
    assert outcome(tmp_path, load) is None
