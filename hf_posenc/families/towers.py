"""Every place in one live model of images where positions enter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from .base import IMAGE_FAMILIES, ImageFamily
from .finding import Site, attention_layers, module_at


@dataclass(frozen=True)
class ImagePlaces:
    """Where positions enter one live model of images."""

    family: ImageFamily
    model: PreTrainedModel
    root: Any
    """The headless model that takes pixels."""

    @property
    def base(self) -> Any:
        return self.model.base_model

    @property
    def config(self) -> Any:
        """The config that speaks of images: the model's own, or that of its vision part."""
        return self.root.config

    @property
    def embeddings(self) -> Any:
        return self.root.embeddings

    @property
    def convolution(self) -> nn.Conv2d:
        found: nn.Conv2d = self.embeddings.get_submodule(self.family.convolution)
        return found

    @property
    def table(self) -> Site:
        return Site(self.embeddings, self.family.table)

    @property
    def biases(self) -> list[Site]:
        """The relative position biases that the model has."""
        held = ((module, name) for module in self.root.modules() for name in self.family.biases)
        return [Site(module, name) for module, name in held if getattr(module, name, None) is not None]

    @property
    def attentions(self) -> list[Any]:
        return attention_layers(self.root, self.config.model_type)[0]

    @property
    def patch(self) -> tuple[int, int]:
        height, width = self.convolution.stride
        return int(height), int(width)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the images that the config speaks of."""
        height, width = pair(self.config.image_size)
        return height // self.patch[0], width // self.patch[1]

    @property
    def special(self) -> int:
        """Tokens of attention that stand before the patches."""
        registers = getattr(self.config, self.family.registers) if self.family.registers else 0
        return self.family.special + int(registers)


def pair(size: Any) -> tuple[int, int]:
    """A height and a width, where a config may have one number for both."""
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def image_family(kind: str) -> ImageFamily | None:
    """The family of a model type that reads images, or holds a model that does."""
    return next((f for f in IMAGE_FAMILIES.values() if kind in (*f.model_types, *f.wholes)), None)


def image_places(model: PreTrainedModel) -> ImagePlaces | None:
    """Where positions enter a model of images; None for other models. Raises if it is not built as expected."""
    kind = model.config.model_type
    family = image_family(kind)
    if family is None:
        return None
    base: Any = model.base_model
    root = getattr(base, "vision_model", None) if kind in family.wholes else base
    for path in ("embeddings", f"embeddings.{family.convolution}"):
        if root is None or module_at(root, path) is None:
            raise UnsupportedModel(
                f"{type(model).__name__} (model type {kind!r}) is not built as the {family.name!r} family expects: "
                f"{type(root if root is not None else base).__name__} has no {path!r}. This transformers may be too "
                "new or too old."
            )
    return ImagePlaces(family, model, root)
