"""Damaged and foreign checkpoints: refused with a reason."""

import json
import os
import shutil

import pytest
import torch
from cells import LENGTH, tokens
from safetensors.torch import load_file, save_file
from stored_models import LONG, logits

from hf_posenc import PosencError, load, merge, save
from hf_posenc.checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from hf_posenc.patching.records import PLAN_FORMAT


@pytest.fixture
def damaged(whole, tmp_path):
    """A way to a copy of a good checkpoint."""

    def take(name):
        shutil.copytree(whole / name, tmp_path / name)
        return tmp_path / name

    return take


def edit(path, change, file="config.json"):
    """Apply `change` to the JSON object in a file of a checkpoint."""
    data = json.loads((path / file).read_text())
    change(data)
    (path / file).write_text(json.dumps(data))


def assert_refused(path, *words, **arguments):
    """That `load` raises a PosencError with these words in it."""
    with pytest.raises(PosencError) as caught:
        load(path, **arguments)
    for word in words:
        assert word in str(caught.value), str(caught.value)


NOT_JSON = {
    "empty": b"",
    "truncated": b'{"format": 1, "sch',
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "null": b"null",
    "a text": b"once upon a time",
    "deep": b"[" * 100_000,
    "a long number": b'{"format": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("text", NOT_JSON)
@pytest.mark.parametrize(("name", "file"), [("yarn", "config.json"), ("adapter", "posenc.json")])
def test_files_that_are_no_json_object(name, file, text, damaged):
    path = damaged(name)
    (path / file).write_bytes(NOT_JSON[text])
    assert_refused(path, str(path / file))


@pytest.mark.parametrize("text", ["empty", "truncated", "binary", "a list"])
def test_an_adapter_config_that_is_no_json_object(text, damaged):
    path = damaged("adapter")
    (path / "adapter_config.json").write_bytes(NOT_JSON[text])
    assert_refused(path, "adapter_config.json")


FOREIGN = {
    "another tool's": ({"name": "posenc", "version": 3}, "not a posenc record"),
    "empty": ({}, "not a posenc record"),
    "of the future": ({"format": PLAN_FORMAT + 1, "scheme": "yarn", "new": 1}, "update hf_posenc"),
    "of no version": ({"format": "1"}, "whole number"),
    "of a true version": ({"format": True}, "whole number"),
    "without a scheme": ({"format": 1, "options": {}, "geometry": {}, "original": {}}, "lacks scheme"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_records(kind, damaged):
    data, reason = FOREIGN[kind]
    adapter, model = damaged("adapter"), damaged("yarn")
    (adapter / "posenc.json").write_text(json.dumps(data))
    assert_refused(adapter, reason)
    edit(model, lambda config: config.update(posenc=data))
    assert_refused(model, reason)


@pytest.mark.parametrize("value", [None, 5, "yarn", [], [{"format": 1}]])
def test_a_record_is_an_object(value, damaged):
    path = damaged("yarn")
    edit(path, lambda config: config.update(posenc=value))
    assert_refused(path, "JSON object")


def at(*keys, value=None, drop=False):
    """A change deep in a config."""

    def change(data):
        for key in keys[:-1]:
            data = data[key]
        if drop:
            del data[keys[-1]]
        else:
            data[keys[-1]] = value

    return change


RECORDS = {
    "unknown scheme": (at("posenc", "scheme", value="yarm"), "Did you mean 'yarn'"),
    "scheme of another type": (at("posenc", "scheme", value=["yarn"]), "Unknown scheme"),
    "unknown option": (at("posenc", "options", "beta_fst", value=1), "Did you mean 'beta_fast'"),
    "unknown key": (at("posenc", "extra", value=1), "unknown keys: extra"),
    "missing key": (at("posenc", "geometry", drop=True), "lacks geometry"),
    "missing number": (at("posenc", "geometry", "head_dim", drop=True), "lacks head_dim"),
    "unknown number": (at("posenc", "geometry", "heads", value=3), "unknown keys: heads"),
    "number of another type": (at("posenc", "geometry", "num_heads", value="4"), "num_heads='4'"),
    "negative number": (at("posenc", "geometry", "head_dim", value=-8), "head_dim=-8"),
    "original without anything": (at("posenc", "original", value={}), "lacks rope_parameters"),
    "original without length": (at("posenc", "original", "max_position_embeddings", drop=True), "lacks max_position"),
    "original of another type": (at("posenc", "original", "rope_parameters", value=5), "makes no sense"),
    "option of another type": (at("posenc", "options", "factor", value="4"), "factor must be"),
    "option out of range": (at("posenc", "options", "factor", value=0.5), "factor must be"),
    "option that is no number": (at("posenc", "options", "factor", value=float("nan")), "factor must be"),
    "option past all numbers": (at("posenc", "options", "factor", value=10**400), "factor must be"),
    "theta past all numbers": (at("posenc", "geometry", "rope", "rope_theta", value=10**400), "rope"),
    "theta of nothing": (at("posenc", "geometry", "rope", "rope_theta", value=0), "rope"),
    "rope type of another type": (at("posenc", "geometry", "rope", "rope_type", value=[]), ""),
    "rope type unknown": (at("posenc", "geometry", "rope", "rope_type", value="spiral"), "spiral"),
    "rope type without its numbers": (at("posenc", "geometry", "rope", "rope_type", value="yarn"), ""),
    "no rope": (at("posenc", "geometry", "rope", drop=True), ""),
}


@pytest.mark.parametrize("fault", RECORDS)
def test_faulty_records(fault, damaged):
    change, reason = RECORDS[fault]
    path = damaged("yarn")
    edit(path, change)
    assert_refused(path, reason)
    with pytest.raises(PosencError):
        describe_checkpoint(path)


@pytest.mark.parametrize("name", ["t5", "learned", "learned-gpt2"])
@pytest.mark.parametrize("seed", ["zero", 1.5, None, [], -1, 2**70])
def test_a_seed_that_is_none(name, seed, damaged):
    path = damaged(name)
    edit(path, at("posenc", "options", "seed", value=seed))
    assert_refused(path, "seed")


CONTRADICTIONS = {
    "factor": ("yarn", at("rope_parameters", "factor", value=8.0), "contradicts itself"),
    "theta": ("yarn", at("rope_parameters", "rope_theta", value=500_000.0), "contradicts itself"),
    "rope type": ("yarn", at("rope_parameters", "rope_type", value="linear"), "contradicts itself"),
    "rope removed": ("yarn", at("rope_parameters", drop=True), "contradicts itself"),
    "length": ("yarn", at("max_position_embeddings", value=64), "max_position_embeddings"),
    "length removed": ("yarn", at("max_position_embeddings", drop=True), "max_position_embeddings"),
    "length of a seal": ("alibi", at("max_position_embeddings", value=64), "max_position_embeddings"),
    "length of a table": ("learned-gpt2", at("n_positions", value=64), "n_positions"),
    "attention removed": ("alibi", at("attn_implementation", drop=True), "attn_implementation"),
    "attention changed": ("alibi", at("attn_implementation", value="sdpa"), "attn_implementation"),
    "attention of a table": ("t5-gpt2", at("attn_implementation", value="eager"), "attn_implementation"),
    "attention added": ("yarn", at("attn_implementation", value="hf_posenc_sdpa"), "attention"),
    "seal broken": ("alibi", at("rope_parameters", "rope_type", value="default"), "contradicts itself"),
    "scheme": ("yarn", at("posenc", "scheme", value="linear"), ""),
    "target": ("yarn", at("posenc", "options", "factor", value=8.0), "contradicts itself"),
    "heads": ("alibi", at("posenc", "geometry", "num_heads", value=8), "num_heads=8"),
    "head size": ("alibi", at("posenc", "geometry", "head_dim", value=16), "head_dim=16"),
    "hidden size": ("alibi", at("posenc", "geometry", "hidden_size", value=64), "hidden_size=64"),
    "direction": ("t5", at("posenc", "geometry", "causal", value=False), "causal=False"),
    "trained length": ("yarn", at("posenc", "geometry", "trained_length", value=16), ""),
    "model type": ("yarn", at("model_type", value="llamma"), "llamma"),
    "another model type": ("yarn", at("model_type", value="bert"), ""),
    "architecture": ("yarn", at("architectures", value=["LlamaForNothing"]), "model_class="),
    "no architecture": ("yarn", at("architectures", drop=True), "model_class="),
    "architectures that are none": ("yarn", at("architectures", value={"a": 1}), "model_class="),
    "architecture that is no model": ("yarn", at("architectures", value=["logging"]), "model_class="),
    "architecture of another family": ("yarn", at("architectures", value=["GPT2LMHeadModel"]), ""),
    "sizes that are none": ("yarn", at("hidden_size", value="large"), "config"),
    "model type that is none": ("yarn", at("model_type", value=["llama"]), "model type"),
    "record lost": ("alibi", at("posenc", drop=True), "lost its 'posenc' record"),
    "record lost on a table": ("t5-gpt2", at("posenc", drop=True), "lost its 'posenc' record"),
}


@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_configs_that_contradict_themselves(fault, damaged):
    name, change, reason = CONTRADICTIONS[fault]
    path = damaged(name)
    edit(path, change)
    assert_refused(path, reason)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_sizes_that_are_not_those_of_the_weights(key, damaged):
    path = damaged("yarn")
    edit(path, lambda config: config.update({key: 2 * config[key]}))
    assert_refused(path)


@pytest.mark.parametrize("name", ["alibi", "t5-gpt2"])
@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention", "hf_posenc_sdpa"])
def test_kernels_that_a_sealed_scheme_cannot_run_on(name, kernel, whole):
    assert_refused(whole / name, "sdpa", attn_implementation=kernel)


def test_directories_that_are_no_checkpoint(tmp_path, whole):
    assert_refused(tmp_path, "not a checkpoint")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "not a directory")
    assert_refused(tmp_path / "missing", "not a directory")
    assert_refused("no-such-organisation/no-such-model", "no-such-organisation/no-such-model")
    with pytest.raises(PosencError, match="is a file"):
        save(load(whole / "yarn"), tmp_path / "file")
    for source in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(PosencError):
            patch_checkpoint(source, tmp_path / "out", "none")
        with pytest.raises(PosencError):
            describe_checkpoint(source)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_missing_shard(damaged):
    path = damaged("shards")
    shards = sorted(path.glob("model-*.safetensors"))
    shards[1].unlink()
    assert_refused(path, shards[1].name)
    with pytest.raises(PosencError, match=shards[1].name):
        patch_checkpoint(path, path.with_name("out"), "yarn", factor=2.0)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 5}}])
def test_an_index_that_is_none(index, damaged):
    path = damaged("shards")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(path)
    with pytest.raises(PosencError):
        patch_checkpoint(path, path.with_name("out"), "yarn", factor=2.0)


@pytest.mark.parametrize("size", [0, 100, 5000])
@pytest.mark.parametrize("name", ["yarn", "none-gpt2"])
def test_truncated_weights(name, size, damaged):
    path = damaged(name)
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:size])
    assert_refused(path, "model.safetensors")
    with pytest.raises(PosencError, match=r"model\.safetensors"):
        patch_checkpoint(path, path.with_name("out"), "yarn", factor=2.0)


@pytest.mark.parametrize(
    ("name", "key"), [("t5", "model.posenc_bias.weight"), ("learned", "model.posenc_table.weight")]
)
def test_parameters_of_a_scheme_that_are_not_there(name, key, damaged):
    path = damaged(name)
    tensors = load_file(path / "model.safetensors")
    own = tensors.pop(key)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert_refused(path, key, "not whole")
    save_file({**tensors, key: own[:-1].clone()}, path / "model.safetensors", metadata={"format": "pt"})
    assert_refused(path, key, "shape")


def with_table(path, change):
    """Rewrite the weights of a GPT-2 with `change` of its table, or without one."""
    tensors = load_file(path / "model.safetensors")
    table = change(tensors.pop("transformer.wpe.weight"))
    kept = tensors if table is None else {**tensors, "transformer.wpe.weight": table}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["learned-gpt2", "none-gpt2"])
def test_a_table_that_is_too_short(name, damaged):
    path = damaged(name)
    with_table(path, lambda table: table[:8].clone())
    assert_refused(path, "wpe")


def test_a_table_that_is_not_there(damaged):
    """A new random one would be a model that knows other positions."""
    path = damaged("learned-gpt2")
    with_table(path, lambda table: None)
    assert_refused(path, "wpe")


def test_a_table_to_patch_that_is_not_there(damaged):
    path = damaged("learned-gpt2")
    with_table(path, lambda table: None)
    edit(path, at("posenc", drop=True))
    with pytest.raises(PosencError, match="wpe"):
        patch_checkpoint(path, path.with_name("out"), "learned", factor=2.0)


@pytest.mark.parametrize("name", ["llama", "yarn", "t5", "none-gpt2"])
def test_pickled_weights_are_not_loaded(name, damaged):
    path = damaged(name)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert_refused(path, "Pickled weights are not loaded")
    with pytest.raises(PosencError, match="Pickled"):
        patch_checkpoint(path, path.with_name("out"), "yarn", factor=2.0)


def test_faulty_adapters(damaged, whole):
    path = damaged("adapter")
    torch.save({}, path / "adapter_model.bin")
    weights = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").unlink()
    assert_refused(path, "Pickled weights are not loaded")
    (path / "adapter_model.safetensors").write_bytes(weights)
    edit(path, lambda adapter: adapter.update(base_model_name_or_path=None), "adapter_config.json")
    assert_refused(path, "base=")
    assert load(path, base=whole / "llama")
    edit(path, lambda adapter: adapter.update(base_model_name_or_path=str(path / "gone")), "adapter_config.json")
    assert_refused(path, "gone")
    with pytest.raises(PosencError):
        merge(path, path.with_name("out"))
    assert not path.with_name("out").exists()


@pytest.mark.parametrize("value", [5, ["a"]])
def test_a_base_model_whose_name_is_none(value, damaged):
    path = damaged("adapter")
    edit(path, lambda adapter: adapter.update(base_model_name_or_path=value), "adapter_config.json")
    assert_refused(path, "base")
    with pytest.raises(PosencError):
        describe_checkpoint(path)


# ---------------------------------------------------------------------------------------------------------------------
# Saving that fails


# ---------------------------------------------------------------------------------------------------------------------
# Fuzzing


def test_the_good_checkpoints_are_good(whole):
    """Else all that is refused above proves nothing."""
    for path in sorted(whole.iterdir()):
        assert logits(load(path), tokens(1, LONG if path.name != "llama" else LENGTH)).isfinite().all()
        describe_checkpoint(path)
