"""Tiny models written out in fp64, pair of tokens by pair of tokens, from the formulas of the papers.

Nothing here is of the package: weights come from a state dict, and the frequencies of rescaled RoPE and DeBERTa's
buckets from transformers.
"""

import json
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from cells import LENGTH
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

HEADS, SIZE, DIM = 4, 32, 8
THETA = 10_000.0
MADE: dict[str, tuple[Tensor, float]] = {}
OWN_TABLE = {"gpt2": "wpe.weight", "bert": "position_embeddings.weight"}
ADDED = ("sinusoidal", "fourier", "learned")
KEEPING = ("window", "sparse", "native")


def default_frequencies(theta: float = THETA) -> Tensor:
    return torch.tensor([theta ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)


def rescaled_frequencies(scheme: str, options: dict, length: int | None = None) -> tuple[Tensor, float]:
    """What transformers makes of a rope type."""
    key = json.dumps([scheme, options, length])
    if key not in MADE:
        MADE[key] = _rescaled_frequencies(scheme, options, length)
    return MADE[key]


def _rescaled_frequencies(scheme: str, options: dict, length: int | None) -> tuple[Tensor, float]:
    rope = {"rope_type": scheme, "rope_theta": THETA, **options}
    if scheme in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = LENGTH
    config = LlamaConfig(
        hidden_size=SIZE,
        num_attention_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=int(LENGTH * options.get("factor", 1.0)),
        rope_parameters=rope,
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[scheme](config, seq_len=length)
    return inv_freq.double(), scale


def frequencies(scheme: str, options: dict, seen: Tensor) -> tuple[Tensor, float]:
    """Of each query, which sees so many tokens: (queries, pairs); and what q and k are multiplied by."""
    if scheme in ("linear", "yarn", "llama3", "proportional"):
        found, scale = rescaled_frequencies(scheme, options)
        return found.expand(len(seen), -1), scale
    if scheme == "ntk":
        theta = THETA * options["factor"] ** (DIM / (DIM - 2))
        return default_frequencies(theta).expand(len(seen), -1), 1.0
    if scheme == "dynamic_ntk":
        step, room = options.get("step", LENGTH // 16), options.get("factor", 1.0)
        over = torch.ceil((seen - LENGTH).clamp(min=0) / step) * step
        grown = (1 + room * over / LENGTH).double()
        theta = THETA * grown ** (DIM / (DIM - 2))
        pairs = torch.arange(DIM // 2).double()
        return theta[:, None] ** (-2 * pairs / DIM), 1.0
    if scheme == "clip":
        return clipped(options).expand(len(seen), -1), 1.0
    if scheme == "longrope":
        short, scale = rescaled_frequencies(scheme, options, LENGTH)
        long, _ = rescaled_frequencies(scheme, options, LENGTH + 1)
        return torch.where((seen > LENGTH)[:, None], long, short), scale
    return default_frequencies(options.get("rope_theta", THETA)).expand(len(seen), -1), 1.0


def clipped(options: dict) -> Tensor:
    """Without waves longer than the trained length, or without so many of the slowest pairs, or those fading."""
    f = default_frequencies()
    first = DIM // 2 - options["pairs"] if "pairs" in options else int((2 * math.pi / f <= LENGTH).sum())
    for i in range(first, DIM // 2):
        fading = (1 + math.cos(math.pi * (i - first) / (options["pairs"] - 1))) / 2 if options.get("taper") else 0.0
        f[i] *= fading
    return f


def pattern(scheme: str, o: dict, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """The distance that each pair counts as, and whether it is seen at all. i, j: positions, to be broadcast."""
    d = i - j
    near, seen = d < o.get("window", 1 << 30), torch.ones_like(d, dtype=torch.bool)
    if scheme == "self_extend":
        w, g = o["window"], o["group"]
        return torch.where(near, d, i // g + w - w // g - j // g), seen
    if scheme == "rerope":
        w, k = o["window"], o.get("slope")
        return torch.where(near, d.double(), w + (d - w) / k if k else float(w)), seen
    if scheme == "string":
        return torch.where(d < o["shift"], d, d - o["shift"] + o["window"]), seen
    if scheme == "dca":
        s, c = o["chunk"], o["chunk"] + o["local_window"]
        before = torch.where(i // s == j // s + 1, (i % s + s).clamp(max=c - 1), c - 1) - j % s
        return torch.where(i // s == j // s, d, before), seen
    if scheme == "streaming":
        s, w = o["sinks"], o["window"]
        full = i >= s + w
        far = torch.where(full & ~near, s + w - 1 - j, d)
        return far, ~full | near | (j < s)
    if scheme == "lm_infinite":
        w = o["window"]
        return d.clamp(max=w), near | (j < o["global_tokens"])
    if scheme == "window":
        return d, near & (-d < o["window"])
    if scheme == "sparse":
        first, stride = o["global_tokens"], o.get("stride")
        strided = d % stride == 0 if stride else ~seen
        return d, (d.abs() < o["window"]) | (j < first) | (i < first) | strided
    return d, seen


def t5_bucket(distance: Tensor, buckets: int, most: int, both: bool) -> Tensor:
    """`distance` is key - query."""
    offset = torch.zeros_like(distance)
    if both:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        away = distance.abs()
    else:
        away = (-distance).clamp(min=0)
    exact = buckets // 2
    octaves = (away.clamp(min=1).double() / exact).log() / math.log(most / exact)
    far = (exact + (octaves * (buckets - exact) + 1e-9).long()).clamp(max=buckets - 1)
    return offset + torch.where(away < exact, away, far)


def temperature(given: dict, n: Tensor, scale: Tensor | None, factor: float) -> Tensor:
    """What the query of each token is multiplied by that can look at n tokens, (heads or 1, tokens)."""
    kind, n = given["kind"], n.double()
    if kind == "log":
        return (n.clamp(min=1).log() / math.log(given["length"])).clamp(min=1)[None]
    if kind == "llama4":
        return 1 + given["beta"] * (1 + (n / given["floor"]).floor()).log()[None]
    if kind == "ministral":
        steps = ((n - 1) / given["original_max_position_embeddings"]).floor()
        return 1 + given["llama_4_scaling_beta"] * (1 + steps).log()[None]
    if kind == "drope":
        return torch.full((1, len(n)), 1 + given["c"] * math.log(factor)).double()
    return scale[:, None] * n.log()[None]


RELATIVE = ("shaw", "transformer_xl", "deberta")
FORGETTING = ("fox", "cable")
UNTURNED = ("alibi", "t5", "none", "kerple", "fire", "sandwich", *RELATIVE, *FORGETTING, *ADDED)


class Part(NamedTuple):
    """What one layer does."""

    scheme: str
    options: dict
    heat: dict | None
    tail: str = ""
    """What the names of its own weights end with, in a plan."""
    index: int = 0
    """Its place among the layers that do the same."""


def _part(scheme: str, given: dict, tail: str) -> Part:
    options = {name: value for name, value in given.items() if name != "temperature"}
    return Part(scheme, options, given.get("temperature"), tail)


class Reference:
    """One model under one scheme, "native" being none at all, or under a plan: a scheme for each layer."""

    causal = True
    scaling = DIM**-0.5

    def __init__(
        self,
        kind: str,
        scheme: str,
        options: dict,
        state: dict[str, Tensor],
        heat: dict | None = None,
        layers: int = 2,
    ):
        self.kind, self.scheme, self.options = kind, scheme, options
        self.w = {name: tensor.double() for name, tensor in state.items()}
        self.causal = kind != "bert"
        self.parts = [Part(scheme, options, heat, index=layer) for layer in range(layers)]
        if scheme == "plan":
            first, second = options["layers"]
            tails = ("_0_0", "_rest_0" if first[0] == "native" else "_rest_1")
            self.parts = [_part(*given, tail) for given, tail in zip((first, second), tails, strict=True)]

    def rotates(self, scheme: str) -> bool:
        return scheme not in UNTURNED and not (scheme in KEEPING and self.kind in OWN_TABLE)

    # ------------------------------------------------------------ positions

    def scores(self, layer: int, states: Tensor, q: Tensor, k: Tensor, at: Tensor, counted: Tensor | None):
        """Of (heads, tokens, channels), before the softmax; which pairs the scheme lets through; what each pair adds
        to the values, (i, j, channels)."""
        part = self.parts[layer]
        scheme, options = part.scheme, part.options
        i, j = at[:, None], at[None, :]
        told, seen = pattern(scheme, options, i, j)
        if part.heat:
            n = at + 1 if self.causal else torch.full_like(at, len(at))
            scale = self.weight(f"posenc_temperature{part.tail}.scale") if part.heat["kind"] == "ssmax" else None
            q = q * temperature(part.heat, n, scale, options.get("factor", 1.0))[..., None]
        if scheme in RELATIVE:
            found, values = self.relative(part, q, k, i - j)
            return found * self.scaling, seen, values
        if self.rotates(scheme):
            f, scale = frequencies(scheme, options, counted if counted is not None else at + 1)
            a, b = (torch.complex(*x.chunk(2, -1)) * scale for x in (q, k))
            angle = told.double()[..., None] * f[:, None, :]  # (i, j, pair)
            found = torch.einsum("hip,hjp,ijp->hij", a, b.conj(), torch.polar(torch.ones_like(angle), angle)).real
        else:
            found = q @ k.mT
        found = found * self.scaling
        if scheme in FORGETTING:
            return found + self.forgotten(part, states), seen, None
        return found + self.bias(part, i, j), seen, None

    def bias(self, part: Part, i: Tensor, j: Tensor) -> Tensor | float:
        """What is added because of where two tokens stand, (heads, i, j)."""
        scheme, o, own = part.scheme, part.options, f"posenc_bias{part.tail}"
        d = (i - j).abs().double()
        if scheme == "alibi":
            return -torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]).double()[:, None, None] * d
        if scheme == "t5":
            buckets, most = o["relative_attention_num_buckets"], o["relative_attention_max_distance"]
            where = t5_bucket(j - i, buckets, most, not self.causal)
            return self.weight(f"{own}.weight")[where].permute(2, 0, 1)
        if scheme == "kerple":
            r1, r2 = (self.weight(f"{own}.{r}").clamp(min=0.01)[:, None, None] for r in ("r1", "r2"))
            return -r1 * (d ** r2.clamp(max=2.0) if o.get("kernel") == "power" else (1 + r2 * d).log())
        if scheme == "fire":
            c, reach = self.weight(f"{own}.c").abs(), torch.maximum(i, j).double()
            reach = torch.maximum(reach, (o["threshold"] * self.weight(f"{own}.multiplier")).abs())
            part = (c * d + 1).log() / (c * reach + 1).log()
            weight, constant = self.weight(f"{own}.inner")
            hidden = torch.relu(part[..., None] * weight + constant)
            return torch.einsum("hw,ijw->hij", self.weight(f"{own}.outer"), hidden)
        if scheme == "sandwich":
            size = o.get("size", 128)
            waves = sum(torch.cos(d / 10_000 ** (2 * m / size)) for m in range(size // 2))
            return torch.stack([waves / (8 * (h + 1) / HEADS) for h in range(HEADS)])
        return 0.0

    def forgotten(self, part: Part, states: Tensor) -> Tensor:
        """The logarithm of what is left between two tokens: the sum over those after the key, up to the query."""
        weight, constant = (
            self.weight(f"posenc_bias{part.tail}.{name}")[part.index] for name in ("weight", "constant")
        )
        gate = states @ weight.T + constant
        left = (torch.sigmoid(gate) if part.scheme == "fox" else torch.sigmoid(-gate)).log().T
        total = left.cumsum(-1)
        return total[:, :, None] - total[:, None, :]

    def relative(self, part: Part, q: Tensor, k: Tensor, apart: Tensor) -> tuple[Tensor, Tensor | None]:
        """Terms that look at content, `apart` being query - key."""
        scheme, o, own, layer = part.scheme, part.options, f"posenc_bias{part.tail}", part.index
        found = q @ k.mT
        if scheme == "shaw":
            most = o["max_distance"]
            rows = (-apart).clamp(-most, most) + most
            a = self.weight(f"{own}.keys")[layer][rows]
            found = found + torch.einsum("hic,ijc->hij", q, a)
            if o.get("relative_queries"):
                found = found + torch.einsum("hjc,ijc->hij", k, a)
            return found, self.weight(f"{own}.values")[layer][rows] if o.get("relative_values") else None
        if scheme == "transformer_xl":
            angle = apart.double()[..., None] / torch.tensor([10_000 ** (2 * c / SIZE) for c in range(SIZE // 2)])
            waves = torch.cat([angle.sin(), angle.cos()], -1)
            r = torch.einsum("hcs,ijs->hijc", self.weight(f"{own}.weight")[layer], waves)
            u, v = (self.weight(f"{own}.{name}")[layer][:, None] for name in "uv")
            return (q + u) @ k.mT + torch.einsum("hic,hijc->hij", q + v, r), None
        buckets, most = o["position_buckets"], o["max_relative_positions"]

        def vectors(d: Tensor, to: str) -> Tensor:
            row = make_log_bucket_position(d.clamp(-most, most), buckets, most).long()
            row = row.clamp(-buckets, buckets - 1) + buckets
            table = self.weight(f"{own}.table")[row]
            return torch.einsum("hcs,ijs->hijc", self.weight(f"{own}.{to}")[layer], table)

        found = found + torch.einsum("hic,hijc->hij", q, vectors(apart, "to_key"))
        found = found + torch.einsum("hjc,hijc->hij", k, vectors(-apart, "to_query"))
        return found / math.sqrt(3), None

    def added(self, at: Tensor) -> Tensor | float:
        """What is added to the embeddings of tokens."""
        if self.scheme in ("sinusoidal", "fourier"):
            f = torch.tensor([THETA ** (-2 * i / SIZE) for i in range(SIZE // 2)], dtype=torch.float64)
            f = f if self.scheme == "sinusoidal" else self.weight("posenc_frequencies")[0]
            angle = at.double()[:, None] * f
            return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)
        own = OWN_TABLE.get(self.kind)
        if self.scheme == "learned":
            return self.weight(own or "posenc_table.weight")[at]
        if own and self.scheme in KEEPING:
            return self.weight(own)[at]
        return 0.0

    def weight(self, tail: str) -> Tensor:
        return next(tensor for name, tensor in self.w.items() if name.endswith(tail))

    # ------------------------------------------------------------ models

    def attend(self, layer, states, q, k, v, at, visible, counted) -> Tensor:
        scores, seen, values = self.scores(layer, states, q, k, at, counted)
        weights = scores.masked_fill(~(visible & seen), -math.inf).softmax(-1).nan_to_num()
        found = weights @ v
        if values is not None:
            found = found + torch.einsum("hij,ijc->hic", weights, values)
        return found.transpose(0, 1).flatten(1)

    def logits(self, ids: Tensor, at: Tensor, visible: Tensor, counted: Tensor | None = None) -> Tensor:
        """(tokens, words). `counted`: how many tokens each query is told to see, those up to itself unless given."""
        run = {"llama": self._llama, "qwen3": self._llama, "gpt2": self._gpt2, "bert": self._bert}[self.kind]
        return run(ids, lambda *given: self.attend(*given, at, visible, counted), self.added(at))

    def _llama(self, ids, attend, added):
        w, eps = self.w, 1e-6

        def norm(x, name):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name]

        x = w["model.embed_tokens.weight"][ids] + added
        for n in range(len(self.parts)):
            p = f"model.layers.{n}."
            h = norm(x, p + "input_layernorm.weight")
            q, k, v = ((h @ w[f"{p}self_attn.{c}_proj.weight"].T).unflatten(-1, (-1, DIM)) for c in "qkv")
            if self.kind == "qwen3":
                q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
            q, k, v = (y.transpose(0, 1) for y in (q, k, v))
            k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
            x = x + attend(n, h, q, k, v) @ w[p + "self_attn.o_proj.weight"].T
            h = norm(x, p + "post_attention_layernorm.weight")
            gate, up = (h @ w[f"{p}mlp.{c}_proj.weight"].T for c in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ w["lm_head.weight"].T

    def _gpt2(self, ids, attend, added):
        w = self.w

        def norm(x, name):
            return F.layer_norm(x, (SIZE,), w[name + ".weight"], w[name + ".bias"], 1e-5)

        def linear(x, name):
            return x @ w[name + ".weight"] + w[name + ".bias"]

        x = w["transformer.wte.weight"][ids] + added
        for n in range(len(self.parts)):
            p = f"transformer.h.{n}."
            h = norm(x, p + "ln_1")
            q, k, v = (
                y.unflatten(-1, (HEADS, DIM)).transpose(0, 1) for y in linear(h, p + "attn.c_attn").chunk(3, -1)
            )
            x = x + linear(attend(n, h, q, k, v), p + "attn.c_proj")
            x = x + linear(F.gelu(linear(norm(x, p + "ln_2"), p + "mlp.c_fc"), approximate="tanh"), p + "mlp.c_proj")
        return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T

    def _bert(self, ids, attend, added):
        w = self.w

        def norm(x, name):
            return F.layer_norm(x, (SIZE,), w[name + ".weight"], w[name + ".bias"], 1e-12)

        def linear(x, name):
            return x @ w[name + ".weight"].T + w[name + ".bias"]

        e = "bert.embeddings."
        x = norm(
            w[e + "word_embeddings.weight"][ids] + w[e + "token_type_embeddings.weight"][0] + added, e + "LayerNorm"
        )
        for n in range(len(self.parts)):
            p = f"bert.encoder.layer.{n}."
            q, k, v = (
                linear(x, f"{p}attention.self.{c}").unflatten(-1, (HEADS, DIM)).transpose(0, 1)
                for c in ("query", "key", "value")
            )
            x = norm(x + linear(attend(n, x, q, k, v), p + "attention.output.dense"), p + "attention.output.LayerNorm")
            h = F.gelu(linear(x, p + "intermediate.dense"))
            x = norm(x + linear(h, p + "output.dense"), p + "output.LayerNorm")
        c = "cls.predictions."
        x = norm(F.gelu(linear(x, c + "transform.dense")), c + "transform.LayerNorm")
        return x @ w[c + "decoder.weight"].T + w[c + "bias"]
