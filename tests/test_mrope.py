"""Models that give each token of an image three positions: schemes that need one are refused before a forward."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from hf_posenc import UnsupportedCell, check_model, is_patched, patch_model

TEXT = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TEXT |= dict(intermediate_size=64, max_position_embeddings=64, initializer_range=0.3, head_dim=8)
VISION = dict(depth=1, hidden_size=32, embed_dim=32, num_heads=2, intermediate_size=32, out_hidden_size=32)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
REFUSED = [
    ("alibi", {}),
    ("t5", {}),
    ("shaw", {}),
    ("dynamic_ntk", {"factor": 2.0}),
    ("longrope", {"factor": 2.0}),
    ("window", {"window": 8}),
    ("learned", {}),
    ("ntk", {"factor": 2.0, "temperature": "log"}),
    ({"every 2nd": "none"}, {}),
]


def seeing(kind, **rope):
    torch.manual_seed(0)
    text = {**TEXT, "rope_parameters": {**ROPE, **rope}}
    config = type(AutoConfig.for_model(kind))(text_config=text, vision_config=VISION)
    return AutoModelForImageTextToText.from_config(config).eval()


def in_space():
    """Four tokens of text and an image of two rows and three columns, as positions of time, height and width."""
    image = torch.tensor([[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6] * 2])
    return torch.cat([torch.arange(4).expand(3, 4), image], 1)[:, None]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.filterwarnings("ignore::hf_posenc.UntrainedWarning")
def test_what_needs_one_position_is_refused_at_the_patch(kind):
    model = seeing(kind)
    for scheme, options in REFUSED:
        with pytest.raises(UnsupportedCell, match=r"M-RoPE.*'yarn'"):
            patch_model(model, scheme, **options)
        assert not is_patched(model), scheme


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
@torch.no_grad()
def test_a_rescaled_model_equals_one_that_was_born_so(kind):
    ids, where = torch.arange(1, 11)[None], in_space()
    model, born = seeing(kind), seeing(kind, rope_type="linear", factor=2.0)
    born.load_state_dict(model.state_dict())
    plain = model(input_ids=ids, position_ids=where).logits
    check_model(patch_model(model, "linear", factor=2.0))
    changed = model(input_ids=ids, position_ids=where).logits
    torch.testing.assert_close(changed, born(input_ids=ids, position_ids=where).logits, rtol=1e-5, atol=1e-5)
    assert (changed - plain).abs().max() > 0.1


def test_a_text_part_alone_is_served_where_its_layers_are_told_one_position():
    sizes = {**TEXT, "rope_parameters": ROPE}
    types = ("qwen3_vl_text", "qwen2_vl_text")
    told, untold = (AutoModel.from_config(AutoConfig.for_model(kind, **sizes)) for kind in types)
    patch_model(told, "alibi")(input_ids=torch.arange(1, 11)[None])
    with pytest.raises(UnsupportedCell, match="M-RoPE"):
        patch_model(untold, "alibi")
