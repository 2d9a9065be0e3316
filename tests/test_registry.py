"""What is registered from outside, by hand or by the entry points of packages; broken ones; what records make of it.

The packages here are written as pip would leave them; one that pip really installs is in test_extending.py.
"""

import copy
import shutil
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from cells import tiny, tokens

from hf_posenc import (
    SCHEMES,
    Family,
    PosencError,
    Scheme,
    UnsupportedModel,
    check_model,
    load,
    patch_model,
    register_family,
    register_scheme,
    save,
)
from hf_posenc import registry as registry_module
from hf_posenc.core.effects import Effect
from hf_posenc.families import FAMILIES
from hf_posenc.families.base import PLUGINS as FAMILY_PLUGINS
from hf_posenc.registry import Origin, Plugins, Registry

SLOW = """
from dataclasses import dataclass
from hf_posenc import Scheme, register_scheme
from hf_posenc.core.effects import Effect, Rotation

@register_scheme
@dataclass(frozen=True, kw_only=True)
class Slow(Scheme):
    name, summary = {name!r}, "rotation at one speed"
    speed: float = 0.1
    def effect(self, geometry):
        return Effect(rotation=Rotation(inv_freq=(self.speed,) * (geometry.rotary_dim // 2)))
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test registers or finds is gone after it."""
    for registry in (SCHEMES, FAMILIES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_homes", dict(registry._homes))
        monkeypatch.setattr(registry.plugins, "faults", {})
        monkeypatch.setattr(registry.plugins, "_done", set())
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("outside_"):
            del sys.modules[name]
    registry_module._entry_points.cache_clear()
    registry_module._origin.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a package where Python finds it, as pip does."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def install(package, code, points, version="1.2"):
        module = package.replace("-", "_")
        (folder / f"{module}.py").write_text(code)
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = [f"[{group}]\n" + "".join(f"{name} = {module}\n" for name in names) for group, names in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        registry_module._entry_points.cache_clear()
        registry_module._origin.cache_clear()
        return folder / f"{module}.py"

    return install


def schemes(*names):
    return {"hf_posenc.schemes": names}


def slow(name="slow"):
    """A scheme made by hand, in this module."""
    space: dict = {"__name__": __name__}
    exec(SLOW.format(name=name), space)
    return space["Slow"]


# --- by entry point --------------------------------------------------------------------------------------------------


def test_a_scheme_of_an_installed_package_is_there_by_its_name(installed, tmp_path):
    installed("outside-slow", SLOW.format(name="slow"), schemes("slow"))
    assert "outside_slow" not in sys.modules  # imported when asked for
    model = patch_model(tiny("llama"), "slow", speed=0.2)
    assert "outside_slow" in sys.modules
    check_model(model)
    assert model.config.posenc["requires"] == {
        "scheme": {"module": "outside_slow", "package": "outside-slow", "version": "1.2"}
    }
    save(model, tmp_path / "saved")
    ids = tokens(2, 40)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved")(ids).logits, model(ids).logits)
    assert "slow" in list(SCHEMES) and SCHEMES["slow"].name == "slow"


def test_no_package_is_imported_for_a_scheme_of_ours(installed):
    installed("outside-slow", SLOW.format(name="slow"), schemes("slow"))
    patch_model(tiny("llama"), "yarn", factor=2.0)
    assert "outside_slow" not in sys.modules


def test_a_wrong_name_is_answered_with_names_from_outside(installed):
    installed("outside-slow", SLOW.format(name="slow"), schemes("slow"))
    with pytest.raises(PosencError, match=r"Unknown scheme 'slwo'. Did you mean 'slow'"):
        patch_model(tiny("llama"), "slwo")
    assert "outside_slow" not in sys.modules


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("", "registers nothing of this name"),
        (SLOW.format(name="other"), "registers nothing of this name"),
        (SLOW.format(name="slow") + "\nraise RuntimeError('late')", "RuntimeError: late"),
    ],
)
def test_a_broken_package_is_named_and_breaks_nothing_else(installed, code, said):
    installed("outside-broken", code, schemes("slow"))
    for _ in range(2):
        with pytest.raises(PosencError, match="'outside-broken' offers 'slow'") as caught:
            patch_model(tiny("llama"), "slow")
        assert said in str(caught.value)
    assert "slow" not in SCHEMES
    patch_model(tiny("llama"), "yarn", factor=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been told
        assert "slow" not in list(SCHEMES) and "yarn" in list(SCHEMES)


def test_listing_warns_of_a_broken_package_once(installed):
    installed("outside-broken", "1 / 0", schemes("slow"))
    with pytest.warns(UserWarning, match="'outside-broken' offers 'slow'.*ZeroDivisionError"):
        assert "alibi" in list(SCHEMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "slow" not in list(SCHEMES)


def test_two_packages_that_offer_one_name(installed):
    installed("outside-one", SLOW.format(name="slow"), schemes("slow"))
    installed("outside-two", SLOW.format(name="slow"), schemes("slow"))
    with pytest.raises(PosencError, match="outside-one and outside-two: uninstall all but one"):
        patch_model(tiny("llama"), "slow")
    assert "outside_one" not in sys.modules


def test_a_package_that_takes_a_name_of_ours(installed):
    saved = copy.deepcopy(patch_model(tiny("llama"), "alibi").config.posenc)
    installed("outside-slow", SLOW.format(name="alibi"), schemes("alibi"))
    with pytest.raises(PosencError, match=r"'outside-slow' offers 'alibi'.*registered twice: by hf_posenc itself"):
        patch_model(tiny("llama"), "alibi")
    # Which of the two was meant is known of an object, and of a record.
    model = patch_model(tiny("llama"), SCHEMES.registered()["alibi"]())
    check_model(model)
    assert model.config.posenc == saved


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_scheme_registered_by_hand(tmp_path):
    model = patch_model(tiny("llama"), slow()(speed=0.3))
    check_model(model)
    assert model.config.posenc["requires"] == {"scheme": {"module": __name__}}
    save(model, tmp_path / "saved")
    load(tmp_path / "saved")
    again = slow()  # a cell of a notebook, run again
    assert SCHEMES["slow"] is again
    load(tmp_path / "saved")
    del SCHEMES._entries["slow"]
    with pytest.raises(PosencError, match=f"'slow' of the module '{__name__}' is needed.*Import that module"):
        load(tmp_path / "saved")


def test_a_name_can_be_taken_once():
    slow()
    with pytest.raises(PosencError, match=f"by the module '{__name__}', and now by the module 'elsewhere'"):
        exec(SLOW.format(name="slow"), {"__name__": "elsewhere"})
    with pytest.raises(PosencError, match="'rope' is registered twice: by hf_posenc itself"):
        slow("rope")


def test_an_object_of_a_class_that_is_not_registered():
    @dataclass(frozen=True, kw_only=True)
    class Loose(Scheme):
        name, summary = "loose", "not registered"

        def effect(self, geometry):
            return Effect()

    with pytest.raises(PosencError, match=r"Loose is not registered.*@register_scheme"):
        patch_model(tiny("llama"), Loose())
    stale = slow()
    slow()
    with pytest.raises(PosencError, match=r"Slow is not registered.*defined again"):
        patch_model(tiny("llama"), stale())


NOT_SCHEMES = {
    "a function": (lambda: None, "derived from hf_posenc.Scheme"),
    "no dataclass": (type("A", (Scheme,), {"name": "a", "summary": "s"}), "@dataclass"),
    "no name": (dataclass(frozen=True, kw_only=True)(type("A", (Scheme,), {"summary": "s"})), "needs name"),
    "no summary": (dataclass(frozen=True, kw_only=True)(type("A", (Scheme,), {"name": "a"})), "needs summary"),
    "odd name": (
        dataclass(frozen=True, kw_only=True)(type("A", (Scheme,), {"name": "A b", "summary": "s"})),
        "small letters",
    ),
    "no effect": (
        dataclass(frozen=True, kw_only=True)(type("A", (Scheme,), {"name": "a", "summary": "s"})),
        "needs effect",
    ),
}


@pytest.mark.parametrize("case", NOT_SCHEMES)
def test_what_is_no_scheme_is_told_why(case):
    thing, said = NOT_SCHEMES[case]
    with pytest.raises(PosencError, match="cannot be registered as a scheme") as caught:
        register_scheme(thing)
    assert said in str(caught.value)


# --- what a record needs ---------------------------------------------------------------------------------------------


def record_of(name="slow"):
    return copy.deepcopy(patch_model(tiny("llama"), name).config.posenc)


def read(record):
    model = tiny("llama")
    model.config.posenc = record
    with pytest.raises(PosencError) as caught:
        check_model(model)
    return str(caught.value)


def test_a_record_names_the_package_that_is_missing(installed):
    file = installed("outside-slow", SLOW.format(name="slow"), schemes("slow"))
    record = record_of()
    assert "no patch is in place" in read(record)  # it can be read
    shutil.rmtree(file.parent)
    forget_packages()
    assert (
        "The scheme 'slow' of the package 'outside-slow' is needed, which is not installed (version 1.2 was used): "
        "pip install outside-slow"
    ) in read(record)


def test_a_record_names_the_package_that_is_broken_or_does_not_offer_it(installed):
    file = installed("outside-slow", SLOW.format(name="slow"), schemes("slow"))
    record = record_of()
    file.write_text("1 / 0")
    forget_packages()
    assert "ZeroDivisionError" in read(record)
    (file.parent / "outside_slow-1.2.dist-info" / "entry_points.txt").unlink()
    forget_packages()
    assert "Version 1.2 is installed and offers no entry point for it: import outside_slow" in read(record)


def forget_packages():
    registry_module._entry_points.cache_clear()
    registry_module._origin.cache_clear()
    sys.modules.pop("outside_slow", None)
    SCHEMES._entries.pop("slow", None)
    SCHEMES.plugins.faults.clear()
    SCHEMES.plugins._done.clear()


def test_a_record_of_another_package_is_not_taken_for_this_one(installed):
    installed("outside-slow", SLOW.format(name="slow"), schemes("slow"))
    record = record_of()
    other = {**record, "requires": {"scheme": {"module": "m", "package": "another"}}}
    assert "of the package 'another' is needed, but the registered one comes from the package 'outside-slow'" in read(
        other
    )
    alike = {**record, "requires": {"scheme": {"module": "m", "package": "Outside.Slow", "version": "9"}}}
    assert "no patch is in place" in read(alike)
    assert "Update hf_posenc" in read({k: v for k, v in record.items() if k != "requires"})
    ours = {**record_of("alibi"), "requires": record["requires"]}
    assert "is needed, but the registered one comes from hf_posenc itself" in read(ours)


@pytest.mark.parametrize(
    "damage",
    [
        [],
        {"scheme": []},
        {"scheme": {}},
        {"scheme": {"module": 1}},
        {"scheme": {"module": "m", "x": "y"}},
        {"x": {}},
        {"family": {}},
        {"family": {"name": "odd"}},
        {"family": {"name": 1, "module": "m"}},
    ],
)
def test_a_damaged_requirement_is_refused(damage):
    read({**record_of("alibi"), "requires": damage})


@pytest.mark.parametrize("name", [[], {}, None, 5, "", "nonsense"])
def test_a_damaged_name_is_refused(name):
    for requires in ({}, {"requires": {"scheme": {"module": "m", "package": "p"}}}):
        read({**record_of("alibi"), "scheme": name, **requires})


def test_records_of_our_own_schemes_have_not_changed():
    assert set(record_of("alibi")) == {"format", "scheme", "options", "geometry", "original", "checksum"}


# --- families --------------------------------------------------------------------------------------------------------

ODD = """
from hf_posenc import Family, register_family
register_family(Family(name="odd", model_types=("odd", "odder"), positions="table", table="wpe"))
"""


def odd(model_type="odd"):
    model = tiny("gpt2")
    model.config.model_type = model_type
    return model


@pytest.mark.parametrize("model_type", ["odd", "odder"])
def test_a_family_of_an_installed_package_is_found_by_model_type(installed, model_type):
    with pytest.raises(UnsupportedModel, match="are not supported"):
        patch_model(odd(model_type), "sinusoidal")
    installed("outside-odd", ODD, {"hf_posenc.families": ["odd"]})
    model = patch_model(odd(model_type), "sinusoidal")
    check_model(model)
    assert model.config.posenc["requires"] == {
        "family": {"name": "odd", "module": "outside_odd", "package": "outside-odd", "version": "1.2"}
    }


def test_a_broken_family_is_told_to_those_who_need_it(installed):
    installed("outside-odd", "1 / 0", {"hf_posenc.families": ["odd"]})
    with pytest.warns(UserWarning, match="'outside-odd' offers 'odd'"):
        patch_model(tiny("llama"), "alibi")
    with pytest.raises(PosencError, match=r"'outside-odd' offers 'odd'.*ZeroDivisionError"):
        patch_model(odd(), "sinusoidal")


def test_a_record_names_the_package_of_a_missing_family():
    record = {**record_of("alibi"), "requires": {"family": {"name": "odd", "module": "m", "package": "outside-odd"}}}
    assert "The family 'odd' of the package 'outside-odd' is needed, which is not installed" in read(record)


def test_a_record_is_not_put_on_a_model_of_another_family(tmp_path):
    save(patch_model(tiny("gpt2"), "sinusoidal"), tmp_path / "saved")
    family = FAMILIES._entries.pop("gpt2")
    FAMILIES.add("gpt2", family, "elsewhere")
    with pytest.raises(PosencError, match=r"made by a family of hf_posenc itself.*the family 'gpt2' of the module"):
        load(tmp_path / "saved")


def test_two_families_cannot_serve_one_type():
    with pytest.raises(PosencError, match="'gpt2' are served by the family 'gpt2'"):
        register_family(Family(name="mine", model_types=("gpt2",), positions="table", table="wpe"))
    with pytest.raises(PosencError, match="'vit' are served by the family 'vit'"):
        register_family(Family(name="mine", model_types=("vit",), positions="table", table="wpe"))
    with pytest.raises(PosencError, match="'mamba' are refused: it has no attention"):
        register_family(Family(name="mine", model_types=("mamba",), positions="none"))
    with pytest.raises(PosencError, match="registered twice: by hf_posenc itself"):
        register_family(Family(name="gpt2", model_types=("mine",), positions="table", table="wpe"))
    with pytest.raises(PosencError, match="names none"):
        register_family(Family(name="mine", positions="RoPE", rotary=True))
    with pytest.raises(PosencError, match="is a tuple, got the text 'mine'"):
        register_family(Family(name="mine", model_types="mine", positions="none"))
    assert "mine" not in FAMILIES and not FAMILY_PLUGINS.faults


def test_the_order_and_origin_of_what_is_registered():
    things: Registry[int] = Registry("thing", Plugins("hf_posenc.things_of_nobody"))
    things.add("b", 1, "hf_posenc.x")
    things.add("a", 2, "mine")
    assert (list(things), len(things), things.built_in()) == (["b", "a"], 2, ["b"])
    assert things.origin("a") == Origin("mine") and str(things.origin("b")) == "hf_posenc itself"
