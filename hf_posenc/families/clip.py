"""The vision towers of CLIP and SigLIP, alone or in the whole model."""

from functools import partial

from .base import VisionFamily, no_rows, register_family

Tower = partial(VisionFamily, table="embeddings.position_embedding", patches="embeddings.patch_embedding")
WHOLE = ("vision_model", "vision_config")

register_family(Tower(name="clip_vision", model_types=("clip_vision_model",)))
register_family(Tower(name="clip", model_types=("clip",), part=WHOLE))
register_family(Tower(name="siglip_vision", model_types=("siglip_vision_model",), offset=no_rows))
register_family(Tower(name="siglip", model_types=("siglip",), part=WHOLE, offset=no_rows))
