"""What this package takes for granted of transformers' models and caches: a contract each."""

import contextlib
import copy
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers
from cells import KINDS, tiny, tokens
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from hf_posenc import UnsupportedModel, patch_model
from hf_posenc.compat import caches, models

# --- transformers: models ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_names_the_attention_that_runs(kind, monkeypatch):
    model, seen = tiny(kind), []

    def attention(module, *args, **kwargs):
        seen.append(module)
        return models.own_eager(module)(module, *args, **kwargs)

    transformers.AttentionInterface.register("contract", attention)
    transformers.AttentionMaskInterface.register("contract", transformers.masking_utils.eager_mask)
    assert models.attention_of(model.config) == "sdpa"
    models.set_attention(model.config, "contract")
    assert models.attention_of(model.config) == "contract"
    model(tokens(1, 4))
    assert len(seen) == 2, f"{models.ATTENTION} no longer says which function attends: a patch would have no effect"


def test_a_value_that_differs_between_layers_is_the_largest():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "global_head_dim": 16}
    made = getattr(transformers, "Gemma4TextConfig", transformers.LlamaConfig)
    config = made(num_hidden_layers=2, hidden_size=48, **kinds)
    with contextlib.suppress(RuntimeError):  # which says that layers differ
        pytest.skip(f"this transformers has one head_dim for all layers, {config.head_dim}")
    assert models.value_of(config, "head_dim") == 16, "per_layer_config is no longer where layers say their own values"
    assert models.value_of(config, "hidden_size") == 48
    assert models.value_of(config, "no_such_value") is None


def test_masks_are_known_by_the_name_of_the_attention():
    assert models.has_mask_function("sdpa") and models.has_mask_function("hf_posenc_sdpa")
    assert not models.has_mask_function("nobody's")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_layers_are_known_by_their_forward(kind):
    model = tiny(kind)
    layers = [module for module in model.modules() if models.calls_interface(type(module))]
    assert len(layers) == 2, f"forwards name {models.INTERFACE} no more: families would be found to have no attention"
    rotary = kind not in ("gpt2", "bert", "bert_decoder")
    assert all(models.rotates(type(layer)) == rotary for layer in layers), "rotations are applied under another name"
    assert all(callable(models.own_eager(layer)) for layer in layers)


def test_infinity_in_a_config_is_read_as_transformers_writes_it(tmp_path):
    config = transformers.LlamaConfig(vocab_size=7, eps=math.inf, other=[1.5, -math.inf])
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    values = models.decode_floats(copy.deepcopy(raw))
    assert (values["eps"], values["other"], values["vocab_size"]) == (math.inf, [1.5, -math.inf], 7)


def test_a_file_that_a_checkpoint_lacks_is_no_error(tmp_path):
    tiny("llama").config.save_pretrained(tmp_path)
    found = models.file_of(str(tmp_path), "config.json")
    assert found is not None and Path(found).samefile(tmp_path / "config.json")
    assert models.file_of(str(tmp_path), "posenc.json") is None


def test_recurrent_models_say_that_they_are_stateful():
    assert models.is_stateful(transformers.MambaForCausalLM), "a state would be cut back like a cache, silently"
    assert not models.is_stateful(tiny("llama"))


def test_adapters_of_either_kind_are_noticed():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    model = tiny("llama")
    assert not models.carries_adapters(model)
    assert models.carries_adapters(peft.get_peft_model(tiny("llama"), config))
    model.add_adapter(config)
    assert models.carries_adapters(model)


def test_auto_classes_are_known_by_what_they_make():
    assert models.auto_classes(tiny("llama")) == ["AutoModelForCausalLM"]
    assert "AutoModelForMaskedLM" in models.auto_classes(tiny("bert"))
    assert "AutoModel" in models.auto_classes(tiny("gpt2").base_model)


def test_configs_say_where_they_come_from_in_these_keys(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).config.to_dict()
    moved = {key: value for key, value in again.items() if str(tmp_path) in str(value)}
    assert set(moved) <= set(models.ORIGIN), "the same model in another place would get another digest"


def test_a_family_that_an_older_release_builds_otherwise_is_refused(monkeypatch):
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    model = transformers.ViTModel(config)
    monkeypatch.setattr(sys.modules["hf_posenc.families.places"], "release", lambda: (5, 21))
    with pytest.raises(UnsupportedModel, match=r"you need 5\.22 or later"):
        patch_model(model, "sinusoidal")


# --- transformers: caches ---


def test_a_cache_tells_where_the_next_query_stands():
    model, cache = tiny("llama"), DynamicCache()
    assert (caches.query_offset(cache, 0), caches.query_offset(cache, 1)) == (0, 0)
    model(tokens(2, 5), past_key_values=cache)
    assert (caches.query_offset(cache, 0), caches.query_offset(cache, 1)) == (5, 5)
    cache.crop(-2)
    assert caches.query_offset(cache, 1) == 3, "negative numbers no longer say how many tokens a cache is cut by"


def test_a_static_cache_tells_it_on_the_device():
    model = tiny("llama")
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(tokens(2, 5), past_key_values=cache)
    offset = caches.query_offset(cache, 1)
    assert isinstance(offset, torch.Tensor) and int(offset) == 5


def test_a_cache_that_runs_ahead_of_its_model_is_believed():
    class Ahead(DynamicCache):
        def get_query_offset(self, layer_idx=0):
            return self.get_seq_length(layer_idx) + 2

    assert caches.query_offset(Ahead(), 0) == 2


def test_layers_of_a_cache_can_be_made_and_replaced():
    class Mine(DynamicLayer):
        pass

    cache = DynamicCache()
    made = caches.layer_at(cache, 1)
    assert type(made) is DynamicLayer and caches.layer_at(cache, 1) is made
    mine = Mine()
    cache.layers[1] = mine
    model = tiny("llama")
    model(tokens(1, 4), past_key_values=cache)
    assert mine.keys.shape[2] == 4, "caches no longer keep their layers in `layers`"
    caches.clear_layer(mine)
    assert caches.query_offset(cache, 1) == 0
    model.model.layers[1].self_attn(torch.zeros(1, 2, 32), (torch.zeros(1, 2, 8),) * 2, None, past_key_values=cache)
    assert caches.query_offset(cache, 1) == 2


def test_a_layer_can_be_kept_out_of_the_table_of_layers():
    class Indexed(DynamicLayer):
        _layer_type = layer_type = "contract"

    known = [
        value for value in vars(transformers.cache_utils).values() if isinstance(value, dict) and "contract" in value
    ]
    type("Ours", (Indexed,), dict(caches.UNREGISTERED))
    for table in known:
        assert table.pop("contract") is Indexed, "our layers would stand in for the model's own"


def test_an_encoder_decoder_cache_keeps_self_attention_apart():
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert isinstance(cache.self_attention_cache, DynamicCache)
