"""Checkpoints of many kinds that are as they should be, for tests to copy and damage."""

from pathlib import Path

from cells import tiny
from peft import LoraConfig, get_peft_model
from stored_models import patched_model
from transformers import AutoModelForCausalLM

from hf_posenc import patch_model, save


def save_good_checkpoints(folder: Path) -> None:
    tiny("llama").save_pretrained(folder / "llama")
    for scheme in ("yarn", "alibi", "t5", "learned", "dynamic_ntk"):
        save(patched_model(scheme, "llama"), folder / scheme)
    for scheme in ("t5", "learned", "none"):
        save(patched_model(scheme, "gpt2"), folder / f"{scheme}-gpt2")
    save(patched_model("t5", "llama"), folder / "shards", max_shard_size="15KB")
    base = patch_model(AutoModelForCausalLM.from_pretrained(folder / "llama"), "yarn", factor=4.0)
    save(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])), folder / "adapter")
