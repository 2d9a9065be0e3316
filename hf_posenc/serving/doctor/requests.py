"""Checks of serving and training configs: commands, JSON and flat YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoints.files import CONFIG
from ...engines.kinds import kind_of_rope, number
from ...errors import PosencError
from ...patching.seal import is_sealed_config
from .findings import NOTE, SUSPICIOUS, WRONG, Finding, check, findings
from .reading import MOST, Checkpoint, read_checkpoint
from .ropes import SCALED, length_of, original_of, raw_ropes, scaled, type_of

MODEL = ("model", "model_path", "model_name_or_path", "pretrained_model_name_or_path", "m")
OVERRIDES = ("hf_overrides", "json_model_override_args", "model_overrides", "model_kwargs", "model_init_kwargs")
LENGTH = (
    *("max_model_len", "context_length", "max_total_tokens", "max_seq_length", "num_ctx", "n_ctx", "ctx_size", "c"),
    *("cutoff_len", "sequence_len"),  # of LLaMA-Factory and axolotl, who train
)
ANSWER = ("max_new_tokens", "max_tokens", "max_completion_length", "num_predict")
DRAFT = ("speculative_model", "draft_model", "model_draft", "speculative_draft_model_path", "md")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
REMOVED = ("rope_scaling", "rope_theta")
"""Flags that vLLM had once."""


@dataclass(frozen=True)
class Request:
    """A serving config: its settings with normalized names, and the models it names if they are on this disk."""

    settings: dict[str, Any]
    text: str
    folder: Path
    command: bool = False
    """Whether it is a command with flags."""
    models: dict[str, Checkpoint] = field(default_factory=dict)
    """"model" and "draft"."""

    def first(self, names: tuple[str, ...]) -> Any:
        return next((self.settings[name] for name in names if name in self.settings), None)

    @property
    def scaled_by_trainer(self) -> bool:
        """LLaMA-Factory takes the name of a scaling, and extends it to the length that it truncates at."""
        return "cutoff_len" in self.settings and self.settings.get("rope_scaling") in SCALED

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings that override the model's config."""
        given = parse_config(self.first(OVERRIDES))
        inner = given if isinstance(given, dict) else {}
        asked = self.settings if not self.scaled_by_trainer else {}
        direct = {k: parse_config(asked[k]) for k in ROPE if k in asked}
        return {**direct, **inner}

    def merged(self) -> Checkpoint:
        """The config that a server would build."""
        base = self.models["model"].section if "model" in self.models else {}
        laid = {k: v for k, v in self.overrides.items() if k != "text_config"}
        text = self.overrides.get("text_config")
        merged = {**base, **laid, **(text if isinstance(text, dict) else {})}
        if "rope_parameters" in merged and "rope_parameters" in laid and "rope_scaling" not in laid:
            merged.pop("rope_scaling", None)
        return Checkpoint({key: value for key, value in merged.items() if key != "posenc"})  # no server reads it


def parse_config(value: Any) -> Any:
    """A value that may be JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_request(path: Path) -> Request:
    if path.stat().st_size > MOST:
        raise PosencError(f"{path} has {path.stat().st_size} bytes, too many for a serving config.")
    text = path.read_bytes().decode("utf-8", errors="replace")
    command = False
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data, command = from_text(text)
    if not isinstance(data, dict) or not data:
        raise PosencError(
            f"{path} is not a checkpoint's or adapter's folder, a GGUF file, or a serving config as JSON, YAML or a "
            "command."
        )
    settings = {str(key).lstrip("-").replace("-", "_").lower(): value for key, value in data.items()}
    settings |= {k: v for k, v in _inner(settings).items() if k not in settings}
    request = Request(settings, text, path.parent, command)
    models = {"model": request.first(MODEL), "draft": request.first(DRAFT)}
    found = {name: _checkpoint(request.folder, place) for name, place in models.items()}
    return Request(settings, text, path.parent, command, {k: v for k, v in found.items() if v is not None})


def _inner(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings of speculative decoding and sampling."""
    speculative = parse_config(settings.get("speculative_config"))
    found = {"draft_model": speculative.get("model")} if isinstance(speculative, dict) else {}
    for name in ("sampling_params", "generation_config", "generation_parameters", "options"):
        inner = settings.get(name)
        found |= {k: v for k, v in inner.items() if k in (*ANSWER, *LENGTH)} if isinstance(inner, dict) else {}
    return found


def from_text(text: str) -> tuple[dict[str, Any], bool]:
    """Flags of a command, lines of YAML or of a Modelfile; and whether it was a command."""
    joined = text.replace("\\\n", " ")
    try:
        words = shlex.split(joined, comments=True)
    except ValueError:
        words = joined.split()
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit() and word.strip("-"):
            name, equals, value = word.partition("=")
            after = words[index + 1] if index + 1 < len(words) else ""
            found[name.lstrip("-")] = value if equals else after
        elif word == "serve" and index + 1 < len(words):
            found["model"] = words[index + 1]
        elif word in ("PARAMETER", "FROM") and index + 2 < len(words):
            name, value = ("model", words[index + 1]) if word == "FROM" else (words[index + 1], words[index + 2])
            found[name] = parse_config(value)
    if found:
        return found, "PARAMETER" not in words
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and value.strip() and name.strip().replace("-", "_").isidentifier():
            found[name.strip()] = parse_config(value.strip().strip("'"))
    return found, False


def _checkpoint(folder: Path, named: Any) -> Checkpoint | None:
    if not isinstance(named, str) or not named or "\0" in named or len(named) > 4096:
        return None
    place = Path(named) if Path(named).is_absolute() else folder / named
    return read_checkpoint(place) if (place / CONFIG).is_file() else None


@check("serving", "shape of the settings")
def shape(it: Request) -> Iterator[Finding]:
    for name in (*OVERRIDES, "rope_parameters", "rope_scaling"):
        value = it.settings.get(name)
        if name == "rope_scaling" and it.scaled_by_trainer:
            continue
        if value is not None and not isinstance(parse_config(value), dict):
            kind = "a list" if isinstance(parse_config(value), list) else f"{str(value)[:60]!r}"
            yield Finding(
                WRONG,
                f"{name} should be a JSON object, and is {kind}: it is dropped, or the server ends.",
                f"""Write it as one, quoted for a shell: --{name.replace("_", "-")} '{{"rope_parameters": {{}}}}'.""",
            )


@check("serving", "removed flag")
def removed(it: Request) -> Iterator[Finding]:
    if it.command and "vllm" in it.text:
        for name in REMOVED:
            if name in it.settings:
                yield Finding(
                    WRONG,
                    f"vLLM has removed --{name.replace('_', '-')}: this command ends with an error.",
                    """Pass it inside --hf-overrides '{"rope_parameters": {...}}': hf-posenc serve-args prints it.""",
                )


@check("serving", "what the server would build")
def merged(it: Request) -> Iterator[Finding]:
    """The checks of configs, on the one that results."""
    if it.overrides or "model" in it.models:
        for one in findings("checkpoint", it.merged()):
            yield Finding(one.level, one.text, one.remedy, where=f"the config that results: {one.check}")


@check("serving", "other scaling than the checkpoint's")
def other_scaling(it: Request) -> Iterator[Finding]:
    if "model" not in it.models or not any(key in it.overrides for key in ROPE):
        return
    own, asked = it.models["model"].section, it.merged().section
    keys = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor")
    ours, theirs = (next(iter(raw_ropes(section).values()), {}) for section in (own, asked))
    differing = [k for k in keys if ours.get(k) != theirs.get(k) and (k in ours or k in theirs)]
    if differing and type_of(ours) != "default":
        yield Finding(
            SUSPICIOUS,
            f"The checkpoint scales its RoPE by itself, and is served with other numbers ({', '.join(differing)}): it "
            "is not the model that was trained.",
            "Leave the checkpoint's own scaling alone: remove the override.",
        )


@check("serving", "longer than the positions reach")
def too_long(it: Request) -> Iterator[Finding]:
    if it.scaled_by_trainer:
        return
    asked, length = number(parse_config(it.first(LENGTH))), length_of(it.merged().section)
    for _, rope in scaled(it.merged().section):
        factor, original = number(rope.get("factor")), original_of(it.merged().section, rope)
        if factor and original and type_of(rope) != "llama3":
            length = max(length or 0, factor * original)
    if asked and length and asked > length:
        yield Finding(
            WRONG,
            f"{asked:g} tokens are asked for, and the positions of the model reach {length:g}.",
            "Extend the checkpoint first: hf-posenc patch MODEL OUT --scheme yarn --target-length "
            f"{asked:g}, and serve that.",
        )


@check("serving", "a larger factor than needed")
def larger_than_needed(it: Request) -> Iterator[Finding]:
    asked, section = number(parse_config(it.first(LENGTH))), it.merged().section
    for _, rope in scaled(section):
        factor, original = number(rope.get("factor")), original_of(section, rope)
        if type_of(rope) == "yarn" and asked and factor and original and factor * original >= 2 * asked:
            need = max(asked / original, 1.0)
            yield Finding(
                NOTE,
                f"{asked:g} tokens are served with a factor for {factor * original:g}: short texts pay for it.",
                f"A factor of {need:g} is enough."
                if need > 1
                else "The model reaches that without any scaling: serve it unscaled.",
            )


@check("serving", "no room for a prompt")
def no_room(it: Request) -> Iterator[Finding]:
    answer = number(parse_config(it.first(ANSWER)))
    length = number(parse_config(it.first(LENGTH))) or length_of(it.merged().section)
    if answer and length and answer >= length:
        yield Finding(
            WRONG,
            f"{answer:g} tokens are to be generated in a context of {length:g}: no token of a prompt is left.",
            "The length holds prompt and answer together: raise it, or lower the answer.",
        )


@check("serving", "draft with other positions")
def draft(it: Request) -> Iterator[Finding]:
    if len(it.models) < 2:
        return
    kinds = []
    for section in (it.merged().section, it.models["draft"].section):
        kinds.append({name: (kind_of_rope(rope), rope.get("factor")) for name, rope in raw_ropes(section).items()})
    if kinds[0] != kinds[1]:
        yield Finding(
            SUSPICIOUS,
            "The model and its draft scale RoPE differently: past the draft's length few of its tokens are accepted.",
            "Patch the draft like the model: hf-posenc patch DRAFT OUT.",
        )


@check("serving", "sealed model")
def sealed(it: Request) -> Iterator[Finding]:
    if "model" in it.models and is_sealed_config(it.models["model"].raw):
        yield Finding(
            WRONG,
            "The model can be computed by hf_posenc alone: a server refuses it.",
            "hf-posenc serve-args PATH --for RUNTIME names the nearest scheme that one can serve.",
        )
