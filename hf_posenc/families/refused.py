"""Model types that cannot be patched, and the reasons, so that the error is an answer and not a failed search."""

from .base import NO_TABLE, UNTOLD, refuse

refuse(
    "it has no attention: order is known by recurrence alone",
    "falcon_mamba",
    "mamba",
    "mamba2",
    "rwkv",
    "xlstm",
    "fnet",
)
refuse(
    "its attention scores are made from relative positions and content together, inside its own code",
    "prophetnet",
    "cpmant",
    "inkling_text",
)
refuse(
    "it rotates queries and keys by a table of its own that no config describes, inside its own attention",
    "codegen",
    "gptj",
    "roformer",
)
refuse(
    "its sinusoids are computed in a module that is no table, and cannot be replaced by one",
    "ctrl",
    "musicgen",
    "musicgen_melody",
    "musicgen_decoder",
    "musicgen_melody_decoder",
    "trocr",
    "xglm",
)
refuse("its positions count cells of a table, or places on a page, not tokens", "layoutlm", "tapas")
refuse("it adds positions of entities to those of words", "luke")
refuse("its position table is quantised", "ibert")
refuse("each of its layers may have a theta of its own, beside `rope_parameters`", "granite_swa", "granitemoe_swa")
refuse("image features stand before its text, and share its attention", "git")
refuse("its attention needs a GPU kernel, and its checkpoints hold position ids of a fixed length", "mra")
refuse("its positions are axial, or those of bytes or latents, not of tokens", "perceiver", "reformer", "blt")
NO_TABLE["recurrent_gemma"] = "its recurrent layers read padding, which must stay without a position"
NO_TABLE.update(dict.fromkeys(("granitemoehybrid", "zamba"), UNTOLD))
