"""BERT kin with relative keys, as transformers 4 saved them: against a hand-made layer of the old definition."""

import json

import pytest
import torch
from cells import LENGTH, tiny, tokens
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForMaskedLM, BertForMaskedLM
from transformers.masking_utils import eager_mask

from hf_posenc import PosencError, check_model, describe, describe_checkpoint, load, save, unpatch_model

KINDS = ["relative_key", "relative_key_query"]


def old_checkpoint(folder, kind):
    """A BERT as transformers 4 would have written it: a table of positions that nothing reads, and vectors."""
    model = tiny("bert")
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    vectors = [torch.randn(2 * LENGTH - 1, 8, generator=generator) for _ in range(2)]
    for layer, held in enumerate(vectors):
        weights[f"bert.encoder.layer.{layer}.attention.self.distance_embedding.weight"] = held
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "position_embedding_type": kind}))
    return vectors


def as_it_was(folder, kind, vectors, ids):
    """Logits by the old code's definition: no positions in the input, and in each layer
    (q_l k_r + q_l e[l - r + L - 1] (+ k_r e[l - r + L - 1])) / sqrt(d)."""
    model = BertForMaskedLM.from_pretrained(folder)
    model.bert.embeddings.position_embeddings.weight.data.zero_()
    places = iter(vectors)

    def attention(module, query, key, value, attention_mask, **kwargs):
        held = next(places).double()
        q, k, v = query.double(), key.double(), value.double()
        at = torch.arange(q.shape[2])
        apart = held[at[:, None] - at + LENGTH - 1]
        scores = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, apart)
        if kind == "relative_key_query":
            scores = scores + torch.einsum("bhrd,lrd->bhlr", k, apart)
        weights = (scores / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("old_reference", attention)
    AttentionMaskInterface.register("old_reference", eager_mask)
    model.config._attn_implementation = "old_reference"
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_old_relative_keys_are_loaded_right(kind, tmp_path):
    folder, ids = tmp_path / "old", tokens(2, LENGTH)
    folder.mkdir()
    vectors = old_checkpoint(folder, kind)
    meant = as_it_was(folder, kind, vectors, ids)
    plain = AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        assert (plain(ids).logits - meant).abs().max() > 1  # what transformers makes of it, without an error
    with pytest.raises(PosencError, match="relative keys"):
        check_model(plain)
    model = load(folder)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, meant, atol=1e-4, rtol=1e-4)
    told = describe(model)
    assert told.scheme == "shaw" and f"distances up to {LENGTH - 1}" in told.bias
    assert describe_checkpoint(folder)[0].options == told.options
    with pytest.raises(PosencError, match="cannot be undone: this model's own positions"):
        unpatch_model(model)
    save(model, tmp_path / "new")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "new")(ids).logits, model(ids).logits)


def test_vectors_that_are_missing_are_missed(tmp_path):
    old_checkpoint(tmp_path, "relative_key")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["bert.encoder.layer.1.attention.self.distance_embedding.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PosencError, match="1 layers, and has 2"):
        load(tmp_path)
