"""The seal: what only hf_posenc can run carries marks that nobody can pass over, whoever saves it."""

import copy
import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers
from cells import CELLS, LENGTH, options, tiny, tokens
from image_cells import patched_images, pixels, states
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_models import LONG, config_of, logits, patched_model
from test_adapters import trainer
from test_old_checkpoints import FOLDERS, OLD, load_with_base, metadata, outputs_of
from test_plain_load import plain_verdicts
from transformers import AutoModelForCausalLM, Phi3Config, PhimoeConfig
from typer.testing import CliRunner

from hf_posenc import PosencError, check_model, describe, load, merge, patch_model, reseal, save, unpatch_model
from hf_posenc.checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from hf_posenc.checkpoints.tensors import rewrite_tensors
from hf_posenc.cli.main import app
from hf_posenc.patching.seal import NAME, Seal

IDS = tokens(2, LENGTH)


def seals(folder):
    """The seals among the weights in a folder."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            found |= {key: stored.get_tensor(key) for key in stored.keys() if NAME in key}  # noqa: SIM118
    return found


def is_sealed(model):
    return describe(model).portability.startswith("sealed")


def assert_sealed(folder, sealed):
    assert [tensor.numel() for tensor in seals(folder).values()] == [1] * sealed
    config = config_of(folder)
    marks = [config.get(key) for key in ("attn_implementation", "experts_implementation")]
    assert all("hf_posenc.load" in mark for mark in marks) if sealed else marks == [None, None]
    assert ("pruned_heads" in config) == sealed


# ---------------------------------------------------------------------------------------------------------------------
# On a live model


@pytest.mark.parametrize(("scheme", "kind"), [(s, k) for s, k in CELLS if k in ("llama", "gpt2", "bert")])
def test_a_seal_comes_with_the_patch_and_goes_with_it(scheme, kind):
    model = tiny(kind)
    weights, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict()
    parameters = [name for name, _ in model.named_parameters()]
    patch_model(model, scheme, **options(scheme))
    found = [key for key in model.state_dict() if NAME in key]
    assert found == ([f"{model.base_model_prefix}.{NAME}.weight"] if is_sealed(model) else [])
    assert not [name for name, _ in model.named_parameters() if NAME in name]  # nothing trains it
    unpatch_model(model)
    assert [name for name, _ in model.named_parameters()] == parameters
    assert model.config.to_dict() == config
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[key], weights[key]) for key in after)


def test_a_seal_moves_with_its_model():
    model = patch_model(tiny("llama"), "alibi")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(torch.bfloat16)):
        seal = getattr(twin.base_model, NAME)
        assert seal.weight.dtype == twin.dtype
        assert torch.equal(seal.weight, torch.ones(1, dtype=twin.dtype))
        check_model(twin)
    assert next(iter(patch_model(model, "t5").base_model.posenc_seal.state_dict().values())).dtype == torch.bfloat16


def test_weights_of_the_original_go_into_a_patched_model_and_not_the_other_way():
    original, model = tiny("llama", seed=1), patch_model(tiny("llama"), "alibi")
    model.load_state_dict(original.state_dict())
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    twin = patch_model(tiny("llama"), "alibi")
    twin.load_state_dict(model.state_dict())
    assert torch.equal(logits(twin, IDS), logits(model, IDS))
    with pytest.raises(RuntimeError, match=NAME):
        original.load_state_dict(model.state_dict())


def test_a_lost_seal_is_noticed(tmp_path):
    model = patch_model(tiny("llama"), "alibi")
    del model.model.posenc_seal
    with pytest.raises(PosencError, match=NAME):
        check_model(model)
    with pytest.raises(PosencError, match=NAME):
        save(model, tmp_path / "a")
    model = patch_model(tiny("llama"), "yarn", factor=2.0)
    model.model.posenc_seal = Seal(model.lm_head.weight)
    with pytest.raises(PosencError, match=NAME):
        check_model(model)


# ---------------------------------------------------------------------------------------------------------------------
# Whoever saves


@pytest.mark.parametrize("scheme", ["alibi", "t5", "dynamic_ntk", "window", "yarn", "learned"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_every_saver_seals(scheme, kind, tmp_path):
    if (scheme, kind) in (("window", "gpt2"), ("window", "bert")):
        pytest.skip("keeps a table that is as long as it was")
    model, given = tiny(kind), options(scheme)
    model.save_pretrained(tmp_path / "source")
    patch_model(model, scheme, **given)
    sealed = is_sealed(model)
    save(model, tmp_path / "save")
    model.save_pretrained(tmp_path / "save_pretrained")
    model.save_pretrained(tmp_path / "shards", max_shard_size="15KB")
    model.base_model.save_pretrained(tmp_path / "headless")
    patch_checkpoint(tmp_path / "source", tmp_path / "disk", scheme, **given)
    for name in ("save", "save_pretrained", "shards", "headless", "disk"):
        assert_sealed(tmp_path / name, sealed)
    if kind == "bert":
        return
    trainer(patch_model(tiny(kind), scheme, **given), tmp_path / "run", 1).train()
    assert_sealed(tmp_path / "run" / "checkpoint-1", sealed)
    adapted = get_peft_model(
        patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), scheme, **given),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn" if kind == "gpt2" else "q_proj"]),
    )
    save(adapted, tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert_sealed(tmp_path / "merged", sealed)


@pytest.mark.parametrize("name", ["axial_rope", "sinusoidal", "learned"])
@pytest.mark.parametrize("family", ["vit", "clip"])
def test_models_of_images_are_sealed(name, family, tmp_path):
    model = patched_images(name, family)
    save(model, tmp_path / "a")
    assert_sealed(tmp_path / "a", is_sealed(model))
    assert torch.equal(states(load(tmp_path / "a"), pixels()), states(model, pixels()))


# ---------------------------------------------------------------------------------------------------------------------
# Right or refused


def without_seal(folder):
    for file in Path(folder).glob("*.safetensors"):
        kept = {key: tensor for key, tensor in load_file(file).items() if NAME not in key}
        save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("scheme", "kind"), [("alibi", "llama"), ("t5", "gpt2"), ("rope", "bert")])
def test_weights_without_their_seal_are_refused(scheme, kind, tmp_path):
    save(patched_model(scheme, kind), tmp_path / "a")
    without_seal(tmp_path / "a")
    with pytest.raises(PosencError, match=r"lack their seal"):
        load(tmp_path / "a")


def test_sealed_weights_belong_to_a_sealed_config(tmp_path):
    """Files that were copied together from two checkpoints."""
    tiny("llama").save_pretrained(tmp_path / "plain")
    save(patched_model("alibi", "llama"), tmp_path / "sealed")
    save(patched_model("yarn", "llama"), tmp_path / "yarn")
    for name in ("plain", "yarn"):
        shutil.copy(tmp_path / "sealed" / "model.safetensors", tmp_path / name)
        with pytest.raises(PosencError, match="sealed"):
            load(tmp_path / name)


FAMILIES = {
    "t5": lambda: transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "phi3": lambda: Phi3Config(**PHI),
    "phimoe": lambda: PhimoeConfig(**PHI),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    ),
}
PHI = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
    "original_max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def of_family(name):
    config = FAMILIES[name]()
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    return auto.from_config(config).eval()


def test_a_stranger_who_forces_an_attention_is_refused_all_the_same(tmp_path):
    """Families that have neither a RoPE type nor a table to be refused by, and those that refuse a RoPE type."""
    save_file({"ids": IDS, "logits": torch.zeros(1)}, tmp_path / "expected.safetensors")
    jobs = {}
    for name in FAMILIES:
        scheme = "none" if name == "bloom" else "alibi"  # which has it already
        save(patch_model(of_family(name), scheme, trained_length=LENGTH), tmp_path / name)
        assert_sealed(tmp_path / name, True)
        for kernel in (None, "eager") if name == "bloom" else (None, "eager", "sdpa"):
            jobs[f"{name} {kernel}"] = {
                "path": str(tmp_path / name),
                "auto": "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM",
                "arguments": {"attn_implementation": kernel} if kernel else {},
                "expected": str(tmp_path / "expected.safetensors"),
                "key": "logits",
            }
    for job, verdict in plain_verdicts(jobs, tmp_path).items():
        assert verdict.startswith("refused"), (job, verdict)
        assert "hf_posenc" in verdict, (job, verdict)


# ---------------------------------------------------------------------------------------------------------------------
# Phi, whose configs take no RoPE that they do not know

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.0, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": LENGTH,
}
SCALED = {"phi3": LONGROPE, "phimoe": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}}
SEALED = {
    "alibi": {},
    "t5": {},
    "sinusoidal": {},
    "dynamic_ntk": {"factor": 2.0},
    "self_extend": {"factor": 4.0, "window": 5},
    "dca": {"chunk": 7, "local_window": 5},
    "streaming": {"sinks": 2, "window": 6},
    "window": {"window": 6},
}


@pytest.mark.parametrize("scheme", SEALED)
@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_phi_can_be_sealed(name, scheme, tmp_path):
    model, ids = of_family(name), tokens(2, LONG)
    before = logits(model, ids)
    patch_model(model, scheme, **SEALED[scheme])
    check_model(model)
    assert is_sealed(model)
    expected = logits(model, ids)
    assert (expected - before).abs().max() > 1
    save(model, tmp_path / "a")
    assert_sealed(tmp_path / "a", True)
    assert torch.equal(logits(load(tmp_path / "a"), ids), expected)
    assert str(describe_checkpoint(tmp_path / "a")[0]) == str(describe(model))
    assert torch.equal(logits(unpatch_model(model), ids), before)


@pytest.mark.parametrize("scheme", ["alibi", "t5", "sinusoidal"])
@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_a_scheme_without_rotation_has_none_on_a_scaled_phi(name, scheme, tmp_path):
    """PhiMoE's rotary module asks its config in each pass: what was switched off must not come back from there."""
    plain, scaled = of_family(name), of_family(name)
    config = type(scaled.config)(**PHI, rope_parameters=copy.deepcopy(SCALED[name]))
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(scaled.state_dict())
    ids = tokens(2, LONG)
    assert (logits(other, ids) - logits(plain, ids)).abs().max() > 0.1
    patch_model(plain, scheme), patch_model(other, scheme)
    assert torch.equal(logits(other, ids), logits(plain, ids))
    save(other, tmp_path / "a")
    assert torch.equal(logits(load(tmp_path / "a"), ids), logits(other, ids))


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_within_reach_a_pattern_is_the_rope_of_phi(name):
    model, ids = of_family(name), tokens(2, LENGTH)
    before = logits(model, ids)
    for scheme, settings in (("window", {"window": 2 * LENGTH}), ("dynamic_ntk", {"factor": 2.0})):
        patch_model(model, scheme, **settings)
        torch.testing.assert_close(logits(model, ids), before, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Old checkpoints made safe

GRADES = {
    name: describe(load_with_base(OLD / name)).portability.partition(":")[0] for name in ("llama_yarn", "llama_dca")
}
MODELS = [name for name in FOLDERS if (OLD / name / "config.json").exists()]


def expected_of(folder):
    stored = load_file(folder / "expected.safetensors")
    return stored.get("output.float32", stored["output"])


@pytest.mark.parametrize("name", MODELS)
def test_old_checkpoints_are_sealed_in_place(name, tmp_path):
    folder = shutil.copytree(OLD / name, tmp_path / name)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    if "posenc" not in config_of(folder):
        with pytest.raises(PosencError, match="nothing to seal"):
            reseal(folder)
        return
    sealed = "attn_implementation" in config_of(folder)
    assert reseal(folder) == sealed
    assert not reseal(folder)
    if not sealed:
        assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
        return
    assert_sealed(folder, True)
    assert config_of(folder)["posenc"]["format"] == 2
    assert sorted(before) == sorted(file.name for file in folder.iterdir())
    kwargs = {"dtype": torch.float32} if "bfloat16" in name else {}
    torch.testing.assert_close(outputs_of(load(folder, **kwargs), folder), expected_of(folder), atol=1e-5, rtol=1e-5)
    model = load(folder)
    save(model, tmp_path / "again")
    assert seals(tmp_path / "again").keys() == seals(folder).keys()
    assert next(iter(seals(folder).values())).dtype == model.dtype


def test_reseal_on_the_command_line(tmp_path):
    shutil.copytree(OLD / "llama_dca", tmp_path / "a")
    run = CliRunner().invoke
    assert "is sealed now" in run(app, ["reseal", str(tmp_path / "a")]).output
    assert "is left as it is" in run(app, ["reseal", str(tmp_path / "a")]).output
    for wrong in (str(OLD / "llama"), str(tmp_path / "nowhere"), "gpt2"):
        assert run(app, ["reseal", wrong]).exit_code == 2


@pytest.mark.parametrize("name", ["llama_dca", "llama_self_extend_sharded"])
def test_a_kill_while_sealing_leaves_a_checkpoint_that_loads(name, tmp_path):
    for step in range(100):
        folder = shutil.copytree(OLD / name, tmp_path / str(step))
        child = os.fork()
        if not child:
            watch_until(step)
            reseal(folder)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        torch.testing.assert_close(outputs_of(load(folder), folder), expected_of(folder), atol=1e-5, rtol=1e-5)
        if not killed:
            break
        reseal(folder)
        assert_sealed(folder, True)
    assert step > 5


def watch_until(step):
    """Let this process die before its n-th write."""
    count = iter(range(1000))

    def watch(event, arguments):
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")) and next(count) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def test_tensors_are_added_without_being_read(tmp_path, monkeypatch):
    """Also where what lies before them has an odd number of bytes, and then by reading all."""
    for count, dtype in ((4, torch.float32), (3, torch.bfloat16), (5, torch.uint8)):
        tensors = {"a": torch.arange(count).to(dtype), "b": torch.ones(2, count).to(dtype)}
        save_file(tensors, tmp_path / "old", metadata={"format": "pt", "x": "y"})
        rewrite_tensors(tmp_path / "old", tmp_path / "new", {"c": torch.full((1,), 2.0)}, [])
        with safe_open(tmp_path / "new", framework="pt") as stored:
            assert stored.metadata() == {"format": "pt", "x": "y"}
        found = load_file(tmp_path / "new")
        assert found.pop("c").item() == 2.0
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
        assert found.keys() == tensors.keys()


def test_the_old_ones_say_what_they_are():
    assert GRADES == {"llama_yarn": "config", "llama_dca": "sealed"}
    assert metadata(OLD / "llama_dca")["scheme"] == "dca"
    assert json.loads((OLD / "llama_dca" / "config.json").read_text())["posenc"]["format"] == 1
