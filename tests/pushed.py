"""Pushes patched models through the calls of other libraries to the hub that HF_ENDPOINT names, and loads them back.

A process of its own: huggingface_hub reads where its hub is once, when it is imported.
"""

import sys
from pathlib import Path

import torch
from cells import tiny, tokens
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posenc import load, patch_model, save

LORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
SCHEMES = {"yarn": {"factor": 4.0}, "alibi": {}}


def main(folder: Path) -> None:
    ids = tokens(1, 8)
    base = tiny("llama")
    base.save_pretrained(folder / "base")
    for scheme, options in SCHEMES.items():
        model = patch_model(AutoModelForCausalLM.from_pretrained(folder / "base"), scheme, **options).eval()
        save(model, folder / scheme, push_to_hub=True, repo_id=f"me/{scheme}-saved")
        model.push_to_hub(f"me/{scheme}")
        assert torch.equal(load(f"me/{scheme}").eval()(ids).logits, model(ids).logits)
        adapted = get_peft_model(model, LORA).eval()
        save(adapted, folder / f"{scheme}-adapter", push_to_hub=True, repo_id=f"me/{scheme}-adapter-saved")
        adapted.push_to_hub(f"me/{scheme}-adapter")
        assert torch.equal(load(f"me/{scheme}-adapter").eval()(ids).logits, adapted(ids).logits)
    save(model, folder / "shards", max_shard_size="50KB", push_to_hub=True, repo_id="me/alibi-shards")
    save(model, folder / "whole", push_to_hub=True, repo_id="me/alibi-shards")  # over shards, and over the card


main(Path(sys.argv[1]))
