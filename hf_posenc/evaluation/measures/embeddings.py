"""Embeddings of texts: by a SentenceTransformer, or the mean of a transformers model's last hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import PosencError
from ...patching.embedders import is_embedder
from ...patching.lengths import reach
from ...patching.patch_state import unwrap_model
from .estimates import mean_and_error
from .haystacks import Haystacks, haystacks
from .needles import fit_text
from .perplexity import Progress, chunks, rows_together
from .processes import ALONE, Processes
from .retrieval import accuracy
from .rows import Row
from .texts import Document

MEAN = "the mean of the last states"


class Embedder(Protocol):
    """Computes unit vectors of texts, which are truncated at `limit` tokens."""

    model: Any
    tokenizer: Any
    limit: int | None
    pooling: str

    def queries(self, texts: Sequence[str]) -> Tensor: ...

    def documents(self, texts: Sequence[str]) -> Tensor: ...


class Pooled:
    """A transformers model with mean pooling over all tokens but padding."""

    pooling = MEAN

    def __init__(self, model: Any, tokenizer: Any):
        if unwrap_model(model).config.is_encoder_decoder:
            raise PosencError(
                f"{type(unwrap_model(model)).__name__} has an encoder and a decoder, so it is not defined what its "
                "embedding of a text is. Evaluate its encoder alone, or a SentenceTransformer of it."
            )
        self.model, self.tokenizer, self.limit = model, tokenizer, reach(model)

    @torch.no_grad()
    def queries(self, texts: Sequence[str]) -> Tensor:
        cut: dict[str, Any] = {"truncation": True, "max_length": self.limit} if self.limit else {}
        rows = [self.tokenizer(text, verbose=False, **cut)["input_ids"] for text in texts]
        longest, filling = max(map(len, rows)), self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        states = unwrap_model(self.model).base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask[..., None].float()
        return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1).cpu()

    documents = queries


class Sentences:
    """A SentenceTransformer with its own pooling, prompts and maximum length."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer, self.limit = model, tokenizer, model.max_seq_length
        self.pooling = "; ".join([*map(str, list(model)[1:]), *(f"{k}={v}" for k, v in model.prompts.items() if v)])

    def queries(self, texts: Sequence[str]) -> Tensor:
        return self._encode_batch(self.model.encode_query, texts)

    def documents(self, texts: Sequence[str]) -> Tensor:
        return self._encode_batch(self.model.encode_document, texts)

    def _encode_batch(self, encode: Callable[..., Tensor], texts: Sequence[str]) -> Tensor:
        given = {"batch_size": len(texts), "show_progress_bar": False, "convert_to_tensor": True}
        return F.normalize(encode(list(texts), **given).float(), dim=-1).cpu()


class Chunked(Embedder):
    """The baseline without a patch: split a long text into equal pieces, and average their embeddings."""

    def __init__(self, whole: Embedder, length: int):
        self.whole, self.length = whole, min(length, whole.limit or length)
        self.model, self.tokenizer, self.limit = whole.model, whole.tokenizer, None
        self.pooling = f"{whole.pooling}, of each of equal pieces of up to {self.length} tokens, and their mean"

    def queries(self, texts: Sequence[str]) -> Tensor:
        return self.whole.queries(texts)

    def documents(self, texts: Sequence[str]) -> Tensor:
        found = []
        for text in texts:
            made = self.whole.documents(pieces(text, self.tokenizer, self.length))
            found.append(F.normalize(made.mean(0), dim=-1))
        return torch.stack(found)


def embedder_of(model: Any, tokenizer: Any) -> Embedder:
    return Sentences(model, tokenizer) if is_embedder(model) else Pooled(model, tokenizer)


def pieces(text: str, tokenizer: Any, length: int) -> list[str]:
    """Split a text into as few pieces of at most `length` tokens as possible, all about equally long."""
    words = text.split()
    special = len(tokenizer("")["input_ids"])
    sizes = [len(ids) for ids in tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]]
    total, count = sum(sizes), 0
    while True:
        count = max(count + 1, math.ceil(total / (length - special)))
        found: list[list[str]] = [[]]
        room = total / count
        used = seen = 0
        for word, size in zip(words, sizes, strict=True):
            if found[-1] and (used + size > length - special or seen >= room * len(found)):
                found.append([])
                used = 0
            found[-1].append(word)
            used, seen = used + size, seen + size
        if len(found) <= count or count > len(words):
            return [" ".join(piece) for piece in found]


def embed(
    make: Callable[[Sequence[str]], Tensor], texts: Sequence[str], sizes: Sequence[int], together: int | None,
    device: str, progress: Progress | None = None, shared: Processes = ALONE,
) -> Tensor:  # fmt: skip
    """The embeddings of texts, in their order, computed in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda i: -sizes[i])

    def read(batch: list[int]) -> Tensor:
        vectors = make([texts[i] for i in batch])
        broken = ~vectors.isfinite().all(-1)
        if broken.any():
            raise PosencError(
                f"{int(broken.sum())} of {len(batch)} embeddings are not finite numbers: the model overflows or its "
                "weights are broken. Load it in float32 or bfloat16, or look at its weights."
            )
        if progress is not None:
            progress(sum(sizes[i] for i in batch) * shared.count)
        return vectors

    cut = list(chunks(order, together or rows_together(max(sizes), device)))
    found: dict[int, Tensor] = {}
    for batch, vectors in zip(cut, shared.each(cut, read), strict=True):
        found.update(zip(batch, vectors, strict=True))
    return torch.stack([found[i] for i in range(len(texts))])


def embedding_retrieval(
    embedder: Embedder,
    task: str,
    length: int,
    *,
    asked: Haystacks | None = None,
    documents: Sequence[Document] = (),
    batch_size: int | None = None,
    scheme: str = "unpatched",
    progress: Progress | None = None,
    shared: Processes = ALONE,
) -> list[Row]:
    """The share of queries whose own document is the nearest by cosine (accuracy at 1)."""
    asked = asked or Haystacks()
    straws = haystacks(task, length, embedder.tokenizer, asked, documents)
    asking, device = straws[: asked.queries], embedder.model.device.type
    sizes = [straw.tokens for straw in straws]
    texts = embed(embedder.documents, [s.text for s in straws], sizes, batch_size, device, progress, shared)
    short = [len(s.query) for s in asking]
    queries = embed(embedder.queries, [s.query for s in asking], short, batch_size, device)
    ranks = own_ranks(queries, texts)
    value, error = accuracy([float(rank == 1) for rank in ranks])
    details: dict[str, Any] = {
        "how": "a query counts where its own document is the nearest of all by cosine; error after Agresti and Coull",
        "chance": 1 / len(straws),
        "queries": len(asking),
        "documents": len(straws),
        "tokens": sizes,
        "read": [min(size, embedder.limit or size) for size in sizes],
        "pooling": embedder.pooling,
        "seed": asked.seed,
        "answers": [{"query": s.query, "depth": s.depth, "rank": r} for s, r in zip(asking, ranks, strict=True)],
    }
    row = Row(
        task=task, protocol="cosine", scheme=scheme, length=length, metric="accuracy", value=value, stderr=error,
        n=len(asking), details=details,
    )  # fmt: skip
    return [row]


def own_ranks(queries: Tensor, documents: Tensor) -> list[int]:
    """The rank of each query's own document, the one with its index, among all. Ties count against it."""
    scores = queries @ documents.T
    own = scores.diagonal()[:, None]
    return [int(rank) for rank in (scores >= own).sum(1)]


PASSAGES = 50
"""Short texts whose embeddings are compared."""


def passages(documents: Sequence[Document], length: int, tokenizer: Any, count: int = PASSAGES) -> list[str]:
    """Passages of about `length` tokens, spread evenly over the documents."""
    found = []
    for index, document in enumerate(documents):
        words = document.text.split()
        each = len(range(index, count, len(documents)))
        for i in range(each):
            start = max(0, len(words) - length) * i // max(1, each - 1)
            taken = words[start : start + length]
            found.append(fit_text(lambda n, taken=taken: " ".join(taken[:n]), tokenizer, length, len(taken))[0])  # type: ignore[misc]
    return found


def similarity_rows(before: Tensor, after: Tensor, scheme: str, length: int) -> list[Row]:
    """What a patch changes on short texts: how far embeddings moved, and whether neighbours kept their order."""
    figures = {
        "cosine": (
            (before * after).sum(-1).double().tolist(),
            "the cosine between a short text's embeddings with and without the patch, averaged over texts",
        ),
        "rank_agreement": (
            [spearman(one, other) for one, other in zip(others(before), others(after), strict=True)],
            "Spearman's correlation between a text's similarities to all others with and without the patch, averaged "
            "over texts",
        ),
    }
    found = []
    for metric, (values, how) in figures.items():
        value, error = mean_and_error(values)
        details = {"how": how, "tokens": length, "documents": len(values)}
        row = Row(
            task="similarity", protocol="paired", scheme=scheme, length=length, metric=metric, value=value,
            stderr=error, n=len(values), details=details,
        )  # fmt: skip
        found.append(row)
    return found


def others(vectors: Tensor) -> Tensor:
    """For each text, its similarity to every other one."""
    count = len(vectors)
    scores = vectors @ vectors.T
    return scores[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)


def spearman(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation. Ties are ranked in order of index: real scores are seldom equal."""
    ranks = torch.stack([values.double().argsort().argsort() for values in (one, other)]).double()
    return float(torch.corrcoef(ranks)[0, 1])
