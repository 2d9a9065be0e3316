"""The corpus that every Python carries."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hf_posenc import PosencError
from hf_posenc.training import stdlib
from hf_posenc.training.stdlib import HELD_OUT, digest, is_held_out, sources, stdlib_texts


@pytest.fixture(scope="module")
def texts():
    return stdlib_texts()


@pytest.fixture(scope="module")
def held_out():
    return stdlib_texts(held_out=True)


def test_it_holds_the_sources_and_the_manual_as_they_are(texts, held_out):
    both = texts | held_out
    path = Path(sysconfig.get_path("stdlib"), "argparse.py")
    assert both["library/argparse.py"] == path.read_text(encoding="utf-8")
    assert "assert" in both["manual/assert"] and "AssertionError" in both["manual/assert"]
    assert sum(map(len, texts.values())) > 5_000_000


def test_another_process_finds_the_same_in_the_same_order(texts):
    code = "from hf_posenc.training.stdlib import *; t = stdlib_texts(); print(digest(t), '|'.join(t))"
    env = os.environ | {"PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert said.strip() == f"{digest(texts)} {'|'.join(texts)}"
    assert list(texts) == sorted(texts)


def test_one_in_25_is_held_out_by_its_name_alone(texts, held_out):
    assert not set(texts) & set(held_out)
    assert 0.5 < len(held_out) * HELD_OUT / (len(texts) + len(held_out)) < 2
    # Written down: another version of Python must make the same choice.
    assert [is_held_out(f"library/{name}") for name in ("argparse.py", "pprint.py", "smtplib.py")] == [
        False,
        True,
        True,
    ]


def test_names_are_relative_and_no_build_of_one_machine_is_in_it(texts, held_out):
    for name in texts | held_out:
        assert name.startswith(("library/", "manual/")) and ".." not in name and "\\" not in name
        assert not {"site-packages", "test", "encodings", "ensurepip"} & set(name.split("/"))
        assert "_sysconfigdata" not in name


def test_digests_tell_corpora_apart():
    given = {"a": "bc", "d": "e"}
    assert digest(given) == digest(dict(given))
    assert len({digest(given), digest({"a": "b", "cd": "e"}), digest({"d": "e", "a": "bc"}), digest({})}) == 4


def test_a_python_without_sources_is_refused(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n" * 200)
    with pytest.raises(PosencError, match="no sources of its standard library"):
        list(sources(tmp_path))


def test_a_python_without_manual_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(PosencError, match="carries no manual"):
        stdlib.stdlib_texts()


def test_a_module_that_cannot_be_read_is_named_without_its_path(tmp_path):
    (tmp_path / "strange.py").write_bytes(b"# coding: utf-8\n" + b"\xff" * 500)
    with pytest.raises(PosencError, match=r"module strange\.py") as caught:
        list(sources(tmp_path))
    assert str(tmp_path) not in str(caught.value)
