"""`serve_args`: the exact command that serves a checkpoint in a runtime, or why it cannot be served there.

What a runtime computes comes from `hf_posenc.engines`; how it is called is data below.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.files import CONFIG, read_json
from ..checkpoints.on_disk import model_of_config
from ..engines.table import ANY, BASES, RUNTIMES, VERDICTS, Entry, entries, look_up
from ..errors import PosencError, UnsupportedCell, suggestion
from ..families import places
from ..models import model_path
from ..patching.describe import Description, cell_of, describe
from ..patching.grades import SEALED
from ..patching.patch_state import record_of
from ..patching.sidecar import ADAPTER
from .doctor.findings import WRONG
from .gguf.header import read_header


@dataclass(frozen=True)
class ServeArgs:
    """How to serve a checkpoint."""

    runtime: str
    length: int
    """Maximum tokens of prompt and answer together."""
    commands: tuple[str, ...]
    """To run, in this order."""
    settings: dict[str, Any]
    """The same as settings for a config."""
    known: str
    """The evidence that this is right: measured, by its source, or untried."""

    def __str__(self) -> str:
        return "\n".join([*self.commands, f"# {self.known}"])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Place:
    """A path to serve, and its length."""

    path: str
    length: int

    @property
    def quoted(self) -> str:
        return shlex.quote(self.path)

    @property
    def name(self) -> str:
        return Path(self.path).name


Words = Callable[[Place], tuple[list[str], dict[str, Any]]]


def _vllm(it: Place) -> tuple[list[str], dict[str, Any]]:
    # Always give the length: for a scaled RoPE vLLM may use the config's length times the factor.
    return [f"vllm serve {it.quoted} --max-model-len {it.length}"], {"model": it.path, "max_model_len": it.length}


def _sglang(it: Place) -> tuple[list[str], dict[str, Any]]:
    command = f"python -m sglang.launch_server --model-path {it.quoted} --context-length {it.length}"
    return [command], {"model_path": it.path, "context_length": it.length}


def _llama_cpp(it: Place) -> tuple[list[str], dict[str, Any]]:
    return [f"llama-server -m {it.quoted} -c {it.length}"], {"model": it.path, "ctx_size": it.length}


def _ollama(it: Place) -> tuple[list[str], dict[str, Any]]:
    lines = f"FROM {it.path}\nPARAMETER num_ctx {it.length}\n"
    name = shlex.quote(it.name.removesuffix(".gguf").lower())
    return [f"printf '%s' {shlex.quote(lines)} > Modelfile", f"ollama create {name} -f Modelfile"], {
        "Modelfile": lines
    }


def _tgi(it: Place) -> tuple[list[str], dict[str, Any]]:
    tokens = {"max_input_tokens": max(it.length - 1, 1), "max_total_tokens": it.length}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in tokens.items())
    return [f"text-generation-launcher --model-id {it.quoted} {flags}"], {"model_id": it.path, **tokens}


def _trl(it: Place) -> tuple[list[str], dict[str, Any]]:
    settings = {"model_name_or_path": it.path, "max_length": it.length}
    return [f"trl sft --model_name_or_path {it.quoted} --max_length {it.length}"], settings


@dataclass(frozen=True)
class Server:
    """How a runtime is called."""

    words: Words
    known_as: str
    """The name in the table of the runtime whose code it runs."""
    export: str | None = None
    """The format of `hf-posenc export`, if the runtime needs it or is right only with it."""
    reads_folders: bool = True


SERVERS = {
    "vllm": Server(_vllm, "vllm", "vllm"),
    "sglang": Server(_sglang, "sglang", "sglang"),
    "llama.cpp": Server(_llama_cpp, "llama.cpp", "gguf", reads_folders=False),
    "ollama": Server(_ollama, "llama.cpp", "gguf", reads_folders=False),
    "tgi": Server(_tgi, "tgi"),
    "trl": Server(_trl, "transformers"),
}
ONLY_HERE = "only hf_posenc computes it"
SCHEME_OF = {
    "yarn": "yarn",
    "theta": "ntk",
    "linear": "linear",
    "llama3": "llama3",
    "none": "none",
    "table": "learned",
}
"""A scheme for each kind of positions, best first."""


def serve_args(path: str | os.PathLike[str], runtime: str) -> ServeArgs:
    """How to serve the checkpoint or GGUF file at `path`; raises UnsupportedCell if it cannot be served."""
    if runtime not in SERVERS:
        raise PosencError(f"How {runtime!r} is called is not known here.{suggestion(runtime, list(SERVERS))}")
    place = Path(model_path(path))
    if place.is_file():
        return _file_arguments(place, runtime)
    if (place / ADAPTER).is_file():
        raise UnsupportedCell(
            f"{place} is an adapter, and a server that adds it to its base does not know its positions: merge it "
            f"first (hf-posenc merge {place} OUT), and serve that."
        )
    if not (place / CONFIG).is_file():
        raise PosencError(f"{place} holds no {CONFIG}: name a checkpoint's folder on this disk, or a GGUF file.")
    model = model_of_config(read_json(str(place / CONFIG)))
    told = describe(model)
    sealed = told.portability.startswith(SEALED)
    if told.runtimes is None or told.target_length is None:
        raise UnsupportedCell(f"{place} reads images, or has no length: what {runtime} makes of it is not known.")
    architecture, kind, keys = cell_of(places(model), sealed, record_of(model))
    server = SERVERS[runtime]
    saved = look_up(server.known_as, "checkpoint", architecture, kind, keys) if server.reads_folders else None
    exported = look_up(server.known_as, "export", architecture, kind, keys) if server.export else None
    entry, by_export = (
        (saved, False) if server.reads_folders and not _export_is_better(exported, saved) else (exported, True)
    )
    if runtime == "trl" and sealed:
        return _trl_arguments(place, told.target_length)
    if sealed and entry is None:
        entry = Entry(
            server.known_as, "checkpoint", architecture, kind, "refuses", "source", "any", "", note=ONLY_HERE
        )
    if entry is not None and entry.verdict in ("wrong", "refuses"):
        raise UnsupportedCell(_refusal(place, runtime, architecture, told, entry))
    return _arguments(place, runtime, told.target_length, entry, by_export)


def _export_is_better(exported: Entry | None, saved: Entry | None) -> bool:
    """Whether an export is right while the saved folder is not."""
    helps = exported is not None and exported.verdict == "right"
    return helps and (saved is None or saved.verdict != "right")


def _arguments(place: Path, runtime: str, length: int, entry: Entry | None, by_export: bool) -> ServeArgs:
    server, served, before = SERVERS[runtime], str(place), []
    if by_export:
        suffix = ".gguf" if server.export == "gguf" else f"-{server.export}"
        served = f"{place}{suffix}"
        before = [f"hf-posenc export {shlex.quote(str(place))} {shlex.quote(served)} --to {server.export}"]
    words, settings = server.words(Place(served, length))
    return ServeArgs(runtime, length, (*before, *words), settings, _evidence(entry, place, runtime))


def _evidence(entry: Entry | None, place: Path, runtime: str) -> str:
    if entry is not None and entry.verdict == "right":
        return f"{RUNTIMES[entry.runtime]}: {entry}"
    return f"Untried on this kind of model: compare first, for example by hf-posenc verify {place} --with RUNTIME"


def _refusal(place: Path, runtime: str, architecture: str, told: Description, entry: Entry) -> str:
    said = "it refuses" if entry.verdict == "refuses" else f"it {VERDICTS[entry.verdict]}"
    note = f": {entry.note}" if entry.note else ""
    near = nearest(SERVERS[runtime], architecture, told.nearest)
    plainly = " without further options" if near == told.scheme else ""
    instead = (
        f"The nearest scheme that it can serve is {near!r}{plainly}: hf-posenc patch ORIGINAL OUT --scheme {near}."
        if near
        else f"No scheme on {architecture!r} models is known to be right there."
    )
    return (
        f"{place} ({told.scheme}) cannot be served by {runtime}, because {said}{note} ({BASES[entry.basis]}, "
        f"{entry.version}). {instead}"
    )


def nearest(server: Server, architecture: str, wanted: str | None) -> str | None:
    """A scheme that a server is known to compute on a model type: the wanted one, or the next best."""
    right = {
        entry.kind
        for entry in entries()
        if entry.runtime == server.known_as and entry.architecture in (architecture, ANY) and entry.verdict == "right"
    }
    schemes = [scheme for kind, scheme in SCHEME_OF.items() if kind in right or ANY in right]
    return wanted if wanted in schemes else next(iter(schemes), None)


def _trl_arguments(place: Path, length: int) -> ServeArgs:
    """Code to train a live model with a scheme that transformers alone refuses."""
    code = f"SFTTrainer(model=hf_posenc.load({str(place)!r}), args=SFTConfig(max_length={length}), train_dataset=...)"
    known = "transformers alone refuses this folder; TRL 1.16 trains the loaded model (measured with LoRA)"
    return ServeArgs("trl", length, (code,), {"max_length": length}, known)


def _file_arguments(path: Path, runtime: str) -> ServeArgs:
    """How to serve a GGUF file; raises if `doctor` finds that it is wrong."""
    from .doctor.examine import doctor  # slow to import

    server = SERVERS[runtime]
    if server.export != "gguf":
        raise UnsupportedCell(f"{path} is a file, and {runtime} serves a checkpoint's folder.")
    header = read_header(path)
    length = header.get("context_length")
    if not isinstance(length, int) or length < 1:
        raise PosencError(f"{path} does not say how far it reads (context_length is {length!r}).")
    wrong = [one for one in doctor(path).findings if one.level == WRONG]
    if wrong:
        raise UnsupportedCell(f"{path} cannot be served as it is, because {wrong[0].text} {wrong[0].remedy}")
    words, settings = server.words(Place(str(path), length))
    known = f"As the file says; whether llama.cpp computes the same: hf-posenc verify {path} --with llama.cpp"
    return ServeArgs(runtime, length, tuple(words), settings, known)
