"""Attention alone: what a bias costs a kernel in time, and how exact it stays."""

from functools import partial

import torch
import torch.nn.functional as F
from report import Row, Run, ratios

from hf_posenc.runtime.attention_call import Call
from hf_posenc.runtime.kernels import sdpa
from hf_posenc.schemes.alibi import LinearBias, slopes
from hf_posenc.schemes.t5 import BucketBias

HEADS, SIZE = 8, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def qkv(length: int, dtype: torch.dtype, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, HEADS, length, SIZE, generator=generator).to(dtype) for _ in range(3)]
    return [x.requires_grad_(grad) for x in made]


def layer(causal: bool) -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = causal, 1
    return module


def plain_attention(x: list[torch.Tensor], causal: bool = True) -> torch.Tensor:
    return F.scaled_dot_product_attention(*x, is_causal=causal).transpose(1, 2)


def our_attention(x: list[torch.Tensor], bias: torch.nn.Module, causal: bool = True) -> torch.Tensor:
    positions = torch.arange(x[0].shape[2])[None]
    call = Call(positions, positions, 0, False)
    return sdpa(layer(causal), *x, None, bias=bias, call=call)[0]


def alibi(causal: bool = True) -> LinearBias:
    return LinearBias(slopes(HEADS), causal)


def t5(causal: bool = True) -> BucketBias:
    return BucketBias(HEADS, 32, 128, not causal, 1.0, 0).requires_grad_(False)


def backward(run: Run) -> None:
    run().sum().backward()  # type: ignore[attr-defined]


def alibi_error(x: list[torch.Tensor]) -> tuple[float, float]:
    """Largest error on the last 512 queries, against fp64: ours, and SDPA's with that bias written out in fp32."""
    length, last = x[0].shape[2], 512
    q, k, v = (t.double() for t in x)
    at = torch.arange(length)
    distance = (at[-last:, None] - at).double()
    scores = q[:, :, -last:] @ k.mT / SIZE**0.5
    seen = distance >= 0
    bias = -distance * torch.tensor(slopes(HEADS)).double()[:, None, None]
    masked = bias.masked_fill(~seen, -torch.inf)
    truth = (scores + masked).softmax(-1) @ v
    ours = our_attention(x, alibi()).transpose(1, 2)[:, :, -last:]
    theirs = F.scaled_dot_product_attention(x[0][:, :, -last:], x[1], x[2], attn_mask=masked.float()[None])
    return (ours.double() - truth).abs().max().item(), (theirs.double() - truth).abs().max().item()


def attention_rows() -> list[Row]:
    rows = []
    for name, dtype in DTYPES.items():
        x = qkv(4096, dtype)
        with torch.no_grad():
            runs = {"plain": partial(plain_attention, x), "alibi": partial(our_attention, x, alibi())}
            value = ratios(runs, "plain", 5)["alibi"]
            rows.append(Row(f"causal ALiBi attention, 4096, {name}, forward", "causal SDPA", value, 1.15))
            ours, noise = alibi_error(x)
        most = 1e-3 if name == "fp32" else 1.1 * noise
        rows.append(
            Row(f"its largest error, {name}", "fp64", ours, most, "", f"SDPA with the bias dense: {noise:.1e}")
        )
        y = qkv(4096, dtype, grad=True)
        runs = {"plain": partial(plain_attention, y), "alibi": partial(our_attention, y, alibi())}
        value = ratios({k: partial(backward, run) for k, run in runs.items()}, "plain", 2)["alibi"]
        rows.append(Row(f"the same, {name}, forward + backward", "causal SDPA", value, 1.25))
    return rows


def growth_rows() -> list[Row]:
    rows = []
    table: dict[str, dict[int, float]] = {"alibi": {}, "t5": {}}
    for length in (1024, 2048, 4096, 8192, 16384):
        x = qkv(length, torch.float32)
        runs: dict[str, Run] = {
            "plain": partial(plain_attention, x),
            "alibi": partial(our_attention, x, alibi()),
            "t5": partial(our_attention, x, t5()),
        }
        with torch.no_grad():
            for name, value in ratios(runs, "plain", 9 if length < 4096 else 3 if length < 8192 else 1).items():
                table[name][length] = value
    for name, by_length in table.items():
        note = ", ".join(f"{n // 1024}k {value:.2f}" for n, value in by_length.items())
        growth = by_length[16384] / by_length[1024]
        rows.append(Row(f"{name} attention, 16k over 1k", "the same of SDPA", growth, 1.2, note=note))
    return rows
