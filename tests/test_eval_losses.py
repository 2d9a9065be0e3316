"""Token losses in slices: those of plain logits, on every family and scheme, in a fraction of the memory."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cells import _SIZES, CAUSAL_CELLS, LENGTH, options, tiny, tokens
from forked import peak_of, result_of
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_posenc import PosencError, patch_model
from hf_posenc.evaluation import token_losses
from hf_posenc.evaluation.measures.losses import bodies, refuse_not_causal

ROOT = Path(__file__).parent.parent
WAYS = [{}, {"chunk": 7}, {"chunk": 6, "step": 5}, {"step": 64}, {"last": 5, "chunk": 4}, {"last": 5, "step": 9}]
HEADS = {
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2, "final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "opt": {"word_embed_proj_dim": 32},  # whose head stands on the decoder inside its base model
    "falcon": {},
    "gpt_neox": {},
}


@torch.no_grad()
def plain(model, ids):
    logits = model(ids).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def agree(model, ids, tolerance=2e-4):
    expected = plain(model, ids)
    for way in WAYS:
        found = token_losses(model, ids, **way)
        assert found.shape[1] == way.get("last", ids.shape[1] - 1)
        torch.testing.assert_close(found, expected[:, -found.shape[1] :], atol=tolerance, rtol=tolerance)
    alone = torch.cat([token_losses(model, row[None]) for row in ids])
    torch.testing.assert_close(alone, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", HEADS)
def test_heads_that_do_more_than_multiply(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **HEADS[kind]})).eval()
    agree(model, tokens(3, LENGTH))


@pytest.mark.parametrize("scheme, kind", CAUSAL_CELLS)
def test_every_patched_cell(scheme, kind):
    model = tiny(kind)
    unpatched = plain(model, tokens(2, LENGTH))
    patch_model(model, scheme, **options(scheme))
    agree(model, tokens(2, 3 * LENGTH), 1e-3)
    assert unpatched.isfinite().all()


@pytest.mark.parametrize("scheme, kind", CAUSAL_CELLS)
def test_parts_over_a_cache_are_the_whole_pass(scheme, kind):
    """To 1e-5 of a nat, past the trained length: in float64, where rounding does not hide what is wrong."""
    model = patch_model(tiny(kind), scheme, **options(scheme)).double()
    ids = tokens(2, 3 * LENGTH)
    whole = token_losses(model, ids)
    for step in (5, 40):
        torch.testing.assert_close(token_losses(model, ids, step=step), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "qwen3"])
def test_the_model_is_left_as_it_was(kind):
    model = tiny(kind)
    before = plain(model, tokens(2, LENGTH))
    token_losses(model, tokens(2, LENGTH), chunk=4)
    for body in bodies(model):
        assert "forward" not in vars(body)
        assert not body._forward_hooks
    assert torch.equal(plain(model, tokens(2, LENGTH)), before)


def test_adapters_on_body_and_head_and_virtual_tokens():
    peft = pytest.importorskip("peft")
    ids = tokens(2, LENGTH)
    lora = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama"), lora).eval()
    torch.testing.assert_close(token_losses(model, ids, chunk=5), plain(model, ids), atol=1e-4, rtol=1e-4)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny("llama"), prompt).eval()
    with torch.no_grad():
        logits = model(ids).logits[:, 3:-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(2, -1)
    torch.testing.assert_close(token_losses(model, ids, chunk=5), expected, atol=1e-4, rtol=1e-4)


def test_a_head_that_cannot_be_parted_is_exact_and_loud():
    model, ids = tiny("llama"), tokens(2, LENGTH)
    model.get_decoder = lambda: None
    model.base_model_prefix = "nothing"
    with pytest.warns(UserWarning, match="all logits"):
        found = token_losses(model, ids, chunk=4)
    torch.testing.assert_close(found, plain(model, ids), atol=1e-4, rtol=1e-4)


def test_losses_that_are_no_numbers_name_the_first_position():
    model, ids = tiny("llama"), tokens(2, LENGTH)

    def overflow(norm, args, output):
        output[1, 20:] = torch.nan

    model.model.norm.register_forward_hook(overflow)
    with pytest.raises(PosencError, match=r"nan at position 21 \(row 1\), the first of 11 "):
        token_losses(model, ids)


def test_a_text_of_one_token_is_refused():
    with pytest.raises(PosencError, match="nothing before it"):
        token_losses(tiny("llama"), tokens(1, 1))


def test_encoders_are_refused_with_what_is_possible():
    with pytest.raises(PosencError, match=r"sees the tokens .* is_decoder=True"):
        refuse_not_causal(tiny("bert"))
    with pytest.raises(PosencError, match="no head"):
        refuse_not_causal(AutoModel.from_config(tiny("bert").config))
    refuse_not_causal(tiny("bert_decoder"))
    refuse_not_causal(tiny("gpt2"))


def test_transformers_own_dynamic_rope_is_not_read_over_a_cache():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    with pytest.raises(PosencError, match="cannot be read in parts"):
        token_losses(tiny("llama", rope_parameters=rope), tokens(1, 2 * LENGTH), step=8)


@torch.no_grad()
def memory_of_losses(way):
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    config = AutoConfig.for_model("llama", vocab_size=49152, max_position_embeddings=3072, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 49152, (1, 3072))
    if way == "plain":
        return peak_of(lambda: F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))
    return peak_of(lambda: token_losses(model, ids).mean())


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own account of memory")
def test_memory_is_a_third_of_the_plain_loop():
    ours, plain = (result_of(partial(memory_of_losses, way)) for way in ("ours", "plain"))
    assert plain > 500 and ours < plain / 3
