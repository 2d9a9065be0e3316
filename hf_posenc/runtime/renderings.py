"""Renderings: ways to add a bias to attention scores without storing it for every pair of tokens.

All are exact. They differ in what they need of the bias, the device and the call. `choose` takes the cheapest that
fits, or the one that the user chose with `set_rendering`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from ..core.biases import Bias
from ..errors import PosencError
from . import flash, gradients, masks
from .attention_call import Call
from .gradients import BiasedAttention, Plan, precision
from .masks import Sight, add_mask, mask_rows
from .sources import Diagonals, Pairs, Products

BLOCK = 512
"""How many queries have their bias written out at once: memory is BLOCK * keys instead of queries * keys."""
FEW = 16
"""Up to this many queries, writing out the bias costs less than any other rendering."""


@dataclass(frozen=True)
class Request:
    """The inputs of one attention call with a bias."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Bias
    call: Call
    scaling: float
    causal: bool
    """Whether there is no mask and query i sees keys 0..i."""
    kwargs: dict[str, Any]

    @property
    def sight(self) -> Sight:
        """Facts about the mask, for renderings that are right only under a causal mask."""
        # A compiler cannot trace the lock inside `cached_property`.
        return masks.UNKNOWN if torch.compiler.is_compiling() else self._sight

    @cached_property
    def _sight(self) -> Sight:
        return masks.sight(self.mask, self.causal, self.call, self.key.shape[2])

    @property
    def key_slopes(self) -> Tensor | None:
        """The slopes m, if the bias is m * (key position) for all keys that are seen in this call; otherwise None."""
        slopes = self.bias.key_slopes
        if slopes is None or (self.mask is not None and self.mask.dtype != torch.bool):
            return None
        if torch.compiler.is_compiling():  # a compiler knows that a call is causal, and no values
            return slopes if self.causal else None
        return slopes if self.sight.behind else None

    @property
    def of_distance(self) -> bool:
        """Whether the bias is a function of the distance alone at all positions of this call."""
        if self.bias.of_distance or torch.compiler.is_compiling():
            return self.bias.of_distance
        return self._furthest <= self.bias.by_distance_until

    @cached_property
    def _furthest(self) -> int:
        return max(int(self.call.query.max()), int(self.call.key(self.key.shape[2]).max()))

    @property
    def first(self) -> int | None:
        """The slot of the first query, if no query sees a later slot than its own; otherwise None."""
        return 0 if self.causal else self.call.first_query if self.sight.earlier else None

    @property
    def dropout(self) -> float:
        return float(self.kwargs.get("dropout", 0.0))

    @property
    def trains(self) -> bool:
        inputs = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        return torch.is_grad_enabled() and (inputs or self.trains_bias)

    @property
    def trains_bias(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.bias.parameters())

    @property
    def precision(self) -> torch.dtype:
        """The dtype in which the bias is computed."""
        return precision(self.query)


class Rendering(NamedTuple):
    """Whether a rendering fits a call, and the function that computes it."""

    fits: Callable[[Request], bool]
    run: Callable[[Request], Tensor]


def sdpa(request: Request, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """torch's attention through transformers' function: (batch, queries, heads, channels)."""
    kwargs = {**request.kwargs, "is_causal": causal, "scaling": request.scaling}
    return sdpa_attention_forward(request.module, query, key, value, mask, **kwargs)[0]


def centre_positions(positions: Tensor, last: Tensor) -> Tensor:
    """Subtract the middle of the range from positions. A softmax ignores a constant, and small numbers round less."""
    return positions - torch.div(positions[:, :1] + last, 2, rounding_mode="floor")


# --- row: slope * (key position) is one number per key, which torch's CPU kernel adds along with its causal mask.


def _row_fits(r: Request) -> bool:
    plain = r.mask is None and r.causal and r.key_slopes is not None and r.dropout == 0.0
    return plain and r.query.shape[2] == r.key.shape[2] and flash.fits(r.query, r.value)


def _row(r: Request) -> Tensor:
    assert r.key_slopes is not None
    positions = centre_positions(r.call.key(r.key.shape[2]), r.call.query[:, -1:])
    row = r.key_slopes[None, :, None, None] * positions[:, None, None, :].to(r.precision)
    groups = r.query.shape[1] // r.key.shape[1]
    key, value = repeat_kv(r.key, groups), repeat_kv(r.value, groups)
    row = row.expand(r.query.shape[0], r.query.shape[1], r.query.shape[2], -1)
    output, _ = flash.flash(r.query, key, value, row, True, r.scaling)
    return output.transpose(1, 2).contiguous()


# --- columns: slope * (key position) has rank one, and so becomes an extra channel of q and k, for any kernel.


def _columns(r: Request, shared: bool = False) -> Tensor:
    size = r.value.shape[-1]
    positions = r.call.key(r.key.shape[2])
    if not shared:  # processes that share a text would subtract different middles
        positions = centre_positions(positions, r.call.query[:, -1:])
    assert r.key_slopes is not None
    q_columns, k_columns = exact_columns(r.key_slopes.to(r.precision) / r.scaling, positions, r.query.dtype)
    query = torch.cat([r.query, q_columns[None, :, None].expand(*r.query.shape[:3], -1)], -1)
    key = torch.cat([r.key, k_columns[:, None].expand(*r.key.shape[:3], -1)], -1)
    value = F.pad(r.value, (0, query.shape[-1] - size))  # kernels need the same size for q, k and v
    return sdpa(r, query, key, value, r.mask, r.causal)[..., :size].contiguous()


def exact_columns(slopes: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns a, b in `dtype` with a @ b = slope * position, exact except for the kernel's own sums in fp32.

    Half precision has few bits. So slopes and positions are written as sums of numbers that it can hold, and each pair
    of these gets a column. This is exact for positions within 131,072 of the middle.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return slopes.to(dtype)[:, None], positions.to(dtype)[..., None]
    # 256 is moved from positions to slopes, because fp16 ends at 65,504.
    q_parts = _parts(slopes * 256, dtype, 3 if dtype == torch.bfloat16 else 2)
    k_parts = _parts(positions.float() / 256, dtype, 2)
    q_columns = [q for q in q_parts for _ in k_parts]
    k_columns = [k for _ in q_parts for k in k_parts]
    return torch.stack(q_columns, -1), torch.stack(k_columns, -1)


def _parts(numbers: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Numbers of `dtype` that add up to the given ones. Each holds what the earlier ones have rounded off."""
    parts, rest = [], numbers.float()
    for _ in range(count):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return parts


# --- toeplitz: a bias of the distance alone is one number per distance. With queries in reverse order, query i and key
# j take number i + j, so that the whole matrix is a view of these numbers in which both strides are one.


def _toeplitz_fits(r: Request) -> bool:
    plain = r.query.device.type == "cpu" and r.dropout == 0.0
    return plain and r.of_distance and r.sight.gapless


def _toeplitz(r: Request) -> Tensor:
    length, keys = r.query.shape[2], r.key.shape[2]
    plan = Plan(partial(Diagonals, length=length), gradients.attend, r.scaling, r.mask, first=r.first)
    if r.trains:
        output: Tensor = BiasedAttention.apply(plan, r.query, r.key, r.value, _numbers(r))
        return output.transpose(1, 2).contiguous()
    diagonals, outputs = plan.source(_numbers(r)), []
    # If queries see only earlier keys: in blocks, each over the keys that it can see. Otherwise one view is enough.
    for part in plan.parts(length, keys, length if r.first is None and r.mask is None else BLOCK):
        here = slice(part.start, part.end)
        mask = None if r.mask is None else r.mask[:, :, here, : part.keys].flip(2)
        rows = diagonals.rows(part, slice(None), slice(None))
        rows = add_mask(rows, mask, r.query.dtype).expand(len(r.query), -1, -1, -1)
        given = (r.query[:, :, here].flip(2), r.key[:, :, : part.keys], r.value[:, :, : part.keys])
        outputs.append(sdpa(r, *given, rows, False).flip(1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _numbers(r: Request) -> Tensor:
    """The bias at each distance in slots, beginning with the last query and the first key: (heads, distances)."""
    first = 0 if r.causal else int(r.call.first_query or 0)
    distance = torch.arange(1 - first - r.query.shape[2], r.key.shape[2] - first, device=r.key.device)
    numbers = r.bias.numbers(distance, r.precision)
    return (numbers.masked_fill(distance > 0, -torch.inf) if r.causal else numbers).contiguous()


# --- products: what queries and what distances give, one multiplication for each pair.


def _products_fit(r: Request) -> bool:
    plain = r.query.device.type == "cpu" and r.dropout == 0.0 and r.bias.of_factors
    return plain and r.sight.gapless and r.first is not None  # so that no key is ahead


def _products(r: Request) -> Tensor:
    assert r.first is not None
    trained = {name: p for name, p in r.bias.named_parameters() if p.requires_grad} if r.trains else {}
    source = partial(Products, r.bias, tuple(trained), r.call.query, r.first, r.precision)
    plan = Plan(source, gradients.attend, r.scaling, r.mask, first=r.first)
    output: Tensor = BiasedAttention.apply(plan, r.query, r.key, r.value, *trained.values())
    return output.transpose(1, 2).contiguous()


# --- flex: torch compiles the bias into one kernel. For GPUs (not measured there); on a CPU the others are faster.


def _flex_fits(r: Request) -> bool:
    bools = r.mask is None or r.mask.dtype == torch.bool
    return bools and r.dropout == 0.0 and r.of_distance


def _flex(r: Request) -> Tensor:
    # On a CPU torch has no backward for it, and elsewhere none that sums the gradients of a lookup.
    if r.trains_bias or (r.trains and r.query.device.type == "cpu"):
        flexed = partial(_run_flex, r.bias, r.call, r.mask, r.causal, r.scaling)
        output = _with_gradients(r, lambda plan, source, *tensors: flexed(*tensors))
    else:
        output, _ = _run_flex(r.bias, r.call, r.mask, r.causal, r.scaling, r.query, r.key, r.value)
    return output.transpose(1, 2).contiguous()


def _run_flex(
    bias: Bias,
    call: Call,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs and their log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    length, keys = query.shape[2], key.shape[2]
    of_query, of_key = call.query.expand(len(query), -1), call.key(keys).expand(len(query), -1)
    first, last = int(of_key.min() - of_query.max()), int(of_key.max() - of_query.min())
    numbers = bias.numbers(torch.arange(first, last + 1, device=query.device), precision(query))

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + numbers[h, of_key[b, j] - of_query[b, i] - first]

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if mask is None else mask.expand(len(query), query.shape[1], -1, -1)[b, h, i, j]

    block_mask = None
    if mask is not None or causal:
        heads = None if mask is None or mask.shape[1] == 1 else query.shape[1]
        block_mask = create_block_mask(sees, len(query), heads, length, keys, device=str(query.device))
    given = {"score_mod": score, "block_mask": block_mask, "scale": scaling, "return_aux": AuxRequest(lse=True)}
    run = _compiled_flex(query.device.type)
    output, found = run(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **given)
    return output, found.lse


@cache
def _compiled_flex(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


# --- blocks: any bias, written out for some queries at a time.


def _blocks(r: Request) -> Tensor:
    if r.trains and r.dropout == 0.0 and not torch.compiler.is_compiling():
        return _with_gradients(r, gradients.attend).transpose(1, 2).contiguous()
    length = r.query.shape[2]
    positions = r.call.key(r.key.shape[2])
    first = r.first

    def block(start: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = key.shape[2] if first is None else min(first + end, key.shape[2])
        bias = r.bias(r.call.query[:, start:end], positions[:, :seen], r.precision)
        rows = add_mask(bias, mask_rows(r.mask, start, end, seen, r.causal, query.device), query.dtype)
        rows = rows.to(query.dtype).expand(query.shape[0], -1, -1, -1)
        return sdpa(r, query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], rows, False)

    if torch.compiler.is_exporting():  # an exported graph for any length has no fixed number of blocks
        first = None
        return block(0, length, r.query, r.key, r.value)
    # A bias that is computed for each pair is faster in smaller blocks, which fit into the CPU's caches.
    size = BLOCK if r.of_distance else max(BLOCK // 4, 1)
    starts = range(0, length, size)
    if len(starts) == 1:
        return block(0, length, r.query, r.key, r.value)
    run: Callable[..., Tensor] = block
    if torch.is_grad_enabled():
        run = partial(checkpoint, block, use_reentrant=False)
    return torch.cat([run(s, min(s + size, length), r.query, r.key, r.value) for s in starts], 1)


def _with_gradients(r: Request, attend: gradients.Attend) -> Tensor:
    """Attention for training: outputs by `attend`, and gradients in blocks."""
    trained = {name: p for name, p in r.bias.named_parameters() if p.requires_grad}
    at = (r.call.query, r.call.key(r.key.shape[2]), r.precision)
    plan = Plan(partial(Pairs, r.bias, tuple(trained), *at), attend, r.scaling, r.mask, r.causal, r.first)
    output: Tensor = BiasedAttention.apply(plan, r.query, r.key, r.value, *trained.values())
    return output


RENDERINGS = {
    "row": Rendering(_row_fits, _row),
    "columns": Rendering(lambda r: r.key_slopes is not None, _columns),
    "shared_columns": Rendering(lambda r: r.key_slopes is not None, partial(_columns, shared=True)),
    "toeplitz": Rendering(_toeplitz_fits, _toeplitz),
    "products": Rendering(_products_fit, _products),
    "flex": Rendering(_flex_fits, _flex),
    "blocks": Rendering(lambda r: True, _blocks),
}
"""In order of preference, which differs for training. `flex` is chosen only on GPUs; `shared_columns` is never chosen
before `columns`, and so only used on request."""


def choose(request: Request, asked: str | None) -> Rendering:
    """The first rendering that fits this call, or the requested one."""
    if asked is not None:
        if not RENDERINGS[asked].fits(request):
            raise PosencError(
                f"The rendering {asked!r} does not fit this call. set_rendering(model, None) lets the package choose."
            )
        return RENDERINGS[asked]
    if torch.compiler.is_exporting() or request.query.shape[2] <= FEW:
        return RENDERINGS["blocks"]
    cpu = request.query.device.type == "cpu"
    names = [name for name in RENDERINGS if not (cpu and name == "flex")]
    if request.trains:  # toeplitz has its own backward, which drops weights that are nearly zero
        names = ["toeplitz", *names]
    return next(RENDERINGS[name] for name in names if RENDERINGS[name].fits(request))
