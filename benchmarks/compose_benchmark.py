"""What a temperature costs on top of a scheme, and a plan against its parts: rows for benchmark.py."""

from collections.abc import Callable
from functools import partial

from report import Row, Run, medians, ratios

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


PLANS = {
    "none and yarn": {"none": {}, "yarn": {"factor": 4.0}},
    "none and window": {"none": {}, "window": {"window": 512}},
    "alibi and yarn": {"alibi": {}, "yarn": {"factor": 4.0}},
}


def plan_rows(patched: Callable, prefill: Callable, decoder: Callable[..., Run], repeated: Callable) -> list[Row]:
    """Every second layer each, against the mean of models that are all one or all the other."""
    rows = []
    for name, parts in PLANS.items():
        models = {scheme: patched("llama", scheme, **given) for scheme, given in parts.items()}
        first, second = parts.items()
        models["plan"] = patched("llama", {"every 2nd": first, "rest": second})
        prefills = medians({kind: partial(prefill, m, 1024) for kind, m in models.items()}, 11)
        decodes = medians({kind: repeated(decoder(m, 2048), 10) for kind, m in models.items()}, 15)
        for what, found in (("prefill 1024", prefills), ("decode at 2048", decodes)):
            mean = sum(found[scheme] for scheme in parts) / 2
            rows.append(Row(f"a plan of {name}, {what}", "the mean of its parts", found["plan"] / mean, 1.0))
    return rows
