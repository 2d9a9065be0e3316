"""The explorer's page in a real Chromium: what it shows is what the schemes compute, to 1e-6."""

import json
import math
import re

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel
from typer.testing import CliRunner

from hf_posenc.cli.main import app
from hf_posenc.core.effects import FollowingRotation
from hf_posenc.errors import PosencError, UnsupportedModel
from hf_posenc.explorer.controls import CONTROLS, GROUPS
from hf_posenc.explorer.page import explorer_page
from hf_posenc.families import places
from hf_posenc.patching.measure import measure
from hf_posenc.schemes import SCHEMES
from hf_posenc.schemes.learned import RESIZE

WIDTHS = (1280, 390)
MOVED = {
    "rope": {"rope_theta": 500_000.0},
    "ntk": {"alpha": "cover"},
    "dynamic_ntk": {"factor": 2.5, "step": 7},
    "yarn": {"beta_fast": 20.0, "beta_slow": 1.5, "attention_factor": 1.25, "truncate": False},
    "llama3": {"low_freq_factor": 0.5, "high_freq_factor": 6.0},
    "longrope": {"attention_factor": 1.3},
    "proportional": {"partial_rotary_factor": 0.4},
    "clip": {"pairs": 5, "taper": True},
    "self_extend": {"window": 20, "group": 11},
    "rerope": {"window": 30, "slope": 9.5},
    "dca": {"chunk": 40, "local_window": 20},
    "string": {"shift": 30, "window": 10},
    "streaming": {"sinks": 3, "window": 20},
    "lm_infinite": {"global_tokens": 5, "window": 17},
    "window": {"window": 23},
    "sparse": {"window": 9, "global_tokens": 2, "stride": 5, "random_blocks": 2, "block": 8},
    "alibi": {"alibi_bias_max": 5.0},
    "t5": {"relative_attention_max_distance": 77},
    "kerple": {"kernel": "power"},
    "fire": {"threshold": 100},
    "fox": {"constant": 3.0},
    "cable": {"constant": -2.0},
    "sinusoidal": {"base": 300.0, "layout": "concatenated"},
    "fourier": {"frequencies": "gaussian", "sigma": 0.5},
    "learned": {"resize": "cyclic"},
}
TIMES = {"string": 1.25}


def llama(**rope):
    config = LlamaConfig(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6,
        head_dim=16, vocab_size=50, max_position_embeddings=64, **({"rope_parameters": rope} if rope else {}),
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert():
    return BertForMaskedLM(
        BertConfig(
            hidden_size=96,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=6,
            vocab_size=50,
            max_position_embeddings=64,
        )
    )


SCALED = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {"llama": llama, "scaled": lambda: llama(**SCALED), "bert": bert}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    models = {name: make() for name, make in MODELS.items()}
    for name, model in models.items():
        (folder / f"{name}.html").write_text(explorer_page(model, name), encoding="utf-8")
    return folder, models


@pytest.fixture(params=MODELS)
def opened(request, browser, pages):
    folder, models = pages
    browser.open(folder / f"{request.param}.html", width=1280)
    return browser, models[request.param]


def assert_near(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None or isinstance(other, str) or (isinstance(other, float) and math.isnan(other)):
            assert one is None or one == other
        else:
            assert one == pytest.approx(float(other), rel=1e-6, abs=1e-6)


def ask_page(browser, name, options, times=4.0, temperature=""):
    state = {"scheme": name, "times": times, "options": options, "temperature": temperature}
    # Infinity is no JSON
    found = browser.run(
        f"(s => {{ s.reach = s.reach === Infinity ? 'none' : s.reach; return s; }})(explorer.set({json.dumps(state)}))"
    )
    return found


def test_every_scheme_of_text_has_controls():
    by_hand = {"axial_rope", "shaw", "transformer_xl", "deberta"}  # of images; vectors that only training makes
    assert set(CONTROLS) == set(SCHEMES.built_in()) - by_hand
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(CONTROLS)
    for name, controls in CONTROLS.items():
        fields = {field for field in SCHEMES[name].__dataclass_fields__}
        assert {control.name for control in controls} <= fields, name
    assert set(MOVED) == {name for name, controls in CONTROLS.items() if controls}


@pytest.mark.parametrize("moved", [False, True], ids=["defaults", "moved"])
def test_what_the_page_shows_is_what_schemes_compute(opened, moved):
    browser, model = opened
    where = places(model)
    compared = 0
    for name in CONTROLS:
        options = MOVED.get(name, {}) if moved else {}
        times = TIMES.get(name, 4.0)
        found = ask_page(browser, name, options, times)
        try:
            sample = SCHEMES[name].from_options({"factor": 4.0} if SCHEMES[name].extends else {})
            geometry = next(iter(measure(where, sample, "extend").values()))
            target = round(geometry.trained_length * times)
            scheme = SCHEMES[name].from_options({**options, "target_length": target})
            effect = scheme.effect_on(geometry)
        except PosencError:
            assert "refused" in found, name
            continue
        assert "refused" not in found, (name, found)
        assert (found["trained"], found["target"]) == (geometry.trained_length, target)
        compare(name, scheme, geometry, effect, target, found)
        compared += 1
    assert compared >= 15


def compare(name, scheme, geometry, effect, target, found):
    if "rotation" in found:
        compare_rotation(geometry, effect.rotation, target, found)
    if effect.bias is not None:
        compare_bias(geometry, effect.bias, target, found)
    if effect.pattern is not None:
        compare_pattern(effect.pattern, target, found)
    if "table" in found:
        table = effect.table.module(None, torch.zeros(1)).vectors(torch.arange(64)[:, None])[:, :64]
        for row, expected in zip(found["table"], table.tolist(), strict=True):
            assert_near(row, expected)
    if "rows" in found:
        own = torch.arange(float(geometry.trained_length), dtype=torch.float64)[:, None]
        made = RESIZE[scheme.resize or "linear"](own, target)[found["rows"]["x"], 0]
        assert_near(found["rows"]["y"], made.tolist())


def compare_rotation(geometry, rotation, target, found):
    after = rotation.inv_freq
    if isinstance(rotation, FollowingRotation):
        stage = rotation.stage(torch.tensor(target))
        growth = float(rotation.growth(stage.double()))
        after = [f * math.exp(-growth * w) for f, w in zip(after, rotation.weights, strict=True)]
    assert_near(found["rotation"]["after"], after)
    assert_near([found["rotation"]["scaling"]], [rotation.attention_scaling])
    seen = [min(1, geometry.trained_length * f / (2 * math.pi)) for f in found["rotation"]["before"]]
    assert_near(found["rotation"]["seen"], seen)
    assert_near(found["rotation"]["asked"], [min(1, target * f / (2 * math.pi)) for f in after])
    for d, value in list(zip(found["score"]["x"], found["score"]["curves"][1][1], strict=True))[::20]:
        assert_near([value], [sum(math.cos(d * f) for f in after) / len(after)])
    if found["config"] is not None:
        same_config(found["config"], rotation.rope_parameters)


def compare_bias(geometry, bias, target, found):
    if bias.of_content:
        said = bias(torch.zeros(1, 1, geometry.hidden_size, dtype=torch.float64), 0)[0, 0, 0].item()
        assert_near(found["score"]["curves"][0][1], [said * d for d in found["score"]["x"]])
        return
    x = torch.tensor(found["score"]["x"], dtype=torch.float64)
    last = torch.tensor([[target - 1.0]], dtype=torch.float64)
    values = bias(last, (target - 1 - x)[None], torch.float64)[0, :, 0].detach()
    for label, curve in found["score"]["curves"]:
        assert_near(curve, values[int(label.split()[1])].tolist())


def compare_pattern(pattern, target, found):
    at = torch.tensor(found["keys"]["at"])
    for row, expected in zip(found["keys"]["cells"], told_distances(pattern, at, at), strict=True):
        assert_near(row, expected)
    last = told_distances(pattern, torch.tensor([target - 1]), target - 1 - torch.tensor(found["told"]["x"]))
    assert_near(found["told"]["y"], last[0])


def told_distances(pattern, query, key):
    """As the patterns themselves say; None for keys that are not seen."""
    told = torch.full((len(query), len(key)), math.nan, dtype=torch.float64)
    for zone in pattern.zones(query[None], key[None]):
        apart = (zone.query[:, :, None] - zone.key[:, None, :])[0].double()
        told = torch.where(zone.seen.expand(1, *told.shape)[0], apart, told)
    return [[None if math.isnan(d) else d for d in row] for row in told.tolist()]


def same_config(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        if isinstance(value, list | tuple):
            assert_near(found[key], value)
        elif isinstance(value, bool | str):
            assert found[key] == value
        else:
            assert_near([found[key]], [value])


def test_temperatures_are_those_of_the_package(opened):
    browser, model = opened
    where = places(model)
    for kind in ("log", "drope", "llama4", "ministral"):
        found = ask_page(browser, "alibi", {}, 4.0, kind)
        geometry = next(iter(measure(where, SCHEMES["alibi"](temperature=kind, factor=4.0), "extend").values()))
        scheme = SCHEMES["alibi"](target_length=4 * geometry.trained_length, temperature=kind)
        made = scheme.effect_on(geometry).temperature
        expected = made(torch.tensor([found["temperature"]["x"]]).float())[0, 0].tolist()
        assert_near(found["temperature"]["y"], expected)


def test_the_reach_is_where_the_first_pair_leaves_its_angles(browser, pages):
    browser.open(pages[0] / "llama.html", width=1280)
    assert ask_page(browser, "rope", {})["reach"] == 64
    assert ask_page(browser, "linear", {})["reach"] == pytest.approx(256, abs=1)
    assert ask_page(browser, "self_extend", {"window": 16, "group": 8})["reach"] == (64 - 16) * 8 + 16
    assert ask_page(browser, "alibi", {})["reach"] == "none"
    assert 64 < ask_page(browser, "ntk", {})["reach"] < 256  # falls short, as it is known to
    assert ask_page(browser, "ntk", {"alpha": "cover"})["reach"] >= 255


def test_the_numbers_are_on_the_page_and_so_is_what_to_copy(browser, pages):
    browser.open(pages[0] / "llama.html", width=1280)
    found = ask_page(browser, "yarn", {"beta_fast": 16})
    rows = browser.run(
        "[...document.querySelectorAll('#numbers tbody tr')].map(r => [...r.cells].map(c => +c.textContent))"
    )
    assert_near([row[2] for row in rows], found["rotation"]["after"])
    command = browser.run("document.getElementById('command').textContent")
    assert command == "hf-posenc patch llama llama-long --scheme yarn --target-length 256 --option beta_fast=16"
    assert json.loads(browser.run("document.getElementById('config').textContent"))["rope_parameters"]["factor"] == 4
    assert "pairs" in browser.run("document.getElementById('words').textContent")
    # the curve on the page runs through the numbers: the last pair of "after"
    y = browser.run("(p => p.getPointAtLength(p.getTotalLength()).y)(document.querySelector('#turns .curve.s1'))")
    assert y == pytest.approx(212 - found["rotation"]["asked"][-1] * (212 - 14), abs=0.2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_and_can_be_read(browser, pages, width, dark):
    browser.open(pages[0] / "llama.html", width=width, dark=dark)
    for name in ("yarn", "sparse", "alibi", "sinusoidal", "learned"):
        ask_page(browser, name, {}, temperature="log")
        assert browser.run("document.documentElement.scrollWidth") <= width
        shown = browser.run(
            "[...document.querySelectorAll('figure:not([hidden])')].map(f => f.getBoundingClientRect().width)"
        )
        assert shown and all(200 < wide <= width for wide in shown)
    ink, paper = browser.run(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (light[0] > light[1]) is dark and abs(light[0] - light[1]) > 500


def test_the_keyboard_alone_is_enough(browser, pages):
    browser.open(pages[0] / "llama.html", width=1280)
    reached = set()
    for _ in range(14):
        browser.press_tab()
        reached.add(browser.run("document.activeElement.id || document.activeElement.dataset.copy"))
    assert {"scheme", "times", "temperature", "c-beta_fast", "c-truncate", "reset", "command", "config"} <= reached
    before = browser.run("explorer.state.times")
    browser.run("document.getElementById('times').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
        )
    assert browser.run("explorer.state.times") > before
    assert browser.run("explorer.last.target") == round(64 * browser.run("explorer.state.times"))


def test_nothing_is_fetched_and_nothing_complains(browser, pages):
    for name in MODELS:
        file = pages[0] / f"{name}.html"
        browser.open(file, width=1280)
        for scheme in CONTROLS:
            ask_page(browser, scheme, {})
        assert {url.partition("#")[0] for url in browser.requests()} <= {file.as_uri(), "data:,"}
        assert browser.complaints() == []
        assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|https?:""", file.read_text("utf-8"))


def test_the_command_writes_a_page_and_never_over_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["explore"])
    assert done.exit_code == 0 and "explore.html is written" in done.output
    again = CliRunner().invoke(app, ["explore"])
    assert again.exit_code == 2 and (tmp_path / "explore.html").exists()
    assert CliRunner().invoke(app, ["explore", "--overwrite"]).exit_code == 0
    assert CliRunner().invoke(app, ["explore", "--out", "nowhere/x.html"]).exit_code == 2


def test_models_that_it_cannot_draw_are_refused():
    tiny = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32)
    with pytest.raises(UnsupportedModel, match="reads images"):
        explorer_page(ViTModel(tiny), "vit")


def test_what_a_model_is_called_cannot_leave_its_place():
    made = explorer_page(llama(), "</script><b>x")
    assert "</script><b>" not in made
