"""`verify`: a runtime that computes something else is caught, whoever damaged what; GGUF files as they come."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_cells import patched_images
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_gguf import model_of
from test_onnx import model_of as encoder_of
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_posenc import PosencError, load, patch_model, save
from hf_posenc.cli import names
from hf_posenc.cli.main import app
from hf_posenc.models import model_path
from hf_posenc.serving import llama_cpp, readers
from hf_posenc.serving.doctor.examine import doctor
from hf_posenc.serving.gguf.header import read_header
from hf_posenc.serving.gguf.vocabulary import read_vocabulary
from hf_posenc.serving.gguf.write import write_gguf
from hf_posenc.serving.proof import next_token
from hf_posenc.serving.readers import READERS, Reader, reader_of
from hf_posenc.serving.verify import CODES, proof_file, verify

gguf = pytest.importorskip("gguf", reason="GGUF files need gguf: pip install gguf")
needs_llama_cpp = pytest.mark.skipif(
    llama_cpp.version() is None, reason="llama.cpp is not here: pip install xllamacpp"
)
SCHEMES = {"config": ("yarn", {"factor": 2.0}), "sealed": ("alibi", {"target_length": 512})}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each grade, of texts and images, an adapter, and a GGUF file of the first."""
    root = tmp_path_factory.mktemp("saved")
    for grade, (scheme, options) in SCHEMES.items():
        save(patch_model(load("tiny"), scheme, **options), root / grade)
        tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"), model_max_length=512)
        tokenizer.save_pretrained(root / grade)
    save(patch_model(model_of("gpt2"), "learned", factor=4.0), root / "weights")
    save(patch_model(encoder_of("bert"), "alibi", target_length=128), root / "encoder")
    save(patch_model(encoder_of("bert"), "learned", factor=4.0), root / "encoder-table")
    save(patched_images("axial_rope", "vit"), root / "images")
    save(patched_images("learned", "vit"), root / "images-table")
    save(load("tiny"), root / "base")
    patched = patch_model(load(root / "base"), "self_extend", factor=2.0, window=16)
    save(get_peft_model(patched, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")), root / "adapter")
    model = load(root / "config").float()
    write_gguf(model, read_vocabulary(root / "config", model.config.vocab_size), root / "config.gguf", "f32")
    return root


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(folder, change, name="config.json"):
    file = folder / name
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_transformers_alone_computes_the_same(copied):
    done = run(copied / "config", "--with", "transformers", "--lengths", "64,300")
    assert done.exit_code == 0 and "computes the same: " in done.output, done.output
    written = json.loads(proof_file(copied / "config", "transformers").read_text())
    assert written["verdict"] == "same" and written["proof"]["furthest"] < 1e-4


def test_transformers_alone_refuses_what_is_sealed(saved):
    found = verify(saved / "sealed", "transformers", lengths=[64])
    assert (found.verdict, found.code) == ("refused", 4)
    assert "transformers without hf_posenc refuses" in found.text and "hf_posenc" in found.text.partition("refuses")[2]


@needs_llama_cpp
def test_llama_cpp_reads_a_file_or_a_folder(copied):
    file = copied / "config.gguf"
    done = run(file, "--with", "llama.cpp", "--against", copied / "config", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["verdict"] == "same" and told["proof"]["lengths"] == [248, 504]
    assert json.loads(Path(f"{file}.proof.json").read_text()) == told
    assert verify(copied / "config", "llama.cpp").verdict == "same"  # by the way of an export
    sealed = verify(copied / "sealed", "llama.cpp")
    assert sealed.verdict == "refused" and "nearest scheme that llama.cpp can serve is 'yarn'" in sealed.text
    assert "hf-posenc patch MODEL OUT --scheme yarn" in sealed.text


@needs_llama_cpp
@pytest.mark.parametrize("damage", ["theta", "factors lost"])
def test_a_gguf_with_edited_positions_is_caught(copied, damage):
    file = copied / "config.gguf"
    data = file.read_bytes()
    if damage == "theta":
        key = b"llama.rope.freq_base"
        at = data.index(key) + len(key) + 4
        data = data[:at] + struct.pack("<f", 10000.0) + data[at + 4 :]
    else:  # a tensor of another name is refused; the same with ones is what a wrong converter writes
        factors = next(t for t in gguf.GGUFReader(file).tensors if t.name == "rope_freqs.weight")
        at, size = int(factors.data_offset), int(factors.n_bytes)
        data = data[:at] + struct.pack("<f", 1.0) * (size // 4) + data[at + size :]
    file.write_bytes(data)
    found = verify(file, "llama.cpp", against=copied / "config")
    assert (found.verdict, found.code) == ("differs", 1) and "DIFFERS" in found.text


def lose_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "posenc_seal" not in k}, folder / "model.safetensors", {"format": "pt"}
    )


def cut_table(folder):
    def cut(key, rows):
        if key.endswith(("wpe.weight", "position_embeddings.weight")):
            return rows[:12].clone()
        return rows[:, :12].clone() if key.endswith("position_embeddings") else rows

    weights = load_file(folder / "model.safetensors")
    save_file({k: cut(k, v) for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def keep_one_mark(folder):
    def strip(raw):
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        for key in ("posenc", "attn_implementation", "pruned_heads"):
            raw.pop(key)

    edit(folder, strip)
    lose_tensor(folder)


def cut_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def option(**values):
    return lambda folder: edit(folder, lambda raw: raw["posenc"]["options"].update(values))


SEAL = {
    "the record": lambda f: edit(f, lambda raw: raw.pop("posenc")),
    "the marks": lambda f: edit(f, lambda raw: raw.pop("attn_implementation")),
    "all of the config": lambda f: edit(
        f, lambda raw: [raw.pop(k) for k in ("posenc", "attn_implementation", "experts_implementation")]
    ),
    "the seal in the weights": lose_tensor,
}
DAMAGE = {
    **{f"{what}, {grade}": (grade, how) for what, how in SEAL.items() for grade in ("sealed", "encoder", "images")},
    "all but one mark": ("sealed", keep_one_mark),
    "an option, sealed": ("sealed", option(alibi_bias_max=4.0)),
    "an option, encoder": ("encoder", option(alibi_bias_max=4.0)),
    "an option, images": ("images", option(rope_theta=50.0)),
    "an option, adapter": ("adapter", lambda f: edit(f, lambda raw: raw["options"].update(window=8), "posenc.json")),
    "the scheme, adapter": ("adapter", lambda f: (f / "posenc.json").unlink()),
    "the words, adapter": ("adapter", lambda f: edit(f, lambda raw: raw.pop("hf_posenc"), "adapter_config.json")),
    "rows of a table": ("weights", cut_table),
    "rows, encoder": ("encoder-table", cut_table),
    "rows, images": ("images-table", cut_table),
    "the length, encoder": ("encoder-table", lambda f: edit(f, lambda raw: raw.update(max_position_embeddings=96))),
    "the size, images": ("images-table", lambda f: edit(f, lambda raw: raw.update(image_size=64))),
    "the length of a table": ("weights", lambda f: edit(f, lambda raw: raw.update(n_positions=1024))),
    "a factor": ("config", lambda f: edit(f, lambda raw: raw["rope_parameters"].update(factor=8.0))),
    "a length": ("config", lambda f: edit(f, lambda raw: raw.update(max_position_embeddings=4096))),
    "an option": ("config", lambda f: edit(f, lambda raw: raw["posenc"]["options"].update(factor=8.0))),
    "the weights": ("config", lambda f: (f / "model.safetensors").write_bytes(b"\x10" * 100)),
    "the end of the weights": ("config", cut_file),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_damaged_is_not_taken_for_the_model(copied, what):
    grade, damage = DAMAGE[what]
    damage(copied / grade)
    done = run(copied / grade, "--with", "transformers")
    assert done.exit_code == 1 and "cannot be loaded" in done.output
    assert not proof_file(copied / grade, "transformers").exists()


def test_an_adapter_without_its_seal_is_caught(copied):
    """load knows its scheme all the same; transformers alone puts it on other positions."""
    edit(copied / "adapter", lambda raw: raw.update(raw.pop("hf_posenc")), "adapter_config.json")
    done = run(copied / "adapter", "--with", "transformers", "--lengths", "300")
    assert done.exit_code == 1 and "DIFFERS" in done.output, done.output
    told = doctor(copied / "adapter")
    assert told.code == 1 and "scheme in the adapter alone" in {one.check for one in told.findings}


@pytest.mark.parametrize("grade", ["images", "images-table"])
def test_images_have_no_next_token(saved, grade):
    done = run(saved / grade, "--with", "transformers")
    assert done.exit_code == 2 and "reads images" in done.output, done.output


def plugged(monkeypatch, read, version="fake 1"):
    """A runtime that somebody else brings."""
    reader = Reader(lambda: version, "pip install fake", read)
    monkeypatch.setattr(readers, "reader_of", lambda name: reader)
    monkeypatch.setattr("hf_posenc.serving.verify.reader_of", lambda name: reader)


def test_a_runtime_that_drops_the_scheme_is_caught(saved, monkeypatch):
    plain = load("tiny").float()
    plugged(monkeypatch, lambda subject, prompts: [next_token(plain, torch.tensor(p))[0] for p in prompts])
    found = verify(saved / "config", "fake")
    assert found.verdict == "differs" and found.proof.lengths == (248, 504) and max(found.proof.divergence) > 0.05


def test_where_a_runtime_is_missing_nothing_is_claimed(saved, monkeypatch):
    plugged(monkeypatch, None, version=None)
    found = verify(saved / "config", "fake")
    assert found.code == 3 and "To prove it: pip install fake, then hf-posenc verify" in found.text


def test_mistakes_are_named(saved, tmp_path):
    for arguments, said in (
        ((tmp_path / "gone", "--with", "transformers"), "neither a folder nor a file"),
        ((tmp_path, "--with", "transformers"), "there is no model to compare with"),
        ((saved / "config.gguf", "--with", "llama.cpp"), "--against FOLDER"),
        ((saved / "config", "--with", "lama.cpp"), "Did you mean 'llama.cpp'?"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and said in done.output, done.output
    with pytest.raises(PosencError, match=r"Known: .*llama\.cpp, .*transformers"):
        reader_of("fake")
    assert set(names.VERIFIERS) == set(READERS)
    assert all(isinstance(reader_of(name), Reader) for name in READERS)
    assert set(CODES.values()) == {0, 1, 3, 4}


# GGUF headers


def test_a_header_says_what_the_gguf_package_says(saved):
    mine, theirs = (
        read_header(saved / "config.gguf", ["tokenizer.ggml.tokens"]),
        gguf.GGUFReader(saved / "config.gguf"),
    )
    assert mine.architecture == "llama" and mine.dtype == "f32"
    assert mine.get("rope.freq_base") == pytest.approx(load("tiny").config.rope_parameters["rope_theta"])
    assert {t.name: tuple(int(n) for n in t.shape) for t in theirs.tensors} == {
        k: v[0] for k, v in mine.tensors.items()
    }
    for key, value in mine.keys.items():
        if value is not None:
            found = theirs.fields[key].contents()
            assert (tuple(found) if isinstance(found, list) else found) == value


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_headers_are_refused_and_never_crash(saved, tmp_path_factory, data):
    whole = (saved / "config.gguf").read_bytes()[:20000]
    at = data.draw(st.integers(0, 2000))
    noise = data.draw(st.binary(max_size=16))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes((whole[:at] + noise + whole[at + len(noise) :])[: data.draw(st.integers(0, len(whole)))])
    try:
        read_header(file)
    except PosencError as error:
        assert "is not a GGUF file, or damaged" in str(error)
