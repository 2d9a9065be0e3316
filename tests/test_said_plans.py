"""Plans that a config says, on families whose layers differ of their own; and what those families do under a plan."""

import json

import pytest
import torch
from cells import LENGTH, VOCAB, tiny, tokens
from comparisons import assert_same, assert_same_model
from evaluated import bytes_tokenizer, document, reader
from peft import LoraConfig, get_peft_model
from test_temperature import KINDS, L, llama4, logits, smollm3
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    Llama4TextConfig,
)
from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextModel
from typer.testing import CliRunner

from hf_posenc import (
    PosencError,
    UnsupportedCell,
    UnsupportedModel,
    check_model,
    describe,
    load,
    patch_checkpoint,
    patch_model,
    save,
    unpatch_model,
)
from hf_posenc.cli.main import app
from hf_posenc.evaluation import Options, Reading, compare
from hf_posenc.serving.folders import choose_way

pytestmark = pytest.mark.filterwarnings("ignore::hf_posenc.UntrainedWarning")
YARN = ("yarn", {"factor": 4.0})
LOG = ("none", {"temperature": "log length=8"})


def assert_said_by_config(model, folder, original):
    """Others load it right; so do we, and give the original back."""
    ids = tokens(2, 40)
    check_model(model)
    assert describe(model).portability.startswith("config")
    save(model, folder)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder), ids), logits(model, ids))
    again = load(folder)
    check_model(again)
    assert torch.equal(logits(again, ids), logits(model, ids)) and describe(again) == describe(model)
    unpatch_model(again)
    assert torch.equal(logits(again, ids), logits(original, ids))
    assert again.config.rope_parameters == original.config.rope_parameters
    return again


# --- by the list of layers that rotate ---


@pytest.mark.parametrize(
    ("own", "plan", "twin"),
    [
        ([1, 1], {0: "none"}, {0: "none"}),
        ([1, 0], {1: "rope"}, {1: "rope"}),
        ([1, 0], {0: "none", 1: "rope"}, {0: "none"}),
        ([1, 0], {0: YARN}, {0: YARN, 1: "none"}),
        ([1, 1], {0: "none", "rest": YARN}, {0: "none", 1: YARN}),
    ],
)
def test_a_list_of_layers_says_a_plan(own, plan, twin, tmp_path):
    model, ids = patch_model(smollm3(no_rope_layers=own), plan), tokens(2, 40)
    assert_same(logits(model, ids), logits(patch_model(tiny("llama"), twin), ids))  # whose plan works inside attention
    again = assert_said_by_config(model, tmp_path / "saved", smollm3(no_rope_layers=own))
    assert again.config.no_rope_layers == own
    patch_model(model, "ntk", factor=2.0)
    assert_same(logits(model, ids), logits(patch_model(smollm3(no_rope_layers=own), "ntk", factor=2.0), ids))
    fresh = patch_model(smollm3(no_rope_layers=own), plan)
    assert_same_model(unpatch_model(fresh), smollm3(no_rope_layers=own))


def test_runtimes_that_count_layers_by_themselves_are_stopped(tmp_path):
    """llama.cpp leaves every fourth layer of a SmolLM3 unrotated, whatever the list says."""
    model = patch_model(smollm3(no_rope_layers=[1, 1]), {0: "none"})
    save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["n_layers"] == 0
    assert all(said == "untried" for said in describe(model).runtimes.values())
    for runtime in ("mlx", "vllm", "sglang"):
        with pytest.raises(UnsupportedCell):
            choose_way(model, runtime)


def test_on_disk_and_in_adapters(tmp_path):
    save(smollm3(no_rope_layers=[1, 1]), tmp_path / "plain")
    found = patch_checkpoint(tmp_path / "plain", tmp_path / "patched", "first 1: none")
    assert found.portability.startswith("config") and found.pairs == 0
    model = patch_model(smollm3(no_rope_layers=[1, 1]), {0: "none"})
    ids = tokens(2, 40)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "patched"), ids), logits(model, ids))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    save(adapted, tmp_path / "adapter")
    again = load(tmp_path / "adapter", base=tmp_path / "plain")
    assert torch.equal(logits(again, ids), logits(adapted, ids))


def test_what_the_list_cannot_say_is_sealed():
    for plan in ({0: "none", 1: LOG}, {0: YARN}, {0: "alibi"}, {0: ("ntk", {"factor": 2.0}), 1: YARN}):
        model = patch_model(smollm3(no_rope_layers=[1, 1]), plan)
        assert describe(model).portability.startswith("sealed")
    window = smollm3(no_rope_layers=[1, 1], use_sliding_window=True, sliding_window=4, layer_types=None)
    window.config.layer_types = None  # which a file leaves out, and a reader makes of the list
    assert describe(patch_model(window, {0: "none"})).portability.startswith("sealed")
    byhand = smollm3(no_rope_layers=[1, 1])
    byhand.model.layers[1].self_attn.use_rope = False
    assert describe(patch_model(byhand, {0: "none"})).portability.startswith("sealed")


def test_changes_by_hand_are_noticed(tmp_path):
    model = patch_model(smollm3(no_rope_layers=[1, 1]), {0: "none"})
    model.model.layers[0].self_attn.use_rope = True
    with pytest.raises(PosencError, match="layers 0 do not rotate as the plan means"):
        check_model(model)
    model.model.layers[0].self_attn.use_rope = False
    model.config.no_rope_layers = [1, 0]
    with pytest.raises(PosencError, match=r"no_rope_layers is \[1, 0\], and the plan means \[0, 1\]"):
        check_model(model)
    model.config.no_rope_layers = [0, 1]
    save(model, tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    raw = json.loads(file.read_text())
    for damage, says in (
        (dict(no_rope_layers=[1, 1]), "contradicts itself"),
        (dict(posenc={**raw["posenc"], "original": {**raw["posenc"]["original"], "no_rope_layers": [2]}}), "no sense"),
        (
            dict(posenc={**raw["posenc"], "options": {**raw["posenc"]["options"], "by": "layers"}}),
            "its config expresses it, 'by'",
        ),
        (dict(posenc={**raw["posenc"], "options": {**raw["posenc"]["options"], "by": "layer_types"}}), "cannot say"),
    ):
        file.write_text(json.dumps({**raw, **damage}))
        with pytest.raises(PosencError, match=says):
            load(tmp_path / "saved")


# --- by RoPE parameters for each type of layer ---


def gemma3():
    config = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, intermediate_size=64, sliding_window=8, initializer_range=0.3, pad_token_id=0,
                  layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=LENGTH)  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Gemma3TextConfig(**config)).eval()


def test_types_of_layers_say_a_plan(tmp_path):
    ids = tokens(2, 40)
    plan = {"full_attention": YARN, "sliding_attention": ("ntk", {"factor": 2.0})}
    model = patch_model(gemma3(), plan)
    assert_same(
        logits(model, ids),
        logits(patch_model(gemma3(), {"1": YARN, "3": YARN, "::2": plan["sliding_attention"]}), ids),
    )
    again = assert_said_by_config(model, tmp_path / "saved", gemma3())
    assert describe(patch_model(again, {"full_attention": "none"})).portability.startswith("config")
    assert describe(patch_model(again, {"1": "none"})).portability.startswith("sealed")
    assert describe(patch_model(again, {"full_attention": LOG})).portability.startswith("sealed")
    save(gemma3(), tmp_path / "plain")  # no weights are read for it
    found = patch_checkpoint(tmp_path / "plain", tmp_path / "patched", "full_attention: yarn factor=4")
    assert found.portability.startswith("config")


def test_one_scheme_for_all_needs_no_plan(tmp_path):
    model, ids = patch_model(tiny("llama"), {"rest": YARN}), tokens(2, 40)
    assert_same(logits(model, ids), logits(patch_model(tiny("llama"), "yarn", factor=4.0), ids))
    assert_said_by_config(model, tmp_path / "saved", tiny("llama"))


# --- families that differ by layer: a plan starts from what each layer really does ---

BASE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, initializer_range=0.3, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"])  # fmt: skip
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
FAMILIES = {
    "cohere2": {},
    "exaone4": dict(sliding_window_pattern=2),
    "exaone_moe": dict(sliding_window_pattern=2, **EXPERTS),
    "afmoe": dict(num_shared_experts=1, num_dense_layers=1, **EXPERTS),
    "kolibri1": EXPERTS,
}
"""Those whose layers rotate in a sliding window only."""


def sometimes_rotating(kind):
    torch.manual_seed(0)
    if kind != "exaone4_5":
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **BASE, **FAMILIES[kind])).eval()
    text = dict(model_type="exaone4", **BASE, **FAMILIES["exaone4"])
    sight = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=4, out_hidden_size=32)
    config = AutoConfig.for_model(kind, text_config=text, vision_config={**sight, "fullatt_block_indexes": [0]})
    return AutoModelForImageTextToText.from_config(config).eval()


def turned_back(module, args, kwargs):
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


@pytest.mark.parametrize("kind", [*FAMILIES, "exaone4_5"])
def test_families_that_rotate_in_some_layers(kind):
    model, ids = sometimes_rotating(kind), tokens(2, 24)
    own = logits(model, ids)
    assert_same(logits(patch_model(model, {1: "none"}), ids), own)  # as it is
    with pytest.raises(UnsupportedCell, match="Layers 1, of '1', are not rotated"):
        patch_model(model, {1: YARN})
    with pytest.raises(UnsupportedCell, match="Layers 1, of 'rest', are not rotated"):
        patch_model(model, {"rest": ("window", {"window": 5})})
    patch_model(model, {0: "none"})
    check_model(model)
    found = logits(model, ids)
    unpatch_model(model)
    layers = model.model.language_model.layers if kind == "exaone4_5" else model.model.layers
    hook = layers[0].self_attn.register_forward_pre_hook(turned_back, with_kwargs=True)
    assert_same(found, logits(model, ids))
    hook.remove()
    assert (found - own).abs().max() > 1e-3 and torch.equal(logits(model, ids), own)


def test_a_bias_is_for_layers_of_any_kind():
    ids, plan = tokens(2, 24), {1: "alibi"}
    meant = logits(patch_model(tiny("llama"), plan), ids)
    assert_same(logits(patch_model(smollm3(no_rope_layers=[1, 0]), plan), ids), meant)
    assert_same(logits(patch_model(smollm3(no_rope_layers=[1, 1]), plan), ids), meant)


def neighbours(weight, heads):
    """Rows of q or k for a model that rotates channels 2i and 2i + 1, from one that rotates i and i + d/2."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def test_llama_4_is_a_llama_with_a_plan():
    llama = tiny("llama")
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
    )
    config = Llama4TextConfig(
        **{name: getattr(llama.config, name) for name in sizes}, intermediate_size_mlp=llama.config.intermediate_size,
        num_hidden_layers=2, head_dim=8, moe_layers=[], no_rope_layers=[1, 0], use_qk_norm=False, floor_scale=L,
        attn_scale=0.7, pad_token_id=0, max_position_embeddings=LENGTH, rope_parameters=llama.config.rope_parameters,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config).eval()
    state = {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in llama.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = neighbours(tensor, 4 if "q_proj" in name else 2)
    theirs.load_state_dict(state)
    ids = tokens(2, 40)
    plan = {1: ("none", {"temperature": KINDS["llama4"][0]})}
    assert_same(logits(patch_model(llama, plan), ids), logits(theirs, ids))
    assert_same(logits(patch_model(llama, "irope", every=2, floor=L, beta=0.7), ids), logits(theirs, ids))


def test_llama_4_loses_its_temperature_where_the_plan_has_one(tmp_path):
    ids, model = tokens(2, 24), llama4((0, 0))
    twin = llama4((0, 0), attn_temperature_tuning=False)
    patch_model(twin, {0: LOG, 1: ("none", {"temperature": KINDS["llama4"][0]})})  # the second is what the model has
    patch_model(model, {0: LOG})
    check_model(model)
    assert_same(logits(model, ids), logits(twin, ids))
    save(model, tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
    model.model.layers[0].self_attn.attn_temperature_tuning = True
    with pytest.raises(PosencError, match="own temperature is back"):
        check_model(model)


def test_refused_with_the_reason():
    config = AutoConfig.for_model("granite_swa", **BASE, layer_rope_theta=[0, 10_000.0])
    with pytest.raises(UnsupportedModel, match="each of its layers may have a theta of its own"):
        patch_model(AutoModelForCausalLM.from_config(config), {0: "none"})
    sizes = {**BASE, "num_key_value_heads": 4, "layer_types": None}
    latent = dict(kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, index_head_dim=16,
                  index_n_heads=2, index_topk=64, n_routed_experts=4, num_experts_per_tok=2,
                  moe_intermediate_size=16)  # fmt: skip
    config = MistralLarge4TextConfig(**{k: v for k, v in sizes.items() if k != "sliding_window"}, **latent)
    with pytest.raises(UnsupportedCell, match="not all of 'mistral_large4_text' is in reach"):
        patch_model(MistralLarge4TextModel(config), {0: "none"})


# --- where else plans are written ---


def test_on_the_command_line_and_in_compare(tmp_path):
    save(tiny("llama"), tmp_path / "plain")
    words = ["patch", str(tmp_path / "plain"), str(tmp_path / "out"), "--plan", "first 1: none; rest: alibi"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    ids = tokens(2, 24)
    meant = logits(patch_model(tiny("llama"), {0: "none", 1: "alibi"}), ids)
    assert torch.equal(logits(load(tmp_path / "out"), ids), meant)
    options = Options(lengths=(48,), reading=Reading(windows=2, scored=8))
    text = [document(200, vocab=250)]
    rows = compare(
        reader(), bytes_tokenizer(), "none,first 1: none; rest: alibi", text, target_length=64, options=options
    )
    assert {row.scheme for row in rows} >= {"none", "first 1: none; rest: alibi"}
