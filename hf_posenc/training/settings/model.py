"""`model` and `scheme`: the model to train, and its positions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from ...errors import suggestion
from ...schemes import SCHEMES
from ...schemes.plans import is_plan, plan_from
from .values import Section, length_of

LENGTHS = ("target_length", "trained_length")
"""Options of a scheme that are lengths."""
OF_THE_PATCH = ("existing", "layer_types")
"""Arguments of `patch_model` that are not options of a scheme."""


class ModelSettings(Section):
    """The model to train: an existing one, or a fresh one."""

    path: str | None = None
    """A folder, a hub name, or `tiny`, the model inside this package."""
    config: dict[str, Any] | None = None
    """Instead of a path: the config of a new model, which is trained from scratch."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default that of the model."""
    objective: Literal["causal", "masked", "contrastive"] = "causal"
    """What the model learns to predict: the next token, masked tokens, or which texts belong together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision that the model computes and is saved in. Trained parameters are always held in float32."""
    quantize: Literal["nf4", "fp4"] | None = None
    """Hold frozen weights of linear layers in 4 bits (QLoRA) with bitsandbytes. Needs `tune.lora`."""
    attn_implementation: str | None = None
    """`sdpa`, `eager`, `flash_attention_2` ..., as in transformers."""
    trust_remote_code: bool = False
    """Run code from the model's repository on the hub."""

    @field_validator("dtype", mode="before")
    @classmethod
    def holds_gradients(cls, dtype: Any) -> Any:
        if dtype == "float16":
            raise ValueError("gradients vanish in float16 without loss scaling: use bfloat16 or float32")
        return dtype

    @model_validator(mode="after")
    def one_model(self) -> ModelSettings:
        if (self.path is None) == (self.config is None):
            raise ValueError("name either a model (path) or the config of a fresh one (config)")
        if self.config is not None and (self.tokenizer is None or "model_type" not in self.config):
            raise ValueError("a fresh model needs tokenizer, and model_type in its config")
        return self


class SchemeSettings(BaseModel):
    """The name of a scheme, and its options, which the scheme checks."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    name: str | None = None
    """A scheme (`hf-posenc schemes` lists them) or a plan. Without one nothing is patched, as in a control."""

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str | None) -> str | None:
        if name is not None and not is_plan(name) and name not in SCHEMES:
            raise ValueError(f"unknown scheme {name!r}.{suggestion(name, list(SCHEMES))}")
        return name

    @model_validator(mode="after")
    def options_have_a_scheme(self) -> SchemeSettings:
        if self.name is None and self.options:
            raise ValueError(f"options {sorted(self.options)} without a scheme's name")
        own = {k: v for k, v in self.options.items() if k not in OF_THE_PATCH}
        if self.name is not None and is_plan(self.name):
            plan_from(self.name, own)
        elif self.name is not None:
            SCHEMES[self.name].from_options(own)
        return self

    @property
    def options(self) -> dict[str, Any]:
        given = dict(self.model_extra or {})
        return {key: length_of(value) if key in LENGTHS else value for key, value in given.items()}
