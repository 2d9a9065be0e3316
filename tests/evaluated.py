"""Models, a tokenizer and text that evaluation is tested with."""

import torch
from cells import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_posenc.evaluation import Document

VOCAB = 260


def bytes_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2, **{letter: 3 + i for i, letter in enumerate(alphabet)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def reader(kind: str = "llama", **sizes):
    """A tiny model that reads bytes."""
    return tiny(kind, **{"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, **sizes})


def bigram(table: torch.Tensor) -> torch.nn.Module:
    """A LLaMA whose logits after token i are `table[i]`, whatever came before."""
    size = len(table)
    config = AutoConfig.for_model(
        "llama", vocab_size=size, hidden_size=size, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        max_position_embeddings=64, rms_norm_eps=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.norm.weight.fill_(size**-0.5)  # the norm makes a one-hot sqrt(size) long
        model.lm_head.weight.copy_(table.T)
    return model


def document(length: int, vocab: int = 97, seed: int = 5, name: str = "random") -> Document:
    return Document(name, torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)))


STORY = " ".join(
    f"On day {i} the {who} went to the {where} with a bag of number {i * 37 % 101} and came home late."
    for i, (who, where) in enumerate(
        [("girl", "market"), ("boy", "river"), ("king", "castle"), ("cat", "garden")] * 40
    )
)
