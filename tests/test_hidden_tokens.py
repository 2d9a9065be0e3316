"""Masks that hide tokens in the middle of a row: a text without them, and each path of a tree of drafts alone."""

import pytest
import torch
from cells import tiny, tokens
from transformers import DynamicCache

from hf_posenc import PosencError, patch_model

GATED = {"fox": {"constant": 1.0, "std": 0.3}, "cable": {"constant": -1.0, "std": 0.3, "seed": 1}}
STREAMING = {"sinks": 2, "window": 6}
CASES = [(scheme, kind) for scheme in GATED for kind in ("llama", "gpt2")]
KERNELS = ["hf_posenc_sdpa", "hf_posenc_eager"]
PARENTS = (-1, 0, 0, 1, 1, 3, 2, 6)
"""Of each draft the one before it; the first comes after the prompt."""


def patched(kind, scheme, kernel="hf_posenc_sdpa", **options):
    model = patch_model(tiny(kind, max_position_embeddings=64), scheme, **options)
    model.set_attn_implementation(kernel)
    return model


def logits(model, ids, **given):
    with torch.no_grad():
        return model(ids, **given).logits


def draft_tree(prompt, kernel):
    """The path to each draft, the mask of prompt and drafts, and their positions."""
    paths = []
    for parent in PARENTS:
        paths.append([*(paths[parent] if parent >= 0 else []), len(paths)])
    seen = torch.ones(prompt + len(paths), prompt + len(paths)).tril().bool()
    for draft, path in enumerate(paths):
        seen[prompt + draft, prompt:] = False
        seen[prompt + draft, [prompt + step for step in path]] = True
    at = torch.tensor([*range(prompt), *(prompt + len(path) - 1 for path in paths)])
    mask = seen[None, None]
    if kernel == "hf_posenc_eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return paths, mask, at[None]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scheme, kind", CASES)
def test_gates_of_tokens_that_nobody_sees_do_not_count(scheme, kind, kernel):
    model, ids = patched(kind, scheme, kernel, **GATED[scheme]), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, 5:9] = mask[0, 20] = mask[1, :3] = mask[1, 30:36] = 0
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, ids, attention_mask=mask, position_ids=at)
    cache, parts = DynamicCache(config=model.config), []
    for start, end in ((0, 25), (25, 33), *((n, n + 1) for n in range(33, 40))):
        given = {"attention_mask": mask[:, :end], "position_ids": at[:, start:end], "past_key_values": cache}
        parts.append(logits(model, ids[:, start:end], **given))
    for row, real in enumerate(mask.bool()):
        alone = logits(model, ids[row, real][None])[0]
        torch.testing.assert_close(found[row, real], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.cat(parts, 1)[row, real], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scheme, kind", CASES)
def test_each_path_of_a_tree_is_a_text_of_its_own(scheme, kind, kernel):
    prompt = 12
    model, ids = patched(kind, scheme, kernel, **GATED[scheme]), tokens(1, prompt + len(PARENTS))
    paths, mask, at = draft_tree(prompt, kernel)
    whole = logits(model, ids, attention_mask=mask, position_ids=at, use_cache=False)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :prompt], past_key_values=cache)
    given = {"attention_mask": mask[:, :, prompt:], "position_ids": at[:, prompt:], "past_key_values": cache}
    cached = logits(model, ids[:, prompt:], **given)
    for draft, path in enumerate(paths):
        alone = logits(model, torch.cat([ids[:, :prompt], ids[:, prompt:][:, path]], 1))[0, -1]
        torch.testing.assert_close(whole[0, prompt + draft], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cached[0, draft], alone, atol=1e-4, rtol=1e-4)


def test_gradients_through_a_tree_are_those_of_its_paths():
    prompt, wish = 12, torch.randn(97, generator=torch.Generator().manual_seed(0))
    model, ids = patched("llama", "fox", **GATED["fox"]), tokens(1, prompt + len(PARENTS))
    paths, mask, at = draft_tree(prompt, "hf_posenc_sdpa")
    trained = [*model.parameters()]
    tree = model(ids, attention_mask=mask, position_ids=at, use_cache=False).logits[0, prompt:]
    found = torch.autograd.grad((tree @ wish).sum(), trained)
    texts = [torch.cat([ids[:, :prompt], ids[:, prompt:][:, path]], 1) for path in paths]
    meant = torch.autograd.grad(sum(model(text).logits[0, -1] @ wish for text in texts), trained)
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_a_compiled_graph_notices_a_tree():
    prompt = 12
    model, ids = patched("llama", "fox", **GATED["fox"]), tokens(1, prompt + len(PARENTS))
    _, mask, at = draft_tree(prompt, "hf_posenc_sdpa")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="hides tokens between those"):
        logits(compiled, ids, attention_mask=mask, position_ids=at, use_cache=False)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_streaming_cache_refuses_a_tree(kernel):
    prompt = 12
    model, ids = patched("llama", "streaming", kernel, **STREAMING), tokens(1, prompt + len(PARENTS))
    _, mask, at = draft_tree(prompt, kernel)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :prompt], past_key_values=cache)
    mask = mask[:, :, prompt:, -len(PARENTS) - cache.layers[0].tokens_kept :]
    given = {"attention_mask": mask, "position_ids": at[:, prompt:], "past_key_values": cache}
    with pytest.raises(PosencError, match="hides tokens that are no padding"):
        logits(model, ids[:, prompt:], **given)


def test_a_streaming_cache_refuses_to_hide_what_it_was_shown():
    model, ids = patched("llama", "streaming", **STREAMING), tokens(2, 13)
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    logits(model, ids[:, :12], attention_mask=mask[:, :12], position_ids=at[:, :12], past_key_values=cache)
    mask[1, 10] = 0
    with pytest.raises(PosencError, match="hides tokens that are no padding"):
        logits(model, ids[:, 12:], attention_mask=mask, position_ids=at[:, 12:], past_key_values=cache)
    mask[1, 10] = 1
    found = logits(model, ids[:, 12:], attention_mask=mask, position_ids=at[:, 12:], past_key_values=cache)
    alone = logits(model, ids[:1, 2:])[0, -1]
    torch.testing.assert_close(found[0, -1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tree_goes_into_an_empty_streaming_cache(kernel):
    prompt = 12
    model, ids = patched("llama", "streaming", kernel, **STREAMING), tokens(1, prompt + len(PARENTS))
    _, mask, at = draft_tree(prompt, kernel)
    meant = logits(model, ids, attention_mask=mask, position_ids=at, use_cache=False)
    torch.testing.assert_close(logits(model, ids, attention_mask=mask, position_ids=at), meant, atol=1e-4, rtol=1e-4)
