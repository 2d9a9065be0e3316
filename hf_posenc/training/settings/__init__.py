"""The keys of a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from .data import DataSettings, LongDocuments, Source, WeightedSource
from .measure import MeasureSettings
from .model import ModelSettings, SchemeSettings
from .train import TrainSettings
from .tune import LoraSettings, TuneSettings
from .values import Section

__all__ = [
    "DataSettings",
    "LongDocuments",
    "LoraSettings",
    "MeasureSettings",
    "ModelSettings",
    "SchemeSettings",
    "Settings",
    "Source",
    "TrainSettings",
    "TuneSettings",
    "WeightedSource",
]


class Settings(Section):
    """A recipe: sections of keys, and where its results are written."""

    model: ModelSettings
    scheme: SchemeSettings = SchemeSettings()
    data: DataSettings
    tune: TuneSettings = TuneSettings()
    train: TrainSettings
    measure: MeasureSettings = MeasureSettings()
    output: str
    """The folder that everything is written to."""

    def of_run(self) -> dict[str, Any]:
        """The settings that identify a run: all but the output folder."""
        return self.model_dump(exclude={"output"})

    @model_validator(mode="after")
    def fresh_is_whole(self) -> Settings:
        if self.model.config is not None and not self.tune.whole:
            raise ValueError("a fresh model has no trained weights for an adapter to build on: set tune.whole: true")
        return self

    @model_validator(mode="after")
    def four_bits_are_frozen(self) -> Settings:
        if self.model.quantize is not None and self.tune.lora is None:
            raise ValueError("model.quantize holds weights in 4 bits, which cannot be trained: set tune.lora")
        return self

    @model_validator(mode="after")
    def answers_are_continuations(self) -> Settings:
        other = next((source.format for source in self.data.all_sources if source.format != "text"), None)
        if other is not None and self.model.objective != "causal":
            raise ValueError(f"data.format: {other} is for model.objective: causal, not {self.model.objective}")
        return self
