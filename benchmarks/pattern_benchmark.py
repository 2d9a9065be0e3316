"""What patterns of keys cost beside plain causal attention: rows of benchmark.py."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from report import Row, Run, medians, ratios

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.effects import Geometry
from hf_posenc.runtime.positions import Call, Positions
from hf_posenc.runtime.zones import attend_in_zones

HEADS, SIZE, LENGTH, WINDOW = 8, 64, 8192, 1024
PATTERNS: dict[str, dict[str, int | float]] = {
    "self_extend": {"target_length": LENGTH, "window": WINDOW, "group": 8},
    "rerope": {"window": WINDOW},
    "dca": {"chunk": 3072, "local_window": 1024},
    "streaming": {"sinks": 4, "window": WINDOW},
    "lm_infinite": {"global_tokens": 10, "window": WINDOW},
    "window": {"window": WINDOW},
    "sparse": {"window": WINDOW // 4, "global_tokens": 16, "random_blocks": 3},
}
SLOW = {"self_extend": 2.2, "rerope": 2.2, "dca": 2.2, "window": 1.0, "streaming": 1.0}
"""The most that they may take, against causal SDPA over as many tokens."""


def qkv(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(3)]


def plain(x: list[torch.Tensor]) -> torch.Tensor:
    return F.scaled_dot_product_attention(*x, is_causal=True).transpose(1, 2)


def attention(x: list[torch.Tensor], name: str) -> torch.Tensor:
    """One layer's attention with a pattern, as a patched model of 4096 trained tokens calls it."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    sizes = dict(hidden_size=HEADS * SIZE, num_heads=HEADS, head_dim=SIZE, rotary_dim=SIZE)
    effect = SCHEMES[name](**PATTERNS[name]).effect(Geometry(**sizes, trained_length=4096, causal=True, rope=rope))
    late = effect.rotation if effect.rotation is not None and effect.rotation.follows_length else None
    shared = Positions(late, torch.device("cpu"), pattern=effect.pattern)
    positions = torch.arange(x[0].shape[2])[None]
    layer = torch.nn.Module().eval()
    call = Call(positions, positions, 0)
    return attend_in_zones(layer, *x, None, call, shared, causal=True, weighs=False)[0]


def memory_case(name: str) -> Run:
    x = qkv(LENGTH)
    return partial(plain, x) if name == "plain" else partial(attention, x, name)


def pattern_rows(peak: Callable[[str], float]) -> list[Row]:
    rows, x, longer = [], qkv(LENGTH), qkv(2 * LENGTH)
    base = peak("pattern:plain")
    with torch.no_grad():
        for name in PATTERNS:
            runs: dict[str, Run] = {"plain": partial(plain, x), name: partial(attention, x, name)}
            rows.append(
                Row(f"{name} attention, {LENGTH}", "causal SDPA", ratios(runs, "plain", 3)[name], SLOW.get(name))
            )
            extra = peak(f"pattern:{name}")
            most = 3.0 if SLOW.get(name) == 2.2 else None
            rows.append(
                Row("its extra memory", "causal SDPA", extra / base, most, note=f"{extra:.0f} of {base:.0f} MB")
            )
        for name in ("window", "streaming"):
            runs = {"short": partial(attention, x, name), "long": partial(attention, longer, name)}
            rows.append(Row(f"{name} attention, 16k over 8k", "itself", ratios(runs, "short", 3)["long"], 2.4))
    return rows


def streaming_rows(model: Callable[..., torch.nn.Module]) -> list[Row]:
    """A text of 100,000 tokens through a cache of fixed size."""
    m = patch_model(model("llama"), "streaming", sinks=4, window=508)
    past, step, seconds, sizes = None, 500, [], set()
    with torch.no_grad():
        for start in range(0, 100_000, step):
            ids = torch.arange(start, start + step)[None] % 1000
            run = partial(m, ids, past_key_values=past, use_cache=True)
            found: list[object] = []
            seconds.append(medians({"pass": lambda run=run, found=found: found.append(run())}, 1)["pass"])
            past = found[0].past_key_values  # type: ignore[attr-defined]
            sizes.add(past.layers[0].keys.shape[2])
    early, late = sorted(seconds[10:40]), sorted(seconds[-30:])
    note = f"cache of {min(sizes)} to {max(sizes)} keys after {past.get_seq_length()} tokens"
    value = late[len(late) // 2] / early[len(early) // 2]
    return [Row("streaming, time per token at 100k", "the same at 10k", value, 1.1, note=note)]
