"""Tiny random models of every family, and the cells of schemes x families that tests run over."""

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from hf_posenc import SCHEMES
from hf_posenc.patching.grades import cells as grades
from hf_posenc.schemes.pattern import PatternScheme

transformers.logging.set_verbosity_error()

VOCAB = 97
LENGTH = 32
"""What every tiny model is "trained" at."""

# With the usual 0.02 attention is all but uniform, and errors in positions hide.
_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_GQA = dict(num_key_value_heads=2)
KINDS: dict[str, dict] = {
    "llama": dict(model_type="llama", **_GQA),
    "mistral": dict(model_type="mistral", **_GQA),
    "qwen2": dict(model_type="qwen2", **_GQA),
    "qwen3": dict(model_type="qwen3", head_dim=8, **_GQA),
    "gpt2": dict(model_type="gpt2"),
    "bert": dict(model_type="bert"),
    "bert_decoder": dict(model_type="bert", is_decoder=True),
}
CAUSAL = [kind for kind in KINDS if kind != "bert"]


def tiny(kind: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny random model with a language-model head, in eval mode."""
    sizes = {**_SIZES, **KINDS[kind], **overrides}
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    torch.manual_seed(seed)
    return auto.from_config(config).eval()


_OPTIONS: dict[str, dict] = {
    "learned": {"target_length": 4 * LENGTH},
    # Parameters of its own, and other frequencies than those of `sinusoidal`.
    "fourier": {"frequencies": "learned", "base": 100.0},
    # Windows far below the trained length, so that they show in short texts.
    "self_extend": {"factor": 4.0, "window": 5},
    "rerope": {"window": 5},
    "dca": {"chunk": 7, "local_window": 5},
    "streaming": {"sinks": 2, "window": 6},
    "lm_infinite": {"global_tokens": 2, "window": 6},
    "window": {"window": 6},
    "sparse": {"window": 4, "global_tokens": 1, "stride": 5},
}


def options(scheme: str) -> dict:
    """What a scheme must be told; enough rows for tests that run past the trained length."""
    return dict(_OPTIONS.get(scheme, {"factor": 4.0} if SCHEMES[scheme].extends else {}))


TEXT = [scheme for scheme in SCHEMES if not grades()[scheme, "RoPE"].startswith("refused")]
"""Schemes that are not for images alone."""
PATTERNS = [scheme for scheme in SCHEMES if issubclass(SCHEMES[scheme], PatternScheme)]
# Patterns keep a table as long as it was, or need RoPE: test_patterns.py has them on tables.
TABLES = ("gpt2", "bert", "bert_decoder")
# Qwen2 is a LLaMA whose projections have biases: one scheme for each way to render is enough of it.
LIKE_LLAMA = ("alibi", "dynamic_ntk", "learned", "rope", "self_extend", "yarn")
CELLS = [
    (scheme, kind)
    for scheme in TEXT
    for kind in KINDS
    if not (scheme in PATTERNS and kind in TABLES)
    and (scheme, kind) != ("streaming", "mistral")  # which has a sliding window of its own
    and (kind != "qwen2" or scheme in LIKE_LLAMA)
]
CAUSAL_CELLS = [(scheme, kind) for scheme, kind in CELLS if kind in CAUSAL]


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
