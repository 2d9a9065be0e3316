"""Which channels a live model rotates. It is run and watched, since models pair channels differently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ..compat.models import attention_of, own_eager, set_attention
from ..errors import PosencError, UnsupportedCell
from ..families import Group
from ..runtime.positions import PREFIX
from ..runtime.rotation import HALVES, LAYOUTS, rotate

KNOWN = {"llama": HALVES, "mistral": HALVES, "qwen2": HALVES, "qwen3": HALVES}
"""Model types that need not be watched, so that their checkpoints can be patched without loading weights."""
WATCHED = PREFIX + "watched"


def attend_and_keep_keys(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """The family's own eager attention, which also keeps the layer's keys."""
    module.posenc_keys = key.detach()
    return own_eager(module)(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(WATCHED, attend_and_keep_keys)
AttentionMaskInterface.register(WATCHED, eager_mask)


def watch_layout(group: Group) -> tuple[str, tuple[int, ...]]:
    """How channels form pairs in a group of layers, and which of those layers rotate nothing.

    A single token sees only itself, so its states are the same at every position. If its keys differ between two
    positions, the difference is the rotation.
    """
    kind = group.stack.config.model_type
    if kind in KNOWN or not group.attentions:  # without attention layers the scheme is refused later
        return KNOWN.get(kind, HALVES), ()
    try:
        before, after = (_keys(group, position) for position in (0, 3))
    except Exception as error:
        raise UnsupportedCell(
            f"This scheme rotates keys by itself, and which channels this {kind!r} model rotates is not known: "
            f"running it on one token failed ({error or type(error).__name__}). A checkpoint on disk must be loaded "
            "and patched live."
        ) from None
    assert group.inv_freq is not None
    inv_freq = group.inv_freq.float()
    rotated = (3 * inv_freq)[None, None]
    angles = (rotated.cos(), rotated.sin())
    layouts, still = set(), []
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        if torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max())):
            still.append(index)
            continue
        fitting = [
            name
            for name in LAYOUTS
            if torch.allclose(rotate(one, angles, name), other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
        ]
        layouts.add(fitting[0] if fitting else None)
    if still and not layouts:  # none of them rotates
        return HALVES, tuple(still)
    if len(layouts) != 1 or None in layouts:
        raise UnsupportedCell(
            f"This scheme rotates keys by itself, and how this {kind!r} model rotates them is none of the ways "
            f"that are known ({', '.join(LAYOUTS)}). Schemes that rescale RoPE in its config ('ntk', 'yarn') work."
        )
    return str(layouts.pop()), tuple(still)


def _keys(group: Group, position: int) -> list[Tensor]:
    """The keys of one token at a position, in every layer of the group, in fp32."""
    config, root = group.stack.root.config, group.stack.root
    kernel, training = attention_of(config), [m for m in root.modules() if m.training]
    words = root.get_input_embeddings().weight
    if not len(words) or words.device.type == "meta":
        raise PosencError("its weights are not loaded")
    token = int(words[:64].float().norm(dim=-1).argmax())  # not padding, whose vector is zero

    def put_back() -> None:
        set_attention(config, kernel)
        for module in training:  # one by one, since some parts may have been in eval mode
            module.training = True
        for attention in group.attentions:
            vars(attention).pop("posenc_keys", None)

    try:
        try:
            set_attention(config, WATCHED)
            root.eval()
            with torch.no_grad():
                ids, where = (torch.full((1, 1), n, device=words.device) for n in (token, position))
                root(input_ids=ids, position_ids=where, use_cache=False)
            return [attention.posenc_keys.float() for attention in group.attentions]
        finally:
            put_back()
    finally:  # once more, for a Ctrl-C while it ran
        put_back()
