"""The card that is written with a checkpoint tells of that checkpoint, and takes nobody's place."""

import re

import pytest
import torch
from cells import tiny, tokens
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posenc import load, merge, patch_checkpoint, patch_model, save
from hf_posenc.checkpoints.cards import base_words, hub_id, is_ours
from hf_posenc.serving.folders import export_folder

LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
ONLY = "Only hf_posenc (`pip install hf-posenc`) loads it"


@pytest.fixture
def base(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def from_base(base, scheme, **options):
    return patch_model(AutoModelForCausalLM.from_pretrained(base), scheme, **options)


def card_of(folder, tmp_path):
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in text and is_ours(folder / "README.md")
    return ModelCard.load(folder / "README.md").data.to_dict(), text


def run(text, folder, monkeypatch):
    """What the code in a card makes, where the folder lies."""
    monkeypatch.chdir(folder.parent)
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], names)
    return names["model"]


@pytest.mark.parametrize(("scheme", "options", "sealed"), [("yarn", {"factor": 4.0}, False), ("alibi", {}, True)])
def test_saved(scheme, options, sealed, base, tmp_path, monkeypatch):
    model, ids = from_base(base, scheme, **options), tokens(1, 8)
    save(model, tmp_path / "out")
    data, text = card_of(tmp_path / "out", tmp_path)
    longer = ["long-context"] if options else []
    assert data == {"library_name": "transformers", "tags": ["hf-posenc", scheme, *longer]}
    trained = model.config.posenc["geometry"]["trained_length"]
    assert f"trained on {trained} tokens" in text and "`base`" in text.casefold()
    assert (f"reach {4 * trained}." in text) == bool(options)
    assert (ONLY in text) == sealed and ("Any transformers loads it right" in text) != sealed
    made = run(text, tmp_path / "out", monkeypatch)
    assert torch.equal(made.eval()(ids).logits, model.eval()(ids).logits)


def test_adapters_and_what_they_are_merged_into(base, tmp_path, monkeypatch):
    adapted = get_peft_model(from_base(base, "yarn", factor=4.0), LoraConfig(**LORA))
    save(adapted, tmp_path / "adapter")
    data, text = card_of(tmp_path / "adapter", tmp_path)
    assert data["library_name"] == "peft" and "base_model" not in data
    assert ONLY in text and 'base="path/to/base"' in text
    merge(tmp_path / "adapter", tmp_path / "merged")
    data, text = card_of(tmp_path / "merged", tmp_path)
    assert data["library_name"] == "transformers" and "an adapter merged into it" in text and ONLY not in text


def test_patched_on_disk(base, tmp_path):
    theirs = "---\nlicense: apache-2.0\nlibrary_name: other\n---\n# Theirs\n"
    (base / "README.md").write_text(theirs)
    patch_checkpoint(base, tmp_path / "out", "t5")
    data, text = card_of(tmp_path / "out", tmp_path)
    assert data == {"library_name": "transformers", "license": "apache-2.0", "tags": ["hf-posenc", "t5"]}
    assert ONLY in text and "nothing was trained with these positions" in text
    assert (tmp_path / "out" / "README.base.md").read_text() == theirs == (base / "README.md").read_text()


def test_ours_is_replaced_and_a_stranger_s_or_an_edited_one_is_not(base, tmp_path):
    out = tmp_path / "out"
    save(from_base(base, "alibi"), out)
    save(from_base(base, "yarn", factor=2.0), out)
    data, text = card_of(out, tmp_path)
    assert "yarn" in data["tags"] and "alibi" not in text
    for words in (text + "\nMy own words.\n", "mine"):
        (out / "README.md").write_text(words)
        save(from_base(base, "alibi"), out)
        patch_checkpoint(base, out, "t5", overwrite=True)
        assert (out / "README.md").read_text() == words
    assert load(out).config.posenc["scheme"] == "t5"


def test_names_of_bases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    cached = "/home/me/.cache/huggingface/hub/models--org--name/snapshots/0123"
    assert [hub_id(n) for n in ("org/name", "models/mine", "/a/b", None, "", cached)] == [
        *("org/name", None, None, None, None, "org/name")
    ]
    assert [base_words(n) for n in ("org/name", "models/mine", "/a/b/", "C:\\x\\y", "")] == [
        *("org/name", "mine", "b", "y", None)
    ]


def test_a_plan_is_told_by_its_parts(base, tmp_path):
    save(from_base(base, {"first 1": "none", "rest": ("window", {"window": 64})}), tmp_path / "out")
    data, text = card_of(tmp_path / "out", tmp_path)
    assert data["tags"] == ["hf-posenc", "none", "window"]
    assert "`none` in layers 0; the position scheme `window` (window=64) in layers 1" in text


@pytest.mark.parametrize("theirs", [False, True])
def test_a_card_does_not_follow_into_a_folder_for_another_runtime(theirs, base, tmp_path):
    save(from_base(base, "linear", factor=2.0), tmp_path / "saved")
    if theirs:
        (tmp_path / "saved" / "README.md").write_text("mine")
    (tmp_path / "saved" / "proof.llama.cpp.json").write_text("{}")
    export_folder(tmp_path / "saved", tmp_path / "out", "mlx")
    assert (tmp_path / "out" / "README.md").exists() == theirs
    assert not list((tmp_path / "out").glob("proof.llama*"))


def test_saved_twice_is_the_same_card_byte_for_byte(base, tmp_path):
    model = from_base(base, "alibi")
    save(model, tmp_path / "out")
    first = (tmp_path / "out" / "README.md").read_bytes()
    save(model, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_bytes() == first


def test_a_model_of_this_package_is_no_model_of_a_hub(tmp_path):
    save(load("tiny"), tmp_path / "out")
    data, text = card_of(tmp_path / "out", tmp_path)
    assert data == {"library_name": "transformers", "tags": ["hf-posenc"]} and "Positions are as they were" in text
    assert hub_id("tiny") is None
