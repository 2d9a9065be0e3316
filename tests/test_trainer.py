"""One step is one step: however its rows are spread over batches, recomputed, or their loss taken."""

import pytest
import torch
from cells import VOCAB, tiny
from torch.utils.data import Dataset

from hf_posenc import PosencError, patch_model
from hf_posenc.training.checks import refuse_other_launch
from hf_posenc.training.loss import LossHead
from hf_posenc.training.rows import Masking, Plan, Stream, TrainingRows, causal_inputs, collate
from hf_posenc.training.settings import Settings
from hf_posenc.training.trainer import ContextTrainer, arguments
from hf_posenc.training.tuning import choose_trainable

# Dropout would draw other numbers for other batches.
DROPOUT = {
    "gpt2": dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "bert": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}
STEPS, ROWS, LENGTH = 3, 4, 24


def settings(output, kind: str = "llama", **train) -> Settings:
    return Settings.model_validate(
        {
            "model": {"path": kind, "objective": "masked" if kind == "bert" else "causal"},
            "data": {"length": LENGTH},
            "tune": {"lora": {"r": 2}, "learning_rate": 1e-2},
            "train": {
                "max_steps": STEPS, "learning_rate": 3e-2, "warmup_steps": 0, "use_cpu": True,
                "lr_scheduler_type": "constant", "logging_steps": 1, **train,
            },
            "output": str(output),
        }
    )  # fmt: skip


def rows(asked: Settings) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    sizes = (30, 7, 50, 11, 90, 40)
    stream = Stream([torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in sizes])
    masking = Masking(mask=0, special=frozenset(), vocabulary=VOCAB, share=0.3)
    causal = asked.model.objective == "causal"
    made = (lambda row, _: causal_inputs(row)) if causal else masking.inputs
    return TrainingRows(stream, Plan(asked.data, [(STEPS * ROWS, LENGTH)], 0, made))


def train_and_record(output, kind: str = "llama", scheme: str | None = "yarn", **train):
    """Losses of all steps, and the trained weights."""
    asked = settings(output, kind, **train)
    model = tiny(kind, **DROPOUT.get(kind, {}))
    if scheme is not None:
        patch_model(model, scheme, **({"factor": 4.0} if scheme == "yarn" else {}))
    torch.manual_seed(0)
    wrapped = choose_trainable(model, asked.tune, asked.model.objective)
    head = None if asked.train.full_logits else LossHead(model)
    trainer = ContextTrainer(
        settings=asked, head=head, other_rate=asked.tune.learning_rate, model=wrapped, args=arguments(asked),
        train_dataset=rows(asked),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: p.detach().clone() for name, p in wrapped.named_parameters() if p.requires_grad}
    return losses, weights


def assert_same(one, other):
    """Adam turns rounding into a whole step where a gradient is nothing, so that a few weights may differ."""
    assert one[0] == pytest.approx(other[0], abs=1e-4)
    for name, weight in one[1].items():
        assert float((weight - other[1][name]).abs().mean()) < 2e-5, name


CASES = [("llama", "yarn"), ("llama", "alibi"), ("gpt2", "rope"), ("bert", "alibi")]


@pytest.mark.parametrize("family, way", CASES)
def test_a_batch_of_four_is_four_of_one(tmp_path, family, way):
    """Rows differ in how many tokens count, so that a mean of means would not do."""
    whole = train_and_record(tmp_path, family, way, per_device_train_batch_size=4)
    parts = train_and_record(tmp_path, family, way, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert_same(whole, parts)


@pytest.mark.parametrize("family, way", CASES)
def test_recomputing_changes_nothing(tmp_path, family, way):
    plain = train_and_record(tmp_path, family, way, per_device_train_batch_size=4)
    assert_same(
        plain, train_and_record(tmp_path, family, way, per_device_train_batch_size=4, gradient_checkpointing=True)
    )


@pytest.mark.parametrize("family, way", CASES)
def test_the_loss_of_the_head_trains_as_that_of_all_logits(tmp_path, family, way):
    short = train_and_record(tmp_path, family, way, per_device_train_batch_size=4)
    assert_same(short, train_and_record(tmp_path, family, way, per_device_train_batch_size=4, full_logits=True))


def test_the_loss_falls_and_is_the_models_own(tmp_path):
    losses, _ = train_and_record(tmp_path, per_device_train_batch_size=4)
    asked = settings(tmp_path)
    data = rows(asked)
    model = patch_model(tiny("llama"), "yarn", factor=4.0)
    with torch.no_grad():
        own = model(**collate([data[i] for i in range(4)]), use_cache=False).loss
    assert losses[0] == pytest.approx(float(own), abs=1e-4)
    assert losses[-1] < losses[0]


def test_adapters_and_the_rest_learn_at_their_own_rates(tmp_path):
    asked = settings(tmp_path)
    model = tiny("llama")
    trainer = ContextTrainer(
        settings=asked, head=None, other_rate=1e-4, model=choose_trainable(model, asked.tune, "causal"),
        args=arguments(asked),
        train_dataset=rows(asked),
    )  # fmt: skip
    optimizer = trainer.create_optimizer()
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    rates = {("lora_" in names[id(p)], group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    assert rates == {(True, 3e-2), (False, 1e-4)}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("world, processes, said", [(2, None, "each knows of 1"), (1, 2, "1 are running")])
def test_a_launch_that_is_not_what_it_seems_is_refused(tmp_path, world, processes, said):
    with pytest.raises(PosencError, match=said):
        refuse_other_launch(settings(tmp_path, processes=processes), 1, world)
    refuse_other_launch(settings(tmp_path), 1, 1)
