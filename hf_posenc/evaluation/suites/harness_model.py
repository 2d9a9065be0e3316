"""Our models in lm-evaluation-harness: `--model hf-posenc`. Importing this registers it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import PreTrainedModel

from ...checkpoints.load import load
from ...checkpoints.tokenizers import tokenizer_of
from ...compat.harness import CountedLM
from ...errors import PosencError, suggestion

REFUSED = ("peft", "delta", "autogptq", "gptqmodel", "gguf_file", "parallelize", "tp_plan")
"""Arguments with which HFLM would load a model itself, without `hf_posenc.load`."""
LOADING = ("revision", "subfolder", "dtype", "device_map", "attn_implementation", "base", "token", "cache_dir")
"""Arguments for `hf_posenc.load`; all others go to HFLM."""
OWN = frozenset(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}


@register_model("hf-posenc")
class PatchedLM(CountedLM):
    """HFLM on a model from `hf_posenc.load`. It refuses a prompt that does not fit instead of truncating it."""

    def __init__(self, pretrained: str | PreTrainedModel, tokenizer: Any = None, **kwargs: Any):
        refused = [name for name in REFUSED if kwargs.pop(name, None)]
        if refused:
            raise PosencError(
                f"{', '.join(refused)} cannot be given to hf-posenc: pretrained= takes a checkpoint, a patched one or "
                "a PEFT adapter as it is, and device_map= spreads it over devices."
            )
        loading = {name: kwargs.pop(name) for name in LOADING if kwargs.get(name) is not None}
        for name in kwargs:
            if name not in OWN:  # HFLM would ignore it silently
                raise PosencError(f"Unknown model argument {name!r}.{suggestion(name, [*LOADING, *OWN])}")
        if isinstance(pretrained, str):
            model = load(pretrained, **loading)
            if "device_map" not in loading and is_usable(kwargs.get("device")):
                model = model.to(kwargs["device"])
        else:
            model = pretrained
        super().__init__(pretrained=model, tokenizer=choose_tokenizer(tokenizer, pretrained, model), **kwargs)

    def get_model_info(self) -> dict[str, Any]:
        """Does not ask the hub, as HFLM does, with the model in place of its name."""
        return {"model_num_parameters": self.model.num_parameters(), "model_dtype": str(self.model.dtype)}

    def tokens_needed(self, request: Instance) -> int:
        """Tokens of the prompt and of the longest answer that the task allows."""
        prompt, given = request.args
        return len(self.tok_encode(prompt)) + int(normalize_gen_kwargs(given, self.max_gen_toks)["max_gen_toks"])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.about_to_read(map(self.tokens_needed, requests))
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def about_to_read(self, needed: Iterable[int]) -> None:
        longest = max(needed, default=0)
        if longest > self.max_length:
            raise PosencError(
                f"A prompt with its answer needs {longest} tokens and max_length is {self.max_length}: lm-eval would "
                f"cut off its beginning. Pass max_length={longest} or more (in --model_args), or shorter tasks."
            )


def is_usable(device: str | None) -> bool:
    """Whether the device exists: lm-eval's default is `cuda:0`, and it runs on the CPU without one."""
    return device is not None and (not device.startswith("cuda") or torch.cuda.is_available())


def choose_tokenizer(given: Any, pretrained: Any, model: Any) -> Any:
    """The tokenizer that was given, else that of the checkpoint or of an adapter's base model."""
    if given is not None and not isinstance(given, str):
        return given
    adapters = getattr(model, "peft_config", None)
    base = adapters["default"].base_model_name_or_path if adapters else None
    places = [given] if given else [pretrained if isinstance(pretrained, str) else model.name_or_path, base]
    tokenizer = tokenizer_of(*places)
    if tokenizer is None:
        raise PosencError(f"No tokenizer can be read at {' or '.join(filter(None, places))}; name one: tokenizer=.")
    return tokenizer
