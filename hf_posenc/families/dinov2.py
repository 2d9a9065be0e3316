"""DINOv2, without and with registers."""

from .base import ImageFamily, register_family

register_family(ImageFamily(name="dinov2", model_types=("dinov2",)))
register_family(
    ImageFamily(
        name="dinov2_with_registers",
        model_types=("dinov2_with_registers",),
        registers="num_register_tokens",
        antialias=True,
    )
)
