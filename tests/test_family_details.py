"""Families in use: encoder-decoders, text parts, models' own ALiBi, training and decoding, checkpoints on disk."""

import copy
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).parent / "sweep"))
from laws import apart, logits, tokens
from shrink import _shrunk, tiny_model

from hf_posenc import PosencError, UnsupportedCell, check_model, describe, load, patch_model, save, unpatch_model
from hf_posenc.checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from hf_posenc.families import places
from hf_posenc.patching.layout import WATCHED, watch_layout

NEAR = 2e-4
"""How far logits may be apart, as a part of their spread, that two ways of computing should agree on."""
IDS = dict(vocab_size=97, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)


# --- encoder-decoders ------------------------------------------------------------------------------------------------


def two_stacks(kind):
    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_layers=2, decoder_layers=2)
    sizes |= dict(encoder_attention_heads=4, decoder_attention_heads=4, init_std=0.3)
    if kind == "bart":
        config = BartConfig(**IDS, **sizes, bos_token_id=1, max_position_embeddings=32, forced_eos_token_id=None)
        return BartForConditionalGeneration(config).eval()
    if kind == "whisper":
        lengths = dict(max_source_positions=20, max_target_positions=32, num_mel_bins=8)
        return WhisperForConditionalGeneration(WhisperConfig(**IDS, **sizes, **lengths, bos_token_id=1)).eval()
    config = T5Config(**IDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=1.5)
    return T5ForConditionalGeneration(config).eval()


@torch.no_grad()
def answers(model, ids, answer, **inputs):
    return model(input_ids=ids, decoder_input_ids=answer, **inputs).logits


def dense_alibi(length, causal):
    """Press et al. 2021 for 4 heads, as the 4-D float mask that every model takes."""
    places = torch.arange(length)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    bias = -slopes[:, None, None] * (places[:, None] - places).abs()
    return bias.masked_fill((places > places[:, None]) & causal, torch.finfo(torch.float32).min).repeat(2, 1, 1, 1)


@torch.no_grad()
def dense_answers(kind, ids, answer):
    """ALiBi in both stacks of a model whose own positions were zeroed by hand; cross-attention has none."""
    twin = two_stacks(kind)
    twin.set_attn_implementation("eager")
    for name, weight in twin.named_parameters():
        if "embed_positions" in name or "relative_attention_bias" in name:
            weight.zero_()
    seen = twin.get_encoder()(input_ids=ids, attention_mask=dense_alibi(ids.shape[1], causal=False))
    mask = dense_alibi(answer.shape[1], causal=True)
    return twin(encoder_outputs=seen, decoder_input_ids=answer, decoder_attention_mask=mask).logits


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_alibi_on_both_stacks_is_the_dense_one(kind):
    model, ids, answer = two_stacks(kind), tokens(2, 30), tokens(2, 28)
    patch_model(model, "alibi", trained_length=32)
    meant = dense_answers(kind, ids, answer)
    assert apart(meant, answers(model, ids, answer)) < NEAR
    assert apart(meant, dense_answers(kind, ids.roll(7, 1), answer)) > 0.1


@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize(("scheme", "options"), [("alibi", {}), ("none", {}), ("dynamic_ntk", {"factor": 4.0})])
def test_both_stacks_decode_and_travel_as_they_run(kind, scheme, options, tmp_path):
    model, ids, answer = two_stacks(kind), tokens(2, 50), tokens(2, 40)
    own, state = answers(model, ids[:, :30], answer[:, :20]), copy.deepcopy(model.state_dict())
    patch_model(model, scheme, trained_length=32, **options)
    said = answers(model, ids, answer)
    cross = [part for name, part in model.named_modules() if name.endswith(("encoder_attn", "EncDecAttention"))]
    assert len(cross) == 2 and not any(part._forward_pre_hooks for part in cross)
    settings = dict(max_new_tokens=40, min_new_tokens=40, do_sample=False)
    for beams in (1, 3):
        cached, whole = (model.generate(ids, num_beams=beams, use_cache=use, **settings) for use in (True, False))
        assert torch.equal(cached, whole) and cached.shape[1] == 41
    save(model, tmp_path / "saved")
    assert torch.equal(answers(load(tmp_path / "saved").eval(), ids, answer), said)
    if describe(model).portability.startswith("sealed"):
        with pytest.raises(ValueError, match="hf_posenc"):
            type(model).from_pretrained(tmp_path / "saved")
    else:
        plain = type(model).from_pretrained(tmp_path / "saved").eval()
        near = answers(model, ids[:, :30], answer[:, :20])
        assert torch.equal(answers(plain, ids[:, :30], answer[:, :20]), near)
    unpatch_model(model)
    assert torch.equal(answers(model, ids[:, :30], answer[:, :20]), own)
    assert all(torch.equal(weight, state[key]) for key, weight in model.state_dict().items())


@pytest.mark.parametrize(("scheme", "options"), [("t5", {}), ("fourier", {"frequencies": "learned"})])
def test_each_stack_gets_its_own_parameters_back(scheme, options, tmp_path):
    """Trained apart they differ, and both go by the same name."""
    model, ids, answer = two_stacks("bart"), tokens(2, 30), tokens(2, 20)
    patch_model(model, scheme, **options)
    ours = [parameter for name, parameter in model.named_parameters() if "posenc_" in name]
    assert len(ours) == 2
    for number, parameter in enumerate(ours):
        parameter.data += number + 1
    save(model, tmp_path / "saved")
    assert torch.equal(answers(load(tmp_path / "saved").eval(), ids, answer), answers(model, ids, answer))


def test_a_loaded_encoder_decoder_is_described_as_the_saved_one(tmp_path):
    model = patch_model(two_stacks("bart"), "alibi")
    save(model, tmp_path / "saved")
    assert str(describe(load(tmp_path / "saved"))) == str(describe(model))


def test_an_encoder_and_decoder_that_nobody_described_is_refused():
    model = MoonshineForConditionalGeneration(_shrunk(MoonshineConfig(), causal=True))
    with pytest.raises(PosencError):
        patch_model(model, "sinusoidal", trained_length=32)


@torch.no_grad()
def speech_outputs(model, answer):
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
    seen = model.get_encoder()(sound).last_hidden_state
    return seen, model(encoder_outputs=(seen,), decoder_input_ids=answer).logits


@pytest.mark.parametrize(
    "scheme",
    ["none", "alibi"],
)
def test_whisper_is_patched_in_its_decoder_alone(scheme):
    model, answer = two_stacks("whisper"), tokens(2, 20)
    seen, own = speech_outputs(model, answer)
    patch_model(model, scheme)
    still, said = speech_outputs(model, answer)
    assert torch.equal(still, seen) and apart(own, said) > 0.01
    with torch.no_grad():
        twin = two_stacks("whisper")
        twin.model.decoder.embed_positions.weight.zero_()
        mask = dense_alibi(20, causal=True) if scheme == "alibi" else None
        meant = twin(encoder_outputs=(seen,), decoder_input_ids=answer, decoder_attention_mask=mask).logits
    assert apart(meant, said) < NEAR


# --- the text part of a model that also sees -------------------------------------------------------------------------


@torch.no_grad()
def vision_states(model):
    size = model.config.vision_config.image_size
    picture = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    return model.model.vision_tower(picture).last_hidden_state


@pytest.mark.parametrize("scheme", ["yarn", "alibi"])
def test_the_text_part_is_patched_and_the_eye_is_not(scheme, tmp_path):
    model, ids = tiny_model("gemma3"), tokens(2, 40)
    own, picture, vision = logits(model, ids), vision_states(model), model.config.vision_config.to_dict()
    patch_model(model, scheme, **({"factor": 4.0} if scheme == "yarn" else {}))
    check_model(model)
    said = logits(model, ids)
    assert apart(own, said) > 0.01
    assert torch.equal(vision_states(model), picture) and model.config.vision_config.to_dict() == vision
    touched = [name for name, part in model.named_modules() if "posenc_link" in vars(part)]
    assert all("language_model" in name for name in touched) and bool(touched) == (scheme == "alibi")
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded, ids), said) and torch.equal(vision_states(loaded), picture)
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    kinds = {"yarn": "yarn", "alibi": "hf_posenc"}
    assert raw["text_config"]["rope_parameters"]["full_attention"]["rope_type"] == kinds[scheme]
    if scheme == "yarn":
        plain = type(model).from_pretrained(tmp_path / "saved").eval()
        assert torch.equal(logits(plain, ids), said)
    else:
        with pytest.raises(ValueError, match="hf_posenc"):
            type(model).from_pretrained(tmp_path / "saved")
    for back in (model, loaded):
        assert torch.equal(logits(unpatch_model(back), ids), own)


@pytest.mark.parametrize(
    ("model_type", "builder"), [("bloom", "_get_alibi_slopes"), ("mpt", "build_mpt_alibi_tensor")]
)
def test_none_takes_the_models_own_alibi_away(model_type, builder, monkeypatch, tmp_path):
    model, ids = tiny_model(model_type), tokens(2, 30)
    own = logits(model, ids)
    patch_model(model, "none", trained_length=32)
    said = logits(model, ids)
    save(model, tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved").eval(), ids), said)
    with pytest.raises(ValueError, match="hf_posenc"):
        type(model).from_pretrained(tmp_path / "saved")
    unpatch_model(model)
    assert torch.equal(logits(model, ids), own) and apart(own, said) > 0.1
    with pytest.raises(UnsupportedCell, match="computes its scores by itself"):
        patch_model(model, "alibi", trained_length=32)
    owner = sys.modules[type(model).__module__]
    if model_type == "mpt":
        owner = owner.MptModel
    build = getattr(owner, builder)
    monkeypatch.setattr(owner, builder, lambda *args, **kwargs: torch.zeros_like(build(*args, **kwargs)))
    assert torch.equal(logits(model, ids), said)


@pytest.mark.parametrize(
    ("model_type", "layout", "unturned"),
    [
        ("mixtral", "halves", ()),
        ("gpt_neox", "halves", ()),
        ("glm", "neighbours", ()),
        ("deepseek_v3", "halves_last", ()),
        ("smollm3", "halves", (1,)),
        ("llama4_text", "neighbours", (1,)),
    ],
)
def test_the_layout_is_seen_by_watching(model_type, layout, unturned):
    model = tiny_model(model_type)
    if unturned:
        assert [i for i, turned in enumerate(model.config.no_rope_layers) if not turned] == list(unturned)
    (group,) = places(model).groups
    assert watch_layout(group) == (layout, unturned)


def traces(model):
    parts = {name: (sorted(vars(part)), part.training) for name, part in model.named_modules()}
    return parts, model.config.to_dict(), model.config._attn_implementation


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_watching_leaves_no_trace(raising, mode):
    model = tiny_model("glm")
    model.train(mode != "eval")
    if mode == "mixed":
        model.model.layers[0].eval()
    (group,) = places(model).groups
    names = []

    def fail(module, args):
        names.append(module.config._attn_implementation)
        if raising:
            raise RuntimeError("not today")

    handle = group.attentions[1].register_forward_pre_hook(fail)
    before = traces(model)
    if raising:
        with pytest.raises(UnsupportedCell, match="not today"):
            watch_layout(group)
    else:
        watch_layout(group)
    assert set(names) == {WATCHED}
    assert traces(model) == before
    handle.remove()


# --- in use ----------------------------------------------------------------------------------------------------------

USES = [
    ("glm", "dynamic_ntk", {"factor": 4.0}),
    ("gpt_neox", "yarn", {"factor": 4.0}),
    ("gemma3_text", "alibi", {}),
    ("opt", "rope", {}),
    ("opt", "learned", {"target_length": 96}),
    ("roberta", "sinusoidal", {}),
    ("deepseek_v3", "dynamic_ntk", {"factor": 4.0}),
]
in_use = pytest.mark.parametrize(("model_type", "scheme", "options"), USES)
decoding = pytest.mark.parametrize(("model_type", "scheme", "options"), [use for use in USES if use[0] != "roberta"])


@decoding
def test_generation_past_the_trained_length_is_the_same_in_every_way(model_type, scheme, options):
    model = patch_model(tiny_model(model_type), scheme, **options)
    text, pad = tokens(1, 20), model.config.pad_token_id or 0
    settings = dict(max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=pad)
    whole = model.generate(text, use_cache=False, **settings)[:, 20:]
    assert torch.equal(model.generate(text, **settings)[:, 20:], whole)
    static = model.generate(text, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(static[:, 20:], whole)
    batch = torch.cat([torch.cat([torch.full((1, 6), pad), text], 1), tokens(1, 26)])
    mask = torch.ones_like(batch)
    mask[0, :6] = 0
    assert torch.equal(model.generate(batch, attention_mask=mask, **settings)[:1, 26:], whole)


def gradients(model, ids, checkpointing):
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@in_use
def test_lora_learns_through_gradient_checkpoints(model_type, scheme, options):
    model, ids = patch_model(tiny_model(model_type), scheme, **options), tokens(2, 50)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.0)).train()
    adapted.enable_input_require_grads()
    plain, kept = gradients(adapted, ids, False), gradients(adapted, ids, True)
    assert plain and plain.keys() == kept.keys() and any(bool(grad.any()) for grad in plain.values())
    for name, grad in plain.items():
        torch.testing.assert_close(kept[name], grad, atol=1e-6, rtol=1e-4)


@in_use
def test_copies_and_casts_keep_positions(model_type, scheme, options):
    model, ids = tiny_model(model_type), tokens(2, 50)
    own, near = logits(model, ids[:, :30]), ids[:, :30]
    said = logits(patch_model(model, scheme, **options), ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), said)
        assert torch.equal(logits(unpatch_model(twin), near), own)
    assert torch.equal(logits(model, ids), said)
    buffers = ("inv_freq", "slopes", "weights")
    before = {name: b.clone() for name, b in model.named_buffers() if name.rpartition(".")[2].endswith(buffers)}
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name in before and "original" not in name:  # which nobody reads on a patched model
            assert buffer.dtype == torch.float32 and torch.equal(buffer, before[name]), name
    assert (said - logits(model, ids)).abs().mean() / said.std() < 0.1, "rounding alone does less"
    check_model(model)


@pytest.mark.parametrize(
    ("model_type", "scheme", "options"), [("opt", "alibi", {}), ("roberta", "sinusoidal", {}), ("glm", "alibi", {})]
)
def test_a_compiled_model_says_the_same(model_type, scheme, options):
    model, ids = patch_model(tiny_model(model_type), scheme, **options), tokens(2, 50)
    said = logits(model, ids)
    torch._dynamo.reset()
    assert apart(said, logits(torch.compile(model, backend="eager", fullgraph=True), ids)) < NEAR


@pytest.mark.parametrize("model_type", ["bert", "opt", "roberta"])
def test_a_second_pass_before_backward_changes_nothing(model_type):
    """As in contrastive training: what layers recompute for the first pass must not read the positions of the last."""
    model = patch_model(tiny_model(model_type), "dynamic_ntk", factor=4.0).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens(2, 60)
    mask, padded = torch.ones_like(ids), ids.clone()
    mask[0, :30], padded[0, :30] = 0, model.config.pad_token_id
    found = []
    for again in (False, True):
        model.zero_grad()
        loss = model(padded, attention_mask=mask).logits[:, -8:].square().mean()
        if again:
            model(ids)
        loss.backward()
        found.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-4)


# --- checkpoints on disk ---------------------------------------------------------------------------------------------

ON_DISK = [
    (model_type, scheme, options)
    for model_type in ("opt", "roberta", "gemma3_text", "bart")
    for scheme, options in (("ntk", {"factor": 4.0}), ("t5", {}), ("sinusoidal", {}), ("learned", {"factor": 2.0}))
]


@pytest.mark.parametrize(("model_type", "scheme", "options"), ON_DISK)
def test_patching_on_disk_is_patching_live_and_saving(model_type, scheme, options, tmp_path):
    model = two_stacks("bart") if model_type == "bart" else tiny_model(model_type)
    model.save_pretrained(tmp_path / "own")
    assert str(describe_checkpoint(tmp_path / "own")[0]) == (own := str(describe(model)))
    patch_model(model, scheme, **options)
    save(model, tmp_path / "live")
    told = str(patch_checkpoint(tmp_path / "own", tmp_path / "disk", scheme, **options))
    live, disk = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("live", "disk"))
    assert live == disk and live["posenc"]["scheme"] == scheme
    live, disk = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "disk"))
    assert live.keys() == disk.keys() and all(torch.equal(live[key], disk[key]) for key in live)
    assert told == str(describe(model)) != own
    if model_type != "bart":  # of two stacks the description has another one first
        assert str(describe_checkpoint(tmp_path / "disk")[0]) == told
    check_model(load(tmp_path / "disk"))


def test_what_must_be_watched_is_refused_on_disk(tmp_path):
    tiny_model("glm").save_pretrained(tmp_path / "own")
    with pytest.raises(UnsupportedCell, match="must be loaded and patched live"):
        patch_checkpoint(tmp_path / "own", tmp_path / "disk", "dynamic_ntk")
    assert not (tmp_path / "disk").exists()
