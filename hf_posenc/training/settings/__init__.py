"""What a recipe may say, key by key."""

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
    """A recipe: sections of keys, and where it is written."""

    model: ModelSettings
    scheme: SchemeSettings = SchemeSettings()
    data: DataSettings
    tune: TuneSettings = TuneSettings()
    train: TrainSettings
    measure: MeasureSettings = MeasureSettings()
    output: str
    """The folder that all is written to."""

    def of_run(self) -> dict[str, Any]:
        """What makes a run the one that it is: all but where it is written."""
        return self.model_dump(exclude={"output"})

    @model_validator(mode="after")
    def fresh_is_whole(self) -> Settings:
        if self.model.config is not None and not self.tune.whole:
            raise ValueError("a fresh model has nothing yet that an adapter could rest on: set tune.whole: true")
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
