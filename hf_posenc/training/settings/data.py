"""`data`: text, and how rows are cut from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .values import Length, Section


class Pose(Section):
    """PoSE: rows of `data.length` whose positions skip ahead, up to `target_length`."""

    target_length: Length = Field(gt=0)
    """How far positions reach."""
    chunks: int = Field(default=2, ge=2)
    """The number of pieces that a row is cut into."""


class Randomized(Section):
    """Sorted random positions below `target_length` (Ruoss et al. 2023). Good on algorithmic tasks, bad for language:
    for texts take PoSE, whose tokens keep their neighbours."""

    target_length: Length = Field(gt=0)
    """How far positions reach."""


class Short(Section):
    """Cut a share of the rows into short pieces, so that the model does not forget short texts."""

    share: float = Field(gt=0, lt=1)
    """The share of such rows."""
    length: Length = Field(gt=1)
    """Tokens in a piece."""


class Stage(Section):
    """Some steps with rows of another length."""

    length: Length = Field(gt=1)
    """Tokens in a row."""
    steps: int = Field(gt=0)
    """The number of steps at this length."""


class LongDocuments(Section):
    """Read long documents more often, since only they use the length of long rows."""

    tokens: int = Field(gt=1)
    """Documents with at least so many tokens are long."""
    weight: float = Field(gt=1)
    """How often they are read, relative to others."""


class Source(Section):
    """Where text comes from, and its format."""

    path: str | list[str] = "stdlib"
    """`stdlib`, files (.txt, .jsonl, .parquet, patterns such as books/*.txt), or the name of a dataset."""
    name: str | None = None
    """The configuration of a dataset that has several."""
    split: str = "train"
    """The split of a dataset on the hub."""
    format: Literal["text", "prompt_completion", "chat"] = "text"
    """`prompt_completion` and `chat` train only on completions and the assistant's turns; examples stay whole."""
    column: str = "text"
    """The column of texts."""
    prompt: str = "prompt"
    """The column of prompts."""
    completion: str = "completion"
    """The column of completions."""
    messages: str = "messages"
    """The column of chats: lists of {role, content}, rendered by the tokenizer's own template."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with examples longer than a row. They are never cut: that would teach answers that do not end."""
    streaming: bool | None = None
    """Read the text while training, in order. By default only if it is too large for memory as tokens."""


class WeightedSource(Source):
    """One source of several."""

    weight: float = Field(default=1.0, gt=0)
    """The share of rows that come from it, against the weights of the others."""


class DataSettings(Source):
    """Text, and how rows are cut from it."""

    sources: list[WeightedSource] = []
    """Several sources with weights, instead of `path` and its keys."""
    long_documents: LongDocuments | None = None
    """Read long documents more often."""
    held_out: float = Field(default=0.05, gt=0, lt=0.5)
    """The share of the text that is kept from training, to measure on."""
    length: Length = Field(gt=1)
    """Tokens in a row: 4096 or 4k."""
    documents: Literal["separate", "joined"] = "separate"
    """`separate`: positions restart at document boundaries, which attention does not cross. `joined`: one stream."""
    passkey: float = Field(default=0.0, ge=0, lt=1)
    """The share of rows that hide a number and ask for it. Passkey scores are optimistic then."""
    answer_weight: float = Field(default=1.0, ge=1)
    """The weight of the tokens of such a number, relative to others."""
    short: Short | None = None
    """Cut a share of the rows into short pieces."""
    pose: Pose | None = None
    """Skip positions (PoSE), so that short rows train long distances."""
    randomized: Randomized | None = None
    """Draw positions at random, for algorithmic tasks."""
    stages: list[Stage] = []
    """Row lengths in order; the steps that are left have `length`."""
    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """The share of tokens that masked language modelling hides."""

    @model_validator(mode="after")
    def one_way_to_say_it(self) -> DataSettings:
        given = self.model_fields_set & set(Source.model_fields)
        if self.sources and given:
            raise ValueError(f"{', '.join(sorted(given))} beside sources: set it for each source")
        return self

    @model_validator(mode="after")
    def examples_stay_whole(self) -> DataSettings:
        if all(source.format == "text" for source in self.all_sources):
            return self
        cut = [key for key in ("pose", "randomized", "short", "stages") if getattr(self, key)]
        if cut:
            raise ValueError(f"{', '.join(cut)} would cut prompts from their answers: they are for text")
        if self.documents == "joined":
            raise ValueError("an answer must not attend to another prompt: set documents: separate")
        return self

    @model_validator(mode="after")
    def long_documents_are_known(self) -> DataSettings:
        if self.long_documents and any(s.streaming or s.format != "text" for s in self.all_sources):
            raise ValueError("long_documents needs all texts in memory: set format: text and streaming: false")
        return self

    @model_validator(mode="after")
    def fits(self) -> DataSettings:
        for name in self.keys_that_skip:
            target = getattr(self, name).target_length
            if target <= self.length:
                raise ValueError(f"{name}.target_length {target} must exceed length {self.length}")
            if self.stages:
                raise ValueError(f"{name} and stages are two ways to the same end: take one")
            if self.documents == "separate":
                raise ValueError(
                    f"{name} skips positions within a row, which must be one piece: set documents: joined"
                )
        if len(self.keys_that_skip) > 1:
            raise ValueError("pose and randomized are two ways to the same end: take one")
        if self.short and self.short.length >= self.length:
            raise ValueError(f"short.length {self.short.length} must be less than length {self.length}")
        return self

    @property
    def all_sources(self) -> list[WeightedSource]:
        """All sources, with their weights."""
        if self.sources:
            return list(self.sources)
        return [WeightedSource(**{key: getattr(self, key) for key in Source.model_fields})]

    @property
    def lengths(self) -> list[int]:
        """All lengths of rows, in order."""
        return [*(stage.length for stage in self.stages), self.length]

    @property
    def reach(self) -> int:
        """The largest position plus one."""
        return (
            max(self.lengths) if not self.keys_that_skip else int(getattr(self, self.keys_that_skip[0]).target_length)
        )

    @property
    def keys_that_skip(self) -> list[str]:
        """The keys that are set and skip positions within a row."""
        return [name for name in ("pose", "randomized") if getattr(self, name) is not None]
