"""ViT and DeiT: a learned table, whose first rows are for tokens that are not patches."""

from .base import VisionFamily, register_family

register_family(VisionFamily(name="vit", model_types=("vit",)))
register_family(VisionFamily(name="deit", model_types=("deit",), offset=lambda config: 2))
