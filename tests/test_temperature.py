"""Temperature, against definitions written out, families that have one of their own, and a plain transformers."""

import copy
import math
import warnings

import pytest
import torch
from cells import LENGTH, VOCAB, tiny, tokens
from comparisons import assert_same, assert_same_model, in_chunks, padded_batch, where_they_stand
from image_cells import tiny_images
from peft import LoraConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Llama4TextConfig,
    Ministral3Config,
    SmolLM3Config,
    StaticCache,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from hf_posenc import (
    PosencError,
    UnsupportedCell,
    UntrainedWarning,
    check_model,
    describe,
    load,
    patch_model,
    save,
    unpatch_model,
)
from hf_posenc.schemes import SCHEMES, Window, Yarn

N, L = 26, 8
KINDS = {
    "log": (dict(kind="log", length=L), lambda n: max(1.0, math.log(n) / math.log(L))),
    "llama4": (dict(kind="llama4", floor=L, beta=0.7), lambda n: 1 + 0.7 * math.log(1 + n // L)),
    "ministral": (
        dict(kind="ministral", llama_4_scaling_beta=0.7, original_max_position_embeddings=L),
        lambda n: 1 + 0.7 * math.log(1 + (n - 1) // L),
    ),
    "drope": ("drope c=0.5", lambda n: 1 + 0.5 * math.log(4)),
    "ssmax": (dict(kind="ssmax", start=0.6), lambda n: 0.6 * math.log(n)),
}
"""What is given, and what queries are to be multiplied by that see n tokens, where the factor is 4."""
SITES = {
    "none": {},
    "yarn": {},
    "learned": {},
    "alibi": {},
    "t5": {},
    "dynamic_ntk": {"trained_length": L, "target_length": 4 * L},
    "self_extend": dict(window=3, trained_length=L, target_length=4 * L),
    "window": dict(window=5),
}
"""A scheme for each site: none, the model's own rotation, a table, biases, stages, zones, a pattern alone."""


def options(site):
    given = {"factor": 4.0, **SITES[site]}
    if "target_length" in given:
        del given["factor"]
    return given


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def by_hand(model, ids, rule):
    """Logits of a patched LLaMA without temperature, read token by token with weights for q that are multiplied."""
    weights = [(layer.self_attn.q_proj.weight, layer.self_attn.q_proj.weight.clone()) for layer in model.model.layers]
    past, parts = DynamicCache(config=model.config), []
    for i in range(ids.shape[1]):
        for live, own in weights:
            live.data = own * rule(i + 1)
        parts.append(logits(model, ids[:, i : i + 1], past_key_values=past))
    for live, own in weights:
        live.data = own
    return torch.cat(parts, 1)


@pytest.mark.filterwarnings("ignore::hf_posenc.UntrainedWarning")
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_every_site(kind, site):
    given, rule = KINDS[kind]
    ids, model = tokens(2, N), tiny("llama")
    meant = by_hand(patch_model(copy.deepcopy(model), site, **options(site)), ids, rule)
    patch_model(model, site, temperature=given, **options(site))
    check_model(model)
    assert_same(logits(model, ids), meant)
    assert_same(in_chunks(model, ids, DynamicCache(config=model.config), (9, 1, 1, 15)), meant)


# --- written out, in double precision ---


def dense(model, ids, rule, causal=True):
    """Logits of a model whose scores are written out and multiplied; q and k come as it rotates them itself."""

    def attention(module, query, key, value, mask, scaling, **kwargs):
        groups, n = query.shape[1] // key.shape[1], ids.shape[1]
        key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
        factors = torch.tensor([rule(i + 1 if causal else n) for i in range(n)], dtype=torch.float64)
        scores = query.double() @ key.transpose(2, 3) * scaling * factors[:, None]
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("temperature_reference", attention)
    AttentionMaskInterface.register("temperature_reference", eager_mask)
    model = copy.deepcopy(model)
    model.config._attn_implementation = "temperature_reference"
    return logits(model, ids)


@pytest.mark.filterwarnings("ignore::hf_posenc.UntrainedWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family, scheme", [("llama", "rope"), ("qwen3", "none"), ("gpt2", "none"), ("bert", "none")])
def test_written_out(family, scheme, kind):
    given, rule = KINDS[kind]
    ids, model = tokens(2, N), tiny(family)
    neutral = patch_model(copy.deepcopy(model), scheme, factor=4.0)
    meant = dense(neutral, ids, rule, causal=family != "bert")
    patch_model(model, scheme, temperature=given, factor=4.0)
    assert_same(logits(model, ids), meant)
    assert_same(
        logits(model.double(), ids).float(), dense(neutral.double(), ids, rule, causal=family != "bert").float()
    )


def test_ssmax_starts_where_its_mean_is_one():
    """1/1024 of the sum of ln n up to 1024 is 5.93; the paper starts from 0.168 there."""
    made = SCHEMES["none"](temperature="ssmax").temperature
    model = patch_model(tiny("llama", max_position_embeddings=1024), "none", temperature=made)
    mean = sum(math.log(n) for n in range(1, 1025)) / 1024
    torch.testing.assert_close(model.model.posenc_temperature.scale, torch.full((4,), 1 / mean))


# --- laws ---

LAWS = [("yarn", "log", dict(factor=4.0)), ("alibi", "ssmax", {}), ("dynamic_ntk", "llama4", dict(factor=2.0))]


@pytest.fixture(params=LAWS, ids=lambda law: f"{law[0]}-{law[1]}")
def tempered(request):
    scheme, kind, given = request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        return patch_model(tiny("llama"), scheme, temperature=KINDS[kind][0], **given)


def test_unpatching_restores_every_bit(tempered):
    assert_same_model(unpatch_model(tempered), tiny("llama"))


def test_padding_and_neighbours(tempered):
    rows = [tokens(1, n, seed=n)[0] for n in (12, 20, 31)]
    for side in ("left", "right"):
        ids, mask, places = padded_batch(rows, side)
        found = logits(tempered, ids, attention_mask=mask, position_ids=where_they_stand(mask))
        for row, place, own in zip(rows, places, found, strict=True):
            assert_same(own[place], logits(tempered, row[None])[0])


def test_packed_texts(tempered):
    first, second = tokens(1, 14), tokens(1, 19, seed=2)
    places = torch.cat([torch.arange(14), torch.arange(19)])[None]
    found = logits(tempered, torch.cat([first, second], 1), position_ids=places, use_cache=False)
    assert_same(found, torch.cat([logits(tempered, first), logits(tempered, second)], 1))


def test_static_cache_eager_and_compiled(tempered):
    ids = tokens(2, 40)
    meant = logits(tempered, ids)
    cache = StaticCache(config=tempered.config, max_cache_len=48)
    assert_same(in_chunks(tempered, ids, cache, (20, 1, 1, 18)), meant)
    if not tempered.model.posenc_temperature.trains and tempered.model.posenc.rotation is None:  # one is enough
        compiled = torch.compile(tempered, fullgraph=True, backend="eager")
        assert_same(logits(compiled, ids, use_cache=False), meant)
    tempered.set_attn_implementation("hf_posenc_eager")
    assert_same(logits(tempered, ids), meant)


def test_half_precision_keeps_the_factors_exact():
    """A factor that is rounded to bfloat16 is off by up to 1/256, for a whole query alike."""
    model = patch_model(tiny("llama"), "yarn", temperature=KINDS["log"][0], factor=4.0).to(torch.bfloat16)
    seen = []
    hook = model.model.posenc_temperature.register_forward_hook(lambda module, given, found: seen.append(found))
    logits(model, tokens(1, 32))
    hook.remove()
    assert seen[0].dtype == torch.float32 and len(seen) == 1  # found once for all layers
    torch.testing.assert_close(seen[0][0, 0, -1], torch.tensor(math.log(32) / math.log(8)))


# --- trained, saved, loaded ---


def test_what_is_saved_comes_back_exactly(tempered, tmp_path):
    for parameter in tempered.parameters():
        parameter.data *= 1.01
    save(tempered, tmp_path / "saved")
    again, ids = load(tmp_path / "saved"), tokens(2, 40)
    check_model(again)
    assert torch.equal(logits(again, ids), logits(tempered, ids))
    assert describe(again) == describe(tempered)


def test_a_trained_temperature_with_lora(tmp_path):
    base = patch_model(tiny("llama"), "none", temperature="ssmax")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["posenc_temperature"]))
    ids = tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "posenc" in name}
    assert trained and all(p.grad.abs().max() > 0 for p in trained.values())
    for parameter in trained.values():
        parameter.data += 0.2
    plain = tiny("llama")
    save(plain, tmp_path / "base")
    save(model, tmp_path / "adapter")
    again = load(tmp_path / "adapter", base=tmp_path / "base")
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_a_constant_travels_by_config(tmp_path):
    for scheme in ("none", "ntk", "yarn", "rope"):
        model = patch_model(tiny("llama"), scheme, temperature="drope c=0.5", factor=4.0)
        found = describe(model)
        assert found.portability.startswith("config") and "drope" in found.temperature
        save(model, tmp_path / scheme)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / scheme)
        assert torch.equal(logits(plain, tokens(2, 40)), logits(model, tokens(2, 40)))
    model = smollm3(no_rope_layers=[1, 0])
    patch_model(model, "ntk", temperature="drope", factor=4.0)
    assert describe(model).portability.startswith("sealed")  # one of its layers would not be scaled


# --- families with a temperature of their own ---


def smollm3(**kwargs):
    given = {**tiny("llama").config.to_dict(), "model_type": "smollm3", **kwargs}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SmolLM3Config(**given)).eval()
    model.load_state_dict(tiny("llama").state_dict())
    return model


def ministral(beta=0.7, **sizes):
    rope = dict(rope_type="default", rope_theta=1e4, llama_4_scaling_beta=beta, original_max_position_embeddings=L)
    config = Ministral3Config(**{**tiny("llama").config.to_dict(), "model_type": "ministral3", **sizes})
    config.rope_parameters, config.head_dim, config.dtype, config.sliding_window = rope, 8, torch.float32, None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    return model


def test_ministrals_own_module():
    ids = tokens(2, 40)
    model = patch_model(tiny("llama"), "rope", temperature=KINDS["ministral"][0])
    assert_same(logits(model, ids), logits(ministral(), ids))


def test_llama_4s_own_module():
    """One attention layer of each, on the same states: feed-forward layers are of other kinds."""
    model = patch_model(tiny("llama"), "none", temperature=KINDS["llama4"][0])
    config = Llama4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2,
        no_rope_layers=[0, 0], floor_scale=L, attn_scale=0.7, attn_implementation="eager",
    )  # fmt: skip
    theirs, ours = Llama4TextAttention(config, 0).eval(), model.model.layers[0].self_attn
    theirs.load_state_dict(ours.state_dict())
    seen = {}
    ours.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(states=kwargs["hidden_states"], out=out[0]), with_kwargs=True
    )
    logits(model, tokens(2, N))
    mask = torch.full((N, N), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        found, _ = theirs(seen["states"], torch.zeros(1), mask)
    torch.testing.assert_close(seen["out"], found, atol=1e-5, rtol=1e-5)


def test_one_temperature_not_two(tmp_path):
    ids, own = tokens(2, 40), ministral()
    assert "the model's own" in describe(own).temperature
    kept = patch_model(ministral(), "ntk", factor=4.0)
    assert_same(
        logits(kept, ids),
        logits(patch_model(tiny("llama"), "ntk", factor=4.0, temperature=KINDS["ministral"][0]), ids),
    )
    for given in ("none", KINDS["log"][0]):
        model = patch_model(ministral(), "ntk", factor=4.0, temperature=given)
        check_model(model)
        assert "own" not in (describe(model).temperature or "")
        assert_same(logits(model, ids), logits(patch_model(tiny("llama"), "ntk", factor=4.0, temperature=given), ids))
        save(model, tmp_path / "saved", overwrite=True)
        assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
        own.config.architectures = model.config.architectures  # by saving
        assert_same_model(unpatch_model(model), own)
    patched = patch_model(model, "ntk", factor=4.0, temperature="none")
    patched.config.rope_parameters["llama_4_scaling_beta"] = 0.7
    with pytest.raises(PosencError, match="own temperature is back"):
        check_model(patched)


def test_ministrals_own_keys_travel_by_config(tmp_path):
    given = "ministral llama_4_scaling_beta=0.3"
    model, ids = patch_model(ministral(), "ntk", factor=4.0, temperature=given), tokens(2, 40)
    assert describe(model).portability.startswith("config")
    check_model(model)
    assert_same(logits(model, ids), logits(patch_model(ministral(0.3), "ntk", factor=4.0), ids))
    save(model, tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), ids), logits(model, ids))
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))


def llama4(no_rope_layers=(1, 0), **kwargs):
    config = Llama4TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, max_position_embeddings=LENGTH,
        no_rope_layers=list(no_rope_layers), floor_scale=L, attn_scale=0.7, pad_token_id=0, initializer_range=0.3,
        **kwargs,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_llama_4_keeps_or_loses_its_own(tmp_path):
    ids, model = tokens(2, 24), llama4()
    assert "llama4, the model's own" in describe(model).temperature
    assert "llama4, the model's own" in describe(patch_model(model, "ntk", factor=4.0)).temperature
    patch_model(model, "rope", temperature="none")
    meant = logits(llama4(attn_temperature_tuning=False), ids)
    assert_same(logits(model, ids), meant)
    assert describe(model).temperature is None and describe(model).portability.startswith("config")
    save(model, tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), ids), logits(model, ids))
    expected = llama4()
    expected.config.dtype, expected.config.architectures = model.config.dtype, model.config.architectures  # by saving
    assert_same_model(unpatch_model(model), expected)
    patch_model(model, "rope", temperature=KINDS["log"][0])
    check_model(model)
    model.config.attn_temperature_tuning = model.model.layers[1].self_attn.attn_temperature_tuning = True
    with pytest.raises(PosencError, match="own temperature is back"):
        check_model(model)


# --- options ---


def test_ways_to_write_it():
    for given in ("drope c=0.2", {"kind": "drope", "c": 0.2}):
        made = Yarn(factor=2.0, temperature=given)
        assert made.options()["temperature"] == {"kind": "drope", "c": 0.2}
        assert Yarn.from_options(made.options()) == made
        hash(made)
    assert Yarn(factor=2.0, temperature="log").options()["temperature"] == "log"
    assert Window(logit_scaling=True) == Window(temperature="log")
    assert "logit_scaling" not in Window().options()
    assert Window.from_options({"logit_scaling": True, "window": 4}).options()["temperature"] == "log"


@pytest.mark.parametrize(
    "given, says",
    [
        ("lgo", "Unknown temperature 'lgo'. Did you mean 'log'"),
        ("drope d=1", "has no option 'd'"),
        ("drope c=x", "c must be a finite number"),
        ("drope 0.2", "name=value"),
        ({"c": 1}, "Give a name"),
        (3, "Give a name"),
        ("llama4 floor=0", "floor must be a positive whole number"),
        ("drope", "computed from the target length"),
    ],
)
def test_mistakes_are_answered(given, says):
    model = tiny("llama")
    with pytest.raises(PosencError, match=says):
        patch_model(model, "none", temperature=given)
    assert_same_model(model, tiny("llama"))


def test_contradictions():
    with pytest.raises(PosencError, match="leave logit_scaling out"):
        Window(logit_scaling=True, temperature="ssmax")
    with pytest.raises(UnsupportedCell, match="reads images"):
        patch_model(tiny_images("vit"), "none", temperature="log")
