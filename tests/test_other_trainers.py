"""Patched models in trainers of others, where these are installed; what docs/trainers.md shows is run as it stands."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_posenc import PosencError, describe, load, patch_model
from hf_posenc.models import model_path

SIZES = (20, 11, 17, 9, 23, 14)
SCHEMES = {"yarn": {"target_length": 1024}, "alibi": {}}


def code_under(heading: str) -> str:
    """The code under a heading of the docs."""
    text = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text()
    found = re.search(rf"## {heading}\n.*?```(?:python|yaml)\n(.*?)```", text, re.S)
    assert found is not None
    return found[1]


def texts():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 700, (size,), generator=generator).tolist()} for size in SIZES]


def batch_of(folder, model, **asked):
    """The trainer that TRL makes, and its first batch."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    args = trl.SFTConfig(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=8, report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, save_strategy="no", learning_rate=1e-3, **asked,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    trainer = trl.SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(texts()), processing_class=tokenizer
    )
    return trainer, next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "asked",
    [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 64}],
    ids=["padding_free", "packing"],
)
def test_no_gradient_crosses_a_border_in_trl(tmp_path, scheme, asked):
    model = patch_model(load("tiny", dtype=torch.float32), scheme, **SCHEMES[scheme])
    trainer, batch = batch_of(tmp_path, model, **asked)
    starts = [i for i, position in enumerate(batch["position_ids"][0].tolist()) if position == 0]
    assert len(starts) == len(SIZES) and batch["input_ids"].shape[0] == 1
    given = {key: value for key, value in batch.items() if key not in ("input_ids", "labels")}
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
    model.train()
    logits = model(inputs_embeds=embedded, use_cache=False, **given).logits[0]
    ends = [*starts[1:], logits.shape[0]]
    for start, end in zip(starts, ends, strict=True):
        reads = torch.autograd.grad(logits[end - 1].sum(), embedded, retain_graph=True)[0][0].abs().sum(-1)
        assert reads[start:end].all() and not reads[:start].any() and not reads[end:].any()
    # The loss that TRL takes is that of the texts one by one.
    alone = [model(torch.tensor([t["input_ids"]]), use_cache=False).logits[0] for t in texts()]
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text["input_ids"][1:]), reduction="sum")
        for logits, text in zip(alone, texts(), strict=True)
    ]
    found = trainer.train().training_loss
    assert found == pytest.approx(float(sum(losses)) / sum(size - 1 for size in SIZES), rel=1e-5)


def test_what_is_shown_for_trl_runs_and_comes_back(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from datasets import Dataset

    monkeypatch.chdir(tmp_path)
    dataset = Dataset.from_dict({"text": ["the sea " * 40, "a hill and a tree " * 30] * 4})
    code = code_under("TRL").replace('"meta-llama/Llama-3.2-1B"', '"tiny"').replace("32768", "1024")
    code = code.replace("max_length=1024", "max_length=256, max_steps=2, use_cpu=True, bf16=False, report_to='none'")
    exec(code, {"dataset": dataset})
    assert describe(load(tmp_path / "llama-32k", dtype=torch.float32)).scheme == "yarn"


def axolotl_manager():
    pytest.importorskip("axolotl")
    import yaml
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault(yaml.safe_load(code_under("axolotl")))
    manager = PluginManager.get_instance()
    for name in cfg.plugins:
        manager.register(name)
    return manager, cfg


def test_axolotl_patches_what_it_builds():
    manager, cfg = axolotl_manager()
    model = load("tiny", dtype=torch.float32)
    manager.post_model_build(cfg, model)
    assert describe(model).scheme == cfg.posenc["scheme"] and describe(model).target_length == 32768
    assert [*manager.get_input_args()] == ["hf_posenc.training.axolotl_plugin.PosencArgs"]


def test_axolotl_is_told_what_it_cannot_do():
    manager, cfg = axolotl_manager()
    from hf_posenc.training.axolotl_plugin import PosencArgs

    with pytest.raises(ValueError, match="Did you mean 'yarn'"):
        PosencArgs(posenc={"scheme": "yarm"})
    with pytest.raises(ValueError, match="target_lenght"):
        PosencArgs(posenc={"scheme": "yarn", "target_lenght": 1})
    cfg.posenc = {"scheme": "alibi"}
    with pytest.raises(PosencError, match="where packed texts end"):
        manager.post_model_build(cfg, load("tiny", dtype=torch.float32))
