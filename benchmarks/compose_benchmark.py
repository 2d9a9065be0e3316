"""What a temperature costs on top of a scheme: rows for benchmark.py."""

from collections.abc import Callable
from functools import partial

from report import Row, Run, ratios

SCHEMES = {"none": {}, "yarn": {"factor": 4.0}, "alibi": {}, "self_extend": {"factor": 4.0}}
KINDS = ("log", "ssmax")


def temperature_rows(
    patched: Callable, prefill: Callable, decoder: Callable[..., Run], repeated: Callable
) -> list[Row]:
    rows = []
    for scheme, given in SCHEMES.items():
        models = {"": patched("llama", scheme, **given)}
        models |= {kind: patched("llama", scheme, temperature=kind, **given) for kind in KINDS}
        prefills = ratios({kind: partial(prefill, m, 1024) for kind, m in models.items()}, "", 11)
        decodes = ratios({kind: repeated(decoder(m, 2048), 10) for kind, m in models.items()}, "", 15)
        for kind in KINDS:
            rows.append(Row(f"{scheme} with {kind}, prefill 1024", f"{scheme} without", prefills[kind], 1.02))
            rows.append(Row(f"{scheme} with {kind}, decode at 2048", f"{scheme} without", decodes[kind], 1.02))
    return rows
