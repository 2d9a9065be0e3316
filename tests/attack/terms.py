"""Families that compute scores by themselves, without their relative terms: judged by models born so."""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from attack.drawing import NATIVE, Cell, Drawn, Wrong, compare, drawn_ids, padded
from transformers import (
    DebertaConfig,
    DebertaForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    FunnelConfig,
    FunnelForMaskedLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from hf_posenc import load, patch_model, save, unpatch_model

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "type_vocab_size": 0,
    "relative_attention": True,
    "pad_token_id": 0,
}
LONGEST = 40


def drawn_terms(draw: random.Random) -> Drawn:
    family = draw.choice(("deberta", "deberta-v2", "deberta-v2", "xlnet", "funnel"))
    scheme = draw.choice(("none", "sinusoidal", "learned")) if family.startswith("deberta") else "none"
    about = dict(
        pos_att_type=draw.choice((["c2p"], ["p2c"], ["c2p", "p2c"])),
        position_biased_input=draw.random() < 0.5,
        max_position_embeddings=LONGEST,
    )
    if family == "deberta-v2":
        about |= dict(position_buckets=draw.choice((-1, 8)), norm_rel_ebd=draw.choice(("none", "layer_norm")))
        about |= dict(share_att_key=draw.random() < 0.5, conv_kernel_size=draw.choice((0, 3)))
    kept = draw.choice(("live", "saved", "unpatched"))
    rows = [drawn_ids(draw, draw.randint(1, LONGEST)) for _ in range(draw.randint(1, 3))]
    cell = Cell(scheme, 0, family)
    seed = draw.randrange(1 << 30)
    case = Drawn("terms", cell, dict(way=kept), made=lambda cell: None)

    def run(_: None, cell: Cell) -> None:
        own = built(family, about, seed)
        ids, mask = padded(rows, left=False)
        model = copy.deepcopy(own)
        if cell.scheme != NATIVE:
            longer = {"target_length": LONGEST} if scheme == "learned" else {}
            patch_model(model, scheme, trained_length=None if longer else LONGEST, **longer)
        told = said(
            own if cell.scheme == NATIVE or kept == "unpatched" else born(own, model, scheme, about), ids, mask
        )
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            if kept == "saved":
                save(model, Path(folder) / "a")
                model = load(Path(folder) / "a")
            if kept == "unpatched" and cell.scheme != NATIVE:
                unpatch_model(model)
            found = said(model, ids, mask)
        if kept == "unpatched" and not torch.equal(found, told):
            raise Wrong("a model that was unpatched is another")
        for n, row in enumerate(rows):
            compare(cell, found[n, : len(row)], told[n, : len(row)].double(), f"row {n}")

    case.run = run
    return case


def said(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, attention_mask=mask).logits
    return logits


def built(family: str, about: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    if family == "xlnet":
        sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.3, "vocab_size": 97}
        return XLNetLMHeadModel(XLNetConfig(**sizes)).eval()
    if family == "funnel":
        sizes = {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "vocab_size": 97}
        return FunnelForMaskedLM(FunnelConfig(**sizes, num_decoder_layers=1, initializer_std=1.0)).eval()
    cls, config = (
        (DebertaForMaskedLM, DebertaConfig) if family == "deberta" else (DebertaV2ForMaskedLM, DebertaV2Config)
    )
    return cls(config(**{**SIZES, **about})).eval()


def born(own: Any, model: Any, scheme: str, about: dict[str, Any]) -> Any:
    """A model of plain transformers that never had such terms, with the weights that it shares with ours."""
    if not own.config.model_type.startswith("deberta"):
        twin = copy.deepcopy(own)
        for name, weight in twin.named_parameters():
            if name.endswith(("rel_attn.r", "r_kernel")):  # the vectors of distances: nothing is left of their terms
                weight.data.zero_()
        return twin
    values = {**SIZES, **about, "relative_attention": False, "position_biased_input": scheme != "none"}
    twin = type(own)(type(own.config)(**values)).eval()
    twin.load_state_dict({k: v for k, v in own.state_dict().items() if k in twin.state_dict()}, strict=False)
    if scheme == "sinusoidal":
        rate = 10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        angle = torch.arange(LONGEST, dtype=torch.float64)[:, None] * rate
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        twin.deberta.embeddings.position_embeddings.weight.data.copy_(waves)
    if scheme == "learned":  # which begins at random where there was none
        table = model.deberta.embeddings.position_embeddings.weight.data
        twin.deberta.embeddings.position_embeddings.weight.data.copy_(table)
    return twin
