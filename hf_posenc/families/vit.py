"""ViT and DeiT: a learned table, its first rows for tokens that are no patches."""

from .base import ImageFamily, register_family

register_family(ImageFamily(name="vit", model_types=("vit",)))
register_family(ImageFamily(name="deit", model_types=("deit",), special=2))
