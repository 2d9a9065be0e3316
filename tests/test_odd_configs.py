"""Whatever a config holds, an error of ours says so: never a bare one from the midst of a computation."""

import json

import pytest
from cells import tiny

from hf_posenc import PosencError, describe, describe_checkpoint, load, patch_checkpoint, patch_model, save


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


HUGE = 10**400
SIZES = [(name, value) for name in ("hidden_size", "num_attention_heads", "head_dim") for value in (-1, 0, HUGE)]
ODD = [*SIZES, ("max_position_embeddings", HUGE), ("model_type", ["llama"]), ("model_type", {})]
ODD += [("anything", nested(3000)), ("rope_parameters", {"rope_theta": 1e4, "anything": nested(3000)})]
THETA = [{"rope_theta": theta} for theta in (-1.0, 0, HUGE, float("nan"), float("inf"))]
ROPE = [*THETA, {"rope_type": []}, {"rope_type": None}, {"rope_type": "yarn", "factor": 2.0}]
ROPE += [{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": n} for n in (None, "x", -1, 0, HUGE)]
BUILT = [("head_dim", 0), ("head_dim", HUGE), ("num_key_value_heads", 0), ("intermediate_size", -1)]


def refused(run):
    with pytest.raises(PosencError) as error:
        run()
    assert len(str(error.value)) > 40, "says what was found and what to do"


@pytest.mark.parametrize("number", range(len(ODD)))
def test_values_that_no_model_has(number):
    name, value = ODD[number]
    model = tiny("llama")
    setattr(model.config, name, value)
    refused(lambda: describe(model))
    for scheme, options in (("yarn", {"factor": 2.0}), ("alibi", {}), ("learned", {})):
        refused(lambda scheme=scheme, options=options: patch_model(model, scheme, **options))


@pytest.mark.parametrize("number", range(len(ROPE)))
@pytest.mark.filterwarnings("ignore")
def test_rope_parameters_that_no_model_has(number):
    model = tiny("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, **ROPE[number]}
    for scheme in ("yarn", "dynamic_ntk"):
        refused(lambda scheme=scheme: patch_model(model, scheme, factor=2.0))


def test_an_object_that_holds_itself_is_no_matter():
    model = tiny("llama")
    model.config.anything = {}
    model.config.anything["itself"] = model.config.anything
    patch_model(model, "alibi")


def test_checkpoints_that_no_model_can_be_built_from(tmp_path):
    save(patch_model(tiny("llama"), "dynamic_ntk", factor=2.0), tmp_path / "a")
    written = (tmp_path / "a/config.json").read_text()
    for name, value in BUILT:
        (tmp_path / "a/config.json").write_text(json.dumps({**json.loads(written), name: value}))
        refused(lambda: load(tmp_path / "a"))
        refused(lambda: describe_checkpoint(tmp_path / "a"))
        refused(lambda: patch_checkpoint(tmp_path / "a", tmp_path / "b", "yarn", factor=2.0))
    (tmp_path / "a/config.json").write_text(written)
    load(tmp_path / "a")
