"""Text and rows: nothing is lost, invented or padded, borders hold, and every row follows from its index."""

import json
import random
from itertools import pairwise

import pytest
import torch
from cells import tiny, tokens

from hf_posenc import PosencError, patch_model
from hf_posenc.training.rows import (
    IGNORED,
    Masking,
    Plan,
    Row,
    Stream,
    StreamedRows,
    TrainingRows,
    causal_inputs,
    collate,
    in_order,
    in_short_pieces,
    scatter_positions,
    skip_positions,
    stages,
)
from hf_posenc.training.settings import DataSettings
from hf_posenc.training.sources import load_corpus, split

DOCUMENTS = [list(range(100 * i, 100 * i + size)) for i, size in enumerate((5, 12, 3, 30, 7))]


def plan(length: int = 8, rows: int = 6, **asked) -> Plan:
    settings = DataSettings(length=length, **asked)
    return Plan(settings, [(rows, length)], 0, lambda row, _: causal_inputs(row))


def test_rows_are_the_stream_cut_without_a_gap():
    stream = Stream(DOCUMENTS)
    flat = [token for document in DOCUMENTS for token in document]
    assert len(stream) == len(flat)
    rows = [stream.row(start, 8) for start in range(0, len(flat) - 7, 8)]
    assert [token for row in rows for token in row.ids] == flat[: 8 * len(rows)]
    assert rows[0].pieces == [5, 3] and rows[1].pieces == [8]
    for row in rows:
        assert sum(row.pieces) == 8 and all(row.pieces)


def test_positions_restart_and_no_token_is_predicted_from_another_document():
    inputs = causal_inputs(Row(list(range(8)), [5, 3]))
    assert inputs["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert inputs["labels"].tolist() == [0, 1, 2, 3, 4, IGNORED, 6, 7]
    assert "attention_mask" not in inputs


@pytest.mark.parametrize("kind, scheme", [("llama", None), ("llama", "yarn"), ("llama", "alibi"), ("gpt2", "rope")])
def test_a_packed_row_is_its_documents_alone(kind, scheme):
    model = tiny(kind)
    if scheme is not None:
        patch_model(model, scheme, **({"factor": 4.0} if scheme == "yarn" else {}))
    ids = tokens(1, 24)[0].tolist()
    batch = collate([causal_inputs(Row(ids, [9, 15]))])
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = torch.cat([model(torch.tensor([part])).logits[0] for part in (ids[:9], ids[9:])])
        joined = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)
    assert (joined[9:] - alone[9:]).abs().max() > 0.1


def test_a_packed_row_of_an_encoder_is_its_documents_alone():
    model = patch_model(tiny("bert"), "alibi")
    ids = tokens(1, 24)[0].tolist()
    masking = Masking(mask=96, special=frozenset(), vocabulary=96, share=0.2)
    batch = collate([masking.inputs(Row(ids, [9, 15]), random.Random(0))])
    labels = batch.pop("labels")
    assert int((labels != IGNORED).sum()) == 5
    with torch.no_grad():
        packed = model(**batch).logits[0]
        alone = torch.cat([model(batch["input_ids"][:, part]).logits[0] for part in (slice(9), slice(9, None))])
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_leaps_are_no_borders():
    """transformers takes any leap of positions for a border, and would hide one chunk of PoSE from the other."""
    row = skip_positions(Row(tokens(1, 16)[0].tolist(), [16]), random.Random(3), target=64, chunks=2)
    assert row.positions is not None and row.positions[0] == 0 and row.positions[-1] < 64
    leaps = [b - a for a, b in pairwise(row.positions)]
    assert sorted(leaps)[:-1] == [1] * 14 and max(leaps) > 1
    model = tiny("llama")
    batch = collate([causal_inputs(row)])
    batch.pop("labels")
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, 0] += 1
    with torch.no_grad():
        change = (model(**batch).logits - model(**other).logits)[0].abs().amax(-1)
    assert change[-1] > 1e-3  # the last token sees the first one across the leap


def test_randomized_positions_rise_and_reach_the_target():
    rows = [scatter_positions(Row(range(8), [3, 5]), random.Random(i), 40) for i in range(300)]
    for row in rows:
        assert row.pieces == [8] and sorted(set(row.positions)) == row.positions
    assert {p for row in rows for p in row.positions} == set(range(40))


def test_leaps_reach_every_distance():
    seen = [skip_positions(Row(range(8), [8]), random.Random(i), 40, 2).positions[-1] for i in range(400)]
    assert min(seen) == 7 and max(seen) == 39 and len(set(seen)) == 33
    three = skip_positions(Row(range(8), [8]), random.Random(0), 40, 3).positions
    assert all(b > a for a, b in pairwise(three)) and len(three) == 8


def test_short_pieces():
    row = in_short_pieces(Row(range(10), [7, 3]), 3)
    assert row.pieces == [3, 3, 1, 3]


def test_documents_are_joined_when_told():
    rows = TrainingRows(Stream(DOCUMENTS), plan(documents="joined"))
    assert all(row["position_ids"].tolist() == list(range(8)) for row in (rows[i] for i in range(6)))
    apart = TrainingRows(Stream(DOCUMENTS), plan())
    assert any(apart[i]["position_ids"].tolist() != list(range(8)) for i in range(6))


def test_a_row_follows_from_its_index_and_the_seed():
    first, again = (TrainingRows(Stream(DOCUMENTS), plan(rows=20)) for _ in range(2))
    backwards = {i: again[i]["input_ids"].tolist() for i in reversed(range(20))}
    assert [first[i]["input_ids"].tolist() for i in range(20)] == [backwards[i] for i in range(20)]
    settings = DataSettings(length=8)
    other = TrainingRows(Stream(DOCUMENTS), Plan(settings, [(20, 8)], 1, lambda row, _: causal_inputs(row)))
    assert [other[i]["input_ids"].tolist() for i in range(20)] != [backwards[i] for i in range(20)]


def test_all_text_is_seen_before_any_is_seen_again():
    rows = TrainingRows(Stream([list(range(64))]), plan(rows=16))
    for seen in (range(8), range(8, 16)):
        assert sorted(t for i in seen for t in rows[i]["input_ids"].tolist()) == list(range(64))
    assert [rows[i]["input_ids"].tolist() for i in range(8)] != [rows[i]["input_ids"].tolist() for i in range(8, 16)]


def test_stages_come_one_after_the_other():
    asked = DataSettings(length=16, stages=[{"length": 8, "steps": 2}])
    rows = TrainingRows(Stream(DOCUMENTS), Plan(asked, stages(asked, 5, 2), 0, lambda row, _: causal_inputs(row)))
    assert [len(rows[i]["input_ids"]) for i in range(len(rows))] == [8] * 4 + [16] * 6
    with pytest.raises(PosencError, match="no step is left"):
        stages(asked, 2, 2)


def test_a_stream_gives_all_documents_again_and_again():
    rows = list(StreamedRows(lambda: in_order(lambda: iter(DOCUMENTS)), plan(rows=16)))
    flat = [token for document in DOCUMENTS for token in document] * 3
    assert [t for row in rows for t in row["input_ids"].tolist()] == flat[: 16 * 8]
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    with pytest.raises(PosencError, match="empty"):
        list(StreamedRows(lambda: in_order(lambda: iter([])), plan()))


def test_special_rows_come_as_often_as_asked():
    asked = DataSettings(length=8, passkey=0.25)
    special = Row([7] * 8, [8], answers=[False] * 6 + [True] * 2)
    made = Plan(asked, [(400, 8)], 0, lambda row, _: causal_inputs(row), lambda rng, length: special)
    rows = TrainingRows(Stream(DOCUMENTS), made)
    count = sum("answers" in rows[i] for i in range(400))
    assert 70 < count < 130
    batch = collate([rows[i] for i in range(40)])
    assert batch["answers"].shape == (40, 8)


def test_masking_hides_what_it_should():
    masking = Masking(mask=999, special=frozenset({0}), vocabulary=500, share=0.15)
    hidden = kept = other = 0
    for seed in range(50):
        ids = [0, *range(1, 100), 0]
        inputs = masking.inputs(Row(ids, [101]), random.Random(seed))
        chosen = (inputs["labels"] != IGNORED).nonzero()[:, 0].tolist()
        assert len(chosen) == 15 and 0 not in chosen and 100 not in chosen
        assert [inputs["labels"][i] for i in chosen] == [ids[i] for i in chosen]
        now = inputs["input_ids"]
        assert all(now[i] == ids[i] for i in range(101) if i not in chosen)
        hidden += sum(now[i] == 999 for i in chosen)
        kept += sum(now[i] == ids[i] for i in chosen)
        other += sum(now[i] not in (999, ids[i]) for i in chosen)
    assert 0.75 < hidden / 750 < 0.85 and 0.06 < kept / 750 < 0.14 and 0.06 < other / 750 < 0.14


def test_too_little_text_is_said_with_its_numbers():
    with pytest.raises(PosencError, match=r"rows of 80 tokens .* have 57 together"):
        TrainingRows(Stream(DOCUMENTS), plan(length=80))


def test_text_comes_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("first " * 50)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"line {i} " * 20}) for i in range(3)))
    import datasets

    datasets.Dataset.from_dict({"text": ["from parquet " * 20]}).to_parquet(str(tmp_path / "c.parquet"))
    paths = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.parquet")]
    found = load_corpus(DataSettings(path=paths, length=8))
    texts = list(found.documents())
    assert len(texts) == 5 and len(found.held_out) == 5  # few documents: the end of each is held out
    assert texts[0] + found.held_out[0] == "first " * 50
    assert 0.04 < len(found.held_out[0]) / 300 < 0.06
    assert len(list(load_corpus(DataSettings(path=str(tmp_path / "*.txt"), length=8)).documents())) == 1


def test_whole_documents_are_held_out_where_there_are_many():
    texts = [f"document {i}" for i in range(1000)]
    whole = split("some", lambda: iter(texts), 0.1, streamed=False)
    streamed = split("some", lambda: iter(texts), 0.1, streamed=True)
    for found in (whole, streamed):
        trained = list(found.documents())
        assert sorted([*trained, *found.held_out]) == sorted(texts)
        assert 60 < len(found.held_out) < 140
    assert whole.held_out == streamed.held_out


def test_stdlib_has_its_own_split():
    found = load_corpus(DataSettings(length=8))
    texts = set(found.documents())
    assert len(texts) > 200 and len(found.held_out) > 10 and not texts & set(found.held_out)


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"path": "nowhere/*.txt"}, "No file matches"),
        ({"path": ["a.txt", "b.txt"]}, "None of these files"),
        ({"path": "strange.bin"}, "not one of .txt"),
        ({"path": "broken.jsonl"}, "cannot be read"),
        ({"path": "other.jsonl"}, "no column 'text' \\(data.column\\). Did you mean 'texts'"),
        ({"path": "numbers.jsonl"}, "holds int, not text"),
        ({"path": "latin.txt"}, "not text in UTF-8"),
        ({"path": "empty.txt"}, "holds no text"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, monkeypatch, asked, said):
    (tmp_path / "strange.bin").write_bytes(b"x")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "other.jsonl").write_text('{"texts": "a"}\n')
    (tmp_path / "numbers.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" ")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PosencError, match=said):
        load_corpus(DataSettings(**asked, length=8))
