"""Families beyond the first six: a part of the sweep in every run, and where positions enter each kind of model.

`make sweep` judges all model types; what is here must hold between two sweeps.
"""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SplinterConfig,
    SplinterModel,
)

sys.path.insert(0, str(Path(__file__).parent / "sweep"))
from laws import SCHEMES, apart, cached_error, judged, logits, tokens
from shrink import CAUSAL, MASKED, tiny_config, tiny_model

from hf_posenc import PosencError, UnsupportedModel, check_model, describe, load, patch_model, save, unpatch_model
from hf_posenc.families import FAMILIES, Family, places
from hf_posenc.families.base import register_family
from hf_posenc.families.verified import verified_families, works

NEAR = 1e-4
"""How far logits may be apart, as a part of their spread, that two ways of computing should agree on."""
SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
SIZES |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
TOLD = [
    *("gpt_neox", "glm", "cohere", "gemma3_text", "modernbert", "smollm3", "deepseek_v3", "mixtral", "gpt_oss"),
    *("gemma4_text", "dbrx"),  # layers with a head_dim of their own; a config that reads n_layers itself
    *("neomme", "falcon_h1"),  # two positions for each token; attention layers that also keep states in the cache
    *("jamba", "opt", "roberta", "bart", "bloom", "mpt"),
]
"""One model type for each way that positions enter."""


def sinusoid(positions, size):
    """Vaswani et al. 2017, row by row: the reference for what is written into a native table."""
    rows = torch.zeros(len(positions), size, dtype=torch.float64)
    for row, position in enumerate(positions):
        for pair in range(size // 2):
            angle = torch.tensor(float(position), dtype=torch.float64) / 10_000 ** (2 * pair / size)
            rows[row, 2 * pair], rows[row, 2 * pair + 1] = angle.sin(), angle.cos()
    return rows.float()


# --- the sweep -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TOLD)
def test_a_part_of_the_sweep_gives_what_the_table_says(model_type):
    found = judged(model_type)
    assert not [verdict for verdict in found.values() if verdict.startswith(("wrong", "cannot"))], found
    assert found == verified_families()["families"][model_type]


def test_the_table_speaks_of_every_text_model_of_its_transformers():
    table = verified_families()
    assert {"transformers", "torch", "machine"} <= set(table["about"])
    if table["about"]["transformers"] == transformers.__version__:
        assert set(table["families"]) == {*CAUSAL, *MASKED}
        assert len(table["families"]) == 214
    good = [name for name, verdicts in table["families"].items() if any(works(v) for v in verdicts.values())]
    assert len(good) >= 100
    for name, verdicts in table["families"].items():
        assert set(verdicts) in ({*SCHEMES}, {"*"}), name
        for verdict in verdicts.values():
            assert verdict in ("config", "weights", "sealed") or verdict.startswith(("refused: ", "cannot ")), name


# --- layers of several types -----------------------------------------------------------------------------------------


def nested_frequencies(model):
    inner = model.base_model.rotary_emb
    return {kind: getattr(inner, f"{kind}_inv_freq").clone() for kind in ("full_attention", "sliding_attention")}


def first_attention(model, ids):
    """What the first layer's attention says, before anything that a later layer does."""
    said = []
    layer = model.base_model.layers[0].self_attn
    handle = layer.register_forward_hook(lambda module, args, output: said.append(output[0]))
    logits(model, ids)
    handle.remove()
    return said[0]


@pytest.mark.parametrize("scheme", ["linear", "alibi", "dynamic_ntk"])
def test_sliding_layers_are_left_alone_to_the_last_bit(scheme):
    model, ids = tiny_model("gemma3_text"), tokens(2, 60)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    before, said, own = nested_frequencies(model), first_attention(model, ids), logits(model, ids)
    patch_model(model, scheme, **({} if scheme == "alibi" else {"factor": 4.0}))
    after = nested_frequencies(model)
    assert torch.equal(after["sliding_attention"], before["sliding_attention"])
    assert torch.equal(first_attention(model, ids), said)
    meant = before["full_attention"] / 4 if scheme == "linear" else torch.zeros_like(before["full_attention"])
    assert torch.equal(after["full_attention"], meant)
    assert apart(own, logits(model, ids)) > 0.01
    assert model.config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert describe(model).layers == "full_attention"


@pytest.mark.parametrize("model_type", ["gemma3_text", "modernbert"])
def test_all_layers_are_rescaled_from_the_theta_of_their_own_type(model_type):
    model, alpha = tiny_model(model_type), 4.0
    thetas = {kind: rope["rope_theta"] for kind, rope in model.config.rope_parameters.items()}
    assert len(set(thetas.values())) == 2
    patch_model(model, "ntk", factor=alpha, layer_types="all")
    for kind, live in nested_frequencies(model).items():
        size = 2 * len(live)
        theta = thetas[kind] * alpha ** (size / (size - 2))
        torch.testing.assert_close(live, theta ** -(torch.arange(0, size, 2) / size), rtol=1e-5, atol=0)


def test_a_list_chooses_layer_types_and_travels(tmp_path):
    model, ids = tiny_model("gemma3_text"), tokens(2, 40)
    before, said = nested_frequencies(model), first_attention(model, ids)
    patch_model(model, "linear", factor=4.0, layer_types=["sliding_attention"])
    assert torch.equal(nested_frequencies(model)["full_attention"], before["full_attention"])
    assert torch.equal(nested_frequencies(model)["sliding_attention"], before["sliding_attention"] / 4)
    assert apart(said, first_attention(model, ids)) > 0.01
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved").eval()
    assert describe(loaded).layers == "sliding_attention"
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    for kind, live in nested_frequencies(loaded).items():
        assert torch.equal(live, nested_frequencies(model)[kind])
    plain = type(model).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(plain, ids), logits(model, ids))
    unpatch_model(loaded)
    assert torch.equal(first_attention(loaded, ids), said)


@pytest.mark.parametrize("choice", ["all", ["sliding_attention"], None])
def test_a_bias_on_some_layer_types_travels(choice, tmp_path):
    model, ids = tiny_model("gemma3_text"), tokens(2, 40)
    patch_model(model, "t5", layer_types=choice)
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    biased = [getattr(vars(layer.self_attn)["posenc_link"], "bias", None) for layer in loaded.model.layers]
    assert [bias is not None for bias in biased] == [choice is not None, choice != ["sliding_attention"]]
    with pytest.raises(ValueError, match="hf_posenc"):
        type(model).from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope"])
def test_layers_that_take_turns_decode_with_their_own_angles(scheme):
    config = tiny_config("gemma3_text")
    config.num_hidden_layers, config.layer_types = 4, config.layer_types * 2
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    assert cached_error(model, tokens(2, 30)) < NEAR
    patch_model(model, scheme, factor=4.0, layer_types="all")
    assert cached_error(model, tokens(2, 60)) < NEAR


@pytest.mark.parametrize(
    ("model_type", "choice", "said"),
    [
        ("gemma3_text", "ful_attention", "Did you mean 'full_attention'"),
        ("gemma3_text", ["full_attention", "global"], "no layers of type 'global'"),
        ("mixtral", "all", "one set of positions for all its layers"),
        ("opt", ["full_attention"], "one set of positions for all its layers"),
        ("gemma3_text", [], "layer_types"),
    ],
)
def test_wrong_layer_types_are_refused(model_type, choice, said):
    model, ids = tiny_model(model_type), tokens(2, 24)
    own = logits(model, ids)
    with pytest.raises(PosencError, match=said):
        patch_model(model, "none", layer_types=choice)
    assert torch.equal(logits(model, ids), own)


# --- tables whose first rows are no positions ------------------------------------------------------------------------

LONG = 80
OFFSETS = {"opt": 2, "roberta": 2, "bart": 2, "mpnet": 2, "camembert": 2}
TABLES = {
    "opt": "model.decoder.embed_positions",
    "bart": "model.decoder.embed_positions",
    "roberta": "roberta.embeddings.position_embeddings",
    "camembert": "roberta.embeddings.position_embeddings",
    "mpnet": "mpnet.embeddings.position_embeddings",
}
COUNTED = ("roberta", "camembert", "mpnet")
"""Types whose config counts the rows before position 0 as well."""
with_offsets = pytest.mark.parametrize("model_type", list(TABLES))


def longer_native(model_type, rows):
    """An unpatched model with the weights of the tiny one, and a native table of these rows."""
    model, config = tiny_model(model_type), tiny_config(model_type)
    config.max_position_embeddings = len(rows) - (0 if model_type in COUNTED else OFFSETS[model_type])
    twin = type(model)(config).eval()
    key = TABLES[model_type] + ".weight"
    state = {name: weight for name, weight in model.state_dict().items() if name != key}
    twin.load_state_dict({**state, key: rows}, strict=True)
    if model_type == "mpnet":  # its own bias is a part of what a patch replaces
        with torch.no_grad():
            twin.mpnet.encoder.relative_attention_bias.weight.zero_()
    return twin


def padded_batch(model, side):
    """A text of 50 tokens beside one of LONG, and where its tokens are."""
    ids = tokens(2, LONG)
    ids[ids == model.config.pad_token_id] = 5
    mask = torch.ones_like(ids)
    hidden = slice(0, LONG - 50) if side == "left" else slice(50, LONG)
    if side != "none":
        ids[0, hidden], mask[0, hidden] = model.config.pad_token_id, 0
    return ids, mask


@with_offsets
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_sinusoids_stand_in_the_rows_that_the_model_reads(model_type, side):
    model = tiny_model(model_type)
    offset = OFFSETS[model_type]
    size = model.get_submodule(TABLES[model_type]).embedding_dim
    twin = longer_native(model_type, sinusoid(range(-offset, LONG), size))
    patch_model(model, "sinusoidal")
    ids, mask = padded_batch(model, side)
    said, meant = (logits(m, ids, attention_mask=mask) for m in (model, twin))
    seen = mask.bool()
    assert apart(meant[seen], said[seen]) < NEAR


@with_offsets
def test_saved_rows_are_positions_less_the_offset(model_type, tmp_path):
    model = tiny_model(model_type)
    offset, key = OFFSETS[model_type], TABLES[model_type] + ".weight"
    own = model.state_dict()[key].clone()
    patch_model(model, "sinusoidal", target_length=64)
    save(model, tmp_path / "computed")
    saved = load_file(tmp_path / "computed" / "model.safetensors")[key]
    extra = model_type == "mpnet"  # sealed, by a row too many
    assert len(saved) == 64 + offset + extra
    torch.testing.assert_close(saved, sinusoid(range(-offset, 64 + extra), saved.shape[1]), atol=1e-5, rtol=0)
    raw = json.loads((tmp_path / "computed" / "config.json").read_text())
    assert raw["max_position_embeddings"] == 64 + (offset if model_type in COUNTED else 0)
    patch_model(model, "learned", target_length=64, resize="cyclic")
    save(model, tmp_path / "learned")
    saved = load_file(tmp_path / "learned" / "model.safetensors")[key]
    length = 32 - (offset if model_type in COUNTED else 0)  # what the tiny config leaves for positions
    rows = [*range(offset), *(offset + position % length for position in range(64))]
    assert len(saved) == len(rows) + extra and torch.equal(saved[: len(rows)], own[rows])


@with_offsets
def test_a_learned_table_reaches_its_end_and_says_so(model_type):
    model = patch_model(tiny_model(model_type), "learned", target_length=60)
    kept = model.get_submodule(TABLES[model_type]).weight.detach()
    twin = longer_native(model_type, kept)
    ids = tokens(1, 60)
    assert apart(logits(twin, ids), logits(model, ids)) < NEAR
    with pytest.raises(PosencError, match=r"Position 60 is past the end .* has 60 rows"):
        logits(model, tokens(1, 61))


# --- a model with a switch -------------------------------------------------------------------------------------------


def falcon(alibi):
    config = FalconConfig(**SIZES, alibi=alibi, multi_query=False, bias=True, max_position_embeddings=32)
    torch.manual_seed(0)
    return FalconForCausalLM(config).eval()


@pytest.mark.parametrize(("scheme", "options"), [("rope", {}), ("ntk", {"factor": 4.0}), ("none", {})])
def test_falcon_leaves_its_alibi(scheme, options, tmp_path):
    model, ids = falcon(alibi=True), tokens(2, 30)
    own = logits(model, ids)
    meant = patch_model(falcon(alibi=False), scheme, **options)
    patch_model(model, scheme, **options)
    assert model.config.alibi is False
    assert apart(own, logits(model, ids)) > 0.1
    assert torch.equal(logits(model, ids), logits(meant, ids))
    if scheme == "rope":
        assert torch.equal(logits(model, ids), logits(falcon(alibi=False), ids))
    save(model, tmp_path / "saved")
    for loaded in (load(tmp_path / "saved"), FalconForCausalLM.from_pretrained(tmp_path / "saved")):
        assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))
    for back in (model, load(tmp_path / "saved").eval()):
        unpatch_model(back)
        assert back.config.alibi is True and torch.equal(logits(back, ids), own)


# --- model types of tomorrow -----------------------------------------------------------------------------------------


class TomorrowConfig(LlamaConfig):
    model_type = "tomorrow"


class TomorrowForCausalLM(LlamaForCausalLM):
    config_class = TomorrowConfig


class OddConfig(GPT2Config):
    model_type = "odd"


class OddLMHeadModel(GPT2LMHeadModel):
    config_class = OddConfig


def two_of(model_class, config_class, **sizes):
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, **sizes)).eval()


@pytest.mark.parametrize(("scheme", "options"), [("yarn", {"factor": 4.0}), ("alibi", {}), ("sinusoidal", {})])
def test_a_type_that_nobody_has_seen_is_served_as_llama(scheme, options):
    sizes, ids = dict(intermediate_size=64, max_position_embeddings=32), tokens(2, 40)
    model, llama = two_of(TomorrowForCausalLM, TomorrowConfig, **sizes), two_of(LlamaForCausalLM, LlamaConfig, **sizes)
    own = logits(model, ids)
    for each in (model, llama):
        check_model(patch_model(each, scheme, **options))
    assert places(model).family.name == "rotary"
    assert torch.equal(logits(model, ids), logits(llama, ids))
    unpatch_model(model)
    assert torch.equal(logits(model, ids), own)


def test_a_type_without_the_conventions_is_refused_with_what_was_looked_for():
    model = two_of(OddLMHeadModel, OddConfig)
    with pytest.raises(UnsupportedModel, match=r"'odd' are not supported.*`inv_freq`.*`config.rope_parameters`"):
        patch_model(model, "none")
    with pytest.raises(UnsupportedModel, match="'mamba' cannot be patched: it has no attention"):
        patch_model(tiny_model("mamba"), "none")
    with pytest.raises(UnsupportedModel, match="'splinter' are not supported"):  # until its data is there, below
        patch_model(splinter(), "none")


@pytest.fixture
def splinter_family():
    """A family added as docs/extending.md says: data, registered."""
    family = Family(
        name="splinter",
        model_types=("splinter",),
        positions="table",
        table="embeddings.position_embeddings",
        embeddings="embeddings",
    )
    yield register_family(family)
    del FAMILIES._entries["splinter"]


def splinter(length=32):
    return two_of(SplinterModel, SplinterConfig, intermediate_size=64, max_position_embeddings=length)


def states(model, ids):
    with torch.no_grad():
        return model(ids).last_hidden_state


def test_a_family_is_data(splinter_family, tmp_path):
    model, ids = splinter(), tokens(2, LONG)
    twin = splinter(LONG)
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if "position_embeddings" not in k}, strict=False)
    with torch.no_grad():
        twin.embeddings.position_embeddings.weight.copy_(sinusoid(range(LONG), 32))
    before = copy.deepcopy(model.state_dict())
    check_model(patch_model(model, "sinusoidal", target_length=LONG))
    assert apart(states(twin, ids), states(model, ids)) < NEAR
    save(model, tmp_path / "saved")
    for loaded in (load(tmp_path / "saved"), SplinterModel.from_pretrained(tmp_path / "saved")):
        assert torch.equal(states(loaded.eval(), ids), states(model, ids))
    check_model(patch_model(model, "alibi"))
    assert describe(model).portability.startswith("sealed") and states(model, ids).isfinite().all()
    unpatch_model(model)
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
