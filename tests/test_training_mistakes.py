"""What `hf-posenc train` says to people who have mistyped, who lack a package, or who press Ctrl-C."""

import json
import sys

import pytest

from hf_posenc.training import recipe
from hf_posenc.training.command import INTERRUPTED, main
from hf_posenc.training.manifest import write_manifest


@pytest.fixture
def train(capsys, tmp_path, monkeypatch):
    """The exit code and what is said; a model that is loaded fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe, "make_model", lambda settings: pytest.fail("the model was loaded first"))

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return ended.value.code, said

    return run


SAID = {
    ("tiny_yarn", "--output", "runs/x"): "Keys of a recipe take an equals sign: --output=runs/x",
    ("tiny_yarn", "tiny_ntk"): "'tiny_ntk' is one word too many: one recipe is run at a time.",
    ("tiny_yarn", "--merge", "tiny_ntk"): "'tiny_ntk' is one word too many: one recipe is run at a time.",
    ("tiny_yarn", "--mege"): "There is no --mege. Did you mean --merge?",
    ("tiny_yarn", "merge=1"): "'merge=1' is one word too many",
    ("tiny_yarn", "--train.max_steps"): "'--train.max_steps' is not understood: write --section.key=value",
    ("tiny_yarn", "--data.path=nowhere/*.txt"): "No file matches 'nowhere/*.txt'",
    ("tiny_yarn", "--data.path=[a.txt, b.txt]"): "None of these files exists: a.txt, b.txt.",
    ("tiny_yarn", "--data.path=books"): "books is a folder. Name the files in it: 'books/*.md'.",
    ("tiny_yarn", "--data.path=books/"): "books/ is a folder. Name the files in it: 'books/*.md'.",
}


@pytest.mark.parametrize("words", SAID, ids=" ".join)
def test_a_mistake_is_told_before_anything_is_loaded(words, train, tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "emma.md").write_text("Emma Woodhouse, handsome, clever, and rich")
    code, said = train(*words)
    assert code == 2 and said.startswith("hf-posenc: ") and SAID[words] in said


def test_a_package_that_lacks_is_named_with_how_to_install_it(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    code, said = train("tiny_yarn", "--dry-run")
    assert (
        code == 2 and "`hf-posenc train` needs psutil, which is not installed: pip install 'hf-posenc[train]'" in said
    )


def test_an_interrupt_says_how_to_go_on(train, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "train", interrupt)
    told = "hf-posenc: interrupted. run holds no checkpoint yet: the same command starts again.\n"
    assert train("tiny_yarn", "--output=run") == (INTERRUPTED, told)
    for step in (2, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        write_manifest(folder, {})
    (tmp_path / "run" / "checkpoint-12").mkdir()  # not written completely
    told = "hf-posenc: interrupted. run/checkpoint-10 is kept: the same command with --resume goes on from it.\n"
    assert train("tiny_yarn", "--output=run") == (INTERRUPTED, told)
