"""A small budget of `make attack`: cases drawn from seeds, judged by a reference that shares no code."""

from collections import Counter

import pytest
import torch
from attack.bits import KINDS
from attack.drawing import HEATS, SCHEMES, Cell, Wrong, blocks_of, compare, meant, patched
from attack.gradients import weights_that_learn
from attack.outcomes import SLOW, drawn, outcome
from attack.reference import Reference
from cells import tokens

BUDGET = 120
PARTS = 6
TRAINED = ["t5", "kerple", "fire", "fourier", "learned", "fox", "cable", "shaw", "transformer_xl", "deberta"]
NEWER = ["t5", "kerple", "fire", "sandwich", "string", "clip", "fox", "cable", "shaw", "transformer_xl", "deberta"]


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_silently_wrong(part):
    words = Counter()
    for seed in range(part, BUDGET, PARTS):
        if drawn(seed).mode in SLOW:
            continue
        word, case, found = outcome(seed)
        assert word not in ("WRONG", "crashed"), f"python tests/attack --only {seed}  # {case.cell}: {found}"
        words[word] += 1
    assert words["right"] > 12


@pytest.mark.skipif(not KINDS, reason="neither bitsandbytes nor torchao is installed")
def test_weights_of_few_bits_are_not_silently_wrong():
    words = Counter()
    for seed in range(12):
        word, case, found = outcome(seed, "bits")
        assert word not in ("WRONG", "crashed"), (
            f"python tests/attack --mode bits --only {seed}  # {case.cell}: {found}"
        )
        words[word] += 1
    assert words["right"] > 8


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "dynamic_ntk", "dca", "learned", *NEWER])
def test_the_judge_knows_another_scheme_when_it_sees_one(scheme):
    cell, ids = Cell(scheme, 0, "llama"), tokens(1, 60)
    with torch.no_grad():
        found = patched(cell)(ids).logits[0]
    compare(cell, found, meant(cell, ids[0]), "itself")
    other = Reference("llama", "rope", {}, patched(cell).state_dict())
    with pytest.raises(Wrong):
        compare(cell, found, other.logits(ids[0], torch.arange(60), torch.ones(60, 60).tril().bool()), "another")


@pytest.mark.parametrize("scheme", TRAINED)
def test_the_judge_differentiates_by_all_that_a_scheme_trains(scheme):
    cell, ids = Cell(scheme, 0, "llama"), tokens(1, 60)
    with weights_that_learn(cell) as weights:
        meant(cell, ids[0]).square().sum().backward()
        for name, parameter in patched(cell).named_parameters():
            if "posenc" in name and parameter.requires_grad:
                assert weights[name].grad is not None and bool(weights[name].grad.any()), name


@pytest.mark.parametrize("variant", range(len(SCHEMES["plan"])))
def test_the_judge_knows_a_plan_from_another(variant):
    cell, ids = Cell("plan", variant, "llama"), tokens(1, 60)
    with torch.no_grad():
        found = patched(cell)(ids).logits[0]
    compare(cell, found, meant(cell, ids[0]), "itself")
    with pytest.raises(Wrong):
        compare(cell, found, meant(Cell("rope", 0, "llama"), ids[0]), "another")


def test_blocks_are_made_small_and_as_they_were_again():
    from hf_posenc.runtime import relative_texts

    usual = relative_texts.BLOCK
    with pytest.raises(ZeroDivisionError), blocks_of(8):
        assert relative_texts.BLOCK == 8
        raise ZeroDivisionError
    assert usual == relative_texts.BLOCK


@pytest.mark.parametrize("heated", range(len(HEATS)))
def test_the_judge_knows_a_temperature_when_it_sees_one(heated):
    cell, ids = Cell("linear", 0, "llama", heated=heated), tokens(1, 60)
    with torch.no_grad():
        found = patched(cell)(ids).logits[0]
    compare(cell, found, meant(cell, ids[0]), "itself")
    with pytest.raises(Wrong):
        compare(cell, found, meant(Cell("linear", 0, "llama"), ids[0]), "without")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "dynamic_ntk"])
def test_eager_attention_in_half_precision(scheme, kind, dtype):
    """BERT's own eager attention does not round its weights to the dtype of the values that they are summed with."""
    cell, ids = Cell(scheme, 0, kind, dtype, "eager"), tokens(1, 40)
    with torch.no_grad():
        made = patched(cell)(ids, output_attentions=True)
    compare(cell, made.logits[0], meant(cell, ids[0]), "eager")
    assert made.attentions[0].dtype == getattr(torch, dtype)
