"""Checkpoints patched and described on disk: the same files as with a model in memory, and no weights read in vain."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from cells import LENGTH, VOCAB, options, tiny, tokens
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from stored_models import LLAMA3, LONG, config_of, logits, patched_model
from transformers import AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

import hf_posenc.checkpoints.on_disk
from hf_posenc import SCHEMES, PosencError, describe, load, patch_model, save
from hf_posenc.checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from hf_posenc.cli.main import app
from hf_posenc.patching.grades import CONFIG, SEALED, cells

KINDS = ["llama", "gpt2", "bert"]
FAMILY = {"llama": "RoPE", "gpt2": "a table", "bert": "a table"}
BY_CONFIG = [name for name in SCHEMES if cells()[name, "RoPE"] == CONFIG]
TOKENIZER = {"model_max_length": LENGTH, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up": "naïve"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Unpatched checkpoints with a tokenizer's files and a README, whole and in shards."""
    folder = tmp_path_factory.mktemp("sources")
    for kind in KINDS:
        for name, settings in ((kind, {}), (f"{kind}-shards", {"max_shard_size": "15KB"})):
            tiny(kind).save_pretrained(folder / name, **settings)
            (folder / name / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
            (folder / name / "tokenizer.json").write_text("{}")
            (folder / name / "README.md").write_text("# A model")
    return folder


def tensors_of(folder):
    """Every tensor by name, from however many files."""
    return {key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()}


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir()}


def command(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def reach(scheme):
    """The options of a scheme as the command line takes them."""
    known = {"factor": "--factor", "target_length": "--target-length"}
    given = options(scheme).items()
    plain = [part for name, value in given if name in known for part in (known[name], str(value))]
    return plain + [part for name, value in given if name not in known for part in ("--option", f"{name}={value}")]


@pytest.mark.parametrize("form", ["", "-shards"], ids=["whole", "shards"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_patching_on_disk_equals_patching_in_memory(scheme, kind, form, sources, tmp_path):
    source, ids = sources / (kind + form), tokens(2, LONG)
    before = digests(source)
    done = command("patch", source, tmp_path / "disk", "--scheme", scheme, *reach(scheme))
    assert done.exit_code == 0, done.output
    assert digests(source) == before
    model = patch_model(tiny(kind), scheme, **options(scheme))
    save(model, tmp_path / "memory")
    mine, theirs = config_of(tmp_path / "disk"), config_of(tmp_path / "memory")
    assert mine == theirs
    mine, theirs = tensors_of(tmp_path / "disk"), tensors_of(tmp_path / "memory")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)
    assert torch.equal(logits(load(tmp_path / "disk"), ids), logits(model, ids))
    if form:
        index = json.loads((tmp_path / "disk" / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == mine.keys()
        for key, file in index.items():
            with safe_open(tmp_path / "disk" / file, framework="pt") as stored:
                assert key in set(stored.keys())


@pytest.mark.parametrize("scheme", BY_CONFIG)
def test_what_lives_in_the_config_reads_no_weights(scheme, sources, tmp_path, monkeypatch):
    class Locked:
        """A safetensors file whose header may be read, and nothing else."""

        def __init__(self, *args, **kwargs):
            self.inner = safe_open(*args, **kwargs)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

        def keys(self):
            return self.inner.keys()

    for module in ("on_disk", "files", "load"):
        monkeypatch.setattr(f"hf_posenc.checkpoints.{module}.safe_open", Locked)
    for name in ("llama", "llama-shards"):
        patch_checkpoint(sources / name, tmp_path / name, scheme, **options(scheme))
        weights = {n: d for n, d in digests(sources / name).items() if "safetensors" in n}
        weights.pop("model.safetensors.index.json", None)
        found = digests(tmp_path / name)
        assert {n: found[n] for n in weights} == weights


def test_the_guard_of_that_test_guards(sources, tmp_path, monkeypatch):
    def closed(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf_posenc.checkpoints.on_disk, "safe_open", closed)
    patch_checkpoint(sources / "llama", tmp_path / "a", "yarn", factor=2.0)
    with pytest.raises(AssertionError, match="weights were read"):
        patch_checkpoint(sources / "gpt2", tmp_path / "b", "learned", factor=2.0)
    assert os.listdir(tmp_path) == ["a"]


def test_half_precision_stays(tmp_path):
    for kind in KINDS:
        tiny(kind).to(torch.bfloat16).save_pretrained(tmp_path / kind)
        for scheme in ("t5", "learned", "sinusoidal", "none", "yarn"):
            patch_checkpoint(tmp_path / kind, tmp_path / "out", scheme, overwrite=True, **options(scheme))
            assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
            model = patch_model(tiny(kind).to(torch.bfloat16), scheme, **options(scheme))
            loaded = load(tmp_path / "out")
            assert torch.equal(logits(loaded, tokens(2, LONG)), logits(model, tokens(2, LONG)))


@pytest.mark.parametrize("scheme", ["yarn", "learned", "t5"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*newly made")
def test_headless_checkpoints(scheme, kind, tmp_path):
    """The names of their weights have no prefix."""
    base = tiny(kind).base_model
    base.save_pretrained(tmp_path / "a")
    patch_checkpoint(tmp_path / "a", tmp_path / "b", scheme, **options(scheme))
    model = patch_model(AutoModel.from_pretrained(tmp_path / "a"), scheme, **options(scheme))
    loaded = load(tmp_path / "b", model_class=AutoModel)
    with torch.no_grad():
        ids = tokens(2, LONG)
        assert torch.equal(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


def test_other_files_come_along(sources, tmp_path):
    command("patch", sources / "llama", tmp_path / "a", "--scheme", "yarn", "--target-length", 4 * LENGTH)
    settings = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings == {**TOKENIZER, "model_max_length": 4 * LENGTH}
    for name in ("README.md", "tokenizer.json", "generation_config.json"):
        kept = "README.base.md" if name == "README.md" else name  # beside a card of what was made
        assert (tmp_path / "a" / kept).read_bytes() == (sources / "llama" / name).read_bytes()
    assert json.loads((sources / "llama" / "tokenizer_config.json").read_text())["model_max_length"] == LENGTH


@pytest.mark.parametrize("name", ["llama", "llama-shards", "gpt2", "gpt2-shards", "bert-shards"])
@pytest.mark.parametrize("scheme", ["yarn", "t5", "learned"])
def test_a_checkpoint_may_be_patched_over_another(scheme, name, sources, tmp_path):
    kind = name.partition("-")[0]
    other = name.removesuffix("-shards") if name.endswith("-shards") else f"{name}-shards"
    shutil.copytree(sources / other, tmp_path / "a")
    done = command("patch", sources / name, tmp_path / "a", "--scheme", scheme, *reach(scheme), "--overwrite")
    assert done.exit_code == 0, done.output
    model = patch_model(tiny(kind), scheme, **options(scheme))
    assert torch.equal(logits(load(tmp_path / "a"), tokens(2, LONG)), logits(model, tokens(2, LONG)))
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(sources / name))


@pytest.mark.parametrize("name", ["llama", "gpt2-shards"])
def test_a_failure_leaves_the_checkpoint_that_was_there_whole(name, sources, tmp_path, monkeypatch):
    shutil.copytree(sources / "llama", tmp_path / "a")
    before = digests(tmp_path / "a")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_posenc.checkpoints.on_disk.shutil, "copy2", full)
    with pytest.raises(OSError, match="No space"):
        patch_checkpoint(sources / name, tmp_path / "a", "t5", overwrite=True)
    monkeypatch.undo()
    assert digests(tmp_path / "a") == before
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("second", ["ntk", "t5"])
@pytest.mark.parametrize("first", ["yarn", "t5", "learned"])
def test_a_patched_rotary_checkpoint_is_patched_from_its_original(first, second, tmp_path):
    save(patched_model(first, "llama"), tmp_path / "a")
    patch_checkpoint(tmp_path / "a", tmp_path / "b", second, **options(second))
    fresh = patch_model(tiny("llama"), second, **options(second))
    loaded = load(tmp_path / "b")
    assert torch.equal(logits(loaded, tokens(2, LONG)), logits(fresh, tokens(2, LONG)))
    assert loaded.config.posenc == fresh.config.posenc
    left = {key for key in tensors_of(tmp_path / "b") if "posenc_" in key}
    assert left == {name for name in fresh.state_dict() if "posenc_" in name}


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("first", ["none", "alibi", "learned"])
def test_a_patched_table_checkpoint_is_refused(first, kind, tmp_path):
    save(patched_model(first, kind), tmp_path / "a")
    done = command("patch", tmp_path / "a", tmp_path / "b", "--scheme", "t5")
    assert done.exit_code == 2
    assert "patch the original checkpoint" in done.output
    assert not (tmp_path / "b").exists()


def test_extending_and_replacing_a_scaled_rope(tmp_path):
    source = tiny("llama", rope_parameters=dict(LLAMA3), max_position_embeddings=64)
    source.save_pretrained(tmp_path / "a")
    lists = ("short_factor", "long_factor")
    for existing in ("extend", "replace"):
        done = command(
            *("patch", tmp_path / "a", tmp_path / "b", "--scheme", "yarn", "--factor", 4),
            *("--existing", existing, "--overwrite"),
        )
        assert done.exit_code == 0, done.output
        again = tiny("llama", rope_parameters=dict(LLAMA3), max_position_embeddings=64)
        patch_model(again, "yarn", factor=4.0, existing=existing)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
        assert torch.equal(logits(plain, tokens(2, LENGTH)), logits(again, tokens(2, LENGTH)))
        rope = config_of(tmp_path / "b")["rope_parameters"]
        assert rope["rope_type"] == ("longrope" if existing == "extend" else "yarn")
        assert all((name in rope) == (existing == "extend") for name in lists)


def test_options_of_a_scheme_on_the_command_line(sources, tmp_path):
    done = command(
        *("patch", sources / "llama", tmp_path / "a", "--scheme", "yarn", "--target-length", 100),
        *("--trained-length", 25, "--option", "beta_fast=16", "--option", "truncate=false"),
    )
    assert done.exit_code == 0, done.output
    given = config_of(tmp_path / "a")["posenc"]["options"]
    assert given["beta_fast"] == 16
    assert given["truncate"] is False
    assert config_of(tmp_path / "a")["rope_parameters"]["factor"] == 4.0
    assert config_of(tmp_path / "a")["rope_parameters"]["original_max_position_embeddings"] == 25


MISTAKES = {
    "unknown scheme": (["--scheme", "yarm", "--factor", "2"], "yarn"),
    "unknown option": (["--scheme", "yarn", "--factor", "2", "--option", "beta_fst=1"], "beta_fast"),
    "option without value": (["--scheme", "yarn", "--factor", "2", "--option", "beta_fast"], "name=value"),
    "no reach": (["--scheme", "yarn"], "target_length"),
    "shorter": (["--scheme", "yarn", "--target-length", "5"], "shorter"),
    "contradiction": (["--scheme", "yarn", "--target-length", "64", "--factor", "3"], "contradict"),
    "existing": (["--scheme", "yarn", "--factor", "2", "--existing", "extnd"], "extend"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_answered_and_write_nothing(mistake, sources, tmp_path):
    arguments, hint = MISTAKES[mistake]
    done = command("patch", sources / "llama", tmp_path / "a", *arguments)
    assert done.exit_code == 2
    assert hint in done.output
    assert "Traceback" not in done.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_describe_reads_what_the_loaded_model_does(scheme, kind, tmp_path, monkeypatch):
    save(patched_model(scheme, kind), tmp_path / "a", max_shard_size="15KB")
    expected = describe(load(tmp_path / "a"))
    for file in (tmp_path / "a").glob("*.safetensors"):
        file.unlink()  # not needed
    found, adapter = describe_checkpoint(tmp_path / "a")
    assert adapter is None
    assert str(found) == str(expected)
    done = command("describe", tmp_path / "a")
    assert done.exit_code == 0, done.output
    assert scheme in done.output
    sealed = cells()[scheme, FAMILY[kind]] == SEALED
    assert (f"{SEALED}:" in done.output) == sealed
    assert (
        expected.nearest is None if not sealed else expected.nearest == (SCHEMES[scheme].nearest or expected.nearest)
    )
    assert expected.nearest is None or expected.nearest in done.output


@pytest.mark.parametrize("kind", KINDS)
def test_describe_of_an_unpatched_checkpoint(kind, sources):
    expected = describe(tiny(kind))
    found, _ = describe_checkpoint(sources / kind)
    assert str(found) == str(expected)
    assert "unpatched" in command("describe", sources / kind).output


@pytest.mark.parametrize("scheme", ["yarn", "alibi", None])
def test_describe_of_an_adapter(scheme, sources, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(sources / "llama")
    model = patch_model(model, scheme, **options(scheme)) if scheme else model
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    save(get_peft_model(model, config), tmp_path / "a")
    for file in (tmp_path / "a").glob("*.safetensors"):
        file.unlink()
    done = command("describe", tmp_path / "a")
    assert done.exit_code == 0, done.output
    assert "LORA" in done.output
    assert str(sources / "llama") in done.output
    assert (scheme or "unpatched") in done.output


def test_describe_of_an_adapter_on_another_base_is_refused(sources, tmp_path):
    """What load would refuse is not described as if it worked."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(sources / "llama"), "yarn", factor=4.0)
    save(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    for other in (tiny("llama", hidden_size=64), patch_model(tiny("llama"), "linear", factor=4.0)):
        other.save_pretrained(tmp_path / "other")
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "base_model_name_or_path": str(tmp_path / "other")}))
        with pytest.raises(PosencError):
            load(tmp_path / "a")
        done = command("describe", tmp_path / "a")
        assert done.exit_code == 2, done.output
        shutil.rmtree(tmp_path / "other")


@pytest.mark.parametrize("path", ["nowhere/at/all", "./nothing"])
@pytest.mark.parametrize("verb", ["patch", "describe", "merge"])
def test_what_is_not_there_is_said_to_be_missing(verb, path, tmp_path):
    arguments = {"patch": [tmp_path / "b", "--scheme", "none"], "describe": [], "merge": [tmp_path / "b"]}[verb]
    done = command(verb, path, *arguments)
    assert done.exit_code == 2
    assert "hf-posenc:" in done.output
    assert path in done.output
    assert not (tmp_path / "b").exists()


def write_gguf(folder, file):
    """The checkpoint in `folder` as GGUF, as llama.cpp's converter lays LLaMA out; RoPE goes in as a base alone."""
    import gguf

    config, tensors = config_of(folder), tensors_of(folder)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCAB)
    assert config["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    assert config["rope_parameters"]["rope_type"] == "default"
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for key, tensor in tensors.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        count = next((n for name, n in heads.items() if name in key), None)
        if count is not None:  # llama.cpp turns neighbours, transformers halves
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_ntk_survives_gguf(sources, tmp_path):
    """A larger base is all that NTK is: it passes through a format whose readers know no other scaling."""
    pytest.importorskip("gguf")
    patch_checkpoint(sources / "llama", tmp_path / "a", "ntk", factor=4.0)
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "a", tmp_path / "gguf" / "model.gguf")
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf"), tokens(2, LONG)
    theta = config_of(tmp_path / "a")["rope_parameters"]["rope_theta"]
    assert loaded.config.rope_parameters["rope_theta"] == pytest.approx(theta, rel=1e-6)
    torch.testing.assert_close(logits(loaded, ids), logits(load(tmp_path / "a"), ids), atol=1e-3, rtol=0)
    assert (logits(loaded, ids) - logits(tiny("llama"), ids)).abs().max() > 0.1
