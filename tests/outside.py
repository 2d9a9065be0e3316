"""What someone else adds: schemes with parameters that train, and a family for a model type of their own.

`pytest --register tests/outside.py` lets every law run over both; test_extending.py does so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model

from hf_posenc import Family, Scheme, register_family, register_scheme
from hf_posenc.core.biases import DistanceBias
from hf_posenc.core.effects import ComputedSource, Effect, Geometry
from hf_posenc.core.tables import ComputedTable


class LogBias(DistanceBias):
    """-r1 * log(1 + r2 * distance), both of them trained, for each head."""

    def __init__(self, heads: int, slope: float):
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(slope, slope / 4, heads))
        self.speed = nn.Parameter(torch.linspace(0.5, 2.0, heads))

    def by_distance(self, distances: Tensor) -> Tensor:
        slope, speed = self.slope.clamp(min=0.01)[:, None], self.speed.clamp(min=0.01)[:, None]
        return -slope * torch.log1p(speed * distances.abs())


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Logarithmic(Scheme):
    """As KERPLE's logarithmic kernel (Chi et al. 2022)."""

    name = "logarithmic"
    summary = "learned bias, logarithmic in the distance"

    slope: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("slope", above=0.0)

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(bias=LogBias(geometry.num_heads, self.slope))


class WaveTable(ComputedTable):
    """One wave through all channels, whose speed is trained."""

    def __init__(self, size: int, rows: int | None, like: Tensor):
        super().__init__(size, rows, like)
        self.posenc_speed = nn.Parameter(torch.tensor([0.7], device=like.device))

    def vectors(self, coordinates: Tensor) -> Tensor:
        phase = torch.arange(self.size, device=coordinates.device) / self.size
        return torch.sin(self.posenc_speed * coordinates + 6 * phase)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Wave(Scheme):
    name = "wave"
    summary = "one wave added to the input, of a speed that is learned"
    adds_to_input = True

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(table=ComputedSource(WaveTable, geometry, self.span(geometry).target))


class OddConfig(GPT2Config):
    model_type = "odd"


class OddModel(GPT2Model):
    config_class = OddConfig


class OddForCausalLM(GPT2LMHeadModel):
    config_class = OddConfig


AutoConfig.register("odd", OddConfig)
AutoModel.register(OddConfig, OddModel)
AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
register_family(Family(name="odd", model_types=("odd",), positions="table", table="wpe"))
