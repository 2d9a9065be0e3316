"""The vision towers of CLIP and SigLIP, by themselves or in the whole model."""

from .base import ImageFamily, register_family

register_family(
    ImageFamily(
        name="clip_vision",
        model_types=("clip_vision_model",),
        wholes=("clip",),
        table="position_embedding",
        convolution="patch_embedding",
    )
)
register_family(
    ImageFamily(
        name="siglip_vision",
        model_types=("siglip_vision_model",),
        wholes=("siglip",),
        table="position_embedding",
        convolution="patch_embedding",
        special=0,
    )
)
