"""sentence-transformers: an embedder put together around a model that is there already."""

from __future__ import annotations

from typing import Any


def embedder_around(inner: Any, path: str, kind: str, **where: Any) -> Any:
    """The SentenceTransformer that was saved at `path`, with `inner` in the place of its model.

    `kind`: how its modules.json names the class of its first module, which is the library's own Transformer.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    class Given(Transformer):
        """The library's own module, which is handed its model and loads none."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return inner

    made = SentenceTransformer._load_with_module_classes(path, {kind: Given}, device=str(inner.device), **where)
    made[0].__class__ = Transformer  # as it would be saved and pickled
    return made
