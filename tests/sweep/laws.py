"""What the sweep asks of one model type: the laws that matter, on a tiny random model, for some schemes."""

from __future__ import annotations

import copy
import math
import sys
import tempfile
import warnings
from functools import partial
from typing import Any

import torch
import transformers
from shrink import CAUSAL, MASKED, PLAIN, POSITIONS, SCALED, VOCAB, is_causal, tiny_model
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from hf_posenc import SCHEMES as REGISTERED
from hf_posenc import PosencError, check_model, describe, load, patch_model, save, unpatch_model
from hf_posenc.families import places

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SCHEMES: dict[str, dict[str, Any]] = {
    "ntk": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "dynamic_ntk": {"factor": 4.0},
    "none": {},
    "alibi": {},
    "rope": {"rope_theta": 5e4},
    "sinusoidal": {},
    "learned": {"target_length": 2 * POSITIONS},
    "rerope": {"window": 5},
    "streaming": {"sinks": 2, "window": 6},
    "window": {"window": 6},
}
"""Each with what it must be told. `rope` gets a theta of its own, or it would change nothing on some models."""
NEAR = 4e-4
"""How far logits may be apart that should be the same, as a part of their spread."""


SAME = 1e-5
"""The same for two runs of the same code: some convolutions sum in an order that depends on where weights lie."""


class Wrong(Exception):
    """A law that does not hold."""


def tokens(batch: int, length: int, words: int = VOCAB) -> Tensor:
    return torch.randint(3, words, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """What a model says of each token: logits, or its last states where it has no head."""
    with torch.no_grad():
        return said(model(input_ids=ids, **kwargs))


def said(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the spread of the first."""
    return float((one - other).abs().max() / one.std().clamp(min=1e-6))


def cached_error(model: PreTrainedModel, ids: Tensor) -> float:
    """How far decoding over a cache, some tokens at a time, is from one pass."""
    whole, past, parts, start = logits(model, ids), None, [], 0
    for end in (ids.shape[1] - 6, ids.shape[1] - 2, ids.shape[1] - 1, ids.shape[1]):
        places = torch.arange(start, end)[None].expand(len(ids), -1)
        extra = {"position_ids": places} if takes_positions(model) else {}
        with torch.no_grad():
            mask = torch.ones(len(ids), end, dtype=torch.long)
            out = model(
                input_ids=ids[:, start:end], past_key_values=past, use_cache=True, attention_mask=mask, **extra
            )
        past, start = out.past_key_values, end
        parts.append(said(out))
    return apart(whole, torch.cat(parts, 1))


def takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in model.forward.__code__.co_varnames or any(
        "position_ids" in getattr(cls.forward, "__wrapped__", cls.forward).__code__.co_varnames
        for cls in [type(model)]
    )


def padded_error(model: PreTrainedModel, ids: Tensor, left: bool) -> float:
    """How far a row is, padded and beside a longer one, from the row alone."""
    row, pad = ids[:1, :12], torch.zeros(1, ids.shape[1] - 12, dtype=torch.long) + (model.config.pad_token_id or 0)
    one = torch.ones_like(row)
    zero = torch.zeros_like(pad)
    batch = torch.cat([torch.cat([pad, row] if left else [row, pad], 1), ids[1:]])
    mask = torch.cat([torch.cat([zero, one] if left else [one, zero], 1), torch.ones_like(ids[1:])])
    extra = {}
    if left and takes_positions(model):
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    seen = logits(model, batch, attention_mask=mask, **extra)[:1]
    alone = logits(model, row, attention_mask=one)
    return apart(alone, seen[:, -12:] if left else seen[:, :12])


def reference_alibi(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """ALiBi as its paper has it, written out pair by pair and added to the family's own eager attention."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    if not module.reference_bias:
        return own(module, query, key, value, attention_mask, **kwargs)
    heads, length = query.shape[1], query.shape[2]
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / closest) for h in range(closest)]
    slopes += [2 ** (-4 * (2 * h + 1) / closest) for h in range(heads - closest)]
    places = torch.arange(length)
    bias = -torch.tensor(slopes)[:, None, None] * (places[:, None] - places).abs()
    mask = bias[None] if attention_mask is None else bias[None] + attention_mask
    kwargs.pop("position_bias", None)
    return own(module, query, key, value, mask, **kwargs)


AttentionInterface.register("reference_alibi", reference_alibi)
AttentionMaskInterface.register("reference_alibi", eager_mask)


def judged(model_type: str) -> dict[str, str]:
    """Each scheme with a verdict: 'config', 'weights' or 'sealed' where it works, 'refused: ...' or 'wrong: ...'.

    Where layers read `rope_parameters` by themselves, models are judged that were born with a scaled RoPE as well.
    """
    torch.set_num_threads(1)
    found = judged_with(model_type, None)
    for rope in (PLAIN, SCALED) if "*" not in found and reads_rope(model_type) else ():
        other = judged_with(model_type, rope)
        found |= {k: f"wrong: with {rope}: {v}" for k, v in other.items() if v.startswith(("wrong", "cannot"))}
    return found


def judged_with(model_type: str, rope: dict[str, Any] | None) -> dict[str, str]:
    try:
        model = tiny_model(model_type, rope=rope)
        words = getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", (VOCAB,))[0]
        ids = tokens(2, POSITIONS - 8, min(words, VOCAB))
        base = Baseline(model, ids, causal=causal(model, model_type, ids))
    except Exception as error:
        return {"*": f"cannot be built here: {type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    asked = {**SCHEMES, **from_outside()}
    return {name: verdict(model, base, name, options) for name, options in asked.items()}


def reads_rope(model_type: str) -> bool:
    """Whether modules other than rotary ones note something else in a model that was born with a scaled RoPE."""
    try:
        plain, scaled = (noted(tiny_model(model_type, rope=rope)) for rope in (PLAIN, SCALED))
    except Exception:  # it has no RoPE, or several
        return False
    return plain != scaled


def noted(model: PreTrainedModel) -> dict[str, Any]:
    parts = [(path, m) for path, m in model.named_modules() if not hasattr(m, "inv_freq")]
    return {f"{path}.{k}": v for path, m in parts for k, v in vars(m).items() if isinstance(v, (int, float))}


def causal(model: PreTrainedModel, model_type: str, ids: Tensor) -> bool:
    """Whether a model decodes: its head says so, or, where it has none, that it keeps a cache."""
    if model_type in {*CAUSAL, *MASKED}:
        return type(model).__name__.endswith(("CausalLM", "LMHeadModel"))
    if is_causal(model_type):
        return True
    with torch.no_grad():
        return getattr(model(input_ids=ids), "past_key_values", None) is not None


def from_outside() -> dict[str, dict[str, Any]]:
    """Schemes that are registered from outside, with what they must be told."""
    found = {name: cls for name, cls in REGISTERED.items() if not REGISTERED.origin(name).built_in}
    return {name: dict(cls.example) or ({"factor": 4.0} if cls.extends else {}) for name, cls in found.items()}


class Baseline:
    """What the unpatched model says, and how well it obeys by itself."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, causal: bool):
        self.ids, self.causal = ids, causal
        self.logits = logits(model, ids)
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.cached = self._error(lambda: cached_error(model, ids)) if causal else None
        self.left = self._error(lambda: padded_error(model, ids, left=True)) if causal else None
        self.right = self._error(lambda: padded_error(model, ids, left=False))

    @staticmethod
    def _error(measured: Any) -> float | None:
        """None where the model itself cannot be asked, or does not obey."""
        try:
            error = measured()
        except Exception:
            return None
        return error if error < NEAR else None


def verdict(model: PreTrainedModel, base: Baseline, scheme: str, options: dict[str, Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                patch_model(model, scheme, **options)
            except PosencError as missing:
                if "trained_length=" not in str(missing):
                    raise
                patch_model(model, scheme, trained_length=POSITIONS, **options)
    except PosencError as reason:
        return _refusal(model, base, reason)
    except Exception as error:
        return f"wrong: patching fails with {type(error).__name__}: {str(error)[:200]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            obey(model, base, scheme)
        grade = describe(model).portability.partition(":")[0]
        if scheme in REFERENCES:
            REFERENCES[scheme](model, base)
    except PosencError as reason:
        unpatch_model(model)
        return f"wrong: the patch was made, and then: {reason}"
    except Wrong as law:
        return f"wrong: {law}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {str(error)[:200]}"
    unpatch_model(model)
    same = torch.equal(logits(model, base.ids), base.logits)
    state = model.state_dict()
    if not same or state.keys() != base.state.keys() or not all(torch.equal(state[k], base.state[k]) for k in state):
        return "wrong: unpatching does not restore the model"
    return grade


def _refusal(model: PreTrainedModel, base: Baseline, reason: Exception) -> str:
    if not torch.equal(logits(model, base.ids), base.logits):
        return "wrong: a refused patch changed the model"
    return f"refused: {reason}"


def obey(model: PreTrainedModel, base: Baseline, scheme: str) -> None:
    """Raise where the patched model breaks a law that the unpatched one obeys."""
    check_model(model)
    said = logits(model, base.ids)
    if not said.isfinite().all():
        raise Wrong("logits are not finite")
    below = scheme == "dynamic_ntk"  # changes nothing within the trained length
    ids = torch.cat([base.ids] * 3, 1) if below else base.ids
    if below:
        said = logits(model, ids)
    elif torch.equal(said, base.logits) and not (scheme == "none" and places(model).family.positions == "none"):
        raise Wrong("the output does not change")
    if base.cached is not None and cached_error(model, ids) > NEAR:
        raise Wrong(f"cached decoding differs from a full pass by {cached_error(model, ids):.2g}")
    if base.left is not None and padded_error(model, base.ids, left=True) > NEAR:
        raise Wrong(f"left padding changes a row by {padded_error(model, base.ids, left=True):.2g}")
    if base.right is not None and padded_error(model, base.ids, left=False) > NEAR:
        raise Wrong(f"right padding changes a row by {padded_error(model, base.ids, left=False):.2g}")
    travel(model, ids, said)


def travel(model: PreTrainedModel, ids: Tensor, said: Tensor) -> None:
    """Saved and loaded: with this package exactly, without it exactly or not at all."""
    grade = describe(model).portability.partition(":")[0]
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        loaded = logits(load(folder).eval(), ids)
        if apart(said, loaded) > SAME:
            raise Wrong(f"load gives other logits, by {apart(said, loaded):.2g}")
        try:
            plain = type(model).from_pretrained(folder)
        except Exception:
            if grade != "sealed":
                raise Wrong(f"a plain load of a {grade!r} checkpoint fails") from None
            return
        try:
            found = logits(plain.eval(), ids)
        except Exception:
            return
        if apart(said, found) > SAME:
            raise Wrong(f"a plain load is silently wrong by {apart(said, found):.2g}")


def compare_alibi(model: PreTrainedModel, base: Baseline) -> None:
    """Our bias against a dense one on the same model with its own positions taken away."""
    said = logits(model, base.ids)
    twin = copy.deepcopy(model)
    layers = dict(model.named_modules())
    biased = {name for name, m in layers.items() if getattr(vars(m).get("posenc_link"), "root", None) is not None}
    for name, module in twin.named_modules():
        if "posenc_link" in vars(layers.get(name, module)):
            module.config._attn_implementation = "reference_alibi"
            module.reference_bias = name in biased
            module._forward_pre_hooks.clear()
    meant = logits(twin, base.ids)
    if apart(meant, said) > NEAR:
        raise Wrong(f"ALiBi differs from the reference by {apart(meant, said):.2g}")


def compare_dynamic_ntk(model: PreTrainedModel, base: Baseline) -> None:
    """Where every query is in the same stage, our rotation must be the family's own with that stage's theta."""
    told = places(model).has_rotary or (places(model).has_table and base.causal)
    if not takes_positions(model) or not told:
        return  # attention is not told where it stands
    far = {"position_ids": torch.arange(100, 100 + base.ids.shape[1])[None].expand(2, -1)}
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch_model(twin, "dynamic_ntk", factor=2.0, step=10_000)
        one = logits(twin, base.ids, **far)
        trained = describe(twin).trained_length
        try:
            patch_model(twin, "ntk", factor=2.0, alpha=1 + 2.0 * 10_000 / trained)
            other = logits(twin, base.ids, **far)
        except PosencError:
            return
    if apart(one, other) > 10 * NEAR:  # angles of far positions, rounded in another order
        raise Wrong(f"dynamic_ntk differs from ntk of its stage by {apart(one, other):.2g}")


def compare_plain(scheme: str, model: PreTrainedModel, base: Baseline) -> None:
    """Where the whole text is near, our attention must be the family's own: sinks, caps, layouts and all."""
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch_model(twin, scheme, window=POSITIONS - 4, trained_length=POSITIONS - 2)
    if apart(base.logits, logits(twin, base.ids)) > NEAR:
        raise Wrong(f"within its window it differs from the model by {apart(base.logits, logits(twin, base.ids)):.2g}")


REFERENCES = {
    "alibi": compare_alibi,
    "dynamic_ntk": compare_dynamic_ntk,
    "rerope": partial(compare_plain, "rerope"),
    "window": partial(compare_plain, "window"),
}
