"""PEFT adapters on patched models: the scheme goes with them, whoever saves, and they load on nothing else."""

import json
import os
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from cells import CELLS, LENGTH, options, tiny, tokens
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from stored_models import LONG, config_of, disturb, logits, patched_model
from test_plain_load import plain_verdicts
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, Trainer, TrainingArguments
from typer.testing import CliRunner

from hf_posenc import PosencError, check_model, describe, is_patched, load, merge, patch_model, save
from hf_posenc.cli.main import app

TARGETS = {"gpt2": ["c_attn"], "bert": ["query", "value"], "bert_decoder": ["query", "value"]}


def with_adapter(model, kind, *, task="CAUSAL_LM", **settings):
    """LoRA whose every part, also the copies of whole modules, is away from where it starts."""
    settings = {"target_modules": TARGETS.get(kind, ["q_proj", "v_proj"]), "r": 4, **settings}
    config = LoraConfig(task_type=None if kind == "bert" else task, **settings)
    return moved(get_peft_model(model, config))


def moved(adapted):
    generator = torch.Generator().manual_seed(3)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapted.eval()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Unpatched checkpoints, as a hub has them."""
    folder = tmp_path_factory.mktemp("originals")
    for kind in ("llama", "gpt2", "bert", "qwen2"):
        tiny(kind).save_pretrained(folder / kind)
    return folder


def base_of(originals, kind, scheme=None):
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model = auto.from_pretrained(originals / kind)
    return patch_model(model, scheme, **options(scheme)) if scheme else model


def record_in(folder):
    """The scheme that lies beside an adapter; what else is there tells its base model by its weights."""
    data = json.loads((Path(folder) / "posenc.json").read_text())
    assert data.pop("base")
    return data


SOME = [(scheme, kind) for scheme, kind in CELLS if kind in ("llama", "gpt2", "bert")]


@pytest.mark.parametrize(("scheme", "kind"), SOME)
def test_adapters_come_back_on_their_positions(scheme, kind, originals, tmp_path):
    """The base is named as the original checkpoint: the scheme comes from the adapter alone."""
    adapted, ids = with_adapter(base_of(originals, kind, scheme), kind), tokens(2, LONG)
    save(adapted, tmp_path / "ours")
    adapted.save_pretrained(tmp_path / "theirs")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        assert record_in(path) == adapted.get_base_model().config.posenc
        loaded = load(path)
        assert isinstance(loaded, PeftModel)
        check_model(loaded)
        assert torch.equal(logits(loaded, ids), logits(adapted, ids))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["yarn", "t5", "learned", "alibi", "none"])
def test_adapters_on_a_patched_checkpoint(scheme, kind, tmp_path):
    """The base on disk is patched itself, with parameters that it learned."""
    save(patched_model(scheme, kind), tmp_path / "base")
    adapted, ids = with_adapter(load(tmp_path / "base"), kind), tokens(2, LONG)
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(load(tmp_path / "adapter"), ids), logits(adapted, ids))


WHOLE = [
    ("yarn", "llama", ["embed_tokens", "norm"]),
    ("alibi", "llama", ["embed_tokens", "norm"]),
    ("t5", "llama", ["posenc_bias", "embed_tokens"]),
    ("learned", "llama", ["posenc_table"]),
    ("t5", "gpt2", ["posenc_bias", "ln_f"]),
    ("learned", "gpt2", ["wpe", "wte"]),
    ("t5", "bert", ["posenc_bias", "word_embeddings"]),
    ("learned", "bert", ["position_embeddings", "LayerNorm"]),
]


@pytest.mark.parametrize("settings", [{"bias": "lora_only"}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize(("scheme", "kind", "modules"), WHOLE)
@pytest.mark.filterwarnings("ignore:.*no longer tied", "ignore:.*tie", "ignore:.*newly made")
def test_whole_modules_are_saved_with_the_adapter(scheme, kind, modules, settings, originals, tmp_path):
    base, ids = base_of(originals, kind, scheme), tokens(2, LONG)
    without = logits(base, ids)
    adapted = with_adapter(base, kind, modules_to_save=modules, **settings)
    expected = logits(adapted, ids)
    assert (expected - without).abs().max() > 0.1
    adapted.save_pretrained(tmp_path / "a")
    assert torch.equal(logits(load(tmp_path / "a"), ids), expected)
    merged = merge(tmp_path / "a", tmp_path / "merged")
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-4, rtol=0)
    assert torch.equal(logits(load(tmp_path / "merged"), ids), logits(merged, ids))


@pytest.mark.filterwarnings("ignore:.*tie")
def test_merging_keeps_the_output_bias_of_an_encoder(originals, tmp_path):
    """PEFT unties the embeddings when it merges a copy of them; BERT's output bias must not get lost on the way."""
    base = base_of(originals, "bert", "t5")
    base.cls.predictions.bias.data += 1.0
    base.save_pretrained(tmp_path / "base")
    adapted = with_adapter(load(tmp_path / "base"), "bert", modules_to_save=["word_embeddings"])
    save(adapted, tmp_path / "a")
    merged, ids = merge(tmp_path / "a", tmp_path / "merged"), tokens(2, LENGTH)
    torch.testing.assert_close(logits(merged, ids), logits(adapted, ids), atol=1e-4, rtol=0)
    assert torch.equal(logits(load(tmp_path / "merged"), ids), logits(merged, ids))


MERGED = [(s, k) for s, k in SOME if k == "llama" or s in ("none", "t5", "learned", "longrope")]


@pytest.mark.parametrize(("scheme", "kind"), MERGED)
def test_merged_models_stand_alone(scheme, kind, originals, tmp_path):
    adapted, ids = with_adapter(base_of(originals, kind, scheme), kind), tokens(2, LONG)
    save(adapted, tmp_path / "a")
    merged = merge(tmp_path / "a", tmp_path / "merged")
    check_model(merged)
    torch.testing.assert_close(logits(merged, ids), logits(adapted, ids), atol=1e-4, rtol=0)
    assert not (tmp_path / "merged" / "posenc.json").exists()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    again = load(tmp_path / "merged")
    assert torch.equal(logits(again, ids), logits(merged, ids))
    assert type(again) is type(adapted.get_base_model())


def test_merge_on_the_command_line(originals, tmp_path):
    adapted, ids = with_adapter(base_of(originals, "llama", "alibi"), "llama"), tokens(2, LONG)
    save(adapted, tmp_path / "a")
    done = CliRunner().invoke(app, ["merge", str(tmp_path / "a"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "alibi" in done.output
    torch.testing.assert_close(logits(load(tmp_path / "out"), ids), logits(adapted, ids), atol=1e-4, rtol=0)
    moved_base = tmp_path / "moved"
    (originals / "llama").rename(moved_base)
    try:
        done = CliRunner().invoke(app, ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--base", str(moved_base)])
    finally:
        moved_base.rename(originals / "llama")
    assert done.exit_code == 0, done.output
    assert torch.equal(logits(load(tmp_path / "b"), ids), logits(load(tmp_path / "out"), ids))
    done = CliRunner().invoke(app, ["merge", str(tmp_path / "out"), str(tmp_path / "c")])
    assert done.exit_code == 2
    assert not (tmp_path / "c").exists()


def test_merge_refuses_what_is_no_adapter(originals, tmp_path):
    with pytest.raises(PosencError, match="no adapter"):
        merge(originals / "llama", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_arguments_go_to_the_base_model(originals, tmp_path):
    adapted, ids = with_adapter(base_of(originals, "llama", "alibi"), "llama"), tokens(2, LONG)
    save(adapted, tmp_path / "a")
    eager = load(tmp_path / "a", attn_implementation="eager", device_map="cpu")
    assert eager.get_base_model().config._attn_implementation == "hf_posenc_eager"
    torch.testing.assert_close(logits(eager, ids), logits(adapted, ids), atol=1e-3, rtol=0)
    half = load(tmp_path / "a", dtype=torch.bfloat16)
    assert half.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    trainable = load(tmp_path / "a", is_trainable=True)
    assert any(p.requires_grad for p in trainable.parameters())
    assert not any(p.requires_grad for p in load(tmp_path / "a").parameters())


def test_a_live_base_is_taken_if_it_is_patched_alike(originals, tmp_path):
    adapted, ids = with_adapter(base_of(originals, "llama", "yarn"), "llama"), tokens(2, LONG)
    save(adapted, tmp_path / "a")
    base = base_of(originals, "llama", "yarn")
    assert torch.equal(logits(load(tmp_path / "a", base=base), ids), logits(adapted, ids))


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "t5"])
def test_an_adapter_is_refused_on_other_positions(scheme, originals, tmp_path):
    save(with_adapter(base_of(originals, "llama", scheme), "llama"), tmp_path / "a")
    bases = {
        "not patched": base_of(originals, "llama"),
        "'linear'": base_of(originals, "llama", "linear"),
        scheme: patch_model(base_of(originals, "llama"), scheme, target_length=7 * LENGTH),
    }
    for reason, base in bases.items():
        before = logits(base, tokens(2, LENGTH))
        with pytest.raises(PosencError, match=reason):
            load(tmp_path / "a", base=base)
        assert torch.equal(logits(base, tokens(2, LENGTH)), before)
        assert not hasattr(base, "peft_config")


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "learned"])
@pytest.mark.parametrize(
    "other",
    [{"hidden_size": 64}, {"num_attention_heads": 8}, {"max_position_embeddings": 64}, {"head_dim": 16}],
    ids=lambda o: next(iter(o)),
)
def test_an_adapter_is_refused_on_another_model(scheme, other, originals, tmp_path):
    save(with_adapter(base_of(originals, "llama", scheme), "llama"), tmp_path / "a")
    tiny("llama", **other).save_pretrained(tmp_path / "other")
    with pytest.raises(PosencError, match=r"another model|made for a model|made on a model"):
        load(tmp_path / "a", base=tmp_path / "other")
    live = patch_model(tiny("llama", **other), scheme, **options(scheme))
    with pytest.raises(PosencError):
        load(tmp_path / "a", base=live)


def test_an_adapter_is_refused_on_another_theta(originals, tmp_path):
    save(with_adapter(base_of(originals, "llama", "yarn"), "llama"), tmp_path / "a")
    theta = {"rope_type": "default", "rope_theta": 5_000.0}
    tiny("llama", rope_parameters=theta).save_pretrained(tmp_path / "other")
    with pytest.raises(PosencError, match="another model"):
        load(tmp_path / "a", base=tmp_path / "other")


def test_an_adapter_of_an_unpatched_model_stays_an_ordinary_one(originals, tmp_path):
    adapted, ids = with_adapter(base_of(originals, "llama"), "llama"), tokens(2, LENGTH)
    save(adapted, tmp_path / "ours")
    adapted.save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        assert not (path / "posenc.json").exists()
        loaded = load(path)
        assert not is_patched(loaded.get_base_model())
        assert torch.equal(logits(loaded, ids), logits(adapted, ids))


def test_an_adapter_of_an_unpatched_model_leaves_a_live_base_as_it_is(originals, tmp_path):
    """It says nothing of positions: whoever hands over a patched base has chosen them."""
    save(with_adapter(base_of(originals, "llama"), "llama"), tmp_path / "a")
    base = base_of(originals, "llama", "yarn")
    assert describe(load(tmp_path / "a", base=base)).scheme == "yarn"


def test_a_lora_config_used_twice_carries_no_scheme_over(originals, tmp_path):
    """One LoraConfig for two models is common in notebooks."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    get_peft_model(base_of(originals, "llama", "yarn"), config).save_pretrained(tmp_path / "patched")
    get_peft_model(base_of(originals, "llama"), config).save_pretrained(tmp_path / "plain")
    get_peft_model(base_of(originals, "llama", "alibi"), config).save_pretrained(tmp_path / "other")
    assert record_in(tmp_path / "patched")["scheme"] == "yarn"
    assert record_in(tmp_path / "other")["scheme"] == "alibi"
    assert not (tmp_path / "plain" / "posenc.json").exists()
    assert not is_patched(load(tmp_path / "plain").get_base_model())


def test_a_record_of_an_earlier_save_does_not_stay(originals, tmp_path):
    """Saving an adapter of an unpatched model where one of a patched model lay."""
    with_adapter(base_of(originals, "llama", "yarn"), "llama").save_pretrained(tmp_path / "a")
    save(with_adapter(base_of(originals, "llama"), "llama"), tmp_path / "a")
    assert not (tmp_path / "a" / "posenc.json").exists()


def test_every_adapter_of_a_model_gets_the_scheme(originals, tmp_path):
    adapted = with_adapter(base_of(originals, "llama", "yarn"), "llama")
    adapted.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", target_modules=["k_proj"], r=2))
    moved(adapted)
    for how, folder in ((adapted.save_pretrained, tmp_path / "theirs"), (lambda p: save(adapted, p), tmp_path / "o")):
        how(folder)
        assert record_in(folder) == record_in(folder / "second") == adapted.get_base_model().config.posenc
    adapted.set_adapter("second")
    expected = logits(adapted, tokens(2, LONG))
    assert torch.equal(logits(load(tmp_path / "o" / "second"), tokens(2, LONG)), expected)


OTHER_KINDS = {
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "vera": lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "layernorm": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]),
}


@pytest.mark.parametrize("method", OTHER_KINDS)
def test_other_methods_of_peft_carry_the_scheme(method, originals, tmp_path):
    adapted, ids = moved(get_peft_model(base_of(originals, "llama", "yarn"), OTHER_KINDS[method]())), tokens(2, LENGTH)
    expected = logits(adapted, ids)
    save(adapted, tmp_path / "ours")
    assert torch.equal(logits(load(tmp_path / "ours"), ids), expected)
    if method in ("prompt tuning", "prefix tuning"):  # these leave nothing on the base model that could be told
        with pytest.warns(UserWarning, match=r"hf_posenc\.save"):
            adapted.save_pretrained(tmp_path / "theirs")
        return
    adapted.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "posenc.json").exists()
    assert torch.equal(logits(load(tmp_path / "theirs"), ids), expected)


@pytest.mark.parametrize("scheme", ["yarn", "alibi"])
def test_adapters_added_by_transformers_itself(scheme, originals, tmp_path):
    model, ids = base_of(originals, "llama", scheme), tokens(2, LONG)
    model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    expected = logits(moved(model), ids)
    model.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "adapter_config.json").exists()
    assert record_in(tmp_path / "a") == model.config.posenc
    loaded = load(tmp_path / "a", base=originals / "llama")
    assert torch.equal(logits(loaded, ids), expected)
    save(model, tmp_path / "b")
    assert record_in(tmp_path / "b") == model.config.posenc
    assert torch.equal(logits(load(tmp_path / "b", base=originals / "llama"), ids), expected)


def test_an_unsealed_adapter_would_be_silently_wrong_in_peft_alone(originals, tmp_path):
    """AutoPeftModel knows nothing of posenc.json: it reads the base as the hub has it."""
    adapted, ids = with_adapter(base_of(originals, "llama", "yarn"), "llama"), tokens(2, LONG)
    save(adapted, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text())["hf_posenc"]))
    naive = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a")
    assert (logits(naive, ids) - logits(adapted, ids)).abs().max() > 1
    assert torch.equal(logits(load(tmp_path / "a"), ids), logits(adapted, ids))


class Lines(Dataset):
    """A few fixed sequences to learn."""

    def __init__(self, length=LENGTH):
        self.rows = tokens(8, length, seed=5)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(model, folder, steps, **settings):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
        **settings,
    )
    return Trainer(model=model, args=arguments, train_dataset=Lines(), eval_dataset=Lines())


def test_the_trainer_leaves_the_scheme_in_every_checkpoint(originals, tmp_path):
    base = base_of(originals, "llama", "t5")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4, modules_to_save=["posenc_bias"])
    job = trainer(get_peft_model(base, config), tmp_path / "run", 2)
    job.train()
    job.save_model(tmp_path / "final")
    folders = [tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-2", tmp_path / "final"]
    for folder in folders:
        assert record_in(folder) == base.config.posenc
    ids = tokens(2, LONG)
    expected = logits(job.model.eval(), ids)
    assert torch.equal(logits(load(folders[2]), ids), expected)
    assert torch.equal(logits(load(folders[1]), ids), expected)
    assert not torch.equal(logits(load(folders[0]), ids), expected)


def test_the_trainer_saves_full_patched_models(originals, tmp_path):
    job = trainer(disturb(base_of(originals, "llama", "t5")), tmp_path / "run", 2)
    job.train()
    ids = tokens(2, LONG)
    assert torch.equal(logits(load(tmp_path / "run" / "checkpoint-2"), ids), logits(job.model.eval(), ids))


JOURNEYS = [("yarn", "llama", "embed_tokens"), ("alibi", "llama", "embed_tokens"), ("rope", "gpt2", "wte")]


def learner(originals, scheme, kind, words):
    """A patched model with LoRA and a trainable copy of its embeddings; without dropout, for runs to be the same."""
    base = base_of(originals, kind, scheme)
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(0)
    targets = TARGETS.get(kind, ["q_proj"])
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, modules_to_save=[words]))


def travel(originals, folder, scheme, kind, words):
    """Train, stop, resume, save, load, merge: the same logits at each station. Gives the merged model's."""
    make, ids = partial(learner, originals, scheme, kind, words), tokens(2, LONG)
    before = logits(make().eval(), ids)
    whole = trainer(make(), folder / "whole", 4)
    whole.train()
    trainer(make(), folder / "run", 2).train()
    resumed = trainer(make(), folder / "run", 4)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    expected = logits(resumed.model.eval(), ids)
    assert (expected - before).abs().max() > 0.01
    assert torch.equal(expected, logits(whole.model.eval(), ids)), "to stop and resume is not to go on"
    assert torch.equal(logits(load(folder / "run" / "checkpoint-4"), ids), expected)
    save(resumed.model, folder / "adapter")
    assert torch.equal(logits(load(folder / "adapter"), ids), expected)
    merged = logits(merge(folder / "adapter", folder / "merged"), ids)
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=0)
    assert torch.equal(logits(load(folder / "merged"), ids), merged)
    return {"ids": ids, "logits": merged}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tie")
def test_from_patch_to_a_merged_model_and_to_a_stranger(originals, tmp_path):
    jobs = {}
    for scheme, kind, words in JOURNEYS:
        expected = str(tmp_path / f"{scheme}.safetensors")
        save_file(travel(originals, tmp_path / scheme, scheme, kind, words), expected)
        path = str(tmp_path / scheme / "merged")
        jobs[scheme] = {"path": path, "auto": "AutoModelForCausalLM", "arguments": {}}
        jobs[scheme] |= {"expected": expected, "key": "logits"}
    found = plain_verdicts(jobs, tmp_path)
    assert found["yarn"] == "exact"
    for scheme in ("alibi", "rope"):
        assert found[scheme].startswith("refused")
        assert "hf_posenc.load" in found[scheme]


def test_loading_does_not_touch_the_files(originals, tmp_path):
    save(with_adapter(base_of(originals, "llama", "yarn"), "llama"), tmp_path / "a")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    load(tmp_path / "a")
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    assert "posenc" not in config_of(originals / "llama")


@pytest.mark.parametrize("scheme", ["t5", "fire", "shaw"])
def test_what_a_scheme_learned_below_an_adapter_is_not_lost_unnoticed(originals, tmp_path, scheme):
    """The adapter does not hold it, and the base model on disk never did."""
    base = patch_model(load(originals / "llama"), scheme, **options(scheme))
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4))
    save(adapted, tmp_path / "fresh")
    load(tmp_path / "fresh")
    for name, parameter in base.named_parameters():
        if "posenc_bias" in name:
            parameter.data.add_(0.1)
    save(adapted, tmp_path / "trained")
    with pytest.raises(PosencError, match=r"other weights than this base model has \(.*posenc_bias"):
        load(tmp_path / "trained")
