"""The attention functions of patched models, registered with transformers when this module is imported.

`hf_posenc_sdpa` and `hf_posenc_eager` rotate q and k, add the bias, and call the kernel they are named after.
transformers without this package does not know these names, and so refuses a checkpoint whose config has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from ..compat.pytorch import assert_later, is_traced
from ..core.effects import FollowingRotation
from ..errors import PosencError, UnsupportedCell
from . import kernels, layouts, relative, tiles
from .attention_call import Call
from .grids import GridLink
from .kernels import is_causal
from .masks import boolean_mask, keep_padding, mask_rows, ordered_queries, sight
from .positions import PREFIX, Link, Positions
from .rotation import rotate
from .temperature import scale_queries
from .zones import attend_in_zones

LOOKS_AHEAD = (
    "The attention mask lets tokens see ahead (a prefix, the tokens of an image), and this scheme chooses among keys "
    "that came before. Give a causal mask, or patch the model with a scheme that heeds any mask: one that rescales "
    "RoPE, 'alibi', 't5'."
)
TRACED = (
    "torch.jit.trace writes down what was done for one example. A patched model does other things at other lengths: "
    "use torch.export or torch.compile."
)
EXPORTED = (
    "torch.export makes one graph for all texts, and this scheme rotates keys anew for each stage of the length. "
    "Export a model with a fixed rotation instead ('ntk', 'yarn'), or run this one as it is."
)
Kernel = Callable[..., tuple[Tensor, Tensor | None]]
Output = tuple[Tensor, Tensor | None]


def attend(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    posenc_call: Call | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Output:
    """Attention of a patched model: rotate q and k, add the bias, and let the kernel do the rest.

    `position_bias` is the family's own bias, if it has one. A patched layer ignores it.
    """
    link = getattr(module, "posenc_link", None)
    if link is None:
        raise PosencError(
            "This model's config names an attention of hf_posenc, but the model itself is not patched. "
            "Load the checkpoint with hf_posenc.load, or patch the model."
        )
    if link.root is None:
        own = {} if position_bias is None else {"position_bias": position_bias}
        return kernel(module, query, key, value, attention_mask, **own, **kwargs)
    if isinstance(link, GridLink):
        mask, grid = link.unpack(attention_mask)
        return kernel(module, *link.rotate(query, key, grid), value, mask, **kwargs)
    assert posenc_call is not None
    if is_traced():
        raise PosencError(TRACED)
    device = query.device.type
    if not torch.is_autocast_enabled(device) or (kernel is kernels.eager and link.shared.pattern is None):
        return _attend(kernel, module, link, query, key, value, attention_mask, posenc_call, **kwargs)
    # Like torch's own attention under autocast: cast all inputs once, and nothing in between.
    query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):
        return _attend(kernel, module, link, query, key, value, attention_mask, posenc_call, **kwargs)


def _attend(
    kernel: Kernel,
    module: nn.Module,
    link: Link,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    **kwargs: Any,
) -> Output:
    shared, causal = link.shared, is_causal(module, kwargs)
    query = scale_queries(query, link, call, mask, key.shape[2], causal)
    if shared.pattern is not None:
        if shared.pattern.causal and mask is not None:
            _refuse_to_look_ahead(mask, call, key.shape[2])
        # The mask does not know which keys a cache of fixed size has dropped.
        unpadded = shared.forgets and call.first_query is None
        given = (query, key, value, None if unpadded else mask, call, shared)
        return attend_in_zones(module, *given, causal=causal, weighs=kernel is kernels.eager, **kwargs)
    if call.stage is not None:
        query, key = _in_one_stage(query, key, call, shared)
    elif call.angles is not None:
        of_query, of_key = call.angles
        query = rotate(query, of_query, shared.layout)
        key = rotate(key, of_key, shared.layout) if call.stored is None else key
    elif shared.rotates_after_caching:
        return _attend_in_stages(kernel, module, query, key, value, mask, call, shared, **kwargs)
    if link.bias is None:
        return kernel(module, query, key, value, mask, **kwargs)
    if link.bias.of_terms:
        told = {"causal": causal, "weighs": kernel is kernels.eager}
        return relative.attend(module, query, key, value, mask, call, link.bias, link.index, **told, **kwargs)
    if link.bias.of_content and mask is not None:
        _refuse_to_look_ahead(mask, call, key.shape[2])
    extra = {"bias": link.bias, "call": call, "rendering": shared.rendering}
    return kernel(module, query, key, value, mask, **extra, **kwargs)


def _refuse_to_look_ahead(mask: Tensor, call: Call, keys: int) -> None:
    """Raise if the mask lets a token see later tokens, which the scheme would hide."""
    if torch.compiler.is_compiling():
        query, key = call.query, call.key(keys)
        if key.shape[1] == mask.shape[3]:
            ahead = ordered_queries(query)[:, :, None] & (key[:, None, :] > query[:, :, None])
            assert_later(~(boolean_mask(mask) & ahead[:, None]).any(), LOOKS_AHEAD)
    elif not sight(mask, False, call, keys).earlier:
        raise PosencError(LOOKS_AHEAD)


def _in_one_stage(query: Tensor, key: Tensor, call: Call, shared: Positions) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, where all queries of a row are in one stage (`FollowingRotation`)."""
    assert call.angles is not None
    query, read = rotate(query, call.angles[0], shared.layout), call.keys_read(key)
    if read is None:
        read = rotate(key, shared.angles(call.key(key.shape[2]), call.stage), shared.layout)
    return query, read


def _attend_in_stages(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    shared: Positions,
    **kwargs: Any,
) -> Output:
    """Attend with queries in several stages: keys, unrotated in the cache, are rotated once for each stage."""
    assert isinstance(shared.rotation, FollowingRotation)
    causal = is_causal(module, kwargs)
    queries, keys = (p.expand(query.shape[0], -1) for p in (call.query, call.key(key.shape[2])))
    ahead = causal and mask is not None and not torch.compiler.is_compiling()
    ahead = ahead and not sight(mask, False, call, key.shape[2]).earlier
    stage = shared.rotation.stage(_count_visible(queries, keys, mask, causal, ahead))

    def rotate_part(part: slice, now: Tensor) -> tuple[Tensor, Tensor]:
        q = rotate(query[:, :, part], shared.angles(queries[:, part], now), shared.layout)
        return q, rotate(key, shared.angles(keys, now), shared.layout)

    if torch.compiler.is_exporting() and query.shape[2] != 1:
        raise UnsupportedCell(EXPORTED)
    stages = [0] if query.shape[2] == 1 else stage.unique().tolist()
    if len(stages) == 1:
        return kernel(module, *rotate_part(slice(None), stage[:, 0]), value, mask, **kwargs)
    if causal and kernel is kernels.sdpa and (job := _in_tiles(module, query, key, value, mask, call, shared, kwargs)):
        return tiles.attend(query, key, value, job), None
    parts = []
    for now in stages:
        here = stage == now
        tokens = here.any(0).nonzero()
        part = slice(int(tokens[0]), int(tokens[-1]) + 1)
        rows = mask_rows(mask, part.start, part.stop, key.shape[2], causal, query.device)
        q, k = rotate_part(part, torch.full_like(stage[:, 0], now))
        parts.append((here[:, part], part, kernel(module, q, k, value, rows, **{**kwargs, "is_causal": False})))
    return _merge(parts, query.shape[2])


def _in_tiles(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    shared: Positions,
    kwargs: dict[str, Any],
) -> tiles.Job | None:
    if (kwargs.get("dropout") and module.training) or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        return None
    scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    return layouts.plan_job(query, key, value, mask, call.query, call.key(key.shape[2]), shared, scaling)


def _merge(parts: list[tuple[Tensor, slice, Output]], length: int) -> Output:
    """For each token, take the output that was computed for its stage."""
    _, _, (output, weights) = parts[0]
    outputs = output.new_zeros((output.shape[0], length, *output.shape[2:]))
    every = None if weights is None else weights.new_zeros((*weights.shape[:2], length, weights.shape[3]))
    for here, part, (output, weights) in parts:
        outputs[:, part] = torch.where(here[..., None, None], output, outputs[:, part])
        if every is not None:
            every[:, :, part] = torch.where(here[:, None, :, None], weights, every[:, :, part])  # type: ignore[arg-type]
    return outputs, every


def _count_visible(queries: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, ahead: bool) -> Tensor:
    """The number of tokens that each query sees: those up to itself, or up to the last that the mask shows."""
    if causal and not ahead:
        return queries + 1
    if mask is None:
        return (keys.amax(-1, keepdim=True) + 1).expand_as(queries)
    seen = boolean_mask(mask)[:, 0]
    last = torch.where(seen, keys[:, None], -1).amax(-1)
    if causal:  # positions of a decoder do not count padding
        return torch.maximum(queries, last) + 1
    first = torch.where(seen.any(1), keys, keys.amax() + 1).amin(-1)[:, None]  # left padding is not counted
    return last + 1 - first


for _name, _kernel, _mask in (("sdpa", kernels.sdpa, sdpa_mask), ("eager", kernels.eager, eager_mask)):
    # An attention function without a mask function gets no mask, and padding would be seen without an error.
    AttentionInterface.register(PREFIX + _name, partial(attend, _kernel))
    AttentionMaskInterface.register(PREFIX + _name, keep_padding(_mask))
