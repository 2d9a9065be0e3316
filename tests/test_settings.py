"""Recipes: every file is read, and what nobody would heed is an error that names the right key."""

import re
from pathlib import Path

import pytest
import yaml

from hf_posenc import SCHEMES, PosencError
from hf_posenc.schemes.plans import is_plan
from hf_posenc.training.recipe_files import recipes
from hf_posenc.training.recipe_keys import keys_markdown
from hf_posenc.training.settings import Settings
from hf_posenc.training.settings.values import models_of
from hf_posenc.training.settings_file import read_settings

RECIPES = list(recipes().values())
NAMED = [
    "llama_linear",
    "llama_ntk",
    "llama_yarn",
    "llama_alibi",
    "gpt2_rope",
    "gpt2_alibi",
    "bert_alibi",
    "bert_learned",
]
PLAIN = """
model: {path: somewhere}
scheme: {name: yarn, target_length: 1024}
data: {length: 512}
train: {max_steps: 10}
output: out
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(PLAIN)
    return path


def test_every_experiment_has_its_recipe():
    names = [path.stem for path in RECIPES]
    assert set(NAMED) <= set(names)
    assert sum(name.startswith("tiny_") for name in names) >= len(NAMED)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_read_and_open_with_their_command(path):
    settings = read_settings(path)
    assert settings.output == f"runs/{path.stem}"
    assert path.read_text().splitlines()[0].startswith(f"# hf-posenc train {path.stem}")
    if settings.scheme.name is not None and not is_plan(settings.scheme.name):  # which reading has checked
        SCHEMES[settings.scheme.name](**settings.scheme.options)  # the scheme knows all its options


def test_the_command_line_wins(recipe):
    settings = read_settings(recipe, ["--data.length=4096", "--train.learning_rate=1e-3", "--tune.lora.r=4"])
    assert (settings.data.length, settings.train.learning_rate) == (4096, 1e-3)
    assert settings.tune.lora is not None and settings.tune.lora.r == 4
    assert read_settings(recipe).data.length == 512


def test_lists_and_nothing_can_be_given(recipe):
    settings = read_settings(
        recipe, ["--measure.lengths=[256, 512]", "--tune.lora=null", "--data.path=[a.txt, b.txt]"]
    )
    assert settings.measure.lengths == [256, 512]
    assert settings.tune.lora is None
    assert settings.data.path == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    "given, said",
    [
        ("--data.lenght=4096", "data.lenght: there is no such key. Did you mean 'length'?"),
        ("--trian.max_steps=3", "trian: there is no such key. Did you mean 'train'?"),
        ("--tune.lora.alpha=3", "tune.lora.alpha: there is no such key. Did you mean 'lora_alpha'?"),
        ("--data.pose.target=3", "data.pose.target: there is no such key. Did you mean 'target_length'?"),
        ("--scheme.name=yarm", "Did you mean 'yarn'?"),
        ("--train.max_steps=many", "train.max_steps"),
        ("--train.max_steps=1.5", "train.max_steps"),
        ("--train.max_steps=0", "train.max_steps"),
        ("--train.learning_rate='1e-3'", "train.learning_rate"),
        ("--train.lr_scheduler_type=cosin", "'cosine'"),
        ("--data.documents=seperate", "'separate'"),
        ("--data.passkey=1.5", "data.passkey"),
        ("--measure.passkeys=7", "a multiple of 5"),
        ("--train.save_total_limit=1", "train.save_total_limit"),
        ("--data.pose={target_length: 100}", "must exceed length"),
        ("--data.randomized={target_length: 100}", "randomized.target_length 100 must exceed length"),
        ("--data.short={share: 0.1, length: 600}", "must be less than length"),
        ("--model.config={}", "either a model (path) or the config"),
        ("--data.length", "write --section.key=value"),
        ("data.length=3", "write --section.key=value"),
        ("--output.length=3", "output is a value, not a section"),
        ("--data.length={", "not YAML"),
        ("--train.warmup_steps=11", "warmup_steps 11 exceed max_steps 10"),
        ("--tune={whole: true, lora: {r: 4}}", "whole trains every parameter, and lora would leave them alone"),
        ("--model.dtype=float16", "gradients vanish in float16"),
    ],
)
def test_what_is_wrong_is_said(recipe, given, said):
    with pytest.raises(PosencError) as error:
        read_settings(recipe, [given])
    assert said in str(error.value)
    assert "Value error" not in str(error.value) and "got {" not in str(error.value)


def test_every_mistake_is_told_at_once(recipe):
    with pytest.raises(PosencError) as error:
        read_settings(recipe, ["--data.lenght=1", "--train.max_step=2"])
    assert "'length'" in str(error.value) and "'max_steps'" in str(error.value)


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(PLAIN.replace("output: out", ""))
    with pytest.raises(PosencError, match="output: is missing"):
        read_settings(path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "model: [", ""])
def test_what_is_no_recipe_is_refused(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(PosencError):
        read_settings(path)


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(PosencError, match="There is no recipe"):
        read_settings(tmp_path / "none.yaml")


def test_a_fresh_model_is_trained_whole():
    raw = {
        "model": {"config": {"model_type": "gpt2"}, "tokenizer": "tiny"},
        "data": {"length": 8},
        "train": {"max_steps": 1},
        "output": "out",
    }
    with pytest.raises(ValueError, match=r"tune\.whole"):
        Settings.model_validate(raw)
    Settings.model_validate({**raw, "tune": {"whole": True}})


def test_lengths_are_written_as_on_the_command_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: tiny}\nscheme: {name: yarn, target_length: 2k}\ndata: {length: 1k}\ntrain: {max_steps: 1}\n"
        "measure: {lengths: [256, 1k]}\noutput: out\n"
    )
    asked = read_settings(path)
    assert asked.data.length == 1024 and asked.scheme.options == {"target_length": 2048}
    assert asked.measure.lengths == [256, 1024]
    for override, lengths in {"512,1k": [512, 1024], "512": [512], "[512, 1k]": [512, 1024]}.items():
        assert read_settings(path, [f"--measure.lengths={override}"]).measure.lengths == lengths
    with pytest.raises(PosencError, match="such as 4096 or 4k"):
        read_settings(path, ["--data.length=1q"])


@pytest.mark.parametrize(
    "override, told",
    [
        ("--scheme.target_lenght=3", "Did you mean 'target_length'"),
        ("--scheme.beta_fast=fast", "beta_fast must be a finite number"),
        ("--scheme.target_length=1q", "such as 4096 or 4k"),
    ],
)
def test_options_of_a_scheme_are_checked_before_anything_is_loaded(tmp_path, override, told):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: tiny}\nscheme: {name: yarn, existing: extend}\ndata: {length: 512}\ntrain: {max_steps: 1}\n"
        "output: out\n"
    )
    assert read_settings(path).scheme.options == {"existing": "extend"}
    with pytest.raises(PosencError, match=re.escape(told)):
        read_settings(path, [override])


def test_few_steps_warm_up_in_time(recipe):
    assert read_settings(recipe).train.warmup_steps == 5
    assert read_settings(recipe, ["--train.max_steps=400"]).train.warmup_steps == 20
    assert read_settings(recipe, ["--train.warmup_steps=0"]).train.warmup_steps == 0


def test_what_was_run_can_be_run_again(recipe, tmp_path):
    """`recipe.yaml` of a run says every key."""
    for words in ([], ["--tune.whole=true"], ["--tune.lora=null"]):
        settings = read_settings(recipe, words)
        (tmp_path / "again.yaml").write_text(yaml.safe_dump(settings.model_dump()))
        assert read_settings(tmp_path / "again.yaml") == settings


def every_key(section, path=""):
    for name, field in section.model_fields.items():
        yield f"{path}{name}", field
        for inner in models_of(field.annotation):
            yield from every_key(inner, f"{path}{name}.")


def test_every_key_has_a_line_and_the_page_shows_it():
    page = (Path(__file__).parent.parent / "docs" / "recipe_keys.md").read_text()
    assert keys_markdown() in page, "make docs writes it anew"
    for path, field in every_key(Settings):
        if "." not in path and path != "output":  # a section, whose docstring speaks for it
            assert f"## `{path}`" in page
            continue
        assert field.description, path
        assert f"| `{path.rpartition('.')[2]}` |" in page and " ".join(field.description.split()) in page
