"""Every way to add a bias, against the whole score matrix in fp64."""

import pytest
import torch
from cells import KINDS, LENGTH, options, tiny, tokens

from hf_posenc import PosencError, patch_model, set_rendering
from hf_posenc.runtime import renderings
from hf_posenc.runtime.attention_call import Call
from hf_posenc.runtime.renderings import RENDERINGS, Request
from hf_posenc.schemes.alibi import LinearBias, slopes
from hf_posenc.schemes.t5 import BucketBias

HEADS, GROUPS, SIZE, SCALE = 4, 2, 16, 0.3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(renderings, "BLOCK", 16)


def bias_of(name: str, causal: bool) -> torch.nn.Module:
    if name == "alibi":
        return LinearBias(slopes(HEADS), causal)
    bias = BucketBias(HEADS, 32, 128, not causal, 1.0, 0)
    return bias.requires_grad_(False)


def request(bias, causal, length=40, dtype=torch.float32, mask=None, positions=None, grad=False) -> Request:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, length, SIZE, generator=generator).to(dtype).requires_grad_(grad)
    k, v = (
        torch.randn(2, HEADS // GROUPS, length, SIZE, generator=generator).to(dtype).requires_grad_(grad)
        for _ in range(2)
    )
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = causal, GROUPS
    positions = torch.arange(length)[None] if positions is None else positions
    call = Call(positions, positions, 0, False)
    return Request(module, q, k, v, mask, bias, call, SCALE, causal and mask is None, {})


def dense(r: Request, causal: bool) -> torch.Tensor:
    """The definition: softmax(q k^T * scale + bias), masked, in fp64."""
    k, v = (x.double().repeat_interleave(GROUPS, 1) for x in (r.key, r.value))
    at = r.call.query.double()
    distance = at[:, None, :] - at[:, :, None]
    if isinstance(r.bias, LinearBias):
        bias = -distance.abs()[:, None] * r.bias.slopes.double().view(-1, 1, 1)
    else:
        bias = r.bias(r.call.query, r.call.query).double()
    scores = r.query.double() @ k.transpose(2, 3) * SCALE + bias
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen[None, None] if r.mask is None else seen & r.mask
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


CASES = [(name, causal, r) for name in ("alibi", "t5") for causal in (True, False) for r in RENDERINGS]


@pytest.mark.parametrize("name, causal, rendering", CASES)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_equals_the_definition(name, causal, rendering, length):
    r = request(bias_of(name, causal), causal, length)
    with torch.no_grad():
        if RENDERINGS[rendering].fits(r):
            ours = RENDERINGS[rendering].run(r).double()
            torch.testing.assert_close(ours, dense(r, causal), atol=2e-6, rtol=1e-5)
        else:
            by_key = rendering in ("row", "columns", "shared_columns") and not (name == "alibi" and causal)
            assert by_key or rendering == "products"  # which is for biases that depend on the query as well


@pytest.mark.parametrize("name, causal, rendering", CASES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(name, causal, rendering, side):
    """A row without its first or last tokens; what padding itself computes is nobody's concern."""
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, slice(0, 9) if side == "left" else slice(31, 40)] = False
    mask = real[:, None, None, :].expand(2, 1, 40, 40)
    if causal:
        mask = mask & torch.ones(40, 40, dtype=torch.bool).tril()
    positions = (real.long().cumsum(-1) - 1).clamp(min=0) if side == "left" else None
    r = request(bias_of(name, causal), causal, mask=mask, positions=positions)
    if RENDERINGS[rendering].fits(r):
        ours = RENDERINGS[rendering].run(r).double()
        torch.testing.assert_close(ours[real], dense(r, causal)[real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name, causal, rendering", CASES)
def test_gradients(name, causal, rendering):
    r = request(bias_of(name, causal), causal, grad=True)
    if not RENDERINGS[rendering].fits(r):
        return
    weight = torch.randn(2, 40, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    inputs = (r.query, r.key, r.value)
    ours = torch.autograd.grad((RENDERINGS[rendering].run(r) * weight).sum(), inputs)
    theirs = torch.autograd.grad((dense(r, causal) * weight).sum(), inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_gradient_of_a_trained_bias(causal):
    """Kernels that give no gradient to a mask are not taken for a bias that trains."""
    bias = bias_of("t5", causal).requires_grad_(True)
    r = request(bias, causal, grad=True)
    weight = torch.randn(2, 40, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad((renderings.choose(r, None).run(r) * weight).sum(), bias.weight)
    (theirs,) = torch.autograd.grad((dense(r, causal) * weight).sum(), bias.weight)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert ours.abs().max() > 0.1


@pytest.mark.parametrize("name, causal, rendering", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(name, causal, rendering, dtype):
    r = request(bias_of(name, causal), causal, 600, dtype)
    if RENDERINGS[rendering].fits(r):
        error = (RENDERINGS[rendering].run(r).double() - dense(r, causal)).norm() / dense(r, causal).norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("name, causal, rendering", CASES)
@torch.no_grad()
def test_skipped_positions_count(name, causal, rendering):
    """Distances come from positions: a jump of 50 is a distance of 50, or the rendering declines."""
    positions = torch.cat([torch.arange(20), torch.arange(70, 90)])[None]
    r = request(bias_of(name, causal), causal, positions=positions)
    if rendering == "toeplitz":
        assert not RENDERINGS[rendering].fits(r)
    elif RENDERINGS[rendering].fits(r):
        torch.testing.assert_close(RENDERINGS[rendering].run(r).double(), dense(r, causal), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_agree_on_models(kind, scheme):
    """Long and padded, with GQA and sliding windows: all renderings give the logits of the eager kernel."""
    sizes = {"sliding_window": 16} if kind == "mistral" else {}
    eager = patch_model(tiny(kind, attn_implementation="eager", **sizes), scheme)
    model = patch_model(tiny(kind, **sizes), scheme)
    ids, real = tokens(2, 2 * LENGTH), torch.ones(2, 2 * LENGTH, dtype=torch.long)
    real[0, :9] = 0
    padded = {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    agreed = 0
    for given in ({}, padded):
        wanted = eager(ids, **given).logits[real == 1] if given else eager(ids).logits
        for rendering in (None, *RENDERINGS):
            set_rendering(model, rendering)
            try:
                logits = model(ids, **given).logits
            except PosencError as refused:
                assert "does not fit" in str(refused)
                continue
            torch.testing.assert_close(logits[real == 1] if given else logits, wanted, atol=1e-4, rtol=1e-4)
            agreed += 1
    assert agreed >= 6 if scheme == "alibi" else agreed >= 4


def test_which_is_chosen():
    """Cheapest first: the row on a causal CPU call, columns behind a mask, the view for distances and in training."""
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    chosen = {
        "row": request(bias_of("alibi", True), True),
        "columns": request(bias_of("alibi", True), True, mask=mask),
        "toeplitz": request(bias_of("t5", False), False),
        "blocks": request(bias_of("t5", True), True, positions=torch.arange(40)[None] * 2),
    }
    for name, r in chosen.items():
        assert renderings.choose(r, None) is RENDERINGS[name], name
    for r in (
        request(bias_of("t5", True).requires_grad_(True), True),
        request(bias_of("alibi", True), True, grad=True),
    ):
        assert renderings.choose(r, None) is RENDERINGS["toeplitz"]
    few = request(bias_of("alibi", True), True, length=4)
    assert renderings.choose(few, None) is RENDERINGS["blocks"]


def test_set_rendering_refuses():
    model = patch_model(tiny("llama"), "yarn", factor=2.0)
    with pytest.raises(PosencError, match="no bias"):
        set_rendering(model, "blocks")
    patch_model(model, "alibi")
    with pytest.raises(PosencError, match="columns"):
        set_rendering(model, "column")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_of_a_shared_text_says_where_it_stands_in_all_parts(monkeypatch, dtype):
    """Processes that share a text meet each other's keys, and none knows where the parts of the others begin."""
    met = []
    monkeypatch.setattr(renderings, "sdpa", lambda r, q, k, v, *_: met.append((q, k)) or v.transpose(1, 2))
    positions = torch.tensor([[0, 1, 2, 3, 50, 51, 90, 91]])
    for part in (positions, positions[:, [0, 1, 6, 7]], positions[:, [2, 3, 4, 5]]):
        r = request(bias_of("alibi", True), True, part.shape[1], dtype, positions=part)
        RENDERINGS["shared_columns"].run(r)
        q, k = (x[:, :, :, SIZE:].double() for x in met.pop())
        added = q[:, ::GROUPS, :1] @ k.mT * SCALE
        wanted = slopes(HEADS)[::GROUPS]
        for head, slope in enumerate(wanted):
            torch.testing.assert_close(added[0, head, 0], slope * part[0].double(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scheme", ["alibi", "t5", "fire", "kerple", "window", "self_extend", "dca", "dynamic_ntk"])
def test_second_derivatives_are_refused(scheme):
    """`torch.autograd.grad` walks only what leads to the tensors that it is given. attack/gradients.py judges those
    of eager attention."""
    model, ids = patch_model(tiny("llama"), scheme, **options(scheme)), tokens(2, 40)
    weight = model.model.layers[0].self_attn.v_proj.weight
    loss = model(ids, use_cache=False).logits.square().mean()
    assert torch.autograd.grad(loss, weight, retain_graph=True)[0].any()
    with pytest.raises(PosencError, match="gradients of gradients"):
        torch.autograd.grad(loss, weight, create_graph=True)
