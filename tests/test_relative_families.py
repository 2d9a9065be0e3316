"""DeBERTa, XLNet and Funnel: their own relative terms taken away, and models born without these as the judge."""

import copy
import warnings

import pytest
import torch
from transformers import (
    DebertaConfig,
    DebertaForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    FunnelConfig,
    FunnelForMaskedLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from hf_posenc import PosencError, UnsupportedCell, check_model, describe, load, patch_model, save, unpatch_model
from hf_posenc.patching.growth import new_rows

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
    "type_vocab_size": 0,
    "relative_attention": True,
}
V3 = {"position_biased_input": False, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
KINDS = {
    "v1": (DebertaForMaskedLM, DebertaConfig, {"pos_att_type": ["c2p", "p2c"], "position_biased_input": False}),
    "v1 with a table": (DebertaForMaskedLM, DebertaConfig, {"pos_att_type": ["c2p"], "position_biased_input": True}),
    "v2": (DebertaV2ForMaskedLM, DebertaV2Config, {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False}),
    "v3": (DebertaV2ForMaskedLM, DebertaV2Config, {"pos_att_type": ["p2c", "c2p"], **V3}),
}
IDS = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(0))


def build_model(kind, **changed):
    cls, config, options = KINDS[kind]
    torch.manual_seed(1)
    return cls(config(**{**SMALL, **options, **changed})).eval()


def patch_quietly(model, scheme, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(model, scheme, **options)


def output_of(model, ids=IDS):
    with torch.no_grad():
        out = model(ids)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def sinusoids(length, size):
    """Vaswani et al. 2017, pair by pair."""
    rate = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()


def plain_twin(kind, model, scheme):
    """The same weights in a model of plain transformers that was never built with relative terms."""
    twin = build_model(kind, relative_attention=False, position_biased_input=scheme != "none")
    weights = {k: v for k, v in model.state_dict().items() if k in twin.state_dict()}
    twin.load_state_dict(weights, strict=False)
    if scheme == "sinusoidal":
        with torch.no_grad():
            twin.deberta.embeddings.position_embeddings.weight.copy_(sinusoids(24, 32))
    return twin.eval()


@pytest.mark.parametrize("scheme", ["none", "sinusoidal"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_deberta_is_one_that_was_born_without_relative_terms(kind, scheme, tmp_path):
    model = build_model(kind)
    own, before = output_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    meant = output_of(plain_twin(kind, copy.deepcopy(model), scheme))
    assert (meant - own).abs().max() > 0.1
    assert "content and relative positions" in str(describe(model))
    patch_quietly(model, scheme)
    check_model(model)
    assert torch.allclose(output_of(model), meant, atol=2e-5)
    save(model, tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(output_of(load(tmp_path / "saved").eval()), output_of(model))
    plain, report = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.allclose(output_of(plain.eval()), meant, atol=2e-5)  # any transformers loads it right
    unpatch_model(model)
    assert torch.equal(output_of(model), own)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_without_terms_and_table_deberta_does_not_know_order():
    model = patch_quietly(build_model("v3"), "none")
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(output_of(model)[:, shuffled], output_of(model, IDS[:, shuffled]), atol=1e-4)
    own = build_model("v3")
    assert (output_of(own)[:, shuffled] - output_of(own, IDS[:, shuffled])).abs().max() > 0.1


def test_a_table_for_a_deberta_that_had_none_is_trained_whole_and_read_past_its_length():
    model = patch_quietly(build_model("v3"), "learned", target_length=48)
    (mask,) = new_rows(model).values()
    assert mask.all() and len(mask) == 48
    assert output_of(model, IDS.repeat(1, 2)).shape == (2, 40, 61)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    table = model.deberta.embeddings.position_embeddings.weight
    assert table.grad is not None and table.grad[:20].abs().sum() > 0
    kept = patch_quietly(build_model("v1 with a table"), "learned", target_length=48)
    (mask,) = new_rows(kept).values()
    assert not mask.all()


@pytest.mark.parametrize("scheme", ["alibi", "rope", "t5", "window", "shaw", "fox"])
def test_what_works_inside_attention_is_refused_there_and_changes_nothing(scheme):
    model = build_model("v3")
    own = output_of(model)
    with pytest.raises(UnsupportedCell, match="computes its scores by itself"):
        patch_quietly(model, scheme, **({"window": 4} if scheme == "window" else {}))
    assert torch.equal(output_of(model), own) and model.config.relative_attention


def kin(kind):
    torch.manual_seed(2)
    if kind == "xlnet":
        sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.3}
        return XLNetLMHeadModel(XLNetConfig(vocab_size=61, **sizes)).eval()
    sizes = {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "num_decoder_layers": 1}
    attention = "factorized" if kind == "funnel, factorized" else "relative_shift"
    config = FunnelConfig(vocab_size=61, **sizes, attention_type=attention, initializer_std=1.0)
    return FunnelForMaskedLM(config).eval()


@pytest.mark.parametrize("kind", ["xlnet", "funnel", "funnel, factorized"])
def test_transformer_xl_terms_are_taken_away(kind, tmp_path):
    """The judge: the same model whose matrix of distances is zero, which leaves their terms at nothing."""
    model = kin(kind)
    own, twin = output_of(model), copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if name.endswith(("rel_attn.r", "r_kernel")):
                weight.zero_()
    meant = output_of(twin)
    patch_quietly(model, "none", trained_length=24)
    assert (meant - own).abs().max() > 1e-3
    assert torch.allclose(output_of(model), meant, atol=1e-5)
    save(model, tmp_path / "saved")
    assert torch.equal(output_of(load(tmp_path / "saved").eval()), output_of(model))
    with pytest.raises((RuntimeError, ValueError), match=r"posenc|shape|size|mismatch"):
        output_of(type(model).from_pretrained(tmp_path / "saved"))
    unpatch_model(model)
    assert torch.equal(output_of(model), own)
    with pytest.raises(PosencError, match="not told positions"):
        patch_quietly(model, "sinusoidal", trained_length=24)
