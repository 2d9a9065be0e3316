"""Models that were made from one config object: a patch of one is none of the other's business."""

import copy
import gc

import pytest
import torch
from cells import options, tiny, tokens
from image_cells import pixels, tiny_images, whole_clip
from transformers import AutoModelForSeq2SeqLM, Gemma3ForConditionalGeneration, PreTrainedConfig, T5Config
from transformers.models.gemma3 import Gemma3Config

from hf_posenc import check_model, load, patch_model, save, unpatch_model


def t5():
    sizes = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)).eval()


def gemma3():
    """A model with a config for each of its parts."""
    text = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=28)
    text |= dict(head_dim=8, intermediate_size=64, max_position_embeddings=32, layer_types=["full_attention"] * 2)
    config = Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


MODELS = {"llama": lambda: tiny("llama"), "gpt2": lambda: tiny("gpt2"), "bert": lambda: tiny("bert"), "t5": t5}
MODELS |= {"gemma3": gemma3, "vit": lambda: tiny_images("vit"), "clip": whole_clip}
CASES = [("llama", "yarn"), ("llama", "alibi"), ("gpt2", "learned"), ("bert", "rope"), ("t5", "alibi")]
CASES += [("gemma3", "ntk"), ("gemma3", "alibi"), ("vit", "axial_rope"), ("clip", "learned")]


def options_for(kind, scheme):
    return {} if kind in ("vit", "clip") else {**options(scheme), **({"trained_length": 32} if kind == "t5" else {})}


def configs_of(model):
    """Every config that a module holds, by its place."""
    found = ((f"{path}.{name}", value) for path, m in model.named_modules() for name, value in vars(m).items())
    return {place: value for place, value in found if isinstance(value, PreTrainedConfig)}


def contents_of(model):
    return {place: (copy.deepcopy(vars(config)), config.to_dict()) for place, config in configs_of(model).items()}


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_the_other_model_keeps_its_config(kind, scheme):
    model = MODELS[kind]()
    other = type(model)(model.config)
    shared, own, before = configs_of(other), configs_of(model), contents_of(other)
    patch_model(model, scheme, **options_for(kind, scheme))
    check_model(model)
    assert {place: id(config) for place, config in configs_of(other).items()} == {p: id(c) for p, c in shared.items()}
    assert contents_of(other) == before
    assert not {id(config) for config in configs_of(model).values()} & {id(config) for config in shared.values()}
    assert model.config.posenc["scheme"] == scheme
    unpatch_model(model)
    assert {place: id(config) for place, config in configs_of(model).items()} == {p: id(c) for p, c in own.items()}
    assert contents_of(other) == before


def test_the_other_model_is_saved_as_what_it_is(tmp_path):
    model = tiny("llama")
    other = type(model)(model.config).eval()
    patch_model(model, "yarn", factor=4.0)
    other.save_pretrained(tmp_path / "other")
    save(model, tmp_path / "model")
    ids = tokens(2, 40)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "other")(ids).logits, other(ids).logits)
        assert torch.equal(load(tmp_path / "model")(ids).logits, model(ids).logits)


def test_a_config_that_is_used_again_after_a_patch():
    model = tiny("gpt2")
    config = model.config
    patch_model(model, "alibi")
    other = type(model)(config)
    assert not hasattr(other.config, "posenc")
    check_model(other)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_what_is_changed_meanwhile_stays(kind):
    """A vocabulary that grows, a token that is set: both models would be wrong otherwise, or nobody's wish."""
    model = tiny(kind)
    other, before = type(model)(model.config), model.config.to_dict()
    patch_model(model, "alibi")
    model.resize_token_embeddings(120)
    model.config.pad_token_id = 7
    unpatch_model(model)
    assert (model.config.vocab_size, model.config.pad_token_id) == (120, 7)
    assert model.get_input_embeddings().weight.shape[0] == 120
    assert {**model.config.to_dict(), "vocab_size": 97, "pad_token_id": 0} == before == other.config.to_dict()
    check_model(model)


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "learned"])
def test_a_part_that_is_patched_by_itself_is_known_to_the_whole(scheme, tmp_path):
    model = tiny("llama")
    patch_model(model.model, scheme, **options(scheme))
    assert model.config is model.model.config
    check_model(model)
    save(model, tmp_path)
    ids = tokens(2, 40)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(ids).logits, model(ids).logits)
    unpatch_model(model.model)
    assert model.config is model.model.config and not hasattr(model.config, "posenc")


def test_a_tower_that_is_patched_by_itself():
    model = whole_clip()
    before = model.config
    patch_model(model.vision_model, "axial_rope")
    assert model.config is not before and model.config.vision_config is model.vision_model.config
    assert model.config.text_config is model.text_model.config
    with torch.no_grad():
        model(torch.arange(5)[None], pixels(1, 24, 40))
    unpatch_model(model.vision_model)
    assert model.config is before and model.config.vision_config is model.vision_model.config


def test_a_model_that_is_no_part_of_another_is_patched_without_a_look_at_everything_alive(tmp_path, monkeypatch):
    """Which takes tens of milliseconds where much is alive, and is for parts of other models alone."""
    looks, everything = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: looks.append(1) or everything())
    model = patch_model(tiny("llama"), "yarn", **options("yarn"))
    save(model, tmp_path)
    patch_model(unpatch_model(load(tmp_path)), "alibi")
    assert not looks
    whole = tiny("llama")
    patch_model(whole.model, "yarn", **options("yarn"))
    assert looks and hasattr(whole.config, "posenc")
