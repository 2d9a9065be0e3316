"""The laws of every scheme on every family of images: what a patch changes, keeps and refuses."""

import copy
import pickle

import pytest
import torch
from cells import options as options_of
from comparisons import anatomy, assert_same_model
from image_cells import (
    CELLS,
    FAMILIES,
    FEW_CELLS,
    NAMES,
    PATCH,
    SOME,
    SPECIAL,
    patched_images,
    pixels,
    states,
    tiny_images,
    tower,
    whole_clip,
)
from peft import LoraConfig, get_peft_model

from hf_posenc import (
    SCHEMES,
    PosencError,
    UnsupportedCell,
    UnsupportedModel,
    check_model,
    describe,
    is_patched,
    patch_model,
    set_rendering,
    unpatch_model,
)
from hf_posenc.families import places
from hf_posenc.families.base import FAMILIES as ALL_FAMILIES
from hf_posenc.patching.grades import sample_geometry
from hf_posenc.runtime.grids import GridReader

every_cell = pytest.mark.parametrize(("name", "family"), CELLS)
few_cells = pytest.mark.parametrize(("name", "family"), FEW_CELLS)
every_family = pytest.mark.parametrize("family", FAMILIES)
TRAINED = {"mixed": "posenc_rotation", "fourier": "posenc_table"}
"""What brings parameters of its own, and where."""
TURNING = ("axial_rope", "mixed")
WIDE = (24, 40)


def close(actual, expected, tolerance=2e-4):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


# --- what a patch changes, and what it does not ---


@every_cell
def test_output_changes_and_unpatching_restores_every_bit(name, family):
    model, other = tiny_images(family), tiny_images(family)
    weights, before = dict(model.named_parameters()), states(model, pixels())
    untouched = anatomy(other)
    scheme, options = NAMES[name]
    patch_model(model, scheme, **options)
    assert is_patched(model)
    check_model(model)
    assert (states(model, pixels()) - before).abs().max() > 0.02
    assert anatomy(other) == untouched
    assert torch.equal(states(other, pixels()), before)
    unpatch_model(model)
    assert not is_patched(model)
    assert_same_model(model, tiny_images(family))
    assert all(p is weights[key] for key, p in model.named_parameters())
    assert torch.equal(states(model, pixels()), before)
    check_model(model)


@every_family
def test_no_two_schemes_are_alike(family):
    outputs = {name: states(patched_images(name, family), pixels()) for name in NAMES}
    for name, one in outputs.items():
        for other, two in outputs.items():
            assert name == other or (one - two).abs().max() > 0.02, (name, other)


@few_cells
def test_patching_anew_equals_patching_once(name, family):
    before = list(NAMES)[list(NAMES).index(name) - 1]
    fresh, model = patched_images(name, family), patched_images(before, family)
    scheme, options = NAMES[name]
    patch_model(model, scheme, **options)
    assert_same_model(model, fresh)
    assert torch.equal(states(model, pixels()), states(fresh, pixels()))
    assert_same_model(unpatch_model(model), tiny_images(family))


@every_cell
def test_any_size_works_without_another_argument(name, family):
    """Rectangles included, in a batch as alone; what is left of an image beside whole patches is not seen."""
    model = patched_images(name, family)
    for height, width in (WIDE, (40, 24), (64, 16), (PATCH, 3 * PATCH)):
        both = states(model, pixels(2, height, width))
        assert both.shape[1] == SPECIAL[family] + height * width // PATCH**2
        close(both[1:], states(model, pixels(2, height, width)[1:]))
    if name != "learned":  # whose table is resized by the model's own code to the pixels that there are
        assert torch.equal(states(model, pixels()), states(model, torch.nn.functional.pad(pixels(), (0, 5, 0, 3))))


@every_family
@pytest.mark.parametrize("name", ["axial_rope", "mixed", "sinusoidal", "fourier"])
def test_rows_and_columns_are_told_apart(name, family):
    """An image and the same patches in the transposed order: only with positions do they differ."""
    model, nothing = patched_images(name, family), patched_images("none", family)
    image = pixels(1, *WIDE)
    blocks = image.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))
    turned = blocks.permute(0, 1, 4, 3, 2, 5).flatten(4).flatten(2, 3)
    assert turned.shape[2:] == image.shape[:1:-1]
    special, (rows, columns) = SPECIAL[family], (3, 5)
    order = [*range(special), *(special + torch.arange(rows * columns).reshape(rows, columns).T.flatten()).tolist()]
    close(states(nothing, turned), states(nothing, image)[:, order])
    assert (states(model, turned) - states(model, image)[:, order]).abs().max() > 0.02


@few_cells
def test_eager_equals_sdpa(name, family):
    one, other = (patched_images(name, family, attn_implementation=kernel) for kernel in ("eager", "sdpa"))
    close(states(one, pixels(2, *WIDE)), states(other, pixels(2, *WIDE)))


# --- a patched model is a model ---


@few_cells
def test_copies_and_pickles_are_models_of_their_own(name, family):
    model = patched_images(name, family)
    expected = states(model, pixels(2, *WIDE))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_model(twin)
        assert torch.equal(states(twin, pixels(2, *WIDE)), expected)
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert_same_model(unpatch_model(model), tiny_images(family))
        patch_model(model, *NAMES[name][:1], **NAMES[name][1])
        assert torch.equal(states(model, pixels(2, *WIDE)), expected)


@few_cells
def test_positions_stay_in_fp32_in_a_bf16_model(name, family):
    model = patched_images(name, family).to(torch.bfloat16)
    check_model(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    kept = [t for key, t in tensors if "posenc_frequencies" in key]
    assert len(kept) == (name not in ("learned", "none"))
    assert all(t.dtype == torch.float32 for t in kept)
    assert torch.isfinite(states(model, pixels().bfloat16())).all()
    assert {p.dtype for key, p in tensors if "posenc" not in key and p.is_floating_point()} == {torch.bfloat16}
    assert_same_model(unpatch_model(model), tiny_images(family).to(torch.bfloat16))


def gradients(model, *sizes):
    """Of a loss over images of several sizes, all of them under way at once."""
    model.zero_grad()
    outputs = [tower(model)(pixels(1, *size)).last_hidden_state for size in sizes]
    weights = torch.randn(32, generator=torch.Generator().manual_seed(0))
    sum((output @ weights).square().mean() for output in outputs).backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["axial_rope", "mixed", "fourier", "learned"])
@pytest.mark.parametrize("family", SOME)
def test_gradient_checkpointing_with_several_sizes_under_way(name, family):
    """What is computed again for the gradient is of the size that it was."""
    model = patched_images(name, family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    expected = gradients(model, WIDE, (32, 32), (40, 24))
    ours = [key for key in expected if "posenc" in key]
    assert len(ours) == (name in TRAINED)
    for key in ours:  # the first dimension is that of layers or axes, each of which has its own
        assert (expected[key].flatten(1).abs().amax(1) > 1e-6).all()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = gradients(model, WIDE, (32, 32), (40, 24))
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["axial_rope", "mixed", "fourier", "learned"])
@pytest.mark.parametrize("family", ["vit", "beit_shared", "siglip"])
def test_lora_trains_on_it_and_merges(name, family):
    saved = [TRAINED[name]] if name in TRAINED else None
    model = patched_images(name, family)
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=saved)
    )
    check_model(adapted)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "modules_to_save" in key:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        before = adapted(pixels(2, *WIDE))[0]
    adapted(pixels(2, *WIDE))[0].square().mean().backward()
    trained = {key: p.grad for key, p in adapted.named_parameters() if p.requires_grad}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in trained.values())
    assert any("modules_to_save" in key for key in trained) == bool(saved)
    merged = adapted.merge_and_unload()
    check_model(merged)
    with torch.no_grad():
        close(merged(pixels(2, *WIDE))[0], before, 1e-3)


@pytest.mark.parametrize("name", TURNING)
def test_another_attention_would_drop_the_rotation(name):
    model = patched_images(name, "vit")
    model.set_attn_implementation("sdpa")
    with pytest.raises(PosencError, match="would drop its positions"):
        model(pixels())
    with pytest.raises(PosencError, match="drops the scheme"):
        check_model(model)
    model.set_attn_implementation("hf_posenc_eager")
    close(states(model, pixels()), states(patched_images(name, "vit"), pixels()))


def test_a_layer_that_is_not_told_its_image_refuses():
    model = patched_images("axial_rope", "vit")
    layer, hidden = tower(model).layers[0], torch.randn(1, 17, 32)
    with pytest.raises(PosencError, match="posenc_grid"):
        layer(hidden)
    assert layer(hidden, posenc_grid=(4, 4)).shape == hidden.shape
    with pytest.raises(PosencError, match="17 tokens"):
        layer(hidden, posenc_grid=(4, 5))


def test_the_whole_of_clip_is_served_by_its_vision_tower():
    model, ids = whole_clip(), torch.arange(5)[None]
    plain = model.get_text_features(ids).pooler_output
    for name, (scheme, options) in NAMES.items():
        patch_model(model, scheme, **options)
        check_model(model)
        alone = patched_images(name, "clip")
        tower(alone).load_state_dict(tower(model).state_dict())
        assert torch.equal(states(model, pixels(2, *WIDE)), states(alone, pixels(2, *WIDE)))
        assert torch.equal(model.get_text_features(ids).pooler_output, plain)
        assert model(ids, pixels(2, *WIDE)).logits_per_image.shape == (2, 1)
    assert_same_model(unpatch_model(model), whole_clip())


# --- what is told ---


@every_cell
def test_describe(name, family):
    model = patched_images(name, family)
    told, side = describe(model), 48 if name == "learned" else 32
    assert told.scheme == NAMES[name][0]
    assert told.options.items() >= NAMES[name][1].items()
    assert told.image_size == (side, side)
    assert told.grid == (side // PATCH, side // PATCH)
    assert (told.patch_size, told.axes, told.special_tokens) == ((PATCH, PATCH), "x, y", SPECIAL[family])
    assert (told.rotation != "none") == (name in TURNING)
    assert told.kernel == ("hf_posenc_sdpa" if name in TURNING else "sdpa")
    assert (told.table != "none") == (name not in (*TURNING, "none"))
    assert told.bias == "none"
    plain = {"learned": "weights", "none": "config" if family.startswith("beit") else "weights"}
    assert told.portability.startswith(plain.get(name, "sealed") + ":")
    for value in (told.scheme, told.kernel, f"({side}, {side})", "x, y"):
        assert value in str(told)


@pytest.mark.parametrize(("family", "own"), [("vit", "table"), ("beit", "bias and table"), ("beit_shared", "bias")])
def test_describe_of_a_model_that_is_not_patched(family, own):
    told = describe(tiny_images(family))
    assert told.scheme == f"{own} (the model's own)"
    assert told.portability == "unpatched"
    assert (told.bias == "none") == (family == "vit")


def unhook(module):
    module._forward_pre_hooks.clear()


DAMAGE = {
    "layers": ("axial_rope", lambda where: unhook(where.stacks[0].attentions[1]), "lost their hook"),
    "model": ("axial_rope", lambda where: unhook(where.stacks[0].root), "tells its layers"),
    "embeddings": ("axial_rope", lambda where: unhook(where.stacks[0].embeddings), "any size"),
    "reader": (
        "sinusoidal",
        lambda where: delattr(where.stacks[0].embeddings, "interpolate_pos_encoding"),
        "own table again",
    ),
    "table": ("fourier", lambda where: delattr(where.stacks[0].root, "posenc_table"), "lost its 'posenc_table'"),
    "rotation": (
        "axial_rope",
        lambda where: where.stacks[0].root.posenc_rotation.posenc_frequencies.mul_(2),
        "scheme means",
    ),
    "size": ("none", lambda where: setattr(where.config, "image_size", 64), "image_size is 64"),
    "rows": ("learned", lambda where: setattr(where.stacks[0].embeddings, "position_embeddings", None), "promises 37"),
    "bias": (
        "none",
        lambda where: setattr(where.stacks[0].root, "shared_position_bias", torch.nn.Linear(1, 1)),
        "biases are back",
    ),
    "record": ("none", lambda where: delattr(where.model.config, "posenc"), "lost the 'posenc' record"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_model_sees_what_is_broken(damage):
    name, break_it, message = DAMAGE[damage]
    model = patched_images(name, "beit")
    check_model(model)
    break_it(places(model))
    with pytest.raises(PosencError, match=message):
        check_model(model)


# --- what is refused ---

FOR_IMAGES = sorted(name for name, cls in SCHEMES.items() if 2 in cls.axes)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in FOR_IMAGES])
def test_schemes_for_text_are_refused(name):
    model, made = tiny_images("vit"), SCHEMES[name](**options_of(name))
    with pytest.raises(UnsupportedCell, match=f"reads images.*{', '.join(FOR_IMAGES)}"):
        made.effect_on(sample_geometry(ALL_FAMILIES["vit"]))
    with pytest.raises(PosencError, match="reads images"):
        patch_model(model, made)
    assert_same_model(model, tiny_images("vit"))


def test_the_schemes_for_images_are_those_that_say_so():
    assert {"axial_rope", "sinusoidal", "fourier", "learned", "none"} <= set(FOR_IMAGES)
    assert not {"alibi", "rope", "yarn", "t5", "window"} & set(FOR_IMAGES)


BAD = {
    "target_length": ("axial_rope", {"target_length": 64}, "target_length=64 is about texts"),
    "factor": ("none", {"factor": 2.0}, "factor=2.0 is about texts"),
    "trained_length": ("learned", {"trained_length": 9}, "image_size="),
    "layer_types": ("axial_rope", {"layer_types": "all"}, "layer_types='all'"),
    "existing": ("axial_rope", {"existing": "replace"}, "existing='replace'"),
    "resize": ("learned", {"resize": "cyclic"}, "bicubically"),
    "small": ("learned", {"image_size": 7}, "less than a patch"),
    "pair": ("learned", {"image_size": [32, 48]}, "image_size must be a positive whole number"),
    "theta": ("axial_rope", {"rope_theta": 1.0}, "greater than 1"),
    "mixed": ("axial_rope", {"mixed": 1}, "True or False"),
    "seed": ("fourier", {"seed": -1}, "seed must be"),
    "sigma": ("fourier", {"sigma": 0.0}, "sigma must be"),
    "frequencies": ("fourier", {"frequencies": "gauss"}, "Did you mean 'gaussian'"),
    "option": ("axial_rope", {"thetta": 3.0}, "no option 'thetta'"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("before", [None, "axial_rope"])
def test_a_bad_request_changes_nothing(bad, before):
    scheme, options, message = BAD[bad]
    model, twin = tiny_images("vit"), tiny_images("vit")
    for each in (model, twin):
        if before is not None:
            patch_model(each, before)
    with pytest.raises(PosencError, match=message):
        patch_model(model, scheme, **options)
    assert_same_model(model, twin)
    assert torch.equal(states(model, pixels()), states(twin, pixels()))


def test_what_does_not_fit_a_model_is_refused():
    with pytest.raises(UnsupportedCell, match="multiple of 4"):
        patch_model(tiny_images("vit", hidden_size=24), "axial_rope")
    for scheme in ("sinusoidal", "fourier"):
        with pytest.raises(UnsupportedCell, match="hidden size 30 is not a multiple of 4"):
            patch_model(tiny_images("vit", hidden_size=30, num_attention_heads=5), scheme)
    with pytest.raises(PosencError, match="'flex_attention'"):
        patch_model(tiny_images("vit", attn_implementation="flex_attention"), "axial_rope")
    model = tiny_images("vit")
    model.vit.embeddings.patch_embeddings.projection.stride = (4, 4)
    with pytest.raises(UnsupportedModel, match="overlap"):
        patch_model(model, "axial_rope")
    with pytest.raises(PosencError, match="no bias"):
        set_rendering(patched_images("axial_rope", "vit"), "blocks")


def test_models_trained_on_rectangles():
    """Their own code cannot resize their table; whatever computes positions works on them."""
    sizes = dict(image_size=(32, 64))
    with pytest.raises(UnsupportedCell, match="4 rows and 8 columns"):
        patch_model(tiny_images("vit", **sizes), "learned")
    for name in ("axial_rope", "sinusoidal", "fourier", "none"):
        model, square = patched_images(name, "vit", **sizes), patched_images(name, "vit")
        assert describe(model).grid == (4, 8)
        own = {k: v for k, v in model.state_dict().items() if "position_embeddings" not in k}
        square.load_state_dict(own, strict=False)
        assert torch.equal(states(model, pixels(2, *WIDE)), states(square, pixels(2, *WIDE)))


def test_schemes_for_images_are_refused_on_text():
    from cells import tiny

    with pytest.raises(UnsupportedCell, match="Use 'rope'"):
        patch_model(tiny("llama"), "axial_rope")
    with pytest.raises(PosencError, match="target_length"):
        patch_model(tiny("gpt2"), "learned", image_size=64)


def test_the_stand_in_is_no_module_and_not_saved():
    model = patched_images("sinusoidal", "vit")
    assert isinstance(tower(model).embeddings.interpolate_pos_encoding, GridReader)
    assert [key for key in model.state_dict() if "posenc" in key] == ["vit.posenc_seal.weight"]
