"""sentence-transformers: builds an embedder around a model that is already loaded."""

from __future__ import annotations

from typing import Any


def embedder_around(inner: Any, path: str, kind: str, **where: Any) -> Any:
    """The SentenceTransformer that was saved at `path`, with `inner` in place of its model.

    `kind` is the class name of its first module in modules.json, which must be the library's own Transformer.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    class Given(Transformer):
        """The library's own module, with the given model instead of a loaded one."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return inner

    made = SentenceTransformer._load_with_module_classes(path, {kind: Given}, device=str(inner.device), **where)
    made[0].__class__ = Transformer  # the local class could not be saved or pickled
    return made
