"""`save` and `load`: everything needed is written, whoever saves, and comes back to the last bit."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from cells import CELLS, KINDS, LENGTH, TEXT, options, tiny, tokens
from safetensors.torch import load_file
from stored_models import LLAMA3, LONG, assert_same_weights, config_of, disturb, logits, patched_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from hf_posenc import PosencError, check_model, describe, is_patched, load, patch_model, save, unpatch_model
from hf_posenc.core.precision import fp32_names

transformers.logging.disable_progress_bar()

every_cell = pytest.mark.parametrize(("scheme", "kind"), CELLS)
few_cells = pytest.mark.parametrize(("scheme", "kind"), [(s, k) for s, k in CELLS if k in ("llama", "gpt2")])


@every_cell
def test_what_is_saved_comes_back_exactly(scheme, kind, tmp_path):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    expected = logits(model, ids)
    save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(model, ids), expected), "saving changed the model"
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        loaded = load(path)
        check_model(loaded)
        assert not loaded.training
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded, ids), expected)
        assert_same_weights(loaded, model)
        assert str(describe(loaded)) == str(describe(model))
        assert loaded.config.posenc == model.config.posenc
    assert set(os.listdir(tmp_path / "ours")) - {"README.md"} == set(os.listdir(tmp_path / "theirs"))


@few_cells
def test_sharded_checkpoints_come_back_exactly(scheme, kind, tmp_path):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    save(model, tmp_path / "a", max_shard_size="15KB")
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "a"), ids), logits(model, ids))


@few_cells
def test_a_checkpoint_of_a_loaded_model_is_the_same_checkpoint(scheme, kind, tmp_path):
    save(patched_model(scheme, kind), tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    assert config_of(tmp_path / "a") == config_of(tmp_path / "b")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("scheme", "kind"), [("yarn", "llama"), ("alibi", "llama"), ("learned", "gpt2")])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_may_be_left_to_the_checkpoint(name, scheme, kind, tmp_path):
    model, ids = patched_model(scheme, kind).to(torch.bfloat16), tokens(2, LONG)
    save(model, tmp_path / "a")
    again = load(tmp_path / "a", **{name: "auto"})
    assert again.dtype == again.config.dtype == torch.bfloat16
    assert torch.equal(logits(again, ids), logits(model, ids))


@few_cells
def test_dtype_is_passed_on(scheme, kind, tmp_path):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    save(model, tmp_path / "a")
    half = load(tmp_path / "a", dtype=torch.bfloat16)
    fp32 = fp32_names(half)
    assert {p.dtype for name, p in half.named_parameters() if name not in fp32} == {torch.bfloat16}
    assert {p.dtype for name, p in half.named_parameters() if name in fp32} <= {torch.float32}
    assert torch.equal(logits(half, ids), logits(copy.deepcopy(model).to(torch.bfloat16), ids))


@few_cells
def test_a_half_precision_model_stays_what_it_is(scheme, kind, tmp_path):
    model = disturb(patch_model(tiny(kind).to(torch.bfloat16), scheme, **options(scheme)))
    save(model, tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded, tokens(2, LONG)), logits(model, tokens(2, LONG)))


@few_cells
def test_the_kernel_under_ours_can_be_chosen(scheme, kind, tmp_path):
    original = tiny(kind)
    original.set_attn_implementation("eager")
    model = disturb(patch_model(original, scheme, **options(scheme)))
    save(model, tmp_path / "a")
    for kernel in ("eager", "sdpa"):
        loaded = load(tmp_path / "a", attn_implementation=kernel)
        assert loaded.config._attn_implementation.endswith(kernel)
        expected = logits(model, tokens(2, LONG))
        if kernel == "eager":
            assert loaded.config._attn_implementation == model.config._attn_implementation
            assert torch.equal(logits(loaded, tokens(2, LONG)), expected)
        else:
            torch.testing.assert_close(logits(loaded, tokens(2, LONG)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("where", ["cpu", "auto", {"": "cpu"}])
@pytest.mark.parametrize(("scheme", "kind"), [("t5", "llama"), ("yarn", "llama"), ("learned", "gpt2"), ("t5", "bert")])
def test_device_map_is_passed_on(scheme, kind, where, tmp_path):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    save(model, tmp_path / "a", max_shard_size="15KB")
    assert torch.equal(logits(load(tmp_path / "a", device_map=where), ids), logits(model, ids))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["yarn", "t5", "learned", "sinusoidal", "alibi"])
@pytest.mark.filterwarnings("ignore:.*newly made")
def test_another_head_can_be_loaded(scheme, kind, tmp_path):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    save(model, tmp_path / "a")
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state
    bare = load(tmp_path / "a", model_class=AutoModel)
    with torch.no_grad():
        assert torch.equal(bare(ids).last_hidden_state, states)
    with pytest.warns(UserWarning, match="newly made"):
        classifier = load(tmp_path / "a", model_class=AutoModelForSequenceClassification)
    assert logits(classifier, ids).shape == (2, 2)
    with torch.no_grad():
        assert torch.equal(classifier.base_model(ids).last_hidden_state, states)


@pytest.mark.parametrize("scheme", [None, "yarn", "alibi"])
@pytest.mark.filterwarnings("ignore:.*newly made")
def test_config_values_can_be_overridden_as_in_from_pretrained(scheme, tmp_path):
    save(patched_model(scheme, "llama") if scheme else tiny("llama"), tmp_path / "a")
    loaded = load(tmp_path / "a", model_class=AutoModelForSequenceClassification, num_labels=3)
    assert loaded.config.num_labels == 3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["yarn", "t5", "learned"])
@pytest.mark.filterwarnings("ignore:.*newly made")
def test_headless_models_are_saved_and_loaded_too(scheme, kind, tmp_path):
    """Weights then have no prefix; a model with a head finds them all the same."""
    full, ids = patched_model(scheme, kind), tokens(2, LONG)
    bare = full.base_model
    save(bare, tmp_path / "bare")
    loaded = load(tmp_path / "bare")
    with torch.no_grad():
        expected = bare(ids).last_hidden_state
        assert torch.equal(loaded(ids).last_hidden_state, expected)
        auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        headed = load(tmp_path / "bare", model_class=auto)
        assert torch.equal(headed.base_model(ids).last_hidden_state, expected)


@pytest.mark.parametrize("scheme", TEXT)
def test_tied_embeddings_stay_tied(scheme, tmp_path):
    model = patched_model(scheme, "llama", tie_word_embeddings=True)
    save(model, tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits(loaded, tokens(2, LONG)), logits(model, tokens(2, LONG)))


@few_cells
def test_with_the_package_imported_a_sealed_checkpoint_names_its_loader(scheme, kind, tmp_path):
    """And the others load as everywhere."""
    model = patched_model(scheme, kind)
    save(model, tmp_path / "a")
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    if describe(model).portability.startswith("sealed"):
        with pytest.raises(Exception, match=r"hf_posenc\.load"):
            auto.from_pretrained(tmp_path / "a")
    else:
        plain = auto.from_pretrained(tmp_path / "a")
        assert torch.equal(logits(plain, tokens(2, LENGTH)), logits(model, tokens(2, LENGTH)))


@pytest.mark.parametrize("kind", KINDS)
def test_unpatched_checkpoints_load_as_ever(kind, tmp_path):
    model = tiny(kind)
    save(model, tmp_path / "a")
    assert "posenc" not in config_of(tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert not is_patched(loaded)
    assert torch.equal(logits(loaded, tokens(2, LENGTH)), logits(model, tokens(2, LENGTH)))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["t5", "learned", "yarn"])
def test_a_loaded_model_trains_and_saves_what_it_learned(scheme, kind, tmp_path):
    save(patched_model(scheme, kind), tmp_path / "a")
    loaded, ids = load(tmp_path / "a"), tokens(2, LONG)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded(ids, labels=ids).loss.backward()
    optimizer.step()
    own = {name: p for name, p in loaded.named_parameters() if "posenc_" in name}
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())
    save(loaded, tmp_path / "a")
    assert torch.equal(logits(load(tmp_path / "a"), ids), logits(loaded, ids))


def test_a_smaller_save_leaves_nothing_of_a_larger_one(tmp_path):
    first, second = patched_model("t5", "llama"), patched_model("yarn", "llama", seed=1)
    save(first, tmp_path / "a", max_shard_size="15KB", portable=True)
    (tmp_path / "a" / "README.md").write_text("mine")
    (tmp_path / "a" / "notes").mkdir()
    (tmp_path / "a" / "notes" / "one.txt").write_text("mine too")
    save(second, tmp_path / "a")
    assert [f.name for f in (tmp_path / "a").glob("model*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "a" / "README.md").read_text() == "mine"
    assert (tmp_path / "a" / "notes" / "one.txt").read_text() == "mine too"
    assert torch.equal(logits(load(tmp_path / "a"), tokens(2, LONG)), logits(second, tokens(2, LONG)))
    assert os.listdir(tmp_path) == ["a"]


def test_save_follows_a_symlink(tmp_path):
    """Checkpoints are often links to a larger disk."""
    model = patched_model("alibi", "llama")
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(logits(load(tmp_path / "disk" / "real"), tokens(2, LONG)), logits(model, tokens(2, LONG)))
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
    assert os.listdir(tmp_path / "disk") == ["real"]


def test_paths_may_be_relative_or_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = patched_model("t5", "llama")
    for path in ("plain", "deep/er/still", "./here/"):
        save(model, path)
        assert torch.equal(logits(load(path), tokens(2, LENGTH)), logits(model, tokens(2, LENGTH)))


def test_save_as_a_process_that_is_not_the_main_one_destroys_nothing(tmp_path):
    """Under DDP every rank calls save; only one writes."""
    model = patched_model("t5", "llama")
    save(model, tmp_path / "a")
    save(model, tmp_path / "a", is_main_process=False)
    assert torch.equal(logits(load(tmp_path / "a"), tokens(2, LENGTH)), logits(model, tokens(2, LENGTH)))


def test_save_refuses_what_is_no_model(tmp_path):
    with pytest.raises(PosencError, match="Linear"):
        save(torch.nn.Linear(2, 2), tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_save_refuses_a_model_that_is_not_what_its_config_says(tmp_path):
    model = patched_model("alibi", "llama")
    save(model, tmp_path / "a")
    before = (tmp_path / "a" / "config.json").read_bytes()
    model.set_attn_implementation("sdpa")
    with pytest.raises(PosencError, match="drops the scheme"):
        save(model, tmp_path / "a")
    assert (tmp_path / "a" / "config.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_base_is_for_adapters(tmp_path):
    save(patched_model("yarn", "llama"), tmp_path / "a")
    with pytest.raises(PosencError, match="base="):
        load(tmp_path / "a", base=tiny("llama"))


def test_ntk_goes_out_as_plain_rope_theta(tmp_path):
    model = patch_model(tiny("llama"), "ntk", factor=4.0)
    save(model, tmp_path / "a")
    rope = config_of(tmp_path / "a")["rope_parameters"]
    assert rope == {"rope_type": "default", "rope_theta": pytest.approx(10_000.0 * 4.0 ** (8 / 6))}


@pytest.mark.parametrize("scheme", ["yarn", "linear", "ntk", "llama3"])
def test_a_composed_map_goes_out_as_factor_lists(scheme, tmp_path):
    """That another process loads them exactly is tested with the other plain loads."""
    model = tiny("llama", rope_parameters=dict(LLAMA3), max_position_embeddings=64)
    patch_model(model, scheme, factor=4.0, existing="extend")
    save(model, tmp_path / "a")
    rope = config_of(tmp_path / "a")["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["short_factor"] == rope["long_factor"]
    assert config_of(tmp_path / "a")["posenc"]["original"]["rope_parameters"] == LLAMA3
    ids = tokens(2, 200)
    assert torch.equal(logits(load(tmp_path / "a"), ids), logits(model, ids))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), ids), logits(model, ids))
    unpatched = unpatch_model(load(tmp_path / "a"))
    assert unpatched.config.rope_parameters == LLAMA3


PORTABLE = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
import hf_posenc
root, cells = sys.argv[1], json.loads(sys.argv[2])
same = {}
for name in cells:
    auto = AutoModelForMaskedLM if name.endswith("-bert") else AutoModelForCausalLM
    model = auto.from_pretrained(f"{root}/{name}", trust_remote_code=True)
    stored = load_file(f"{root}/{name}.logits")
    with torch.no_grad():
        same[name] = torch.equal(model(stored["ids"]).logits, stored["logits"]) and hf_posenc.is_patched(model)
    half = auto.from_pretrained(f"{root}/{name}", trust_remote_code=True, dtype=torch.bfloat16)
    same[name] &= half.dtype == torch.bfloat16 and hf_posenc.is_patched(half)
    config = AutoConfig.from_pretrained(f"{root}/{name}")
    config.use_cache, config.chunk_size_feed_forward = False, 1
    heeded = auto.from_pretrained(f"{root}/{name}", trust_remote_code=True, config=config)
    same[name] &= not heeded.config.use_cache and heeded.config.chunk_size_feed_forward == 1
    eager = auto.from_pretrained(f"{root}/{name}", trust_remote_code=True, attn_implementation="eager")
    same[name] &= len(eager(stored["ids"], output_attentions=True).attentions) > 0
print(json.dumps(same))
"""


def test_portable_checkpoints_open_with_trust_remote_code(tmp_path):
    from safetensors.torch import save_file

    cells = [("alibi", "llama"), ("t5", "gpt2"), ("rope", "bert"), ("dynamic_ntk", "qwen2"), ("yarn", "llama")]
    ids = tokens(2, LONG)
    for scheme, kind in cells:
        model, name = patched_model(scheme, kind), f"{scheme}-{kind}"
        save(model, tmp_path / name, portable=True)
        save_file({"ids": ids, "logits": logits(model, ids)}, tmp_path / f"{name}.logits")
        assert torch.equal(logits(load(tmp_path / name), ids), logits(model, ids))
    names = [f"{scheme}-{kind}" for scheme, kind in cells]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PORTABLE, str(tmp_path), json.dumps(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(names, True)


def test_a_given_config_is_heeded_or_refused(tmp_path):
    model = patched_model("alibi", "llama")
    save(model, tmp_path / "a")
    config = AutoConfig.from_pretrained(tmp_path / "a", use_cache=False, rms_norm_eps=1e-3)
    loaded = load(tmp_path / "a", config=config)
    assert (loaded.config.use_cache, loaded.config.rms_norm_eps) == (False, 1e-3)
    assert not torch.equal(logits(loaded, tokens(1, LONG)), logits(model, tokens(1, LONG)))
    assert torch.equal(
        logits(load(tmp_path / "a", config=model.config), tokens(1, LONG)), logits(model, tokens(1, LONG))
    )
    others = {
        "rope_parameters": AutoConfig.from_pretrained(tmp_path / "a", rope_parameters={"rope_theta": 5.0}),
        "posenc": tiny("llama").config,
        "a config of a 'llama' model": tiny("gpt2").config,
        "got a str": str(tmp_path / "a"),
    }
    for message, config in others.items():
        with pytest.raises(PosencError, match=message):
            load(tmp_path / "a", config=config)


def test_portable_without_the_permission_is_refused(tmp_path):
    save(patched_model("alibi", "llama"), tmp_path / "a", portable=True)
    with pytest.raises(Exception, match=r"trust_remote_code|hf_posenc"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a", trust_remote_code=False)


@pytest.mark.parametrize("scheme", ["alibi", "yarn"])
def test_load_never_runs_the_code_of_a_checkpoint(scheme, tmp_path):
    save(patched_model(scheme, "llama"), tmp_path / "a", portable=True)
    marker = tmp_path / "ran"
    for file in (tmp_path / "a").glob("*.py"):
        file.write_text(f"open({str(marker)!r}, 'w').close()\n" + file.read_text())
    assert list((tmp_path / "a").glob("*.py"))
    load(tmp_path / "a")
    load(tmp_path / "a", model_class=AutoModelForCausalLM)
    assert not marker.exists()
