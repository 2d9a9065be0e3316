"""`serve_args`: exact commands where a runtime is right, a reason and another scheme where it is not."""

import json
import shlex

import pytest
from cells import tiny
from complaints import config, write
from test_gguf import model_of, vocabulary
from typer.testing import CliRunner

from hf_posenc import PosencError, UnsupportedCell, load, patch_model, save
from hf_posenc.cli import names
from hf_posenc.cli.main import app
from hf_posenc.engines import table
from hf_posenc.engines.table import Entry
from hf_posenc.serving.arguments import SERVERS, serve_args
from hf_posenc.serving.doctor.examine import doctor
from hf_posenc.serving.gguf.write import write_gguf

LONG = 256
COMMANDS = {
    "vllm": ["vllm serve {path} --max-model-len 256"],
    "sglang": ["python -m sglang.launch_server --model-path {path} --context-length 256"],
    "llama.cpp": ["hf-posenc export {path} {path}.gguf --to gguf", "llama-server -m {path}.gguf -c 256"],
    "tgi": ["text-generation-launcher --model-id {path} --max-input-tokens 255 --max-total-tokens 256"],
    "trl": ["trl sft --model_name_or_path {path} --max_length 256"],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by scheme."""
    root = tmp_path_factory.mktemp("served")
    for scheme in ("yarn", "alibi"):
        save(patch_model(model_of("llama"), scheme, target_length=LONG), root / scheme)
    return root


@pytest.mark.parametrize("runtime", COMMANDS)
def test_commands(saved, runtime):
    found = serve_args(saved / "yarn", runtime)
    assert list(found.commands) == [line.format(path=saved / "yarn") for line in COMMANDS[runtime]]
    assert found.length == LONG and LONG in found.settings.values()
    assert "right (" in found.known


def test_ollama_reads_a_modelfile(saved, tmp_path):
    found = serve_args(saved / "yarn", "ollama")
    assert found.settings["Modelfile"] == f"FROM {saved / 'yarn'}.gguf\nPARAMETER num_ctx {LONG}\n"
    assert shlex.split(found.commands[1])[2] == found.settings["Modelfile"]
    (tmp_path / "Modelfile").write_text(found.settings["Modelfile"])
    assert doctor(tmp_path / "Modelfile").code == 0


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "llama.cpp", "ollama", "tgi"])
def test_what_is_sealed_names_the_nearest(saved, runtime):
    with pytest.raises(UnsupportedCell, match=rf"cannot be served by {runtime}, because it refuses.* is '(yarn|ntk)'"):
        serve_args(saved / "alibi", runtime)


def test_what_was_only_read_is_said_to_be_so(saved, tmp_path):
    for runtime, basis in {"sglang": "by its source, ", "tgi": "by its source, ", "vllm": "measured, "}.items():
        assert f"right ({basis}" in serve_args(saved / "yarn", runtime).known
    save(patch_model(model_of("llama"), "linear", factor=4.0), tmp_path / "linear")
    with pytest.raises(UnsupportedCell, match=r"would be wrong: passes over a linear scaling \(by its source, "):
        serve_args(tmp_path / "linear", "tgi")
    save(patch_model(model_of("llama"), "none", target_length=LONG), tmp_path / "none")
    export, serve = serve_args(tmp_path / "none", "sglang").commands
    assert export.endswith("-sglang --to sglang") and f"{tmp_path / 'none'}-sglang" in serve


def test_what_is_sealed_trains_as_a_live_model(saved):
    (code,) = serve_args(saved / "alibi", "trl").commands
    assert f"hf_posenc.load('{saved / 'alibi'}')" in code and "max_length=256" in code


def entry(kind, verdict, way="checkpoint"):
    return Entry("vllm", way, "llama", kind, verdict, "measured", "9", "2026-12-01", (), None, "says so")


def test_what_would_be_wrong_is_not_told(saved, monkeypatch):
    monkeypatch.setattr(table, "entries", lambda: (entry("yarn", "wrong"),))
    monkeypatch.setattr("hf_posenc.serving.arguments.entries", table.entries)
    with pytest.raises(UnsupportedCell, match=r"because it would be wrong: says so \(measured, 9\)\. No scheme"):
        serve_args(saved / "yarn", "vllm")
    more = (*table.entries(), entry("theta", "right"))
    monkeypatch.setattr(table, "entries", lambda: more)
    monkeypatch.setattr("hf_posenc.serving.arguments.entries", table.entries)
    with pytest.raises(UnsupportedCell, match=r"The nearest scheme that it can serve is 'ntk'"):
        serve_args(saved / "yarn", "vllm")
    monkeypatch.setattr(table, "entries", lambda: (*more, entry("yarn", "right", "export")))
    export, serve = serve_args(saved / "yarn", "vllm").commands
    assert export.endswith("-vllm --to vllm") and serve.startswith(f"vllm serve {saved / 'yarn'}-vllm ")


def test_files_adapters_and_others(saved, tmp_path):
    save(model_of("llama", ("yarn", {"factor": 4.0})), tmp_path / "m")
    file = tmp_path / "m" / "x.gguf"
    write_gguf(load(tmp_path / "m"), vocabulary(), file, "f32")
    assert serve_args(file, "llama.cpp").commands == (f"llama-server -m {file} -c 256",)
    file.unlink()
    write_gguf(model_of("llama"), vocabulary(), file, "f32")
    with pytest.raises(UnsupportedCell, match=r"llama\.cpp rotates otherwise than the checkpoint beside it"):
        serve_args(file, "llama.cpp")
    with pytest.raises(UnsupportedCell, match="is a file, and vllm serves a checkpoint's folder"):
        serve_args(file, "vllm")
    write(tmp_path, {"a/adapter_config.json": {}})
    with pytest.raises(UnsupportedCell, match="merge it first"):
        serve_args(tmp_path / "a", "vllm")
    with pytest.raises(PosencError, match=r"holds no config\.json"):
        serve_args(tmp_path, "vllm")
    with pytest.raises(PosencError, match=r"How 'vlm' is called is not known here\. Did you mean 'vllm'"):
        serve_args(saved / "yarn", "vlm")
    assert set(names.SERVERS) == set(SERVERS)


def test_paths_with_spaces_are_quoted(tmp_path):
    write(tmp_path / "my model", config())
    words = shlex.split(serve_args(tmp_path / "my model", "vllm").commands[0])
    assert words == ["vllm", "serve", str(tmp_path / "my model"), "--max-model-len", "4096"]


def test_the_command_line(saved):
    done = CliRunner().invoke(app, ["serve-args", str(saved / "yarn"), "--for", "vllm", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["settings"]["max_model_len"] == LONG
    done = CliRunner().invoke(app, ["serve-args", str(saved / "alibi"), "--for", "vllm"])
    assert done.exit_code == 2 and "cannot be served by vllm, because" in done.output


def test_tables_are_served_by_those_who_read_them(tmp_path):
    save(patch_model(tiny("gpt2"), "learned", factor=4.0), tmp_path / "gpt2")
    assert "right (measured" in serve_args(tmp_path / "gpt2", "vllm").known
    assert serve_args(tmp_path / "gpt2", "tgi").known.startswith("Untried on this kind of model: compare first")
