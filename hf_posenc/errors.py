"""The errors and the warning of this package, and the hint that ends a message about an unknown name."""

from difflib import get_close_matches


class PosencError(ValueError):
    """A request that cannot be met. The model is left unchanged."""


class UnsupportedModel(PosencError):
    """This package cannot patch this kind of model."""


class UnsupportedCell(PosencError):
    """This scheme makes no sense on this model, or cannot be computed exactly there."""


class MissingPackage(PosencError, ImportError):
    """A package that is needed only for some features is not installed."""


class UntrainedWarning(UserWarning):
    """The model is patched as requested, but must be trained before it works well."""


def suggestion(name: object, known: list[str]) -> str:
    """The end of an error message about an unknown name: the closest known name, then all of them."""
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(sorted(known))}."
