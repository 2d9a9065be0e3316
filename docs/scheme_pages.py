"""`make docs`: a page for every scheme, of its code, of docs/schemes/about.toml and of pictures drawn from it."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from scheme_pictures import FACTOR, TARGET, TRAINED, Picture, pictures
from tables import write_table

from hf_posenc.patching.grades import CONFIG, KINDS, MEANING, cell
from hf_posenc.patching.untrained import training_needs
from hf_posenc.schemes import SCHEMES, Scheme

FOLDER = Path(__file__).parent / "schemes"
SHARED = {
    "target_length": "how many tokens the model should read",
    "trained_length": "corrects the trained length that the config states",
    "factor": "`target_length` over the trained length, instead of it",
    "temperature": "what queries are multiplied by: `log`, `llama4`, `ministral`, `drope`, `ssmax` or `none`",
    "rope_theta": "RoPE's base; the model's own unless given",
}
"""Options that schemes share, in words."""
NEEDS = {
    "no": "No: it works on a trained model as it is.",
    "yes": "Yes: a trained model has never seen such positions, and `patch_model` warns of that.",
}


def about() -> dict[str, dict[str, Any]]:
    """Sentences, formula and paper of every scheme."""
    return {name: entry for name, entry in _told().items() if name != "options"}


def options() -> dict[str, str]:
    """What options mean, by name."""
    return _told()["options"]


@cache
def _told() -> dict[str, dict[str, Any]]:
    return tomllib.loads((FOLDER / "about.toml").read_text(encoding="utf-8"))


def make_pages() -> dict[str, str]:
    """Every page and picture, by the name of its file."""
    known, needs, files = about(), training_needs(), {}
    for name in SCHEMES.built_in():
        drawn = pictures(name)
        files[f"{name}.md"] = page(name, known[name], needs[name], drawn)
        files.update({f"{name}-{picture.name}.svg": picture.svg for picture in drawn})
    return files


def page(name: str, entry: dict[str, Any], needs: str, drawn: list[Picture]) -> str:
    scheme = SCHEMES[name]
    wanted = f", target_length={TARGET}" if scheme.extends else ""
    paper = f"[{entry['paper']}]({entry['url']})" if "url" in entry else entry["paper"]
    trained = NEEDS.get(needs) or f"On a model with {needs.removeprefix('not on ')}: no. Elsewhere: yes."
    parts = [
        "<!-- Made by `make docs` from the code and about.toml: edit those. -->",
        f"# {name}",
        entry["does"],
        f'```python\npatch_model(model, "{name}"{wanted})\n```',
        f"**Formula.**\n\n```text\n{re.sub(' {2,}', chr(10), entry['formula'])}\n```",
        f"**Paper.** {paper}, {entry['year']}.",
        f"**Needs training?** {trained}",
        _loaders(name, scheme),
        _options(scheme),
        _pictures(name, drawn),
        "[All schemes](README.md)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loaders(name: str, scheme: type[Scheme]) -> str:
    """Who can load a saved model, by what the model's own positions were."""
    grades = {kind: cell(name, kind).partition(":")[0] for kind in KINDS}
    rows = [f"| {kind} | {grade} | {MEANING.get(grade, 'not offered')} |" for kind, grade in grades.items()]
    head = "## Who can load the result\n\n| a model with | grade | which means |\n|---|---|---|\n"
    if scheme.nearest:
        served = f"Nearest scheme that other runtimes serve: [`{scheme.nearest}`]({scheme.nearest}.md)."
    elif CONFIG in grades.values():
        served = "Other runtimes can serve it where the grade is config: see [serving](../serving.md)."
    else:
        served = "No scheme close to it can be served by other runtimes: see [serving](../serving.md)."
    return head + "\n".join(rows) + "\n\n" + served


def _options(scheme: type[Scheme]) -> str:
    own = [_option(field) for field in dataclasses.fields(scheme) if field.name not in SHARED]
    shared = [_option(field) for field in dataclasses.fields(scheme) if field.name in SHARED]
    words = " ".join((scheme.__doc__ or "").split())
    head = "| option | type | default | what it is |\n|---|---|---|---|"
    return "\n".join([f"## Options\n\n{words}\n", head, *own, *shared])


def _option(field: dataclasses.Field[Any]) -> str:
    hidden = {"None", "TemperatureKind", "Mapping[str, Any]"}
    kinds = [kind for kind in str(field.type).split(" | ") if kind not in hidden]
    default = "-" if field.default is None else f"`{field.default!r}`"
    return f"| `{field.name}` | {' or '.join(kinds)} | {default} | {SHARED.get(field.name) or options()[field.name]} |"


def _pictures(name: str, drawn: list[Picture]) -> str:
    if not drawn:
        return ""
    said = f"Drawn from the code, for a model trained at {TRAINED:,} tokens (factor {FACTOR}) unless stated otherwise."
    shown = [f"![{picture.caption}]({name}-{picture.name}.svg)\n\n{picture.caption}" for picture in drawn]
    return "\n\n".join(["## Pictures", said, *shown])


def index() -> str:
    """Links to all pages, for docs/schemes/README.md."""
    known, needs = about(), training_needs()
    rows = [
        f"| [`{name}`]({name}.md) | {known[name]['year']} | {needs[name]} | {SCHEMES[name].summary} |"
        for name in sorted(SCHEMES.built_in())
    ]
    return "| scheme | year | needs training | what it does |\n|---|---|---|---|\n" + "\n".join(rows)


def main() -> None:
    files = make_pages()
    for old in [*FOLDER.glob("*.md"), *FOLDER.glob("*.svg")]:
        if old.name not in files and old.name != "README.md":
            old.unlink()
    for name, content in files.items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    write_table(FOLDER / "README.md", "pages", index())


if __name__ == "__main__":
    main()
