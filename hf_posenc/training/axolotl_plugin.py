"""axolotl: positions for the model that it trains, before adapters are put on it.

plugins: [hf_posenc.training.axolotl_plugin.PosencPlugin]
posenc: {scheme: yarn, target_length: 32768}
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from ..compat.models import attention_of
from ..errors import PosencError, suggestion
from ..patching.patch import patch_model
from ..runtime.positions import PREFIX
from ..schemes import SCHEMES
from .settings import SchemeSettings


class PosencArgs(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    posenc: dict[str, Any]
    """`scheme`, and the scheme's own options."""

    @field_validator("posenc")
    @classmethod
    def check_scheme(cls, asked: dict[str, Any]) -> dict[str, Any]:
        options = dict(asked)
        name = options.pop("scheme", None)
        if name not in SCHEMES:
            raise ValueError(f"posenc.scheme: unknown scheme {name!r}.{suggestion(str(name), list(SCHEMES))}")
        return {"scheme": name, **SchemeSettings(name=name, **options).options}


class PosencPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.PosencArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        options = dict(PosencArgs.check_scheme(dict(cfg.posenc or {})))
        name = options.pop("scheme")
        patch_model(model, name, **options)
        own = attention_of(model.config) or ""
        if cfg.sample_packing and own.startswith(PREFIX):
            raise PosencError(
                f"axolotl tells its own attention alone where packed texts end, and {name!r} brings another. Set "
                "sample_packing: false, or take a scheme that rescales RoPE ('yarn', 'linear', 'ntk')."
            )
