"""`doctor`: what users complained of is found, what is sound is left in peace, and no file ends it."""

import json
import os
import shutil

import pytest
import torch
from complaints import COMPLAINTS, LLAMA, NOT_FILES, YARN, config, write
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from test_gguf import model_of, vocabulary
from test_old_checkpoints import FOLDERS, OLD
from test_verify import DAMAGE, copied, saved  # noqa: F401
from typer.testing import CliRunner

from hf_posenc import PosencError, load, patch_model, save
from hf_posenc.cli.main import app
from hf_posenc.serving.doctor.examine import doctor
from hf_posenc.serving.doctor.findings import CHECKS, LEVELS, NOTE
from hf_posenc.serving.gguf.write import write_gguf


def special(what, folder):
    """Complaints that take more than JSON."""
    if what == "inv_freq":
        write(folder, config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
        broken = torch.tensor([1.0, 3e33, float("nan"), -2.0])
        save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": broken}, folder / "model.safetensors")
    elif what == "alibi":
        save(patch_model(model_of("llama"), "alibi"), folder)
    else:  # a converter that drops YaRN
        save(model_of("llama", ("yarn", {"factor": 4.0})), folder)
        write_gguf(model_of("llama"), vocabulary(), folder / "model.gguf", "f32")


@pytest.mark.parametrize("thread", COMPLAINTS)
def test_complaints_are_found(thread, tmp_path):
    files, check = COMPLAINTS[thread]
    special(files, tmp_path) if isinstance(files, str) else write(tmp_path, files)
    asked = [path for path in tmp_path.glob("serve.*")] or [tmp_path]
    found = {one.check: one for one in doctor(asked[0]).findings}
    assert check in found, found
    assert found[check].text and found[check].remedy and found[check].level in LEVELS


def test_every_complaint_is_accounted_for():
    assert len(COMPLAINTS) + len(NOT_FILES) == 49


SOUND = {
    "plain": config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "old": config(rope_theta=5e5),
    "old scaling": config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}),
    "yarn": {**config(rope_parameters=YARN), "tokenizer_config.json": {"model_max_length": 1e30}},
    "both": config(rope_parameters=YARN, rope_scaling=YARN, rope_theta=1e6),
    "llama 3.1": config(
        rope_theta=5e5,
        rope_scaling={
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 256,
        },
    ),
    "by type of layer": config(
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        head_dim=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "trained": {
        "serve.yaml": "model_name_or_path: m\nrope_scaling: yarn\ncutoff_len: 16384\n",
        **{f"m/{k}": v for k, v in config().items()},
    },
    "served": {
        "serve.yaml": "model: m\nmax-model-len: 4096\n",
        **{f"m/{k}": v for k, v in config(rope_parameters=YARN).items()},
    },
}


@pytest.mark.parametrize("what", SOUND)
def test_what_is_sound_is_left_in_peace(what, tmp_path):
    write(tmp_path, SOUND[what])
    found = doctor(next(tmp_path.glob("serve.*"), tmp_path))
    assert [one for one in found.findings if one.level != NOTE] == [] and found.code == 0
    assert "cannot be built" not in found.does


def test_what_we_write_is_sound(saved, tmp_path):  # noqa: F811
    for grade in ("config", "sealed"):
        found = doctor(saved / grade)
        assert found.code == 0, found
        assert "portability" in found.does and "vllm" in found.does
    assert doctor(saved / "config.gguf", against=saved / "config").code == 0
    for kind, how in (
        ("phi3", "yarn"),
        ("qwen3", "yarn"),
        ("gemma2", "linear"),
        ("llama", "none"),
        ("gpt2", "learned"),
    ):
        folder = tmp_path / f"{kind}-{how}"
        model = model_of(kind, (how, {"target_length": 256} if how == "none" else {"factor": 4.0}))
        save(model, folder)
        write_gguf(model, vocabulary(), folder / "model.gguf", "f32")
        found = doctor(folder)
        assert [one for one in found.findings if one.level != NOTE] == [], (kind, how)


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_damaged_is_noticed(copied, what):  # noqa: F811
    grade, damage = DAMAGE[what]
    damage(copied / grade)
    found = doctor(copied / grade)
    assert found.code == 1 and "wrong" in {one.level for one in found.findings}


@pytest.mark.parametrize(("name", "runtime"), [("model.onnx", "onnx"), ("model.bin", "ct2")])
def test_a_converted_model_is_left_to_verify(name, runtime, tmp_path):
    write(tmp_path, {"config.json": {"add_source_bos": False}})
    assert "cannot be built" in doctor(tmp_path).does
    (tmp_path / name).write_bytes(b"whole")
    found = doctor(tmp_path)
    assert found.code == 0 and f"hf-posenc verify {tmp_path} --with {runtime} --against" in found.does


def test_tables_that_are_shorter_than_promised(tmp_path):
    save(patch_model(model_of("gpt2"), "learned", factor=4.0), tmp_path / "a")
    model_of("gpt2").save_pretrained(tmp_path / "b")
    for folder in ("a", "b"):
        assert doctor(tmp_path / folder).code == 0
        file = tmp_path / folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "n_positions": 1024}))
        assert "rows of the table" in {one.check for one in doctor(tmp_path / folder).findings}


def test_checkpoints_of_the_first_version_want_a_seal():
    sealed = [one for name in FOLDERS for one in doctor(OLD / name).findings if one.check == "seal"]
    assert sealed and all("hf-posenc reseal" in one.remedy for one in sealed)


def adapter(folder, base, scheme=None):
    model = load(base)
    if scheme:
        patch_model(model, scheme, factor=2.0)
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    peft.peft_config["default"].base_model_name_or_path = str(base)
    save(peft, folder)
    return {one.check for one in doctor(folder).findings}


def test_adapters_and_their_base_agree(saved, tmp_path):  # noqa: F811
    plain = tmp_path / "plain"
    save(load("tiny"), plain)
    assert "scheme in the adapter alone" not in adapter(tmp_path / "a", plain, "yarn")  # it is sealed
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    write(tmp_path, {"a/adapter_config.json": settings["hf_posenc"]})  # as the first version wrote it
    assert "scheme in the adapter alone" in {one.check for one in doctor(tmp_path / "a").findings}
    assert not {"scheme in the base alone", "two schemes"} & adapter(tmp_path / "b", saved / "config")
    os.remove(tmp_path / "b" / "posenc.json")
    assert "scheme in the base alone" in {one.check for one in doctor(tmp_path / "b").findings}
    shutil.copy(tmp_path / "a" / "posenc.json", tmp_path / "b")
    record = json.loads((tmp_path / "b" / "posenc.json").read_text())
    (tmp_path / "b" / "posenc.json").write_text(json.dumps({**record, "options": {"factor": 3.0}}))
    assert "two schemes" in {one.check for one in doctor(tmp_path / "b").findings}
    (tmp_path / "b" / "posenc.json").write_text("{")
    assert "record of the adapter" in {one.check for one in doctor(tmp_path / "b").findings}
    settings = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    write(tmp_path, {"b/adapter_config.json": {**settings, "base_model_name_or_path": "nobody/nothing"}})
    assert "base out of sight" in {one.check for one in doctor(tmp_path / "b").findings}


# Odd files


ODD = {
    "a list": ("config.json", "[]", 2),
    "nothing": ("config.json", "", 2),
    "deep": ("config.json", "[" * 100_000, 2),
    "huge numbers": ("config.json", json.dumps({**LLAMA, "rope_parameters": {"rope_theta": 10**400}}), 1),
    "text for numbers": ("config.json", json.dumps({**LLAMA, "rope_parameters": {**YARN, "factor": "4"}}), 1),
    "giants": ("config.json", json.dumps({**LLAMA, "num_hidden_layers": 10**9, "posenc": {}}), 1),
    "a giant inside": ("config.json", json.dumps({**LLAMA, "vision_config": {"depth": 10**9}}), 0),
    "other types": ("config.json", json.dumps({**LLAMA, "rope_parameters": ["yarn"], "text_config": 3}), 0),
    "escapes": ("config.json", json.dumps({**LLAMA, "rope_scaling": {"rope_type": "\x1b[31mred"}}), 1),
    "a cut GGUF": ("model.gguf", "GGUF\3\0\0\0", 2),
    "poetry": ("poem.txt", "once upon a midnight dreary", 2),
    "an index that leads out": (
        "model.safetensors.index.json",
        json.dumps({"weight_map": {"a": "../../etc/passwd", "b": 3}}),
        0,
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_files_are_answered(what, tmp_path):
    name, text, code = ODD[what]
    if "index" in name:
        write(tmp_path, config())
    (tmp_path / name).write_text(text)
    asked = tmp_path if name.endswith(".json") else tmp_path / name
    done = CliRunner().invoke(app, ["doctor", str(asked)])
    assert done.exit_code == code, done.output
    assert "\x1b" not in done.output and "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path / "gone", tmp_path):
        with pytest.raises(PosencError, match=r"is no file and no folder|is not on this disk|nothing to look at"):
            doctor(place)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "max_position_embeddings",
    "text_config",
    "auto_map",
    "posenc",
)
INNER = ("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "mrope_section")


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES | st.dictionaries(st.sampled_from(INNER), VALUES)),
    st.sampled_from(["llama", "unheard_of"]),
)
@settings(max_examples=60, deadline=None)
def test_no_config_ends_it(tmp_path_factory, odd, kind):
    folder = tmp_path_factory.getbasetemp() / "odd"
    write(folder, {"config.json": {**LLAMA, "model_type": kind, **odd}, "serve.json": odd, "g/x.json": "{}"})
    assert doctor(folder).code in (0, 1)
    try:
        assert doctor(folder / "serve.json").code in (0, 1)
    except PosencError as error:
        assert "is not a checkpoint's or adapter's folder" in str(error)


def test_records_are_not_a_servers_matter(saved, tmp_path):  # noqa: F811
    overrides = {"rope_parameters": {**YARN, "original_max_position_embeddings": 256}}
    write(tmp_path, {"serve.json": {"model": str(saved / "config"), "hf_overrides": overrides}})
    said = {one.where for one in doctor(tmp_path / "serve.json").findings}
    assert not [where for where in said if where.endswith((": record", ": seal"))]


def test_json_says_all(tmp_path):
    write(tmp_path, COMPLAINTS["vllm#44158"][0])
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == told["code"] == 1 and told["kind"] == "checkpoint"
    assert {"level", "text", "remedy", "check", "where"} == set(told["findings"][0])
    assert sum(map(len, CHECKS.values())) >= 35


@pytest.mark.parametrize(
    "text",
    [
        "FROM ./m\nPARAMETER num_ctx 16384\n",
        "vllm serve m \\\n  --max-model-len 16384\n",
        "model: m\nmax_model_len: 16384\n",
        'python -m sglang.launch_server --model-path m --context-length=16384 --json-model-override-args "{}"',
    ],
)
def test_serving_configs_are_read_in_several_forms(text, tmp_path):
    write(tmp_path, {"serve.sh": text, **{f"m/{k}": v for k, v in config().items()}})
    assert "longer than the positions reach" in {one.check for one in doctor(tmp_path / "serve.sh").findings}
