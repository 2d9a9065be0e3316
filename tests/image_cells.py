"""Tiny random models of images, and the cells of schemes x families that tests of them run over."""

import pytest
import torch
import transformers

from hf_posenc import patch_model
from hf_posenc.compat.models import release
from hf_posenc.families import places

if release() < (5, 22):
    pytest.skip("vision models are patched from transformers 5.22 on", allow_module_level=True)

SIDE, PATCH = 32, 8
"""Pixels a side of the images that every tiny model is "trained" on, and of its patches."""
SPECIAL = {"vit": 1, "deit": 2, "beit": 1, "beit_shared": 1, "dinov2": 1, "registers": 3, "clip": 1, "siglip": 0}
"""Tokens that are no patches."""
_SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=5)
_SIZES |= dict(image_size=SIDE, patch_size=PATCH, initializer_range=0.3)
FAMILIES = {
    "vit": (transformers.ViTForImageClassification, transformers.ViTConfig, {}),
    "deit": (transformers.DeiTForImageClassification, transformers.DeiTConfig, {}),
    "beit": (
        transformers.BeitForImageClassification,
        transformers.BeitConfig,
        dict(use_relative_position_bias=True, use_absolute_position_embeddings=True, layer_scale_init_value=1.0),
    ),
    "beit_shared": (
        transformers.BeitForImageClassification,
        transformers.BeitConfig,
        dict(use_shared_relative_position_bias=True, layer_scale_init_value=1.0),
    ),
    "dinov2": (transformers.Dinov2ForImageClassification, transformers.Dinov2Config, {}),
    "registers": (
        transformers.Dinov2WithRegistersForImageClassification,
        transformers.Dinov2WithRegistersConfig,
        dict(num_register_tokens=2),
    ),
    "clip": (transformers.CLIPVisionModelWithProjection, transformers.CLIPVisionConfig, dict(projection_dim=5)),
    "siglip": (transformers.SiglipVisionModel, transformers.SiglipVisionConfig, {}),
}
NAMES = {
    "axial_rope": ("axial_rope", {}),
    "mixed": ("axial_rope", {"mixed": True, "rope_theta": 10.0}),
    "sinusoidal": ("sinusoidal", {}),
    "gaussian": ("fourier", {"frequencies": "gaussian"}),
    "fourier": ("fourier", {"frequencies": "learned", "base": 100.0}),
    "learned": ("learned", {"image_size": 48}),
    "none": ("none", {}),
}
"""Schemes with options, as tests call them."""
CELLS = [(name, family) for name in NAMES for family in FAMILIES]
SOME = ("vit", "beit_shared", "registers", "siglip")
"""Families that differ in all that matters: with and without a table, a bias, registers, a class token."""
FEW_CELLS = [(name, family) for name, family in CELLS if family in SOME]


def tiny_images(family, seed=0, **overrides):
    """A tiny random model of images, in eval mode. Zeros that training would fill are random as well."""
    cls, config, own = FAMILIES[family]
    torch.manual_seed(seed)
    return fill_tables(cls(config(**{**_SIZES, **own, **overrides})))


def whole_clip(seed=0):
    """Both towers of CLIP."""
    text = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    sizes = {key: value for key, value in _SIZES.items() if key != "num_labels"}
    config = transformers.CLIPConfig(text_config=text, vision_config=sizes, projection_dim=5)
    torch.manual_seed(seed)
    return fill_tables(transformers.CLIPModel(config))


def fill_tables(model):
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("position", "token", "relative")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def patched_images(name, family, **overrides):
    scheme, options = NAMES[name]
    return patch_model(tiny_images(family, **overrides), scheme, **options)


def pixels(batch=2, height=SIDE, width=SIDE, seed=1):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def tower(model):
    return places(model).stacks[0].root


@torch.no_grad()
def states(model, images, **inputs):
    """The last hidden states of the tower: every token's."""
    return tower(model)(images, **inputs).last_hidden_state
