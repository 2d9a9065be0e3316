"""The loss of every token, without holding the logits of a whole text in memory.

The body of a model runs once. Its head then gets the output of the body slice by slice, through the model's own
forward with the body replaced: so everything that the class does to logits (a scale, a soft cap, a bias) is done.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ...compat.models import is_stateful
from ...compat.pytorch import unwrap_compiled
from ...errors import PosencError
from ...patching.lengths import places_or_none
from ...patching.patch_state import is_patched, links, unwrap_model

CHUNK = 512
"""Tokens whose logits are in memory at once."""


@torch.no_grad()
def token_losses(
    model: Any, input_ids: Tensor, *, last: int | None = None, chunk: int = CHUNK, step: int | None = None
) -> Tensor:
    """Negative log likelihood in nats of the `last` tokens of each row (all but the first, unless given), in fp32.

    The head gets `chunk` tokens at a time. With `step`, the body reads so many tokens at a time with a KV cache.
    No value changes with either, but for rounding.
    """
    rows, length = input_ids.shape
    count = length - 1 if last is None else last
    if not 0 < count < length:
        raise PosencError(
            f"{count} of {length} tokens cannot be scored: the first has nothing before it. Score fewer."
        )
    first = length - count
    losses = torch.empty((rows, count), dtype=torch.float32)
    for start, logits in sliced_logits(model, input_ids, first - 1, max(1, chunk // rows), step):
        targets = input_ids[:, start + 1 : start + 1 + logits.shape[1]].to(logits.device)
        found = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        losses[:, start + 1 - first :][:, : targets.shape[1]] = found.view(targets.shape).cpu()
    refuse_broken(losses, first)
    return losses


def sliced_logits(
    model: Any, ids: Tensor, first: int, size: int, step: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The logits from position `first` to the last but one, as pairs of a slice's start and its logits."""
    end = ids.shape[1] - 1
    if step is not None and not is_cacheable(model):
        raise PosencError(
            f"{type(unwrap_model(model)).__name__} cannot be read in parts over a cache exactly: leave step out."
        )
    cache = DynamicCache() if step is not None else None
    for at in range(0, end, step or end):
        stop = min(at + (step or end), end)
        once = Pass(model, ids[:, at:stop], at, cache)
        for start in range(max(first, at), stop, size):
            yield start, once.logits(slice(start - at, min(start + size, stop) - at))
        if cache is not None and stop <= first:  # only fills the cache
            once.logits(slice(0, 1))


class Pass:
    """A pass of a model over tokens, with logits slice by slice. The body runs for the first slice."""

    def __init__(self, model: Any, ids: Tensor, at: int = 0, cache: Any = None):
        self.model = unwrap_compiled(model)
        self.inner = unwrap_model(model)
        self.ids = ids.to(embedding(self.inner).device)
        self.given: dict[str, Any] = {"return_dict": True}
        if cache is not None:
            positions = torch.arange(at, at + ids.shape[1], device=self.ids.device)[None]
            self.given |= {"past_key_values": cache, "use_cache": True, "position_ids": positions}
        elif "use_cache" in inspect.signature(self.inner.forward).parameters:
            self.given["use_cache"] = False
        self.body: nn.Module | None = None
        self.output: Any = None
        self.whole: Tensor | None = None

    def logits(self, where: slice) -> Tensor:
        if self.whole is not None:
            return self.whole[:, where]
        with self._body_cut(where) if self.body is None else self._body_still(where):
            given = self.given if self.body is None else {"return_dict": True}
            logits: Tensor = self.model(input_ids=self.ids, **given).logits
        if logits.shape[1] == where.stop - where.start:
            return logits
        if self.body is not None:
            raise PosencError(
                f"The head of {type(self.inner).__name__} was given {where.stop - where.start} tokens and made logits "
                f"of {logits.shape[1]}: it cannot be evaluated in slices."
            )
        warnings.warn(
            f"The head of {type(self.inner).__name__} cannot be run without its body: all logits of a pass are "
            "held in memory.",
            stacklevel=2,
        )
        self.whole = logits
        return logits[:, where]

    def _slice_output(self, where: slice) -> Any:
        hidden = self.output.last_hidden_state
        extra = hidden.shape[1] - self.ids.shape[1]  # what prompt tuning puts in front
        part = hidden[:, where.start + extra : where.stop + extra]
        return dataclasses.replace(self.output, last_hidden_state=part)

    @contextmanager
    def _body_cut(self, where: slice) -> Iterator[None]:
        """Run the body, keep its whole output, and give the head a slice of it."""

        def keep(body: nn.Module, args: Any, output: Any) -> Any:
            if self.body is not None or getattr(output, "last_hidden_state", None) is None:
                return None
            self.body, self.output = body, output
            return self._slice_output(where)

        handles = [body.register_forward_hook(keep) for body in bodies(self.inner)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _body_still(self, where: slice) -> Iterator[None]:
        """Replace the body by one that returns a slice of its earlier output."""
        assert self.body is not None
        own = vars(self.body).get("forward")
        self.body.forward = lambda *args, **kwargs: self._slice_output(where)
        try:
            yield
        finally:
            del self.body.forward
            if own is not None:  # it was wrapped before, for example by accelerate
                self.body.forward = own


def is_cacheable(model: Any) -> bool:
    """Whether reading a text in parts with a KV cache gives the same as a single pass."""
    inner = unwrap_model(model)
    rope = getattr(inner.config, "rope_parameters", None) or {}
    if not is_patched(inner) and rope.get("rope_type") in ("dynamic", "longrope"):
        return False  # those of transformers keep keys in the cache that were rotated with old angles
    taken = inspect.signature(inner.forward).parameters
    return "past_key_values" in taken and not is_stateful(inner)


def forgets(model: nn.Module) -> bool:
    """Whether a scheme drops keys from the cache, which then cannot be cropped."""
    return any(link.shared.forgets for _, link in links(model.modules()))


def bodies(model: PreTrainedModel) -> list[nn.Module]:
    """The modules below the head of a language model, innermost first."""
    found = [model.get_decoder(), model.base_model]
    return [body for body in dict.fromkeys(found) if isinstance(body, nn.Module) and body is not model]


def refuse_broken(losses: Tensor, first: int) -> None:
    """Raise if a loss is not finite; `first` is the position of the first column."""
    broken = ~losses.isfinite()
    if broken.any():
        row, column = broken.nonzero()[broken.nonzero()[:, 1].argmin()].tolist()
        raise PosencError(
            f"The loss is {losses[row, column]:g} at position {first + column} (row {row}), the first of "
            f"{int(broken.sum())} tokens: the model overflows or its weights are broken. Load it in float32 or "
            "bfloat16, or look at its weights."
        )


def embedding(model: PreTrainedModel) -> Tensor:
    weight: Any = model.get_input_embeddings().weight
    return weight


def vocabulary_of(model: Any) -> int:
    return embedding(unwrap_model(model)).shape[0]


def refuse_not_causal(model: Any) -> None:
    """Raise for a model whose tokens see later ones, or that predicts none."""
    inner = unwrap_model(model)
    name = type(inner).__name__
    if inner.get_output_embeddings() is None or getattr(inner.config, "is_encoder_decoder", False):
        raise PosencError(
            f"{name} has no head that predicts the next token, which perplexity and retrieval need. A decoder with "
            "its language-model head can be evaluated (load it with model_class=AutoModelForCausalLM, if its weights "
            "have one); encoders are evaluated by their embeddings: --tasks embed_passkey,embed_needle."
        )
    vocabulary = vocabulary_of(model)
    ids = torch.arange(2, 10)[None] % vocabulary
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % vocabulary
    with torch.no_grad():
        before, after = (Pass(model, x).logits(slice(0, 8)).float() for x in (ids, other))
    changed = (before - after).abs().nan_to_num().amax(-1)[0]
    leak, own = float(changed[:-1].max()), float(changed[-1])
    rounding = 8 * torch.finfo(inner.dtype).eps * float(before.abs().nan_to_num().max())  # experts regroup tokens
    where = places_or_none(inner)
    built = where is None or where.stacks[-1].causal
    if leak > 1e-4 * own + rounding or (leak and not built):
        raise PosencError(
            f"{name} sees the tokens that it would have to predict: it is an encoder. Perplexity and retrieval "
            "are for decoders; of this family, use one with is_decoder=True in its config and a causal head. "
            "Encoders are evaluated by their embeddings: --tasks embed_passkey,embed_needle."
        )
