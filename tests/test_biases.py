"""Every bias in every rendering, forward and backward, behind every kind of mask: against its formula in fp64."""

import itertools

import pytest
import torch
from accelerate import cpu_offload
from biases import HEADS, MADE, NOT_OF_DISTANCE, Far, KerpleLog, KerplePower, by_formula, scheme_of, tensors_of
from cells import tiny, tokens
from torch import nn

from hf_posenc import SCHEMES, PosencError, patch_model, set_rendering
from hf_posenc.compat import pytorch
from hf_posenc.core.biases import Bias, DistanceBias
from hf_posenc.core.precision import fp32_names
from hf_posenc.runtime import gradients, masks, renderings
from hf_posenc.runtime.attention_call import Call
from hf_posenc.runtime.masks import Sight, sight
from hf_posenc.runtime.renderings import RENDERINGS, Request
from hf_posenc.schemes.fire import ProgressiveBias

LENGTH, GROUPS, SIZE, SCALE = 40, 2, 16, 0.3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (renderings, gradients, masks):
        monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(gradients, "TOGETHER", {"cpu": 2000})


def padding(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, slice(0, 9) if side == "left" else slice(31, 40)] = False
    positions = (real.long().cumsum(-1) - 1).clamp(min=0) if side == "left" else torch.arange(LENGTH)[None]
    return real[:, None, None, :].expand(2, 1, LENGTH, LENGTH), positions


def mask_of(kind: str, causal: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A mask, with all that it hides in it, and the positions that go with it."""
    slots = torch.arange(LENGTH)
    behind = (slots <= slots[:, None])[None, None]
    if kind == "none":
        return None, slots[None]
    if kind in ("left", "right"):
        seen, positions = padding(kind)
        return seen & behind if causal else seen, positions
    if kind == "packed":
        text = (slots >= 17).long()
        same = (text[:, None] == text)[None, None]
        return same & behind if causal else same, (slots - 17 * text)[None]
    if kind == "jump":  # behind a causal mask, with positions that leap
        return behind if causal else None, torch.where(slots < 20, slots, slots + 50)[None]
    if kind == "prefix":
        return behind | (slots < 13)[None, None, None], slots[None]
    if kind == "image":
        inside = (slots >= 10) & (slots < 21)
        return behind | (inside[:, None] & inside)[None, None], slots[None]
    generator = torch.Generator().manual_seed(5)
    scattered = (torch.rand(2, 1, LENGTH, LENGTH, generator=generator) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    if kind == "scattered":
        return scattered, slots[None]
    assert kind == "numbers"
    return torch.randn(2, HEADS, LENGTH, LENGTH, generator=generator).masked_fill(~scattered, -torch.inf), slots[None]


CAUSAL_MASKS = ("none", "left", "right", "packed", "jump")
ANY_MASKS = ("prefix", "image", "scattered", "numbers")
KINDS = [(kind, causal) for kind in CAUSAL_MASKS for causal in (True, False)] + [(kind, True) for kind in ANY_MASKS]


def request(name: str, kind: str, causal: bool, dtype=torch.float32, grad=True) -> Request:
    generator = torch.Generator().manual_seed(0)
    # As models lay them out: heads beside channels.
    q = torch.randn(2, LENGTH, HEADS, SIZE, generator=generator).to(dtype).transpose(1, 2).requires_grad_(grad)
    k, v = (
        torch.randn(2, LENGTH, HEADS // GROUPS, SIZE, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_(grad)
        for _ in range(2)
    )
    mask, positions = mask_of(kind, causal)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = causal, GROUPS
    call = Call(positions, positions, 0, False)
    return Request(module, q, k, v, mask, MADE[name](causal), call, SCALE, causal and mask is None, {})


def dense(name: str, r: Request, causal: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """softmax(q k^T * scale + bias + mask) v in fp64, (batch, queries, heads, channels), and the bias's tensors."""
    tensors = tensors_of(r.bias)
    q, k, v = (x.detach().double().requires_grad_() for x in (r.query, r.key, r.value))
    at = r.call.query
    scores = q @ k.repeat_interleave(GROUPS, 1).mT * SCALE + by_formula(name, tensors, at, at, causal)
    if r.mask is None and causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    elif r.mask is not None:
        scores = scores.masked_fill(~r.mask, -torch.inf) if r.mask.dtype == torch.bool else scores + r.mask
    weights = scores.softmax(-1).nan_to_num()  # of a query that sees nothing
    output = (weights @ v.repeat_interleave(GROUPS, 1)).transpose(1, 2)
    return output, {"query": q, "key": k, "value": v, **{n: t for n, t in tensors.items() if t.requires_grad}}


def real_queries(r: Request) -> torch.Tensor:
    """Those that see something: what padding computes is nobody's concern. (batch or 1, queries)."""
    if r.mask is None:
        return torch.ones(1, LENGTH, dtype=torch.bool)
    return masks.boolean_mask(r.mask).any(-1).any(1)


CASES = [(n, kind, causal, r) for n, (kind, causal), r in itertools.product(MADE, KINDS, RENDERINGS)]


def differences(name, kind, causal, rendering, dtype=torch.float32) -> dict[str, float] | None:
    """How far outputs and gradients are from the formula, over their size; None where the rendering does not fit.

    Parameters of a bias share one size: what a softmax does not see cancels out in some of them.
    """
    r = request(name, kind, causal, dtype)
    if not RENDERINGS[rendering].fits(r):
        return None
    wanted, leaves = dense(name, r, causal)
    real = real_queries(r)[..., None, None]
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * real
    ours = RENDERINGS[rendering].run(r)
    given = {"query": r.query, "key": r.key, "value": r.value, **dict(r.bias.named_parameters())}
    found = torch.autograd.grad((ours * weight).sum(), [given[leaf] for leaf in leaves])
    meant = torch.autograd.grad((wanted * weight).sum(), list(leaves.values()))
    pairs = {"output": (ours * real, wanted * real), **dict(zip(leaves, zip(found, meant, strict=True), strict=True))}
    inputs = ("output", "query", "key", "value")
    sizes = {leaf: float(b.detach().abs().max()) for leaf, (_, b) in pairs.items()}
    trained = max((size for leaf, size in sizes.items() if leaf not in inputs), default=0.0)
    sizes = {leaf: size if leaf in inputs else trained for leaf, size in sizes.items()}
    return {leaf: float((a - b).detach().abs().max()) / sizes[leaf] for leaf, (a, b) in pairs.items()}


@pytest.mark.parametrize("name, kind, causal, rendering", CASES)
def test_every_bias_in_every_rendering(name, kind, causal, rendering):
    found = differences(name, kind, causal, rendering)
    if found is None:
        assert rendering != "blocks"
        return
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize("name, kind, causal, rendering", [c for c in CASES if c[1] in ("none", "left", "numbers")])
def test_in_float64(name, kind, causal, rendering):
    """Parameters of the bias and their gradients stay in fp32; flex computes in fp32 whatever it is given."""
    found = differences(name, kind, causal, rendering, torch.float64)
    if found is not None:
        exact = {found.pop(leaf) for leaf in ("output", "query", "key", "value")}
        assert max(exact) < (2e-5 if rendering == "flex" else 1e-12), exact
        assert max(found.values(), default=0.0) < (1e-4 if rendering == "flex" else 1e-5), found


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("name, kind, causal, rendering", [c for c in CASES if c[1] in ("none", "left", "prefix")])
def test_in_half_precision(name, kind, causal, rendering, dtype, most):
    found = differences(name, kind, causal, rendering, dtype)
    if found is not None:
        inputs = ("output", "query", "key", "value")  # gradients of a flat network are differences of rounded numbers
        assert max(v for leaf, v in found.items() if name != "fire_near" or leaf in inputs) < most, found


def test_what_fits_what():
    """Flex and the view take every bias of distance; a number per key only where nothing that is ahead is seen, as
    products of what queries and distances give."""
    for name, (kind, causal) in itertools.product(MADE, KINDS):
        r = request(name, kind, causal)
        fits = {rendering for rendering in RENDERINGS if RENDERINGS[rendering].fits(r)}
        assert ("flex" in fits) == (name not in NOT_OF_DISTANCE and kind != "numbers"), (name, kind)
        # Padding in front of an encoder's text stands elsewhere than its slots say, and sees the text.
        leaps = kind == "jump" or (kind == "left" and not causal)
        assert ("toeplitz" in fits) == (name not in NOT_OF_DISTANCE and not leaps), (name, kind)
        shortcuts = fits & {"row", "columns", "shared_columns"}
        behind = causal and kind in CAUSAL_MASKS
        assert bool(shortcuts) == (name == "alibi" and behind), (name, kind)
        assert ("products" in fits) == (name.startswith("fire") and behind and not leaps), (name, kind)
        if name == "fire":
            assert renderings.choose(r, None) is RENDERINGS["products" if "products" in fits else "blocks"]


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple_log", "fire"])
def test_without_the_kernel_for_cpus(name, monkeypatch):
    monkeypatch.setattr(pytorch, "CPU_ATTENTION", ())
    for kind, causal in KINDS:
        assert not RENDERINGS["row"].fits(request(name, kind, causal))
        for rendering in ("toeplitz", "products", "blocks"):
            found = differences(name, kind, causal, rendering)
            assert found is None or max(found.values()) < 2e-5, (kind, causal, rendering, found)


# --- the gradient itself


@pytest.mark.parametrize("name", ["t5", "kerple_log", "kerple_power", "fire", "fire_near"])
@pytest.mark.parametrize("kind, causal", [("none", True), ("none", False), ("left", True), ("scattered", True)])
@pytest.mark.parametrize("rendering", ["toeplitz", "products", "blocks"])
def test_gradients_are_those_of_finite_differences(name, kind, causal, rendering, monkeypatch):
    r = request(name, kind, causal, torch.float64)
    bias = r.bias
    bias._parameters.update({n: nn.Parameter(p.detach().double()) for n, p in bias.named_parameters()})
    if not RENDERINGS[rendering].fits(r):
        return
    trained = list(bias.named_parameters())

    def run(query, key, value, *values):
        live = {n: v for (n, _), v in zip(trained, values, strict=True)}
        with monkeypatch.context() as patch:
            for n, v in live.items():
                patch.setitem(bias._parameters, n, v)
            here = Request(r.module, query, key, value, r.mask, bias, r.call, SCALE, r.causal, {})
            return RENDERINGS[rendering].run(here) * real_queries(r)[..., None, None]

    inputs = (r.query, r.key, r.value, *(p for _, p in trained))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "weight, constant", [(1.0, -0.5), (-1.0, 0.5), (1.0, -2.0), (1.0, 0.1), (-3.0, 0.7), (0.0, 1.0)]
)
@pytest.mark.parametrize("written", [1, 2**22])
def test_one_unit_that_bends_anywhere_or_nowhere(weight, constant, written, monkeypatch):
    """On in the distance, nearby, nowhere or everywhere, for some heads of a block at a time or for all: beside a unit
    that is on, so that there is a gradient."""
    monkeypatch.setattr(gradients, "WRITTEN", written)
    inner = torch.tensor([[weight, 2.0], [constant, 0.3]])

    def made(causal):
        bias = ProgressiveBias(HEADS, 2, 7.5, 0)
        bias.inner.data.copy_(inner)
        return bias

    monkeypatch.setitem(MADE, "fire", made)
    found = differences("fire", "none", True, "products")
    assert found is not None and max(found.values()) < 2e-5, found


def test_some_of_the_parameters_train():
    """Gradients of those alone are the same as if all trained."""
    wanted, found = {}, {}
    for kept in (None, "inner", "outer", "c", "multiplier"):
        r = request("fire", "none", True)
        for name, p in r.bias.named_parameters():
            p.requires_grad_(kept in (None, name))
        RENDERINGS["products"].run(r).square().sum().backward()
        grads = {name: p.grad for name, p in r.bias.named_parameters() if p.grad is not None}
        wanted, found = (grads, found) if kept is None else (wanted, found | grads)
    torch.testing.assert_close(found, wanted)


def test_nothing_of_the_size_of_all_pairs_is_kept():
    """What a training step holds for its backward pass: inputs, outputs and a number per query."""
    r, held = request("kerple_log", "none", True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        renderings.choose(r, None).run(r)
    assert max(held) <= r.query.numel()


def test_weights_that_are_all_but_zero_do_not_cost_the_others():
    """A bias that falls steeply: gradients of near keys are as exact as ever, and those of far ones are zero."""
    r = request("alibi", "none", True)
    r.bias.slopes *= 40
    wanted, leaves = dense("alibi", r, True)
    ours = RENDERINGS["toeplitz"].run(r)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((ours * weight).sum(), (r.query, r.key, r.value))
    meant = torch.autograd.grad((wanted * weight).sum(), list(leaves.values()))
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)


# --- what a mask lets through

WANTED = {  # by kind: behind, earlier, gapless
    "none": Sight(True, True, True),
    "left": Sight(True, True, True),
    "right": Sight(True, True, True),
    "packed": Sight(True, True, True),
    "jump": Sight(True, True, False),
    "prefix": Sight(False, False, True),
    "image": Sight(False, False, True),
    "scattered": Sight(False, False, True),
    "numbers": Sight(False, False, True),
}


@pytest.mark.parametrize("kind", WANTED)
def test_what_is_seen(kind):
    mask, positions = mask_of(kind, True)
    call = Call(positions, positions, 0, False)
    for _ in range(2):  # the second time from what was noted
        assert sight(mask, mask is None, call, LENGTH) == WANTED[kind]


def test_a_mask_that_is_changed_is_looked_at_again():
    mask, positions = mask_of("right", True)
    call = Call(positions, positions, 0, False)
    mask = mask.clone()
    assert sight(mask, False, call, LENGTH).behind
    mask[1, 0, 3, 30] = True
    assert not sight(mask, False, call, LENGTH).behind
    mask[1, 0, 3, 30] = False
    leaping = Call(positions.flip(1), positions.flip(1), 0, False)
    assert sight(mask, False, call, LENGTH) == WANTED["right"]
    assert sight(mask, False, leaping, LENGTH) == Sight(False, True, False)
    with torch.inference_mode():
        unversioned = mask.clone()
        assert sight(unversioned, False, call, LENGTH).behind
        unversioned[1, 0, 3, 30] = True
        assert not sight(unversioned, False, call, LENGTH).behind


def test_chunks_of_a_text():
    """Queries that stand behind keys of a cache: slots count from theirs."""
    mask, positions = mask_of("left", True)
    late = Call(positions[:, 25:], positions, 25, False)
    assert sight(mask[:, :, 25:], False, late, LENGTH) == WANTED["left"]
    early = Call(positions[:, 25:], positions, 20, False)
    assert not sight(mask[:, :, 25:], False, early, LENGTH).earlier
    somewhere = Call(positions[:, 25:], positions, None, False)  # under a static cache
    assert sight(mask[:, :, 25:], False, somewhere, LENGTH) == Sight(True, True, False)


# --- models


@pytest.fixture(autouse=True)
def as_registered(monkeypatch):
    """No other test meets the schemes that are registered here."""
    for name in ("_entries", "_homes"):
        monkeypatch.setattr(SCHEMES, name, dict(getattr(SCHEMES, name)))


@pytest.mark.parametrize("kind", [KerpleLog, KerplePower, Far])
def test_a_scheme_of_somebody_else(kind):
    """A bias in a file of a test: patched, trained and decoded in every rendering."""
    ids = tokens(2, 40)
    plain = tiny("llama")
    eager = patch_model(tiny("llama", attn_implementation="eager"), scheme_of(kind))
    model = patch_model(tiny("llama"), scheme_of(kind))
    real = torch.ones_like(ids)
    real[0, :9] = 0
    padded = {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    for given in ({}, padded):
        wanted = eager(ids, **given).logits[real == 1]
        wanted.square().mean().backward()
        assert (wanted - plain(ids, **given).logits[real == 1]).abs().max() > 0.1
        ran = set()
        for rendering in (None, *RENDERINGS):
            set_rendering(model, rendering)
            model.zero_grad()
            try:
                logits = model(ids, **given).logits[real == 1]
            except PosencError as refused:
                assert "does not fit" in str(refused)
                continue
            ran.add(rendering)
            torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)
            logits.square().mean().backward()
            for name, parameter in model.named_parameters():
                theirs = eager.get_parameter(name).grad
                torch.testing.assert_close(parameter.grad, theirs, atol=1e-3 * theirs.abs().max(), rtol=1e-2)
        assert ran >= ({None, "blocks"} if kind is Far else {None, "blocks", "toeplitz", "flex"})
        eager.zero_grad()
    set_rendering(model, None)
    made = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(made, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))


class Mixed(DistanceBias):
    """One parameter that is cast with its model, and one that is not."""

    follows_dtype = ("cast",)

    def __init__(self, heads: int):
        super().__init__()
        self.cast, self.kept = (nn.Parameter(torch.linspace(0.1, 1.0, heads)) for _ in range(2))

    def by_distance(self, distances: torch.Tensor) -> torch.Tensor:
        return -self.cast[:, None] * distances.abs() - self.kept[:, None]


def test_which_parameters_follow_the_dtype_is_declared():
    after = patch_model(tiny("llama"), scheme_of(Mixed)).to(torch.bfloat16)
    before = patch_model(tiny("llama").to(torch.bfloat16), scheme_of(Mixed))
    for model in (after, before):
        kept = fp32_names(model)
        assert {"model.posenc_bias.kept"} == {name for name, _ in model.named_parameters()} & kept
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "posenc" in name:
                assert tensor.dtype == (torch.float32 if name in kept else torch.bfloat16), name
    back = after.float()
    assert all(p.dtype == torch.float32 for p in back.parameters())


def test_a_bias_says_what_is_missing():
    class Nothing(DistanceBias):
        pass

    with pytest.raises(NotImplementedError, match="by_distance"):
        Nothing()(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(NotImplementedError, match="between"):
        Bias()(torch.zeros(1, 2), torch.zeros(1, 2))
    assert repr(KerpleLog()) == "KerpleLog(r1=(4,), r2=(4,))"


@pytest.mark.parametrize("scheme", ["t5", "kerple", "fire"])
def test_offloaded_weights_compute_the_same(scheme):
    model, ids = patch_model(tiny("llama"), scheme), tokens(1, 24)
    with torch.no_grad():
        before = model(ids).logits
        cpu_offload(model, execution_device="cpu")
        assert torch.allclose(model(ids).logits, before, atol=1e-5)
