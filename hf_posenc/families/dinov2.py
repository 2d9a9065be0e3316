"""DINOv2, without and with registers."""

from .base import VisionFamily, register_family

register_family(VisionFamily(name="dinov2", model_types=("dinov2",)))
register_family(
    VisionFamily(
        name="dinov2_with_registers",
        model_types=("dinov2_with_registers",),
        registers="num_register_tokens",
        antialias=True,
    )
)
