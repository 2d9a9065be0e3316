"""Checks of what a config says of RoPE and lengths; also of one that a server makes up."""

from __future__ import annotations

from collections.abc import Iterator

from ...engines.kinds import USUAL_THETA, number
from .findings import NOTE, SUSPICIOUS, WRONG, Finding, check
from .reading import Checkpoint
from .ropes import HELD, SCALED, length_of, original_of, raw_ropes, scaled, theta_of, type_of

KNOWN = ("default", "hf_posenc", *SCALED)


@check("checkpoint", "theta missing")
def theta_missing(it: Checkpoint) -> Iterator[Finding]:
    lost = it.section.get("rope_parameters")
    for layers, rope in scaled(it.section):
        if theta_of(it.section, rope) is None:
            was = number(lost.get("rope_theta")) if isinstance(lost, dict) else None
            instead = f"; rope_parameters has {was:g}, and rope_scaling goes before it" if was else ""
            yield Finding(
                WRONG if was else SUSPICIOUS,
                f"RoPE{layers} is scaled ({type_of(rope)!r}) and has no rope_theta: readers take 10000{instead}.",
                "Write rope_theta, that of the original model, beside the scaling in rope_parameters.",
            )


@check("checkpoint", "two thetas")
def two_thetas(it: Checkpoint) -> Iterator[Finding]:
    top = number(it.section.get("rope_theta"))
    for rope in raw_ropes(it.section).values():
        inner = number(rope.get("rope_theta"))
        if top is not None and inner is not None and top != inner:
            yield Finding(
                WRONG,
                f"rope_theta is {top:g} at the top and {inner:g} in rope_parameters: transformers 5 takes {inner:g}, "
                "older ones and many runtimes the other.",
                "Find out which one the model was trained with (its first release says), and write it at both places.",
            )


@check("checkpoint", "theta out of sight")
def theta_out_of_sight(it: Checkpoint) -> Iterator[Finding]:
    for rope in raw_ropes(it.section).values():
        theta = number(rope.get("rope_theta"))
        readable = type_of(rope) != "hf_posenc"  # what is sealed is read by nobody
        if readable and theta not in (None, USUAL_THETA) and "rope_theta" not in it.section:
            yield Finding(
                NOTE,
                f"rope_theta={theta:g} is in rope_parameters alone, where transformers 5 writes it: a runtime that "
                "reads the top of config.json computes with 10000, without a word.",
                'Add "rope_theta" at the top too; transformers does not mind. Or ask the runtime: hf-posenc verify.',
            )
            return


@check("checkpoint", "odd numbers")
def odd_numbers(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in raw_ropes(it.section).items():
        for key in ("rope_theta", "factor", HELD, "attention_factor", "partial_rotary_factor"):
            value = rope.get(key)
            found = number(value)
            odd = found is None or found < 0 or (key == "rope_theta" and found <= 1)
            if value is not None and odd:
                yield Finding(
                    WRONG,
                    f"{key}{f' of {layers!r}' if layers else ''} is {value!r}, which is no such number.",
                    "Restore config.json from where the model comes.",
                )


@check("checkpoint", "unknown type")
def unknown_type(it: Checkpoint) -> Iterator[Finding]:
    for rope in raw_ropes(it.section).values():
        if type_of(rope) not in KNOWN:
            yield Finding(
                WRONG,
                f"The rope_type {type_of(rope)!r} is not known: transformers refuses it, and llama.cpp's converter "
                "only warns and writes a plain RoPE.",
                f"Take one of {', '.join(SCALED)}, or load it with the code that it was made for.",
            )


@check("checkpoint", "two types")
def two_types(it: Checkpoint) -> Iterator[Finding]:
    for rope in raw_ropes(it.section).values():
        new, old = rope.get("rope_type"), rope.get("type")
        if isinstance(new, str) and isinstance(old, str) and type_of({"type": new}) != type_of({"type": old}):
            yield Finding(
                WRONG,
                f"rope_type is {new!r} and type is {old!r}: each runtime takes another one of them.",
                "Remove the key `type`, or write the same into both.",
            )


@check("checkpoint", "two scalings")
def two_scalings(it: Checkpoint) -> Iterator[Finding]:
    old, new = it.section.get("rope_scaling"), it.section.get("rope_parameters")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    differing = [k for k in ("factor", HELD, "attention_factor") if number(old.get(k)) != number(new.get(k))]
    if type_of(old) != type_of(new) or differing:
        yield Finding(
            WRONG,
            f"rope_scaling ({type_of(old)!r}) and rope_parameters ({type_of(new)!r}) do not say the same"
            f"{': ' + ', '.join(differing) if differing else ''}; transformers 5 takes the first.",
            "Keep rope_parameters and remove rope_scaling, or write the same into both.",
        )


@check("checkpoint", "original length missing")
def original_missing(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in scaled(it.section):
        if type_of(rope) in ("yarn", "llama3", "longrope") and original_of(it.section, rope) is None:
            length = length_of(it.section)
            yield Finding(
                WRONG,
                f"{type_of(rope)!r}{layers} has no {HELD}: transformers takes max_position_embeddings "
                f"({length or 'none'}) for the trained length, other runtimes take what they like.",
                f"Write {HELD}, the length that the model was trained at, into rope_parameters.",
            )


@check("checkpoint", "two original lengths")
def two_originals(it: Checkpoint) -> Iterator[Finding]:
    top = number(it.section.get(HELD))
    for rope in raw_ropes(it.section).values():
        inner = number(rope.get(HELD))
        if top is not None and inner is not None and top != inner:
            yield Finding(
                WRONG,
                f"{HELD} is {top:g} at the top and {inner:g} in rope_parameters: one key, two meanings.",
                "Write the length that the model was trained at into both.",
            )


@check("checkpoint", "factor against length")
def factor_against_length(it: Checkpoint) -> Iterator[Finding]:
    length = length_of(it.section)
    for layers, rope in scaled(it.section):
        factor, original = number(rope.get("factor")), original_of(it.section, rope)
        if type_of(rope) not in ("linear", "yarn", "dynamic") or not (factor and original and length):
            continue
        if factor < 1e20 and abs(factor * original - length) > 0.02 * length:
            yield Finding(
                SUSPICIOUS,
                f"{original:g} tokens times a factor of {factor:g}{layers} reach {factor * original:g}, and "
                f"max_position_embeddings is {length:g}: servers offer one or the other.",
                f"Write max_position_embeddings={factor * original:g}, or the factor that is meant.",
            )


@check("checkpoint", "scaling by one")
def scaling_by_one(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in scaled(it.section):
        factor = number(rope.get("factor"))
        if factor is not None and factor <= 1 and type_of(rope) in ("linear", "yarn", "dynamic"):
            yield Finding(
                SUSPICIOUS,
                f"{type_of(rope)!r}{layers} with factor {factor:g} changes nothing: the logits are those of the "
                "unscaled model.",
                "Write the factor that is meant, target length over trained length: hf-posenc patch does it.",
            )


@check("checkpoint", "M-RoPE and scaling")
def mrope_scaled(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in scaled(it.section):
        if "mrope_section" in rope or "mrope_section" in it.section:
            yield Finding(
                SUSPICIOUS,
                f"{type_of(rope)!r}{layers} together with M-RoPE: several runtimes drop one of them.",
                "Compare before serving: hf-posenc verify PATH --with RUNTIME.",
            )


@check("checkpoint", "M-RoPE on a part")
def mrope_partial(it: Checkpoint) -> Iterator[Finding]:
    for rope in raw_ropes(it.section).values():
        part = number(rope.get("partial_rotary_factor", it.section.get("partial_rotary_factor")))
        if "mrope_section" in rope and part is not None and 0 < part < 1:
            yield Finding(
                SUSPICIOUS,
                f"partial_rotary_factor={part:g} together with M-RoPE: some runtimes rotate all channels.",
                "Compare before serving: hf-posenc verify PATH --with RUNTIME.",
            )


@check("checkpoint", "the price in the short")
def price(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in scaled(it.section):
        factor = number(rope.get("factor"))
        if type_of(rope) == "yarn" and factor is not None and factor > 1:
            yield Finding(
                NOTE,
                f"YaRN{layers} with factor {factor:g} acts at every length: short texts pay for long ones.",
                "Serve short texts with the unscaled model, or measure: hf-posenc eval PATH. The scheme 'dynamic_ntk' "
                "of hf_posenc leaves them as they are.",
            )


@check("checkpoint", "theta follows the length")
def theta_follows(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in scaled(it.section):
        if type_of(rope) == "dynamic":
            yield Finding(
                SUSPICIOUS,
                f"'dynamic'{layers} takes theta from the length of each call: keys that lie in a cache from shorter "
                "ones keep the rotation that they were given, and servers take one theta for all lengths.",
                "Take the scheme 'dynamic_ntk' of hf_posenc, which rotates cached keys anew; or 'ntk', which servers "
                "compute.",
            )


@check("checkpoint", "LongRoPE switches")
def longrope_switches(it: Checkpoint) -> Iterator[Finding]:
    for layers, rope in scaled(it.section):
        if type_of(rope) == "longrope" and rope.get("short_factor") != rope.get("long_factor"):
            yield Finding(
                SUSPICIOUS,
                f"LongRoPE{layers} takes other factors past the trained length. Runtimes take them at another length, "
                "or for all of a batch, and keep keys in the cache that were rotated with the first.",
                "Take the scheme 'longrope' of hf_posenc, which does not; or serve texts of one side of the border.",
            )


@check("checkpoint", "tokenizer cuts")
def tokenizer_cuts(it: Checkpoint) -> Iterator[Finding]:
    length, most = length_of(it.section), number(it.side["tokenizer_config.json"].get("model_max_length"))
    if length and most is not None and most < length:
        yield Finding(
            SUSPICIOUS,
            f"The tokenizer cuts at {most:g} tokens (model_max_length), and the model reads {length:g}.",
            f"Write model_max_length={length:g} into tokenizer_config.json.",
        )
    seen = number(it.side["sentence_bert_config.json"].get("max_seq_length"))
    if length and seen is not None and seen != length:
        cut = "cuts texts there" if seen < length else "has no positions past its own length"
        yield Finding(
            SUSPICIOUS if seen < length else WRONG,
            f"sentence_bert_config.json says {seen:g} tokens, and the model {length:g}: it {cut}.",
            f"Write max_seq_length={length:g}.",
        )


@check("checkpoint", "no room for a prompt")
def no_room(it: Checkpoint) -> Iterator[Finding]:
    length = length_of(it.section)
    for key in ("max_new_tokens", "max_length"):
        asked = number(it.side["generation_config.json"].get(key))
        if length and asked is not None and (asked > length or (asked == length and key == "max_new_tokens")):
            yield Finding(
                SUSPICIOUS,
                f"generation_config.json asks for {key}={asked:g}, and the model reads {length:g} tokens, prompt and "
                "answer together.",
                f"Lower {key}, or extend the model: hf-posenc patch.",
            )


@check("checkpoint", "code of its own")
def own_code(it: Checkpoint) -> Iterator[Finding]:
    if isinstance(it.raw.get("auto_map"), dict):
        made = it.raw.get("transformers_version")
        made = made if isinstance(made, str) else "an unknown version"
        yield Finding(
            SUSPICIOUS if made.startswith(("3.", "4.")) else NOTE,
            f"The checkpoint brings its own code, made for transformers {made[:20]}; since 5 theta is read from "
            "config.rope_parameters, and code that asks for config.rope_theta gets its own default or an error.",
            "Compare the logits with those under the version that it was made for, before trusting it.",
        )
