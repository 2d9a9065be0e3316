"""Encoders with decoders written out in fp64: T5 and its kin, and BART. Nothing here is of the package."""

import math

import torch
import torch.nn.functional as F
from attack.reference import DIM, HEADS, KEEPING, SIZE, Reference
from torch import Tensor


def of_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, DIM)).transpose(0, 1)


class Stack(Reference):
    """One half of a model. `read`: what the decoder reads of the encoder, one text without padding."""

    def __init__(self, kind: str, scheme: str, options: dict, state: dict[str, Tensor], causal: bool):
        super().__init__(kind, scheme, options, state)
        self.causal = causal
        self.scaling = DIM**-0.5 if kind == "bart" else 1.0

    def states(self, ids: Tensor, pads: int, read: Tensor | None) -> Tensor:
        """Of one text, behind `pads` tokens that are none."""
        n = len(ids)
        at, visible = torch.arange(n), torch.ones(n, n, dtype=torch.bool)
        if self.causal:
            visible = visible.tril()
        counted = at + 1 if self.causal else torch.full((n,), n)

        def attend(*given):
            return self.attend(*given, at, visible, counted)

        return self._bart(ids, pads, attend, read) if self.kind == "bart" else self._t5(ids, attend, read)

    def cross(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (of_heads(q) @ of_heads(k).mT * self.scaling).softmax(-1)
        return (weights @ of_heads(v)).transpose(0, 1).flatten(1)

    def _t5(self, ids, attend, read):
        w = self.w

        def norm(x, name):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[name + ".weight"]

        def linear(x, name):
            return x @ w[name + ".weight"].T

        x = w["embed_tokens.weight"][ids]
        for n in range(2):
            p = f"block.{n}.layer."
            h, own = norm(x, p + "0.layer_norm"), p + "0.SelfAttention."
            x = x + linear(attend(n, h, *(of_heads(linear(h, own + c)) for c in "qkv")), own + "o")
            if self.causal:
                h, other = norm(x, p + "1.layer_norm"), p + "1.EncDecAttention."
                found = self.cross(linear(h, other + "q"), linear(read, other + "k"), linear(read, other + "v"))
                x = x + linear(found, other + "o")
            last = p + ("2." if self.causal else "1.")
            h, dense = norm(x, last + "layer_norm"), last + "DenseReluDense."
            if self.kind == "t5":
                inner = linear(h, dense + "wi").relu()
            else:
                inner = F.gelu(linear(h, dense + "wi_0"), approximate="tanh") * linear(h, dense + "wi_1")
            x = x + linear(inner, dense + "wo")
        return norm(x, "final_layer_norm")

    def _bart(self, ids, pads, attend, read):
        """Its decoder counts padding for its table, and cannot be told otherwise."""
        w = self.w

        def norm(x, name):
            return F.layer_norm(x, (SIZE,), w[name + ".weight"], w[name + ".bias"], 1e-5)

        def linear(x, name):
            return x @ w[name + ".weight"].T + w[name + ".bias"]

        x = norm(w["embed_tokens.weight"][ids] + self.of_table(torch.arange(len(ids)) + pads), "layernorm_embedding")
        for n in range(2):
            p, own = f"layers.{n}.", f"layers.{n}.self_attn."
            found = attend(n, x, *(of_heads(linear(x, f"{own}{c}_proj")) for c in "qkv"))
            x = norm(x + linear(found, own + "out_proj"), p + "self_attn_layer_norm")
            if self.causal:
                other = p + "encoder_attn."
                found = self.cross(*(linear(y, f"{other}{c}_proj") for y, c in ((x, "q"), (read, "k"), (read, "v"))))
                x = norm(x + linear(found, other + "out_proj"), p + "encoder_attn_layer_norm")
            inner = F.gelu(linear(x, p + "fc1"))
            x = norm(x + linear(inner, p + "fc2"), p + "final_layer_norm")
        return x

    def of_table(self, at: Tensor) -> Tensor | float:
        if self.scheme in ("learned", *KEEPING):
            return self.weight("embed_positions.weight")[at + 2]
        return self.added(at)


class Pair:
    """An encoder and a decoder, and what makes words of their states."""

    def __init__(self, kind: str, scheme: str, options: dict, state: dict[str, Tensor]):
        self.kind = kind
        halves = {}
        for half in ("encoder.", "decoder."):
            start = ("model." if kind == "bart" else "") + half
            own = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
            halves[half] = Stack(kind, scheme, options, own, half == "decoder.")
        self.encoder, self.decoder = halves["encoder."], halves["decoder."]
        self.head = state["lm_head.weight"].double()
        self.shift = state["final_logits_bias"].double() if kind == "bart" else 0.0

    def logits(self, read: Tensor, ids: Tensor, pads: int) -> Tensor:
        states = self.decoder.states(ids, pads, self.encoder.states(read, 0, None))
        scale = 1 / math.sqrt(SIZE) if self.kind in ("t5", "umt5") else 1.0
        found: Tensor = (states * scale) @ self.head.T + self.shift
        return found.squeeze(0) if found.ndim == 3 else found
