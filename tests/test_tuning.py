"""What is trained: exactly what was asked for."""

import pytest
import torch
from cells import tiny, tokens

from hf_posenc import PosencError, patch_model
from hf_posenc.training.settings import LoraSettings, TuneSettings
from hf_posenc.training.tuning import choose_trainable, count_trainable

PLAIN = dict(lora=LoraSettings(r=2))


def trainable_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    "kind, names",
    [
        ("llama", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("gpt2", {"attn.c_attn", "attn.c_proj"}),
        ("bert", {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}),
    ],
)
def test_attention_means_all_its_projections(kind, names):
    objective = "masked" if kind == "bert" else "causal"
    model = choose_trainable(tiny(kind), TuneSettings(**PLAIN, norms=False, embeddings=False), objective)
    found = trainable_names(model)
    assert all("lora_" in name for name in found)
    layers = {name.split(".lora_")[0] for name in found}
    assert len(layers) == 2 * len(names)
    assert all(any(layer.endswith("." + name) for name in names) for layer in layers)


def test_all_linear_is_more():
    few = count_trainable(choose_trainable(tiny("llama"), TuneSettings(**PLAIN), "causal"))
    lora = LoraSettings(r=2, target_modules="all-linear")
    assert count_trainable(choose_trainable(tiny("llama"), TuneSettings(lora=lora), "causal")) > few


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_norms_and_embeddings_are_trained_beside(kind):
    model = choose_trainable(tiny(kind), TuneSettings(**PLAIN), "masked" if kind == "bert" else "causal")
    found = trainable_names(model)
    norms = [m for m in tiny(kind).modules() if "Norm" in type(m).__name__]
    whole = {name.rpartition(".")[0] for name in found if "modules_to_save" in name}
    embedded = [name for name in whole if any(word in name for word in ("embed_tokens", "wte", "word_embeddings"))]
    assert len(embedded) == 1
    assert len(whole) >= len(norms) + 1


def test_tied_embeddings_stay_tied():
    model = tiny("llama", tie_word_embeddings=True)
    wrapped = choose_trainable(model, TuneSettings(**PLAIN), "causal")
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "embed_tokens" in name:
                parameter += 1.0
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    first, last = (end.modules_to_save["default"].weight for end in ends)
    assert torch.equal(first, last)


@pytest.mark.parametrize("scheme, name", [("t5", "posenc_bias"), ("learned", "posenc_table")])
def test_what_the_scheme_brought_is_trained(scheme, name):
    options = {"target_length": 64} if scheme == "learned" else {}
    model = patch_model(tiny("llama"), scheme, **options)
    bare = TuneSettings(**PLAIN, norms=False, embeddings=False)
    assert any(
        name in found and "modules_to_save" in found
        for found in trainable_names(choose_trainable(model, bare, "causal"))
    )
    model = patch_model(tiny("llama"), scheme, **options)
    none = TuneSettings(**PLAIN, norms=False, embeddings=False, positions="none")
    assert not any(name in found for found in trainable_names(choose_trainable(model, none, "causal")))


@pytest.mark.parametrize("lora", [None, LoraSettings(r=2)])
def test_only_new_rows_change(lora):
    model = patch_model(tiny("bert"), "learned", target_length=64, resize="cyclic")
    asked = TuneSettings(lora=lora, norms=False, embeddings=False, positions="new")
    wrapped = choose_trainable(model, asked, "masked")
    if lora is None:
        assert trainable_names(wrapped) == {"bert.embeddings.position_embeddings.weight"}
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(tokens(2, 60), labels=tokens(2, 60)).loss.backward()
        optimizer.step()
    name = next(n for n, p in wrapped.named_parameters() if "position_embeddings" in n and p.requires_grad)
    after = dict(wrapped.named_parameters())[name]
    assert torch.equal(after[:32], before[name][:32])
    assert not torch.equal(after[32:60], before[name][32:60])


def test_new_rows_need_a_table():
    with pytest.raises(PosencError, match="learned"):
        choose_trainable(patch_model(tiny("bert"), "alibi"), TuneSettings(positions="new"), "masked")


def test_nothing_to_train_is_refused():
    nothing = TuneSettings(lora=None, norms=False, embeddings=False)
    with pytest.raises(PosencError, match="Nothing would be trained"):
        choose_trainable(tiny("llama"), nothing, "causal")


def test_everything():
    model = choose_trainable(tiny("gpt2"), TuneSettings(whole=True), "causal")
    assert count_trainable(model) == sum(p.numel() for p in model.parameters())
