"""Search for the best factors or options of a scheme, or recommend a scheme."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .budget import Budget
    from .recommend import Advice, recommend
    from .search import Found, search

__all__ = ["Advice", "Budget", "Found", "recommend", "search"]
_HOMES = {
    ".budget": ("Budget",),
    ".recommend": ("Advice", "recommend"),
    ".search": ("Found", "search"),
}
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
