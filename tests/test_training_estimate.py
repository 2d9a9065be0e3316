"""What `--dry-run` says of memory, against what torch's allocator says of a run."""

import pytest
import torch
from cells import tiny
from torch.utils.data import Dataset

from hf_posenc import patch_model
from hf_posenc.training.dry_run import ERROR
from hf_posenc.training.estimate import estimate_step
from hf_posenc.training.loss import LossHead
from hf_posenc.training.settings import Settings
from hf_posenc.training.trainer import ContextTrainer, arguments
from hf_posenc.training.tuning import choose_trainable

LENGTH = 1024
SIZES = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
ADAPTED = {"lora": {"r": 4, "target_modules": "all-linear"}}
CASES = {
    "plain": ({}, {}, {}),
    "recomputed": ({}, {"gradient_checkpointing": True}, {}),
    "least": ({}, {"gradient_checkpointing": True, "recompute_attention": True, "mlp_tokens": 128}, {}),
    "bf16": ({"dtype": "bfloat16"}, {}, ADAPTED),
    "autocast": ({}, {"bf16": True, "gradient_checkpointing": True}, ADAPTED),
    "dropped": ({}, {}, {"lora": {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"}}),
    "whole": ({"dtype": "bfloat16"}, {"gradient_checkpointing": True}, {"whole": True}),
    "words": ({"config": {"vocab_size": 32768}}, {"gradient_checkpointing": True}, {}),
    "all logits": ({"config": {"vocab_size": 4096}}, {"full_logits": True}, {}),
}


class Rows(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        ids = torch.randint(3, 60, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(LENGTH)}


def memory_of(model) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def peak(train) -> int:
    """The most bytes that were allocated at once, beside those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        train()
    told = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(told, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_of_a_step_is_what_the_allocator_counts(tmp_path, case):
    of_model, of_train, of_tune = CASES[case]
    sizes = {**SIZES, "max_position_embeddings": LENGTH, "tie_word_embeddings": True, **of_model.get("config", {})}
    dtype = of_model.get("dtype", "float32")
    asked = Settings.model_validate({
        "model": {"path": "llama", "dtype": dtype}, "data": {"length": LENGTH}, "tune": of_tune,
        "train": {"max_steps": 2, "warmup_steps": 0, "use_cpu": True, "save_steps": 100, **of_train},
        "output": str(tmp_path),
    })  # fmt: skip
    model = patch_model(tiny("llama", **sizes).to(getattr(torch, dtype)), "yarn", factor=2.0)
    found = estimate_step(model, asked)
    wrapped = choose_trainable(model, asked.tune, "causal")
    head = None if asked.train.full_logits else LossHead(model)
    trainer = ContextTrainer(settings=asked, head=head, model=wrapped, args=arguments(asked), train_dataset=Rows())
    trainer.save_model = trainer._save_checkpoint = lambda *args, **kwargs: None
    measured = memory_of(wrapped) + peak(trainer.train)
    assert 1 - ERROR < found.peak / measured < 1 + ERROR, (found.peak / measured, found)
