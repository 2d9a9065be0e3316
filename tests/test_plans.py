"""Plans, a scheme for each group of layers: against wholes put together, SmolLM3, and users' mistakes."""

import copy
import itertools
import json

import pytest
import torch
from cells import LENGTH, tiny, tokens
from comparisons import assert_same, assert_same_model, in_chunks, padded_batch, where_they_stand
from peft import LoraConfig, get_peft_model
from test_temperature import llama4, ministral, smollm3
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, StaticCache

from hf_posenc import (
    PosencError,
    UnsupportedCell,
    check_model,
    describe,
    load,
    patch_checkpoint,
    patch_model,
    save,
    set_rendering,
    unpatch_model,
)
from hf_posenc.evaluation.runs.entries import parsed_schemes
from hf_posenc.schemes.plans import NAMED, plan_from

pytestmark = pytest.mark.filterwarnings("ignore::hf_posenc.UntrainedWarning")
PARTS = {
    "own": "own",
    "none": "none",
    "yarn": ("yarn", {"factor": 4.0}),
    "alibi": "alibi",
    "t5": ("t5", {"seed": 3}),
    "dynamic_ntk": "dynamic_ntk",
    "self_extend": ("self_extend", {"factor": 4.0, "window": 5}),
    "window": ("window", {"window": 7}),
    "log": ("none", {"temperature": {"kind": "log", "length": 8}}),
}
"""A scheme for each site."""
PAIRS = list(itertools.combinations(PARTS, 2))


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def uniform_model(part):
    """A model all of whose layers do the same."""
    model = tiny("llama")
    if part == "own":
        return model
    name, options = PARTS[part] if isinstance(PARTS[part], tuple) else (PARTS[part], {})
    return patch_model(model, name, **options)


def put_together(parts, ids):
    """Logits of layers that each belong to a model of their own: a pass for each, that is given the states so far."""
    states = None
    for index, part in enumerate(parts):
        model, seen = uniform_model(part), {}
        layer = model.model.layers[index]
        before = layer.register_forward_pre_hook(lambda m, args, s=states: args if s is None else (s, *args[1:]))
        after = layer.register_forward_hook(lambda m, args, out, seen=seen: seen.update(out=out))
        logits(model, ids, use_cache=False)
        before.remove(), after.remove()
        states = seen["out"] if torch.is_tensor(seen["out"]) else seen["out"][0]
    with torch.no_grad():
        return model.lm_head(model.model.norm(states))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair_of_sites(pair):
    ids = tokens(2, 44)
    meant = put_together(pair, ids)
    model = patch_model(tiny("llama"), {index: PARTS[part] for index, part in enumerate(pair)})
    check_model(model)
    assert_same(logits(model, ids), meant)
    assert_same(in_chunks(model, ids, DynamicCache(config=model.config), (20, 1, 1, 22)), meant)


def test_the_reference_tells_layers_apart():
    ids = tokens(2, 44)
    assert (put_together(("none", "yarn"), ids) - put_together(("yarn", "none"), ids)).abs().max() > 0.1


# --- families whose layers differ of their own ---


def test_smollm3_is_a_llama_with_a_plan():
    ids = tokens(2, 40)
    theirs = smollm3(no_rope_layers=[1, 0])
    assert_same(logits(patch_model(tiny("llama"), {1: "none"}), ids), logits(theirs, ids))
    both = {0: PARTS["window"]}
    assert_same(logits(patch_model(theirs, both), ids), logits(patch_model(tiny("llama"), {**both, 1: "none"}), ids))
    check_model(theirs)
    with pytest.raises(UnsupportedCell, match="not rotated by this 'smollm3' model's own code"):
        patch_model(theirs, {"last 1": ("yarn", {"factor": 4.0})})


def test_llama_4_and_ministral_keep_their_own_in_what_is_left_out():
    ids, model, twin = tokens(2, 24), llama4(use_qk_norm=False), llama4(no_rope_layers=(0, 0), use_qk_norm=False)
    twin.model.layers[0].self_attn.attn_temperature_tuning = False
    meant = logits(twin, ids)
    assert_same(logits(patch_model(model, {0: "none"}), ids), meant)
    with pytest.raises(UnsupportedCell, match="give all groups a temperature"):
        patch_model(ministral(), {0: "none"}, temperature="log")
    assert_same(
        logits(patch_model(ministral(), {0: "none", 1: "rope"}, temperature="none"), ids),
        logits(patch_model(tiny("llama"), {0: "none"}), ids),
    )


# --- laws ---

MIXED = {0: ("window", {"window": 9, "temperature": {"kind": "log", "length": 8}}), 1: "t5"}


@pytest.fixture
def mixed():
    return patch_model(tiny("llama"), MIXED)


def test_unpatching_restores_every_bit(mixed):
    assert_same_model(unpatch_model(mixed), tiny("llama"))
    assert_same_model(unpatch_model(patch_model(patch_model(tiny("llama"), MIXED), "yarn", factor=2.0)), tiny("llama"))


def test_padding_static_caches_compilers_and_kernels(mixed):
    rows = [tokens(1, n, seed=n)[0] for n in (12, 31)]
    ids, mask, places = padded_batch(rows, "left")
    found = logits(mixed, ids, attention_mask=mask, position_ids=where_they_stand(mask))
    for row, place, own in zip(rows, places, found, strict=True):
        assert_same(own[place], logits(mixed, row[None])[0])
    ids = tokens(2, 40)
    meant = logits(mixed, ids)
    assert_same(in_chunks(mixed, ids, StaticCache(config=mixed.config, max_cache_len=48), (20, 1, 19)), meant)
    set_rendering(mixed, "blocks")
    assert_same(logits(mixed, ids), meant)
    mixed.set_attn_implementation("hf_posenc_eager")
    assert_same(logits(mixed, ids), meant)


def test_compiled_in_one_graph():
    model, ids = patch_model(tiny("llama"), {0: "none", 1: PARTS["yarn"]}), tokens(2, 40)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(logits(compiled, ids, use_cache=False), logits(model, ids))


def test_saved_loaded_described_and_refused_by_others(mixed, tmp_path):
    ids = tokens(2, 40)
    save(mixed, tmp_path / "saved")
    again = load(tmp_path / "saved")
    check_model(again)
    assert torch.equal(logits(again, ids), logits(mixed, ids))
    assert describe(again).plan == describe(mixed).plan and str(describe(mixed))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["posenc"]["format"] == 3
    with pytest.raises(Exception, match=r"hf_posenc\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    parts = again.config.posenc["options"]["parts"]
    parts[0]["layers"], parts[1]["layers"] = parts[1]["layers"], parts[0]["layers"]
    with pytest.raises(PosencError, match="another part of the plan"):
        check_model(again)


def test_what_is_left_out_is_said():
    model = patch_model(tiny("llama"), {1: "none"})
    assert describe(model).plan == {"1 (1)": "none", "others (0)": "the model's own positions"}
    assert describe(model).portability.startswith("sealed")


def test_adapters_carry_a_plan(mixed, tmp_path):
    save(tiny("llama"), tmp_path / "base")
    names = [name for name, _ in mixed.model.named_children() if name.startswith("posenc_bias")]
    model = get_peft_model(mixed, LoraConfig(target_modules=["q_proj"], modules_to_save=names))
    ids = tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.01
    save(model, tmp_path / "adapter")
    assert torch.equal(logits(load(tmp_path / "adapter", base=tmp_path / "base"), ids), logits(model, ids))


def test_on_disk_by_text(tmp_path):
    save(tiny("llama"), tmp_path / "plain")
    text = "every 2nd: none temperature='log length=8'; rest: window window=9"
    found = patch_checkpoint(tmp_path / "plain", tmp_path / "patched", text)
    plan = {"every 2nd": ("none", {"temperature": "log length=8"}), "rest": ("window", {"window": 9})}
    live = patch_model(tiny("llama"), plan)
    assert found.plan == describe(live).plan
    assert torch.equal(logits(load(tmp_path / "patched"), tokens(2, 40)), logits(live, tokens(2, 40)))


def test_a_part_that_changes_is_noticed(mixed):
    rotaries = [module for name, module in mixed.model.named_children() if name.startswith("posenc_rotary")]
    assert len(rotaries) == 2
    rotaries[1].inner.inv_freq += 1
    with pytest.raises(PosencError, match="live frequencies of '1'"):
        check_model(mixed)


# --- how plans are written ---


@pytest.mark.parametrize(
    "selector, meant",
    [
        (3, [3]),
        (-1, [7]),
        ("0, 4", [0, 4]),
        ((1, 2), [1, 2]),
        (range(2), [0, 1]),
        (slice(2, 4), [2, 3]),
        ("2:4", [2, 3]),
        ("::3", [0, 3, 6]),
        ("every 4th", [3, 7]),
        ("every 3rd from 1", [1, 4, 7]),
        ("first 2", [0, 1]),
        ("last 3", [5, 6, 7]),
        ("sliding_attention", [0, 2, 4, 6]),
        (lambda index: index % 3 == 2, [2, 5]),
    ],
)
def test_selectors(selector, meant):
    types = ["sliding_attention", "full_attention"] * 4
    plan = plan_from([(selector, "none"), ("rest", "rope")], {}).on(8, types)
    assert list(plan.parts[0].layers) == meant
    assert sorted(plan.parts[0].layers + plan.parts[1].layers) == list(range(8))


@pytest.mark.parametrize("name", NAMED)
def test_named_plans(name):
    plan = plan_from(name, {}).on(8, [])
    free = [part.layers for part in plan.parts if part.scheme.name == "none"]
    assert free == [(0, 4)] if name == "swan" else [(3, 7)]
    assert parsed_schemes(f"ntk,{name}")[1].scheme == name


@pytest.mark.parametrize(
    "given, options, says",
    [
        ({0: "none", "first 2": "rope"}, {}, "Layer 0 is in two groups"),
        ({7: "none"}, {}, "7 is not a layer of this model"),
        ({"evry 4th": "none"}, {}, "selects no layers"),
        ({"every 4th": "none"}, {}, "selects none of the 2 layers"),
        ({0: "nnoe"}, {}, "Did you mean 'none'"),
        ({0: ("none", 3)}, {}, "A group of a plan has a scheme"),
        ({0: "own"}, {}, "gives no layer a scheme"),
        ({}, {}, "groups of layers with a scheme each"),
        ({0: "none"}, {"window": 3}, "Give options to the scheme of a group"),
        ("swan", {"windw": 3}, "has the options every, window"),
        ({0: "sinusoidal"}, {}, "adds to the input"),
        ({0: "streaming"}, {}, "drops the same keys|drops keys"),
        ("first 1 none", {}, "Unknown scheme"),
        ("first 1: none; first 1: rope", {}, "each group once"),
        ({0: "yarn"}, {}, "needs to know how far"),
        ({0: "none"}, {"layer_types": "all"}, "leave layer_types out"),
    ],
)
def test_mistakes_are_answered(given, options, says):
    model = tiny("llama")
    with pytest.raises(PosencError, match=says):
        patch_model(model, given, **options)
    assert_same_model(model, tiny("llama"))


def test_families_that_have_no_plan():
    for kind in ("gpt2", "bert"):
        with pytest.raises(UnsupportedCell, match="enter elsewhere"):
            patch_model(tiny(kind), {0: "none"})


def test_layers_that_share_a_type_with_others():
    """Gemma 3: two sets of angles; a plan divides each."""
    config = dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, intermediate_size=64, sliding_window=8, initializer_range=0.3, pad_token_id=0,
                  layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=LENGTH)  # fmt: skip
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(Gemma3TextConfig(**config)).eval(), tokens(2, 24)
    meant = copy.deepcopy(model)
    patch_model(meant, "none", layer_types="full_attention")
    patch_model(model, {"full_attention": "none"})
    check_model(model)
    assert_same(logits(model, ids), logits(meant, ids))
    patch_model(model, {"0:2": "none"})
    check_model(model)
    assert (logits(model, ids) - logits(meant, ids)).abs().max() > 0.01
