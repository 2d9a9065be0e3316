"""The sentence that a comparison opens with: what error bars carry, and no more."""

import pytest

from hf_posenc.evaluation.measures.rows import Row
from hf_posenc.evaluation.runs.verdict import verdict

NOISE = (0.03, -0.02, 0.01, -0.04, 0.02, 0.0, -0.01, 0.01)


def losses(scheme, mean, length=4096, task="perplexity", wobble=1.0):
    own = [mean + wobble * x for x in NOISE]
    return Row(
        task=task, protocol="last", scheme=scheme, length=length, metric="loss", value=sum(own) / len(own),
        stderr=0.01, n=len(own), details={"losses": own},
    )  # fmt: skip


def tax(scheme, value, error):
    return Row(
        task="tax", protocol="last", scheme=scheme, length=2048, metric="loss", value=value, stderr=error, n=8
    )  # fmt: skip


def hits(scheme, value, depth, n=10):
    return Row(
        task="passkey", protocol="generation", scheme=scheme, length=4096, metric="accuracy", value=value,
        stderr=0.1, n=n, details={"depth": depth},
    )  # fmt: skip


def test_who_is_level_by_how_much_and_what_needs_training():
    rows = [losses("unpatched", 3.0), losses("yarn", 2.69, wobble=0.5), losses("ntk", 2.689, wobble=1.5)]
    rows += [losses("linear", 2.9, wobble=0.9), losses("yarn", 9.0, length=1024)]
    taxes = [tax("yarn", 0.01, 0.01), tax("linear", 0.94, 0.21), tax("ntk", 0.15, 0.04)]
    assert verdict([*rows, *taxes]) == (
        "At 4096 tokens ntk and yarn are level, 0.31 ± 0.00 nats better than unpatched (n = 8); "
        "linear costs 0.94 ± 0.21 nats on short text: it needs training."
    )


def test_nobody_is_ahead_where_errors_are_larger():
    rows = [losses("unpatched", 3.0), losses("yarn", 2.999, wobble=-1.0)]
    assert verdict(rows) == "At 4096 tokens yarn cannot be told from the unpatched model."


def test_the_unpatched_model_may_be_first():
    assert verdict([losses("unpatched", 2.0), losses("yarn", 3.0)]) == "At 4096 tokens unpatched is first."


@pytest.mark.parametrize(
    "far, told",
    [
        (3.5, "From 1024 to 4096 tokens the loss of yarn rises by 0.50 ± 0.00 nats (n = 8)."),
        (2.5, "From 1024 to 4096 tokens the loss of yarn falls by 0.50 ± 0.00 nats (n = 8)."),
    ],
)
def test_one_model_is_compared_with_itself(far, told):
    assert verdict([losses("yarn", 3.0, length=1024), losses("yarn", far, wobble=0.9)]) == told


def test_one_model_that_stays_level():
    rows = [losses("yarn", 3.0, length=1024), losses("yarn", 3.001, wobble=-1.0)]
    assert verdict(rows) == "From 1024 to 4096 tokens the loss of yarn stays level (+0.00 ± 0.02 nats, n = 8)."


def test_without_losses_the_shares_of_all_depths_are_told_the_best_first():
    rows = [
        hits("unpatched", 0.0, 0.0),
        hits("unpatched", 0.2, 1.0),
        hits("yarn", 1.0, 0.0),
        hits("yarn", 0.5, 1.0, 30),
    ]
    assert verdict(rows) == (
        "At 4096 tokens the share of passkey that is right (generation): yarn 0.62 ± 0.07 (n = 40), "
        "unpatched 0.10 ± 0.08 (n = 20)."
    )


def test_nothing_is_said_of_nothing():
    assert verdict([]) == ""
    assert verdict([losses("yarn", 3.0)]) == ""
