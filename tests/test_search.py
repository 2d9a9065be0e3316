"""Searching: what candidates may be, that the same seed finds the same, and that what guides never judges."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from cells import tiny
from forked import fork_two
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_posenc import PosencError, UnsupportedModel, describe, is_patched, load, patch_model, save
from hf_posenc.checkpoints.tokenizers import tokenizer_of
from hf_posenc.cli.main import app
from hf_posenc.cli.search import FITNESSES as TYPED
from hf_posenc.core.ranges import Range
from hf_posenc.evaluation import Document, tokenized
from hf_posenc.evaluation.measures.processes import launched_processes
from hf_posenc.schemes import SCHEMES
from hf_posenc.search import Budget, recommend, search
from hf_posenc.search.candidates import LiveRope, geometry_of
from hf_posenc.search.evolution import evolve
from hf_posenc.search.page import page
from hf_posenc.search.rules import RULES, rules_markdown
from hf_posenc.search.samples import FITNESSES, needle_samples, sample_losses, shares, split, text_samples
from hf_posenc.search.spaces import FactorSpace, critical_pair, option_space, ramp, searched_critical_pair

SMALL = Budget(population=4, parents=2, rounds=2, samples=4, held_out=4)
TARGET = 512


@pytest.fixture(scope="module")
def model():
    return load("tiny", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("tiny")


@pytest.fixture(scope="module")
def documents(tokenizer):
    source = random.__file__
    with open(source, encoding="utf-8") as file:
        return tokenized({"random.py": file.read()}, tokenizer)


@pytest.fixture(scope="module")
def space(model):
    return FactorSpace(geometry_of(model, SCHEMES["longrope"](target_length=TARGET)), TARGET)


# --- candidates ---


@given(seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_factors_stay_monotone_and_in_bounds(space, seed):
    rng = random.Random(seed)
    starts = list(space.starts().values())
    child = space.mutate(space.cross(*rng.sample(starts, 2), rng), rng)
    for _ in range(5):
        child = space.mutate(child, rng)
    attention, *factors = child
    assert factors == sorted(factors)
    assert min(factors) >= 1.0 and max(factors) <= 1.25 * TARGET / 256
    assert 0.5 < attention < 2.0


def test_published_maps_are_the_starts(space, model):
    for name in ("linear", "ntk", "yarn", "llama3"):
        attention, *factors = space.starts()[f"{name}'s factors"]
        scheme = SCHEMES[name](target_length=TARGET)
        rotation = scheme.effect_on(space.geometry).rotation
        assert factors == pytest.approx([b / f for b, f in zip(space.base, rotation.inv_freq, strict=True)])
        assert attention == pytest.approx(rotation.attention_scaling)


def test_the_critical_pair_is_counted_by_hand():
    frequencies = [1.0, 0.1, 0.01, 0.001]  # waves of 6.3, 63, 628 and 6283 tokens
    assert critical_pair(frequencies, 100) == 2
    assert ramp(4, 2, 16.0) == (1.0, 4.0, 16.0, 16.0)
    assert searched_critical_pair(ramp(4, 2, 16.0), 16.0) == 2


@pytest.mark.parametrize("scheme", sorted(n for n in SCHEMES if SCHEMES[n].ranges is not SCHEMES["none"].ranges))
def test_every_value_of_a_declared_range_is_taken_or_refused_clearly(scheme, model):
    start = SCHEMES[scheme](target_length=TARGET)
    space = option_space(start, geometry_of(model, start))
    rng, taken = random.Random(0), 0
    genes = next(iter(space.starts().values()))
    assert space.scheme(genes).options() == pytest.approx(start.options())
    for _ in range(20):
        genes = space.mutate(genes, rng)
        try:
            space.scheme(genes).effect_on(space.geometry)
            taken += 1
        except PosencError:
            continue
    assert taken > 5


@pytest.mark.parametrize(
    "kind, option", [("drope", "c"), ("llama4 floor=64", "beta"), ("ministral", "llama_4_scaling_beta")]
)
def test_a_temperature_is_searched_with_the_options_of_its_scheme(kind, option, model):
    for scheme, others in (("none", 0), ("yarn", 3)):
        start = SCHEMES[scheme](target_length=TARGET, temperature=kind)
        space = option_space(start, geometry_of(model, start))
        genes = next(iter(space.starts().values()))
        same = space.scheme(genes)
        assert len(genes) == others + 1
        assert getattr(same.temperature, option) == pytest.approx(getattr(start.temperature, option))
        moved = space.scheme((*genes[:-1], 0.5))
        assert getattr(moved.temperature, option) == pytest.approx(0.25)
        assert moved.temperature.options()["kind"] == kind.split()[0]
        assert getattr(moved.temperature, "floor", 64) == 64  # what has no range stays


def test_ranges_go_there_and_back():
    for r in (Range(1, 9), Range(1, 64, log=True), Range(2, 40, log=True, whole=True)):
        for share in (0.0, 0.3, 1.0):
            value = r.at(share)
            assert r.low <= value <= r.high
            assert r.at(r.share(value)) == pytest.approx(value)
    assert Range(1, 64, log=True).at(0.5) == pytest.approx(8.0)


# --- evolution ---


class Line:
    """One number, best at 3."""

    def starts(self):
        return {"zero": (0.0,)}

    def mutate(self, genes, rng):
        return (round(genes[0] + rng.gauss(0, 1), 3),)

    def cross(self, first, second, rng):
        return ((first[0] + second[0]) / 2,)


def test_evolution_finds_a_minimum_and_the_same_one_again():
    budget = Budget(population=12, parents=4, rounds=12, samples=4)

    def judge(candidates, count):
        return [[(genes[0] - 3) ** 2] * count for genes in candidates]

    found = evolve(Line(), judge, budget, seed=1)
    assert found[-1].genes[0] == pytest.approx(3, abs=0.1)
    assert evolve(Line(), judge, budget, seed=1) == found
    assert evolve(Line(), judge, budget, seed=2) != found
    assert [r.best for r in found] == sorted((r.best for r in found), reverse=True)


@pytest.mark.parametrize("poison", [math.inf, math.nan, -math.inf])
def test_a_poisoned_candidate_cannot_win(poison):
    def judge(candidates, count):
        return [[poison] * count if genes[0] > 0.5 else [abs(genes[0] - 2)] * count for genes in candidates]

    found = evolve(Line(), judge, Budget(population=8, parents=3, rounds=6, samples=4), seed=0)
    assert found[-1].genes[0] <= 0.5 and math.isfinite(found[-1].best)


def test_a_search_over_one_candidate_returns_it():
    class Point(Line):
        def mutate(self, genes, rng):
            return genes

        cross = mutate

    found = evolve(Point(), lambda candidates, count: [[1.0] * count for _ in candidates], Budget(), seed=0)
    assert len(found) == 1 and found[0].genes == (0.0,)


def test_clearly_worse_candidates_are_read_on_few_samples():
    counts = []

    def judge(candidates, count):
        counts.append((len(candidates), count))
        return [[abs(genes[0])] * count for genes in candidates]

    evolve(Line(), judge, Budget(population=16, parents=4, rounds=1, samples=16), seed=0)
    assert counts[1][1] == 4 and counts[2][1] == 8 and counts[3][1] == 16
    assert counts[1][0] == 16 and counts[2][0] <= 8 and counts[3][0] <= 4


# --- what is read ---


def test_what_guides_never_judges(documents, tokenizer):
    guiding, judging = split(documents, TARGET)
    assert len(guiding[0].ids) + len(judging[0].ids) == len(documents[0].ids)
    assert torch.equal(torch.cat([guiding[0].ids, judging[0].ids]), documents[0].ids)


def test_text_too_short_to_split_says_how_much_is_needed(tokenizer):
    short = tokenized({"a": "a short text"}, tokenizer)
    with pytest.raises(PosencError, match="is needed, and the longest has"):
        split(short, 100)


def test_short_texts_give_the_windows_that_they_have(documents):
    ids = documents[0].ids
    texts = [Document("long", ids[:2000], ""), Document("short", ids[:260], ""), Document("other", ids[:400], "")]
    assert shares([10, 1, 3], 7) == [3, 1, 3] and shares([10, 1, 3], 30) == [10, 1, 3] and shares([9, 9], 5) == [3, 2]
    found = text_samples(texts, 256, 8, None)
    assert len(found) == 8 and all(len(sample.ids) == 256 for sample in found)
    assert torch.equal(found[4].ids, ids[2:258])  # the only window of the short text
    assert torch.equal(found[5].ids, ids[:256]) and torch.equal(found[7].ids, ids[144:400])


def test_a_sample_is_scored_as_transformers_scores_it(model, documents, tokenizer):
    for samples in (text_samples(documents, 200, 3, None), needle_samples(tokenizer, 250, 3, seed=0)):
        ours = sample_losses(model, samples)
        for sample, loss in zip(samples, ours, strict=True):
            labels = sample.ids.clone()
            labels[: -sample.scored] = -100
            with torch.no_grad():
                theirs = float(model(sample.ids[None], labels=labels[None]).loss)
            assert loss == pytest.approx(theirs, abs=1e-4)


def test_frequencies_written_in_place_are_those_of_the_patch(model, space, documents):
    samples = text_samples(documents, TARGET, 2, None)
    before = sample_losses(model, samples)
    genes = space.mutate(space.starts()["yarn's factors"], random.Random(3))
    with LiveRope(model).holding(genes[1:], genes[0]):
        tried = sample_losses(model, samples)
    assert sample_losses(model, samples) == before
    patched = patch_model(load("tiny", dtype=torch.float32), space.scheme(genes))
    assert sample_losses(patched, samples) == pytest.approx(tried, abs=1e-5)
    assert describe(patched).portability.startswith("config")


# --- the search itself ---


def test_a_search_returns_what_is_no_worse_and_leaves_the_model_alone(model, tokenizer, documents, tmp_path):
    ids = documents[0].ids[None, :300]
    with torch.no_grad():
        before = model(ids).logits
    out = tmp_path / "search.jsonl"
    found = search(model, tokenizer, documents, target_length=TARGET, budget=SMALL, out=out)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert not is_patched(model)
    chosen = found.value("searched" if found.genes == found.rounds[-1].genes else found.start, TARGET)
    assert chosen.value <= found.value(found.start, TARGET).value
    lines = out.read_text().splitlines()
    assert "nats better" in found.sentence or "nothing better" in found.sentence
    html = page(found, "hf-posenc eval x")
    assert found.sentence.split("(")[0].strip()[:40] in html and html.count("<svg") >= 2

    again = search(model, tokenizer, documents, target_length=TARGET, budget=SMALL, out=out)
    assert again.genes == found.genes
    assert out.read_text().splitlines() == lines, "what was kept was read again"
    with pytest.raises(PosencError, match="another run"):
        search(model, tokenizer, documents, target_length=TARGET, budget=SMALL, seed=1, out=out)

    # As if it had been killed: half of the log, and half a line of what came then.
    out.write_text("\n".join(lines[: len(lines) // 2]) + "\n" + lines[-1][:20])
    assert search(model, tokenizer, documents, target_length=TARGET, budget=SMALL, out=out).genes == found.genes
    assert len(out.read_text().splitlines()) >= len(lines)


def test_options_of_a_scheme_are_searched(model, tokenizer, documents):
    budget = Budget(population=3, parents=2, rounds=1, samples=2, held_out=2)
    found = search(model, tokenizer, documents, target_length=TARGET, scheme="yarn", fitness="needles", budget=budget)
    assert found.scheme.name == "yarn" and found.scheme.target_length == TARGET
    assert not is_patched(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_length": 100}, "not longer than the trained length"),
        ({"scheme": "linear"}, "no options that could be searched"),
        ({"scheme": SCHEMES["linear"](factor=2.0, temperature="log")}, "no options that could be searched"),
        ({"scheme": SCHEMES["longrope"](factor=2.0, temperature="drope")}, "leave temperature out"),
        ({"fitness": "beauty"}, "Unknown fitness"),
        ({"short_weight": -1.0}, "short_weight"),
        ({"target_length": 10**6}, "is needed, and the longest has"),
        ({"budget": Budget(population=2, parents=2, samples=10**4)}, "give a longer text, or ask for"),
    ],
)
def test_what_cannot_be_searched_is_said_before_anything_is_read(model, tokenizer, documents, change, message):
    asked = {"target_length": TARGET, "budget": SMALL, **change}
    with pytest.raises(PosencError, match=message):
        search(model, tokenizer, documents, **asked)
    assert not is_patched(model)


@pytest.mark.parametrize(
    "wrong", [{"population": 0}, {"parents": 9, "population": 4}, {"rounds": 0}, {"held_out": 1}, {"samples": 1.5}]
)
def test_a_budget_too_small_for_one_round_is_refused(wrong):
    with pytest.raises(PosencError):
        Budget(**wrong)


def test_models_without_a_rope_or_already_patched_are_refused(tokenizer):
    with pytest.raises(UnsupportedModel, match="does not"):
        LiveRope(tiny("gpt2"))
    with pytest.raises(PosencError, match="unpatch_model first"):
        LiveRope(patch_model(tiny("llama"), "yarn", factor=2.0))


# --- the command line, and what it writes ---


def test_what_is_written_is_loaded_by_plain_transformers(tmp_path, documents):
    text = tmp_path / "text.txt"
    text.write_text(documents[0].text)
    out = tmp_path / "out"
    sizes = ["--population", "2", "--parents", "2", "--rounds", "1", "--samples", "2", "--held-out", "2"]
    typed = ["search", "tiny", "--target-length", str(TARGET), "--text", str(text), "--out", str(out), *sizes]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 0, done.output
    assert "Next: hf-posenc eval" in done.output
    assert json.loads((out / "config.json").read_text())["rope_parameters"]["rope_type"] == "longrope"
    ids = documents[0].ids[None, :TARGET]
    with torch.no_grad():
        ours = load(out, dtype=torch.float32)(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(ids).logits
    assert torch.allclose(ours, plain, atol=1e-5)
    refused = CliRunner().invoke(app, typed)
    assert refused.exit_code == 2 and "--overwrite" in refused.output
    assert TYPED == FITNESSES


def test_two_processes_find_what_one_does(tmp_path, documents, model, tokenizer):
    budget = Budget(population=4, parents=2, rounds=1, samples=2, held_out=2)
    text, log, answer = tmp_path / "text.txt", tmp_path / "log.jsonl", tmp_path / "genes.json"
    text.write_text(documents[0].text)

    def find():
        torch.set_num_threads(1)
        words = tokenizer_of("tiny")
        read = tokenized({"random.py": text.read_text()}, words)
        own = load("tiny", dtype=torch.float32)
        found = search(own, words, read, target_length=TARGET, budget=budget, out=log)
        if launched_processes().first:
            answer.write_text(json.dumps(found.genes))

    processes = fork_two(find, tmp_path)
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "0").read_text()
    one = search(model, tokenizer, documents, target_length=TARGET, budget=budget, out=tmp_path / "one.jsonl")
    assert tuple(json.loads(answer.read_text())) == one.genes
    assert log.read_text() == (tmp_path / "one.jsonl").read_text()


# --- recommending ---


def test_rules_name_schemes_that_work_on_their_kind():
    for rule in RULES:
        SCHEMES[rule.scheme].from_options(rule.options)
        assert rule.source and rule.why and rule.factors[0] < rule.factors[1]


def test_the_docs_show_the_rules():
    docs = Path(__file__).parent.parent / "docs" / "search.md"
    if not docs.exists():
        pytest.skip("an installed package has no docs beside it")
    assert f"<!-- rules -->\n{rules_markdown()}\n<!-- /rules -->" in docs.read_text(encoding="utf-8")


def test_a_recommendation_heeds_training_and_runtime(model):
    advice = recommend(model, target_length=1024, path="my/model")
    assert advice.sentence.startswith("For 1024 tokens (4 times the trained 256): yarn")
    assert advice.command == "hf-posenc patch my/model my/model-long --scheme yarn --target-length 1024"
    served = recommend(model, target_length=1024, serve="vllm", training=False)
    assert {option.rule.scheme for option in served.options} == {"yarn", "ntk"}
    assert served.passed_over["linear"] == "it needs training" and "refuses" in served.passed_over["self_extend"]
    assert not is_patched(model)
    with pytest.raises(PosencError, match="Nothing fits"):
        recommend(tiny("gpt2"), target_length=1024, training=False)
    with pytest.raises(PosencError, match="reads it as it is"):
        recommend(model, target_length=200)
    with pytest.raises(PosencError, match="Unknown runtime"):
        recommend(model, target_length=1024, serve="vlm")


def test_a_measured_recommendation_names_no_winner_that_error_bars_do_not_carry(model, tokenizer, documents):
    told = []
    advice = recommend(
        model, tokenizer, documents, target_length=TARGET, serve="vllm", training=False, tell=told.append
    )
    assert len(told) == 1 and told[0].startswith("Measuring yarn, ntk:alpha=cover and the model as it is, 20 windows")
    at = {row.scheme: row.value for row in advice.rows if row.metric == "loss" and row.length == TARGET}
    assert {"unpatched", "yarn", "ntk:alpha=cover"} <= set(at)
    winner = [name for name in at if f"take {name}:" in advice.sentence]
    level = "level" in advice.sentence or "nothing is better" in advice.sentence
    assert bool(winner) != level
    assert not is_patched(model)


def test_a_config_is_enough_for_rules(tmp_path):
    save(tiny("llama"), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    done = CliRunner().invoke(app, ["recommend", str(tmp_path / "m"), "--target-length", "128"])
    assert done.exit_code == 0, done.output
    assert "By rule, not measured" in done.output
