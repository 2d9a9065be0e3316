"""Encoders past their 512 tokens: the rows that `learned` makes, which of them are new, which texts keep theirs."""

import pytest
import torch
import torch.nn.functional as F
from cells import LENGTH, tiny, tokens
from scipy.interpolate import CubicHermiteSpline
from transformers import AutoConfig, AutoModelForMaskedLM

from hf_posenc import PosencError, load, new_rows, patch_model, save
from hf_posenc.schemes.learned import RESIZE, TRAINED, cubic_rows, grouped_rows, hierarchical_rows, linear_rows

LONG = 8 * LENGTH
KEEPING = ("cyclic", "hierarchical")
"""Ways of resizing that promise the first rows untouched."""
ENCODERS = ("bert", "roberta", "distilbert", "mpnet")


def encoder(kind: str):
    if kind == "bert":
        return tiny("bert")
    sizes = {
        "roberta": dict(max_position_embeddings=LENGTH + 2, pad_token_id=1),
        "mpnet": dict(max_position_embeddings=LENGTH + 2, pad_token_id=1),
        "distilbert": dict(max_position_embeddings=LENGTH, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    }[kind]
    if kind != "distilbert":
        sizes |= dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = AutoConfig.for_model(kind, vocab_size=97, initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(config).eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def table_of(length: int = 12, size: int = 5) -> torch.Tensor:
    return torch.randn(length, size, generator=torch.Generator().manual_seed(0))


def resize(table, rows, how):
    return hierarchical_rows(table, rows, 0.4) if how == "hierarchical" else RESIZE[how](table, rows)


# ---------------------------------------------------------------- rows against references


@pytest.mark.parametrize("rows", [24, 30, 37, 96])
def test_grouped_rows_are_longembeds(rows):
    table, factor = table_of(), rows / 12
    assert torch.equal(grouped_rows(table, rows), torch.stack([table[int(p / factor + 1e-9)] for p in range(rows)]))


@pytest.mark.parametrize("times", [2, 3, 8])
def test_linear_rows_are_torchs_interpolation(times):
    """With corners aligned torch puts the old rows at multiples, as LongEmbed does; past the last one it ends."""
    table = table_of()
    reach = (len(table) - 1) * times + 1
    wanted = F.interpolate(table.T[None], size=reach, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(linear_rows(table, times * len(table))[:reach], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("times", [2, 3, 8])
def test_cubic_rows_are_scipys_hermite_spline(times):
    """Catmull-Rom: a Hermite spline whose slopes are half the difference of the neighbours."""
    table = table_of().double()
    ends = torch.cat([2 * table[:1] - table[1:2], table, 2 * table[-1:] - table[-2:-1]])
    spline = CubicHermiteSpline(range(len(table)), table.numpy(), ((ends[2:] - ends[:-2]) / 2).numpy())
    reach = (len(table) - 1) * times + 1
    wanted = torch.from_numpy(spline([p / times for p in range(reach)]))
    torch.testing.assert_close(cubic_rows(table, times * len(table))[:reach], wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rows", [13, 24, 30, 96])
@pytest.mark.parametrize("how", RESIZE)
def test_trained_rows_are_the_tables_own_to_the_last_bit(how, rows):
    """Every row that is called trained is a row of the table; where the first come first, all of them are."""
    table = table_of()
    made, trained = resize(table, rows, how), TRAINED[how](12, rows)
    own = table if how in KEEPING else table[torch.arange(rows)[trained] * 12 // rows]
    assert torch.equal(made[trained], own)
    if how in KEEPING:
        assert torch.equal(made[:12], table) and trained.tolist() == [True] * 12 + [False] * (rows - 12)
    elif rows % 12 == 0:
        assert trained.sum() == 12 and torch.equal(made[trained], table)


# ---------------------------------------------------------------- live encoders


@pytest.mark.parametrize("how", RESIZE)
@pytest.mark.parametrize("kind", ENCODERS)
def test_short_texts_are_read_as_before_where_that_is_promised(kind, how):
    model, ids = encoder(kind), tokens(2, LENGTH)
    before = logits_of(model, ids)
    if kind == "mpnet":  # its own bias is taken away
        before = logits_of(patch_model(encoder(kind), "learned"), ids)
    patch_model(model, "learned", target_length=LONG, resize=how)
    assert torch.equal(logits_of(model, ids), before) == (how in KEEPING)
    assert logits_of(model, tokens(1, LONG)).isfinite().all()
    with pytest.raises(PosencError, match=f"has {LONG} rows"):
        model(tokens(1, LONG + 1))


@pytest.mark.parametrize("scheme", ["alibi", "rope", "yarn", "t5", "sinusoidal"])
@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "mpnet"])  # whose scores are out of reach
def test_other_schemes_reach_far_on_bert_kin(kind, scheme):
    model = patch_model(encoder(kind), scheme, target_length=LONG)
    long = tokens(1, LONG)
    both = torch.cat([long, torch.cat([tokens(1, 20, seed=2), torch.full((1, LONG - 20), 1)], 1)])
    mask = torch.ones_like(both)
    mask[1, 20:] = 0
    with torch.no_grad():
        together = model(both, attention_mask=mask).logits
        torch.testing.assert_close(together[:1], model(long).logits, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(together[1:, :20], model(both[1:, :20]).logits, atol=1e-3, rtol=1e-3)


def test_recurrent_positions_are_pointed_to_by_their_name_here():
    with pytest.raises(PosencError, match="resize='cyclic'"):
        patch_model(encoder("bert"), "learned", target_length=LONG, resize="recurrent")


# ---------------------------------------------------------------- new rows


@pytest.mark.parametrize("how", RESIZE)
@pytest.mark.parametrize("kind", ENCODERS[:2])
def test_new_rows_are_those_that_the_table_did_not_have(kind, how, tmp_path):
    model = encoder(kind)
    own = model.base_model.embeddings.position_embeddings.weight.detach().clone()
    patch_model(model, "learned", target_length=LONG, resize=how)
    ((name, mask),) = new_rows(model).items()
    weight = dict(model.named_parameters())[name]
    assert mask.shape == (len(weight),) and mask.sum() == LONG - LENGTH
    assert torch.equal(weight[~mask], own)
    save(model, tmp_path / "model")
    assert torch.equal(new_rows(load(tmp_path / "model"))[name], mask)


def test_a_gradient_kept_to_new_rows_trains_nothing_else():
    model = patch_model(encoder("roberta"), "learned", target_length=LONG, resize="cyclic").requires_grad_(False)
    ((name, mask),) = new_rows(model).items()
    weight = dict(model.named_parameters())[name].requires_grad_(True)
    weight.register_hook(lambda grad: grad * mask[:, None].to(grad))
    before = weight.detach().clone()
    model(tokens(2, LONG)).logits.square().mean().backward()
    torch.optim.SGD([weight], lr=1.0).step()
    changed = (weight.detach() != before).any(-1)
    assert torch.equal(changed, mask)


def test_new_rows_of_what_has_none():
    with pytest.raises(PosencError, match="is not patched"):
        new_rows(tiny("bert"))
    with pytest.raises(PosencError, match="'alibi'"):
        new_rows(patch_model(tiny("bert"), "alibi"))
    ((_, mask),) = new_rows(patch_model(tiny("llama"), "learned", target_length=64)).items()
    assert mask.all() and len(mask) == 64
