"""Long rows: what is recomputed, and in what parts, changes neither loss nor gradients."""

from collections import Counter

import pytest
import torch
from cells import VOCAB, options, tiny

from hf_posenc import PosencError, patch_model
from hf_posenc.compat.kernels import KernelMode
from hf_posenc.training.checks import refuse_recomputing
from hf_posenc.training.memory import recompute
from hf_posenc.training.settings import TrainSettings, TuneSettings
from hf_posenc.training.settings_file import read_settings
from hf_posenc.training.tuning import choose_trainable

LENGTH = 32


class Counted(KernelMode):
    """How often each kernel runs."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def kernel(self, name, args, run):
        self.calls[name] += 1
        return run()

    @property
    def attention(self) -> int:
        return sum(n for name, n in self.calls.items() if "scaled_dot_product" in name and "backward" not in name)


def step(family: str, scheme: str | None, **asked) -> tuple[dict[str, torch.Tensor], Counted]:
    """Gradients of one row of two texts, and what ran for them."""
    torch.manual_seed(0)
    model = tiny(family)
    if scheme is not None:
        patch_model(model, scheme, **options(scheme))
    wrapped = choose_trainable(model, TuneSettings(), "causal").train()
    if asked:
        recompute(wrapped, TrainSettings(max_steps=1, gradient_checkpointing=True, **asked))
    ids = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[*range(20), *range(LENGTH - 20)]])
    with Counted() as counted:
        wrapped(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}, counted


@pytest.mark.parametrize("family, scheme", [("llama", "yarn"), ("llama", "alibi"), ("gpt2", None)])
def test_recomputed_gradients_are_those_of_the_plain_step(family, scheme):
    plain, once = step(family, scheme)
    for asked in ({"recompute_attention": True}, {"recompute_attention": False}, {"mlp_tokens": 7}):
        found, counted = step(family, scheme, **asked)
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
        again = 2 if asked.get("recompute_attention") else 1
        assert counted.attention == again * once.attention, "what attention gave is kept, unless told otherwise"


def test_an_mlp_reads_a_row_in_parts():
    torch.manual_seed(0)
    model, seen = tiny("llama"), []
    recompute(model, TrainSettings(max_steps=1, gradient_checkpointing=True, mlp_tokens=7))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda layer, args, out: seen.append(out.shape[1]))
    model.train()(input_ids=torch.arange(3, 23)[None], use_cache=False).logits.sum().backward()
    assert set(seen) == {7, 6}
    seen.clear()
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(3, 23)[None])
    assert seen == [20]


@pytest.mark.parametrize(
    "family, asked, said",
    [
        ("llama", "--train.offload=true", "where they are already"),
        ("bert", "--train.mlp_tokens=8", "no plain MLP"),
    ],
)
def test_what_cannot_be_recomputed_so_is_refused(family, asked, said):
    settings = read_settings("tiny_yarn", ["--train.gradient_checkpointing=true", asked])
    with pytest.raises(PosencError, match=said):
        refuse_recomputing(settings, tiny(family), "cpu")
