"""ViT and DeiT: a learned table, its first rows for tokens that are no patches."""

from .base import VisionFamily, register_family

register_family(VisionFamily(name="vit", model_types=("vit",)))
register_family(VisionFamily(name="deit", model_types=("deit",), offset=lambda config: 2))
