"""The errors of this package, and the tail of a message about a name that is not known."""

from difflib import get_close_matches


class PosencError(ValueError):
    """A request that cannot be met. The model is as it was before."""


class UnsupportedModel(PosencError):
    """The model is of a kind that this package cannot patch."""


class UnsupportedCell(PosencError):
    """This scheme has no meaning, or no exact rendering, on this model."""


class MissingPackage(PosencError, ImportError):
    """Something that only a part of this package needs is not installed."""


class UntrainedWarning(UserWarning):
    """The model is patched as asked, and will not work well before it is trained."""


def suggestion(name: object, known: list[str]) -> str:
    """The tail of an error message about an unknown name."""
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(sorted(known))}."
