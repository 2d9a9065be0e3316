"""Models of images on disk: loaded exactly or refused, with this package and without."""

import copy
import json

import pytest
import torch
from image_cells import CELLS, FAMILIES, NAMES, patched_images, pixels, states, tiny_images, tower, whole_clip
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_plain_load import plain_verdicts
from transformers import CLIPModel, CLIPVisionModel, ViTForImageClassification, ViTModel
from typer.testing import CliRunner

from hf_posenc import PosencError, check_model, describe, is_patched, load, merge, patch_model, save, unpatch_model
from hf_posenc.checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from hf_posenc.cli.main import app

WIDE = (24, 40)
FORCED = {"forced_sdpa": {"attn_implementation": "sdpa"}, "forced_eager": {"attn_implementation": "eager"}}
WAYS = {"as_is": {}, **FORCED, "bf16": {"dtype": "bfloat16"}, "wide": {}}
"""How a stranger may load, and the last on an image of another shape."""
PLAIN = ("learned", "none")
STRANGERS = [
    (name, family) for name, family in CELLS if name in ("axial_rope", "sinusoidal", *PLAIN) or family == "vit"
]


def disturb(model):
    """Parameters that are not what their scheme starts them with, as after training."""
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    return model


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, change):
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# --- with this package -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "family"), CELLS)
def test_a_checkpoint_comes_back_exactly(name, family, tmp_path):
    model = disturb(patched_images(name, family))
    save(model, tmp_path / "a")
    loaded = load(tmp_path / "a")
    check_model(loaded)
    for size in ((32, 32), WIDE):
        assert torch.equal(states(loaded, pixels(2, *size)), states(model, pixels(2, *size)))
    assert loaded.config.posenc == model.config.posenc
    assert str(describe(loaded)) == str(describe(model))
    assert {k: v.dtype for k, v in loaded.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
    with pytest.raises(PosencError, match="load the original model"):
        unpatch_model(loaded)
    found, adapter = describe_checkpoint(tmp_path / "a")
    assert (str(found), adapter) == (str(describe(model)), None)


@pytest.mark.parametrize("first", ["axial_rope", "learned"])
@pytest.mark.parametrize("second", ["mixed", "none", "learned"])
@pytest.mark.parametrize("family", ["vit", "beit", "clip"])
def test_patching_a_loaded_model(first, second, family, tmp_path):
    save(patched_images(first, family), tmp_path / "a")
    loaded, (scheme, options) = load(tmp_path / "a"), NAMES[second]
    if second == "learned":
        before = states(loaded, pixels())
        with pytest.raises(PosencError, match="starts from the model's own table"):
            patch_model(loaded, scheme, **options)
        assert torch.equal(states(loaded, pixels()), before)
        return
    patch_model(loaded, scheme, **options)
    check_model(loaded)
    if first != "learned":  # whose size the loaded config has
        assert loaded.config.posenc == patched_images(second, family).config.posenc
    assert torch.equal(states(loaded, pixels(2, *WIDE)), states(patched_images(second, family), pixels(2, *WIDE)))
    save(loaded, tmp_path / "b")
    assert torch.equal(states(load(tmp_path / "b"), pixels()), states(loaded, pixels()))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name, tmp_path):
    model = patched_images(name, "vit")
    save(model, tmp_path / "a")
    half = load(tmp_path / "a", dtype=torch.bfloat16)
    images = pixels().bfloat16()
    assert torch.equal(states(half, images), states(copy.deepcopy(model).to(torch.bfloat16), images))
    save(half, tmp_path / "b")
    assert torch.equal(states(load(tmp_path / "b"), images), states(half, images))


@pytest.mark.filterwarnings("ignore:.*was loaded with")
@pytest.mark.parametrize("name", NAMES)
def test_another_head_and_shards(name, tmp_path):
    model = patched_images(name, "vit")
    save(model, tmp_path / "a", max_shard_size="20KB")
    bare = load(tmp_path / "a", model_class=ViTModel)
    assert torch.equal(states(bare, pixels()), states(model, pixels()))


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_of_clip(name, tmp_path):
    scheme, options = NAMES[name]
    model = disturb(patch_model(whole_clip(), scheme, **options))
    save(model, tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert torch.equal(states(loaded, pixels(2, *WIDE)), states(model, pixels(2, *WIDE)))
    assert str(describe_checkpoint(tmp_path / "a")[0]) == str(describe(model))
    if name in PLAIN:
        side = model.config.vision_config.image_size
        plain = CLIPModel.from_pretrained(tmp_path / "a")
        assert torch.equal(states(plain, pixels(1, side, side)), states(model, pixels(1, side, side)))
        return
    with pytest.raises(ValueError, match="hf_posenc"):
        CLIPModel.from_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="hf_posenc"):  # by another mark of the seal
        CLIPModel.from_pretrained(tmp_path / "a", attn_implementation="sdpa")


@pytest.mark.parametrize("name", ["axial_rope", "sinusoidal"])
def test_a_tower_patched_by_itself_does_not_pass_for_a_whole(name, tmp_path):
    model = whole_clip()
    patch_model(model.vision_model, *NAMES[name][:1], **NAMES[name][1])
    model.save_pretrained(tmp_path / "a")
    for opened in (CLIPModel.from_pretrained, load):
        with pytest.raises((ValueError, RuntimeError)):
            opened(tmp_path / "a")
    save(model.vision_model, tmp_path / "b")
    assert torch.equal(states(load(tmp_path / "b"), pixels()), states(model, pixels()))


@pytest.mark.parametrize(("name", "module"), [("axial_rope", None), ("mixed", "posenc_rotation"), ("none", None)])
def test_adapters_carry_their_scheme(name, module, tmp_path):
    tiny_images("vit").save_pretrained(tmp_path / "base")
    base = ViTForImageClassification.from_pretrained(tmp_path / "base")
    patch_model(base, *NAMES[name][:1], **NAMES[name][1])
    saved = [module] if module else None
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=saved)
    adapted = disturb(get_peft_model(base, settings))
    save(adapted, tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted(pixels(2, *WIDE)).logits
        loaded = load(tmp_path / "adapter")
        assert torch.equal(loaded(pixels(2, *WIDE)).logits, expected)
        assert describe(loaded).scheme == describe_checkpoint(tmp_path / "adapter")[0].scheme == NAMES[name][0]
        merge(tmp_path / "adapter", tmp_path / "merged")
        torch.testing.assert_close(load(tmp_path / "merged")(pixels(2, *WIDE)).logits, expected, atol=1e-3, rtol=0)
    other = tiny_images("vit", image_size=64)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(PosencError, match="another model"):
        load(tmp_path / "adapter", base=tmp_path / "other")


def test_random_frequencies_are_saved(tmp_path):
    """What is loaded are the numbers in the file, not those that the seed gives now."""
    save(patched_images("gaussian", "vit"), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    (key,) = [key for key in tensors if "posenc_frequencies" in key]
    assert tensors[key].shape == (2, 8)
    save_file({**tensors, key: tensors[key] * 2}, file, metadata={"format": "pt"})
    loaded = load(tmp_path / "a")
    assert torch.equal(tower(loaded).posenc_table.posenc_frequencies, tensors[key] * 2)
    assert not torch.equal(states(loaded, pixels()), states(patched_images("gaussian", "vit"), pixels()))
    save_file({k: v for k, v in tensors.items() if k != key}, file, metadata={"format": "pt"})
    with pytest.raises(PosencError, match="lacks"):
        load(tmp_path / "a")


# --- what is refused -------------------------------------------------------------------------------------------------


def set_in(*path):
    def change(config):
        *owners, last, value = path
        for owner in owners:
            config = config[owner]
        config[last] = value

    return change


DAMAGED = {
    "size": ("axial_rope", "vit", set_in("image_size", 64), "image_size=64"),
    "learned size": ("learned", "vit", set_in("image_size", 64), "other shapes"),
    "original size": ("axial_rope", "vit", set_in("posenc", "original", "image_size", 64), "grid"),
    "no size": ("axial_rope", "vit", lambda config: config["posenc"]["original"].pop("image_size"), "image_size"),
    "bad size": ("axial_rope", "vit", set_in("posenc", "original", "image_size", [32]), "makes no sense"),
    "scheme": ("axial_rope", "vit", set_in("posenc", "scheme", "none"), "no option"),
    "grid": ("axial_rope", "vit", set_in("posenc", "geometry", "grid", [4, 5]), "grid"),
    "half a grid": ("axial_rope", "vit", set_in("posenc", "geometry", "grid", [4]), "makes no sense"),
    "no grid": ("axial_rope", "vit", lambda config: config["posenc"]["geometry"].pop("grid"), "not all"),
    "layers": ("mixed", "vit", set_in("posenc", "geometry", "layers", 3), "layers=3"),
    "flag": ("axial_rope", "beit", set_in("use_absolute_position_embeddings", False), "lacks|contradicts|left out"),
    "bias": ("none", "beit", set_in("use_relative_position_bias", True), "lacks"),
    "original flag": ("none", "beit", set_in("posenc", "original", "use_relative_position_bias", 1), "no sense"),
    "seal": ("axial_rope", "vit", set_in("attn_implementation", "sdpa"), "contradicts"),
    "sealed": ("none", "vit", set_in("attn_implementation", "hf_posenc_sdpa"), "names the attention"),
    "record": ("axial_rope", "vit", lambda config: config.pop("posenc"), "lost its 'posenc' record"),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.filterwarnings("ignore:.*was loaded with")
def test_a_config_that_contradicts_itself_is_refused(damage, tmp_path):
    name, family, change, message = DAMAGED[damage]
    save(patched_images(name, family), tmp_path / "a")
    edit_config(tmp_path / "a", change)
    with pytest.raises(PosencError, match=message):
        load(tmp_path / "a")


def test_what_cannot_be_given_when_loading(tmp_path):
    save(patched_images("axial_rope", "vit"), tmp_path / "a")
    with pytest.raises(PosencError, match="image_size cannot be given"):
        load(tmp_path / "a", image_size=64)
    with pytest.raises(PosencError, match="'flex_attention'"):
        load(tmp_path / "a", attn_implementation="flex_attention")
    loaded = load(tmp_path / "a", attn_implementation="eager")
    assert describe(loaded).kernel == "hf_posenc_eager"


def test_models_of_images_are_not_patched_on_disk(tmp_path):
    tiny_images("vit").save_pretrained(tmp_path / "a")
    with pytest.raises(PosencError, match=r"patch_model it, and save it with hf_posenc\.save"):
        patch_checkpoint(tmp_path / "a", tmp_path / "b", "axial_rope")
    assert not (tmp_path / "b").exists()


def test_the_command_line_describes_them(tmp_path):
    save(patched_images("axial_rope", "clip"), tmp_path / "a")
    tiny_images("beit").save_pretrained(tmp_path / "b")
    done = CliRunner().invoke(app, ["describe", str(tmp_path / "a")])
    assert done.exit_code == 0, done.output
    assert "axial_rope" in done.output and "(4, 4)" in done.output and "sealed" in done.output
    done = CliRunner().invoke(app, ["describe", str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert "bias and table (the model's own)" in done.output
    done = CliRunner().invoke(app, ["families"])
    for kind in ("vit", "deit", "beit", "dinov2_with_registers", "clip_vision_model", "siglip_vision_model"):
        assert kind in done.output.replace(",", " ").split()


# --- without this package --------------------------------------------------------------------------------------------


@torch.no_grad()
def answer(model, images, way):
    twin = copy.deepcopy(model)
    if way in FORCED:
        twin.set_attn_implementation(FORCED[way]["attn_implementation"])
    output = (twin.to(torch.bfloat16) if way == "bf16" else twin)(images.bfloat16() if way == "bf16" else images)
    return output.logits if "logits" in output else output.last_hidden_state


def ways_of(name):
    return list(WAYS) if name in PLAIN else ["as_is", *FORCED]


def jobs_for(name, family, folder):
    model = disturb(patched_images(name, family))
    save(model, folder / f"{name}-{family}")
    side, jobs = 48 if name == "learned" else 32, {}
    for way in ways_of(name):
        images = pixels(2, *(WIDE if way == "wide" else (side, side)))
        expected = answer(model, images, way) if name in PLAIN else torch.zeros(1)  # sealed: not to answer at all
        file = folder / f"{name}-{family}-{way}.safetensors"
        save_file({"ids": images.bfloat16() if way == "bf16" else images, way: expected}, file)
        jobs[f"{name}-{family} {way}"] = {
            "path": str(folder / f"{name}-{family}"),
            "auto": FAMILIES[family][0].__name__,
            "arguments": WAYS[way],
            "expected": str(file),
            "key": way,
        }
    return jobs


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """One process for all, and a checkpoint that is wrong on purpose."""
    folder, jobs = tmp_path_factory.mktemp("images"), {}
    for name, family in STRANGERS:
        jobs |= jobs_for(name, family, folder)
    spoilt = jobs_for("learned", "vit", folder)
    tensors = load_file(folder / "learned-vit" / "model.safetensors")
    copied = folder / "spoilt"
    copied.mkdir()
    (copied / "config.json").write_text((folder / "learned-vit" / "config.json").read_text())
    key = "vit.embeddings.position_embeddings"
    save_file({**tensors, key: tensors[key] + 1}, copied / "model.safetensors", metadata={"format": "pt"})
    jobs["spoilt"] = {**spoilt["learned-vit as_is"], "path": str(copied)}
    return plain_verdicts(jobs, folder)


OWN_SIZES = ("vit", "deit", "clip", "siglip")
"""Families whose own code refuses other sizes, unless it is told to resize its table."""


@pytest.mark.parametrize(("name", "family"), STRANGERS)
def test_a_stranger_gets_the_same_or_nothing(name, family, verdicts):
    found = {way: verdicts[f"{name}-{family} {way}"] for way in ways_of(name)}
    if name not in PLAIN:
        assert all(verdict.startswith("refused") for verdict in found.values()), found
        assert "hf_posenc.load" in found["as_is"]  # who forces an attention has read the message already
        return
    wide = found.pop("wide")
    assert set(found.values()) == {"exact"}, found
    assert wide.startswith("refused") if family in OWN_SIZES else wide == "exact"


def test_the_script_sees_what_is_wrong(verdicts):
    assert verdicts["spoilt"].startswith("wrong")
    assert [job for job, found in verdicts.items() if found.startswith("wrong")] == ["spoilt"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_loaded_plain_model_is_not_patched(name, tmp_path):
    save(patched_images(name, "clip"), tmp_path / "a")
    assert not is_patched(CLIPVisionModel.from_pretrained(tmp_path / "a"))
