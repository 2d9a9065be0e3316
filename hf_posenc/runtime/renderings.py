"""Ways to add a bias to attention scores without a bias per pair of tokens in memory.

Each is exact; they differ in what they ask of the bias, the device and the call. `choose` takes the cheapest that
fits, or the one that `set_rendering` asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from ..compat import pytorch
from ..errors import PosencError
from .calls import Call

BLOCK = 512
"""Queries whose bias is written out at once: memory is BLOCK * keys, never queries * keys."""
FEW = 16
"""Up to this many queries, writing out their bias costs less than any preparation of the keys."""


class Request(NamedTuple):
    """One attention call with a bias, as transformers would make it."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Any
    call: Call
    scaling: float
    causal: bool
    """Whether query i sees keys 0..i, there being no mask that says so."""
    kwargs: dict[str, Any]

    @property
    def dropout(self) -> float:
        return float(self.kwargs.get("dropout", 0.0))

    @property
    def trains_bias(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.bias.parameters())


class Rendering(NamedTuple):
    fits: Callable[[Request], bool]
    run: Callable[[Request], Tensor]


def sdpa(request: Request, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """transformers' own call of torch's kernel: (batch, queries, heads, channels)."""
    kwargs = {**request.kwargs, "is_causal": causal, "scaling": request.scaling}
    return sdpa_attention_forward(request.module, query, key, value, mask, **kwargs)[0]


def add_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Bias and mask as one additive mask, in fp32."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        # Not -inf: a row of padding that sees nothing must not become NaN.
        return torch.where(mask, bias, torch.finfo(dtype).min)
    return (bias + mask).clamp(min=torch.finfo(dtype).min)


def centred(positions: Tensor, last: Tensor) -> Tensor:
    """Positions counted from their middle: a row of scores does not see a constant, and small numbers round less."""
    return positions - torch.div(positions[:, :1] + last, 2, rounding_mode="floor")


# --- row: slope * key position is one number per key, which torch's CPU kernel adds beside its own causal mask.


def _row_fits(r: Request) -> bool:
    plain = r.mask is None and r.causal and r.bias.key_slopes is not None and r.dropout == 0.0
    square = r.query.shape[2] == r.key.shape[2] and r.query.shape[3] == r.value.shape[3]
    return plain and square and r.query.device.type == "cpu" and r.query.dtype in pytorch.CPU_ATTENTION


def _row(r: Request) -> Tensor:
    positions = centred(r.call.key(r.key.shape[2]), r.call.query[:, -1:])
    row = r.bias.key_slopes[None, :, None, None] * positions[:, None, None, :].float()
    groups = r.query.shape[1] // r.key.shape[1]
    key, value = repeat_kv(r.key, groups), repeat_kv(r.value, groups)
    # The public function takes a mask or `is_causal`; the kernel behind it takes both, and then skips what is masked.
    mask = row.expand(r.query.shape[0], r.query.shape[1], r.query.shape[2], -1)
    output, _ = pytorch.cpu_attention(r.query, key, value, causal=True, scaling=r.scaling, mask=mask)
    return output.transpose(1, 2).contiguous()


# --- columns: slope * key position has rank one, and so is a channel more of q and k, for any kernel.


def _columns(r: Request, shared: bool = False) -> Tensor:
    size = r.value.shape[-1]
    positions = r.call.key(r.key.shape[2])
    if not shared:  # by several processes: the middle of one part is not that of another
        positions = centred(positions, r.call.query[:, -1:])
    q_columns, k_columns = exact_columns(r.bias.key_slopes / r.scaling, positions, r.query.dtype)
    query = torch.cat([r.query, q_columns[None, :, None].expand(*r.query.shape[:3], -1)], -1)
    key = torch.cat([r.key, k_columns[:, None].expand(*r.key.shape[:3], -1)], -1)
    value = F.pad(r.value, (0, query.shape[-1] - size))  # kernels want one size for all three
    return sdpa(r, query, key, value, r.mask, r.causal)[..., :size].contiguous()


def exact_columns(slopes: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns a, b in `dtype` with a @ b = slope * position, exact but for the kernel's own fp32 sums.

    Half precision holds few bits, so that slopes and positions are written as sums of parts that it does hold, and
    each pair of parts gets a column. Exact for positions within 131,072 of the middle.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return slopes.to(dtype)[:, None], positions.to(dtype)[..., None]
    # The power of two moves range from one side to the other: fp16 ends at 65,504.
    q_parts = _parts(slopes * 256, dtype, 3 if dtype == torch.bfloat16 else 2)
    k_parts = _parts(positions.float() / 256, dtype, 2)
    q_columns = [q for q in q_parts for _ in k_parts]
    k_columns = [k for _ in q_parts for k in k_parts]
    return torch.stack(q_columns, -1), torch.stack(k_columns, -1)


def _parts(numbers: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Numbers of `dtype` that add up to the given ones: each takes up what those before it rounded off."""
    parts, rest = [], numbers.float()
    for _ in range(count):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return parts


# --- toeplitz: a bias of the distance alone is one number per distance. With the keys in reverse order, query i and
# key j' meet number i + j', so that the whole matrix is a view of those numbers with both strides one.


def _toeplitz_fits(r: Request) -> bool:
    cpu = r.query.device.type == "cpu" and r.dropout == 0.0 and not r.trains_bias
    return cpu and r.call.without_gaps(r.mask is not None)


def _toeplitz(r: Request) -> Tensor:
    length, keys = r.query.shape[2], r.key.shape[2]
    first = int(r.call.first_query or 0)
    # number n is the bias at distance key - query = (keys - 1 - first) - n, for n = i + j'
    distance = (keys - 1 - first) - torch.arange(length + keys - 1, device=r.key.device)
    numbers = r.bias.by_distance(distance).contiguous()
    if r.causal:
        numbers = numbers.masked_fill(distance > 0, torch.finfo(torch.float32).min)
    key, value = r.key.flip(2), r.value.flip(2)
    mask = None if r.mask is None else r.mask.flip(3)
    # A causal call goes in blocks, each over the keys that it can see; else one view does for all queries.
    step = BLOCK if r.causal or mask is not None else length
    outputs = []
    for start in range(0, length, step):
        end = min(start + step, length)
        unseen = keys - (first + end) if r.causal else 0
        rows = numbers.as_strided(
            (1, len(numbers), end - start, keys - unseen), (0, numbers.shape[1], 1, 1), start + unseen
        )
        if mask is not None:
            rows = add_mask(rows, mask[:, :, start:end], r.query.dtype)
        rows = rows.expand(r.query.shape[0], -1, -1, -1)
        part = (r.query[:, :, start:end], key[:, :, unseen:], value[:, :, unseen:])
        outputs.append(sdpa(r, *part, rows, False))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


# --- flex: torch compiles the bias into one kernel. For GPUs, where it has not been measured; on a CPU the others win.


def _flex(r: Request) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    length, keys = r.query.shape[2], r.key.shape[2]
    of_query, of_key = r.call.query.expand(len(r.query), -1), r.call.key(keys).expand(len(r.query), -1)
    numbers = r.bias.distances(of_query.device)

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + r.bias.at(numbers, h, of_key[b, j] - of_query[b, i])

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if r.mask is None else r.mask[b, 0, i, j]

    block_mask = None
    if r.mask is not None or r.causal:
        block_mask = create_block_mask(seen, len(r.query), None, length, keys, device=str(r.query.device))
    grouped = r.query.shape[1] != r.key.shape[1]
    output = _compiled_flex(r.query.device.type)(
        r.query, r.key, r.value, score_mod=score, block_mask=block_mask, scale=r.scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous()


@cache
def _compiled_flex(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def _flex_fits(r: Request) -> bool:
    bools = r.mask is None or r.mask.dtype == torch.bool
    trains = torch.is_grad_enabled() and r.query.device.type == "cpu"  # torch has no backward of it there
    return bools and r.dropout == 0.0 and not r.trains_bias and not trains


# --- blocks: any bias, for some queries at a time; in training each block is computed again for its gradient.


def _blocks(r: Request) -> Tensor:
    length = r.query.shape[2]
    positions = r.call.key(r.key.shape[2])

    def block(start: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = end if r.causal else key.shape[2]
        bias = r.bias(r.call.query[:, start:end], positions[:, :seen])
        rows = add_mask(bias, mask_rows(r.mask, start, end, seen, r.causal, query.device), query.dtype)
        rows = rows.to(query.dtype).expand(query.shape[0], -1, -1, -1)
        return sdpa(r, query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], rows, False)

    starts = range(0, length, BLOCK)
    if len(starts) == 1:
        return block(0, length, r.query, r.key, r.value)
    run: Callable[..., Tensor] = block
    if torch.is_grad_enabled():
        run = partial(checkpoint, block, use_reentrant=False)
    return torch.cat([run(s, min(s + BLOCK, length), r.query, r.key, r.value) for s in starts], 1)


def mask_rows(
    mask: Tensor | None, start: int, end: int, keys: int, causal: bool, device: torch.device
) -> Tensor | None:
    """The mask of queries start..end. No mask on a causal layer means that query i sees keys 0..i."""
    if mask is not None:
        return mask[:, :, start:end, :keys]
    if not causal:
        return None
    rows, columns = torch.arange(start, end, device=device), torch.arange(keys, device=device)
    return (columns <= rows[:, None])[None, None]


RENDERINGS = {
    "row": Rendering(_row_fits, _row),
    "columns": Rendering(lambda r: r.bias.key_slopes is not None, _columns),
    "shared_columns": Rendering(lambda r: r.bias.key_slopes is not None, partial(_columns, shared=True)),
    "toeplitz": Rendering(_toeplitz_fits, _toeplitz),
    "flex": Rendering(_flex_fits, _flex),
    "blocks": Rendering(lambda r: True, _blocks),
}
"""In the order of preference; flex is for GPUs only, unless asked for, and shared columns come only when asked for."""


def choose(request: Request, asked: str | None) -> Rendering:
    """The first rendering that fits this call, or the one asked for."""
    if asked is not None:
        if not RENDERINGS[asked].fits(request):
            raise PosencError(
                f"The rendering {asked!r} does not fit this call; set_rendering(model, None) lets us choose."
            )
        return RENDERINGS[asked]
    if request.query.shape[2] <= FEW:
        return RENDERINGS["blocks"]
    cpu = request.query.device.type == "cpu"
    names = [name for name in RENDERINGS if not (cpu and name == "flex")]
    return next(RENDERINGS[name] for name in names if RENDERINGS[name].fits(request))
