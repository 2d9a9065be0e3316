"""The bench of length generalisation: its data, its measure, its file, its page. What it finds is published."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_posenc import PosencError
from hf_posenc.cli.main import app
from hf_posenc.training.length_bench import command, runs
from hf_posenc.training.length_bench.page import by_scheme, mean_past_training, page
from hf_posenc.training.length_bench.runs import (
    SCHEME_NAMES,
    Job,
    Settings,
    exact_match,
    held_out_examples,
    make_model,
    random_positions,
    read_results,
    run,
    task_batches,
)
from hf_posenc.training.length_bench.tasks import LETTERS, NUMBERS, TASKS, VOCABULARY, draw, is_held_out

DOCS = Path(__file__).parent.parent / "docs"
SMALL = Settings(layers=1, hidden=16, heads=2, steps=2, batch=4, longest=4, tested=(3, 6), examples=5)


def test_answers_are_right():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == len(NUMBERS)
    rng = random.Random(0)
    for length in (1, 2, 7, 20, 40):
        for task in TASKS:
            prompt, answer = TASKS[task](length, rng)
            assert set((*prompt, *answer)) <= set(VOCABULARY)
            if task == "addition":
                one, other = "".join(prompt).split("+")
                assert len(one) == len(other) == length and int(one) + int(other) == int("".join(answer))
            elif task == "scan":
                assert len(answer) == length and actions_of(prompt) == answer
            else:
                assert len(prompt) == length and answer == (prompt[::-1] if task == "reverse" else prompt)


def actions_of(words):
    """What commands ask for, read one by one."""
    done = []
    for clause in " ".join(words).split(" and "):
        verb, *more = clause.split()
        once = [*(w.upper() for w in more if w in ("left", "right")), verb.upper()]
        done += once * (3 if "thrice" in more else 2 if "twice" in more else 1)
    return done


@pytest.mark.parametrize("task", TASKS)
def test_what_is_tested_was_never_trained_on(task):
    rng = random.Random(1)
    trained = {" ".join(draw(task, rng.randint(1, 20), rng, False).prompt) for _ in range(2000)}
    tested = {" ".join(e.prompt) for n in (5, 10, 20, 40) for e in held_out_examples(Job(task, "none", 0), n)}
    assert tested and not trained & tested
    assert all(is_held_out(e) for e in held_out_examples(Job(task, "rope", 3), 10))
    assert held_out_examples(Job(task, "rope", 3), 10) == held_out_examples(Job(task, "none", 0), 10)


def test_exact_match_is_that_of_greedy_decoding():
    job = Job("copy", "none", 0, SMALL)
    model = make_model(job, 20, len(VOCABULARY)).eval()
    examples = held_out_examples(job, 2)
    with torch.no_grad():  # a model that says what it was told to: the token that it reads, mostly
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    right = []
    for example in examples:
        prompt = torch.tensor([example.ids[: -example.answer_length]])
        made = model.generate(
            prompt, max_new_tokens=example.answer_length, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        right.append(made[0].tolist() == example.ids)
    assert exact_match(model, examples) == sum(right) / len(right)


def test_every_scheme_trains_and_a_run_is_the_same_again():
    for scheme in SCHEME_NAMES:
        result = run(Job("repeat_one", scheme, 1, SMALL))
        assert set(result["by_length"]) == {"3", "6"} and result["train_loss"] > 0
    again = run(Job("repeat_one", SCHEME_NAMES[-1], 1, SMALL))
    assert {**again, "cpu_seconds": 0} == {**result, "cpu_seconds": 0}
    at = random_positions(10, 50, torch.Generator().manual_seed(0))
    assert (at.diff() > 0).all() and at.max() < 50


def test_an_alphabet_is_what_tasks_on_letters_draw_from_and_models_have_room_for():
    for alphabet in (4, 26, 100):
        job = Job("copy", "none", 0, replace(SMALL, alphabet=alphabet))
        drawn = {token for example in held_out_examples(job, 400) for token in example.prompt}
        assert drawn == set(LETTERS[:alphabet])
        assert max(NUMBERS[token] for token in drawn) < job.vocabulary == 55 + max(alphabet - 26, 0)
    assert Job("addition", "none", 0, replace(SMALL, alphabet=100)).draw(3, random.Random(0), False).prompt[3] == "+"
    with pytest.raises(PosencError, match="1 to 100 tokens, not 101"):
        Job("copy", "none", 0, Settings(alphabet=101))


def test_rows_of_a_bucket_are_of_about_one_length():
    def of(bucket):
        job = Job("copy", "none", 0, Settings(batch=16, bucket=bucket))
        return [ids for ids, _ in itertools.islice(task_batches(job), 16)]

    shuffled, sorted_ = of(1), of(8)
    assert all(len(ids) == 16 for ids in (*shuffled, *sorted_))
    padded = [
        float((torch.cat([ids.flatten() for ids in found]) == NUMBERS["<pad>"]).double().mean())
        for found in (shuffled, sorted_)
    ]
    assert padded[0] > 0.3 and padded[1] < 0.12
    widths = [ids.shape[1] for ids in sorted_[:8]]
    assert widths != sorted(widths)  # training does not go from short to long
    lengths = [n for ids in sorted_ for n in (ids != NUMBERS["<pad>"]).sum(1).tolist()]
    assert {2 * n + 2 for n in range(1, 21)} == set(lengths)


def test_a_task_has_settings_of_its_own_and_options_change_them(monkeypatch):
    asked = []
    monkeypatch.setattr(command, "bench", lambda jobs, out, processes: asked.extend(jobs))
    monkeypatch.setattr(runs, "OF_TASK", {"copy": {"steps": 7, "layers": 2}})
    told = [
        "--tasks",
        "copy,scan",
        "--schemes",
        "rope",
        "--seeds",
        "1",
        "--layers",
        "5",
        "--batch",
        "3",
        "--bucket",
        "4",
    ]
    told += ["--hidden", "32", "--heads", "2", "--alphabet", "9", "--learning-rate", "0.5"]
    assert not CliRunner().invoke(app, ["bench", "length-generalisation", *told]).exception
    changed = Settings(layers=5, batch=3, bucket=4, hidden=32, heads=2, alphabet=9, learning_rate=0.5)
    assert asked == [Job("copy", "rope", 0, replace(changed, steps=7)), Job("scan", "rope", 0, changed)]


def test_results_from_before_a_setting_are_those_of_its_default(tmp_path):
    result = run(Job("copy", "rope", 0, SMALL))
    del result["settings"]["bucket"], result["settings"]["alphabet"]
    (tmp_path / "results.jsonl").write_text(json.dumps(result) + "\n")
    jobs = [Job("copy", "rope", 0, s) for s in (SMALL, replace(SMALL, bucket=2))]
    assert command.missing_jobs(jobs, read_results(tmp_path / "results.jsonl")) == jobs[1:]


def test_a_bench_goes_on_from_its_file(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(command, "run", lambda job: ran.append(job) or run(job))
    given = ([Job("copy", name, seed, SMALL) for seed in range(2) for name in ("none", "rope")], tmp_path)
    written = command.bench(*given, 1)
    assert len(ran) == 4 and len(read_results(tmp_path / "results.jsonl")) == 4
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    command.bench(*given, 1)
    assert len(ran) == 5 and written.read_text().count("<h2>") == 1  # a run that goes on is of the same kind
    command.bench(*given, 1)
    assert len(ran) == 5 and "4 of 4 runs" in capsys.readouterr().out
    text = written.read_text()
    assert "2 seeds" in text and text.count("<polyline") == 2 and "0.31" in text  # published for copying
    (tmp_path / "results.jsonl").write_text("nonsense\n" + lines[0])
    with pytest.raises(PosencError, match="Line 1"):
        read_results(tmp_path / "results.jsonl")


def test_error_bars():
    head = {"task": "copy", "scheme": "rope", "settings": {**SMALL.__dict__}, "parameters": 9, "cpu_seconds": 1.0}
    results = [{**head, "seed": s, "by_length": {"5": v}} for s, v in enumerate((0.0, 0.5, 1.0))]
    found = by_scheme(results)["rope"][5]
    assert found.mean == 0.5 and found.error == pytest.approx(0.5 / 3**0.5) and found.seeds == 3
    assert "0.50 ± 0.29" in page(json.loads(json.dumps(results)))


def test_mistakes_are_told():
    with pytest.raises(PosencError, match="repeat_one"):
        Job("copying", "rope", 0)
    with pytest.raises(PosencError, match="'rop'"):
        Job("copy", "rop+randomized", 0)
    assert "length-generalisation" in CliRunner().invoke(app, ["bench", "--help"]).stdout


def test_the_page_is_made_of_the_kept_results_where_none_leads(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import bench_page

    assert bench_page.bench_markdown() in (DOCS / "bench.md").read_text(encoding="utf-8")
    assert len(bench_page.pictures()) == bench_page.bench_markdown().count("###")  # none takes the place of another
    for name, drawn in bench_page.pictures().items():
        assert (DOCS / "bench" / name).read_text(encoding="utf-8") == drawn
    kept = [r for r in read_results(bench_page.RESULTS) if r["task"] == "repeat_one"]
    for layers in (2, 3):  # what holds at both sizes; the page says what does not
        group = [r for r in kept if r["settings"]["layers"] == layers]
        found, far = mean_past_training(group), by_scheme(group)
        compared = ("t5", "alibi", "rope", "sinusoidal")
        assert all(found[name].seeds == 3 for name in ("none", *compared))
        assert found["none"].mean > max(found[name].mean for name in compared)
        assert found["sinusoidal"].mean < 0.05 and far["rope"][40].mean < 0.05
