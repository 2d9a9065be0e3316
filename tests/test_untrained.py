"""Who is told that a scheme is no use before training: those whose weights have never seen the like of it."""

import warnings

import pytest
import torch
from cells import options, tiny

from hf_posenc import SCHEMES, UntrainedWarning, is_patched, load, patch_model, save
from hf_posenc.families import FAMILIES
from hf_posenc.patching.untrained import needs_training, training_needs

WORDS = {word for family in FAMILIES.values() for own in family.positions.split(" or ") for word in own.split(" and ")}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_scheme_keeps_are_positions_of_families(scheme):
    assert set(SCHEMES[scheme].keeps) <= WORDS
    assert training_needs()[scheme] in ("yes", "no") or training_needs()[scheme].startswith("not on ")


@pytest.mark.parametrize(
    "scheme, kind, warned",
    [
        ("yarn", "llama", False),
        ("yarn", "bert", True),
        ("yarn", "gpt2", True),
        ("alibi", "llama", True),
        ("learned", "bert", False),
        ("learned", "llama", True),
        ("window", "bert", False),
        ("self_extend", "llama", False),
        ("none", "llama", True),
        ("proportional", "llama", True),
    ],
)
def test_a_patch_warns_where_the_weights_know_other_positions(scheme, kind, warned):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch_model(tiny(kind), scheme, **options(scheme))
    found = [w for w in said if issubclass(w.category, UntrainedWarning)]
    assert len(found) == warned
    if warned:
        assert repr(scheme) in str(found[0].message) and "hf-posenc train" in str(found[0].message)
        assert found[0].filename == __file__  # where the user called
        instead = str(found[0].message).partition("as it is: ")[2].rstrip(".").split(", ")
        assert "window" in instead
        for name in instead:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UntrainedWarning)
                patch_model(tiny(kind), name, **options(name))


def test_a_warning_that_is_made_an_error_leaves_the_model_as_it_was():
    model = tiny("bert")
    ids = torch.arange(3, 12)[None]
    before = model(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        with pytest.raises(UntrainedWarning):
            patch_model(model, "yarn", factor=2.0)
    assert not is_patched(model) and torch.equal(model(ids).logits, before)


def test_a_checkpoint_that_was_trained_is_loaded_without_a_word(tmp_path):
    save(patch_model(tiny("bert"), "alibi"), tmp_path / "trained")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        load(tmp_path / "trained")


def test_families_that_mix_kinds():
    assert not needs_training(SCHEMES["alibi"], FAMILIES["bloom"])
    assert not needs_training(SCHEMES["yarn"], FAMILIES["falcon"])  # RoPE or ALiBi
    both = next(family for family in FAMILIES.values() if family.positions == "table and bias")
    assert needs_training(SCHEMES["learned"], both)  # the bias is lost
