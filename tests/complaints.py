"""What users of 2025 and 2026 complained of, rebuilt in miniature: what lies in a folder, and what doctor should find.

`COMPLAINTS`: the thread -> (what to write, which check finds it). `NOT_FILES`: those that no file can show, and why.
"""

import json

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}


def config(**changes):
    """A checkpoint that is a config alone."""
    return {"config.json": {**LLAMA, **changes}}


def theta(model_type, architecture):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return config(model_type=model_type, architectures=[architecture], rope_parameters=rope)


def serving_config(model=None, **settings):
    """A serving config beside the model that it names."""
    files = {f"model/{name}": data for name, data in (model or {}).items()}
    return {**files, "serve.json": {"model": "model", **settings}}


MROPE = {**YARN, "mrope_section": [1, 1, 2]}
SWITCHING = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
COMPLAINTS = {
    # A. transformers 5 moved rope_theta
    "unsloth#4112": ("inv_freq", "stored frequencies"),
    "unsloth#7028": (config(rope_parameters={"rope_type": "linear", "factor": 4.0}), "theta missing"),
    "vllm#44158": (config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "two thetas"),
    "vllm#56066": (
        config(
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            rope_scaling={"rope_type": "linear", "factor": 4.0},
        ),
        "theta missing",
    ),
    "DeepSpeed#8345": (theta("exaone4", "Exaone4ForCausalLM"), "theta out of sight"),
    "sglang#14745": (theta("qwen3", "Qwen3ForCausalLM"), "theta out of sight"),
    "lmdeploy#4304": (theta("qwen2", "Qwen2ForCausalLM"), "theta out of sight"),
    "mlx-lm#953": (theta("llama", "LlamaForCausalLM"), "theta out of sight"),
    "Bacformer#33": (
        config(auto_map={"AutoModel": "modeling.Bac"}, transformers_version="4.50.0", rope_theta=5e4),
        "code of its own",
    ),
    # B. Setting it at all
    "Soup#793": (config(rope_parameters={**YARN, "factor": 1.0}), "scaling by one"),
    "ms-swift#5146": (config(rope_parameters=YARN, max_position_embeddings=1024), "factor against length"),
    "Qwen3#1424": (config(rope_parameters=YARN, max_position_embeddings=1280), "factor against length"),
    "LlamaFactory#8664": (
        {
            "serve.yaml": "stage: sft\nmodel_name_or_path: model\ncutoff_len: 16384\n",
            **{f"model/{name}": data for name, data in config().items()},
        },
        "longer than the positions reach",
    ),
    "Megatron-LM#1418": (
        config(rope_parameters=YARN, original_max_position_embeddings=4096),
        "two original lengths",
    ),
    "ROLL#276": (
        serving_config(config(rope_parameters=YARN), hf_overrides={"rope_parameters": {**YARN, "factor": 2.0}}),
        "other scaling than the checkpoint's",
    ),
    "Trinity-RFT#389": (
        serving_config(
            config(rope_parameters=YARN), hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        ),
        "other scaling than the checkpoint's",
    ),
    "unsloth#3083": (serving_config(config(), max_model_len=16384), "longer than the positions reach"),
    "recipes#856": (
        {"serve.sh": """vllm serve Qwen/Qwen3-8B --rope-scaling '{"rope_type":"yarn","factor":4.0}'"""},
        "removed flag",
    ),
    "xinference#3571": (serving_config(config(), hf_overrides=["rope_scaling", "factor=4"]), "shape of the settings"),
    # C. M-RoPE, YaRN, partial rotary
    "omlx#3347": (config(rope_parameters=MROPE), "M-RoPE and scaling"),
    "LightLLM#1582": (config(rope_parameters={**YARN, "type": "linear"}), "two types"),
    "maxtext#4616": (
        config(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [1, 1, 2],
                "partial_rotary_factor": 0.25,
            }
        ),
        "M-RoPE on a part",
    ),
    "exllamav3#332": (
        config(
            rope_parameters={**MROPE, "mrope_interleaved": True},
            rope_scaling={**MROPE, "mrope_interleaved": True, "rope_type": "mrope"},  # how users got round it
        ),
        "two scalings",
    ),
    "sglang#13313": (
        {"config.json": {"model_type": "qwen2_5_vl", "text_config": {**LLAMA, "rope_parameters": MROPE}}},
        "M-RoPE and scaling",
    ),
    "imp#897": (
        {
            **serving_config(config(rope_parameters=YARN), speculative_config={"model": "draft"}),
            **{f"draft/{name}": data for name, data in config().items()},
        },
        "draft with other positions",
    ),
    # D. The price in the short
    "Qwen3#1567": (config(rope_parameters=YARN), "the price in the short"),
    "sglang#6030": (config(rope_parameters={**YARN, "factor": 2.0}), "the price in the short"),
    "keys_values#12": (
        config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
        "theta follows the length",
    ),
    "exllamav3#29": (serving_config(config(rope_parameters=YARN), max_model_len=2048), "a larger factor than needed"),
    # E. LongRoPE's border
    "unsloth#10681": (config(rope_parameters=SWITCHING), "LongRoPE switches"),
    "mlxcel#1358": (config(rope_parameters={**SWITCHING, "short_factor": [1.1] * 4}), "LongRoPE switches"),
    "llama.cpp#24875": (config(rope_scaling={**SWITCHING, "type": "su", "rope_type": "su"}), "LongRoPE switches"),
    "optimum-intel#1504": (config(rope_parameters={**SWITCHING, "factor": 2.0}), "LongRoPE switches"),
    # F. Lengths of answers
    "marin#4737": (
        {**config(), "generation_config.json": {"max_new_tokens": 4096}},
        "no room for a prompt",
    ),
    "open-r1#463": (serving_config(config(), max_model_len=2048, max_completion_length=2048), "no room for a prompt"),
    # H. Encoders, export
    "semantic-router#1359": (
        {**config(rope_parameters=YARN), "tokenizer_config.json": {"model_max_length": 1024}},
        "tokenizer cuts",
    ),
    "ModernBERT#181": (
        {**config(), "sentence_bert_config.json": {"max_seq_length": 16384}},
        "tokenizer cuts",
    ),
    "llama.cpp#13322": ("gguf", "frequencies"),
    "vllm#17869": ("alibi", "only here"),
}
NOT_FILES = {
    "transformers#41964": "about typing the parameters in Python",
    "tinker-cookbook#57": "a hosted service without the option",
    "sieval#11": "a score; its cause is not in any file",
    "LongRoPE#22": "a question for code",
    "RULER#100": "official scores not reproduced",
    "RULER#86": "official scores not reproduced",
    "FlashPrefill#5": "official scores not reproduced",
    "lighteval#726": "a wish for suites",
    "transformers#46634": "a mask that is passed in a call",
    "nanoVLM#204": "positions that are passed in a call",
}


def write(folder, files):
    for name, data in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(data if isinstance(data, str) else json.dumps(data))
