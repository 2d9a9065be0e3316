"""Rows as a comparison of schemes gives them, with the awkward ones: explosions, infinities, no error, a gap."""

import math

from hf_posenc.evaluation.measures.rows import Row

LENGTHS = (256, 512, 1024, 2048)
LOSSES = {
    "unpatched": (2.312, 4.871, 6.935, 7.482),
    "linear": (2.574, 2.561, 2.549, 2.561),
    "ntk": (2.352, 2.331, 2.342, 3.204),
    "dynamic_ntk": (2.312, 2.318, 2.347, 2.411),
    "yarn": (2.349, 2.316, 2.295, 2.302),
    "alibi": (2.981, 3.012, 3.094, math.inf),
}
ABOUT = {
    "title": "How far does it read?",
    "model": "stories15M",
    "text": "persuasion.txt",
    "trained_length": 256,
    "target_length": 2048,
    "verdict": "At 2048 tokens yarn is first, 5.18 ± 0.04 nats better than unpatched (n = 32).",
    "command": "hf-posenc compare stories15M --schemes none,linear,ntk,dynamic_ntk,yarn --target-length 2k "
    "--text persuasion.txt --report out.html",
    "versions": {"hf-posenc": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2"},
    "device": "cpu, float32",
    "date": "2026-11-16",
}


def sample_rows() -> list[Row]:
    return [*loss_rows(), *position_rows(), *shift_rows(), *retrieval_rows(), *harness_rows(), *tax_rows()]


def loss_rows() -> list[Row]:
    made = []
    for scheme, losses in LOSSES.items():
        for length, loss in zip(LENGTHS, losses, strict=True):
            error = 0.021 + 0.006 * (length // 512) if math.isfinite(loss) else None
            details = {"windows": 32, "tokens": 2048, "seeds": 0, "scored": 64, "losses": [loss] * 32}
            common = {"task": "perplexity", "protocol": "last", "scheme": scheme, "length": length, "n": 32}
            made.append(Row(**common, metric="loss", value=loss, stderr=error, details=details))
            risen = math.exp(loss)
            made.append(
                Row(**common, metric="perplexity", value=risen, stderr=error and risen * error, details=details)
            )
            if scheme in ("unpatched", "yarn", "ntk"):
                common["protocol"], moved = "sliding", loss + 0.05
                details = {"windows": 96, "tokens": 24_576, "seeds": 0, "stride": 256}
                made.append(Row(**common, metric="loss", value=moved, stderr=error, details=details))
    return made


def position_rows() -> list[Row]:
    made = []
    for scheme, final in (("unpatched", 7.4), ("dynamic_ntk", 2.4), ("yarn", 2.28)):
        for start in range(1, 2048, 64):
            middle = start + 32
            loss = 2.3 + 1.1 * math.exp(-middle / 60)
            if middle > 256:
                loss += (final - 2.3) * (1 - math.exp(-(middle - 256) / 300))
            details = {"from": start, "to": start + 64, "window": 2048, "windows": 16, "tokens": 1024, "seeds": 0}
            made.append(
                Row(task="loss_by_position", protocol="whole", scheme=scheme, length=start + 64, metric="loss",
                    value=loss, stderr=0.05, n=16, details=details)
            )  # fmt: skip
    return made


def shift_rows() -> list[Row]:
    made = []
    for scheme, climbs in (("unpatched", (0.0, 0.6, 1.4, 1.5)), ("yarn", (0.0, 0.02, 0.01, 0.04))):
        for length, climb in zip(LENGTHS, climbs, strict=True):
            common = {"task": "shift", "protocol": "gap", "scheme": scheme, "length": length, "n": 20}
            made.append(Row(**common, metric="loss", value=2.4 + climb, stderr=0.04, details={"before": 128}))
            if climb:
                made.append(Row(**common, metric="climb", value=climb, stderr=0.02, details={"before": 128}))
    return made


def retrieval_rows() -> list[Row]:
    made = []
    for task, protocol in (("passkey", "likelihood"), ("passkey", "generation"), ("multikey", "likelihood")):
        for scheme in ("unpatched", "dynamic_ntk", "yarn"):
            for length in LENGTHS:
                for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                    reach = {"unpatched": 0.05, "dynamic_ntk": 0.55, "yarn": 0.9}[scheme]
                    value = 1.0 if length <= 256 else reach * (0.6 + 0.4 * depth) * (0.7 if task != "passkey" else 1)
                    if (scheme, length, depth) == ("dynamic_ntk", 2048, 0.0):
                        continue  # a cell that was not run
                    details = {"depth": depth, "trials": 20, "seeds": 20, "tokens": length - 9}
                    error = (value * (1 - value) / 20) ** 0.5
                    made.append(
                        Row(task=task, protocol=protocol, scheme=scheme, length=length, metric="accuracy", value=value,
                            stderr=error, n=20, details=details)
                    )  # fmt: skip
    return made


def harness_rows() -> list[Row]:
    made = []
    for scheme, scores in (("unpatched", (0.62, 0.04, 0.0, 0.0)), ("yarn", (0.6, 0.55, 0.41, 0.3))):
        for length, score in zip(LENGTHS, scores, strict=True):
            details = {
                "tokens": {"mean": length - 190.0, "shortest": length - 201, "longest": length - 180},
                "seed": 0,
            }
            made.append(
                Row(task="niah_single_1", protocol="lm-eval", scheme=scheme, length=length, metric="accuracy",
                    value=score, stderr=(score * (1 - score) / 50) ** 0.5, n=50, details=details)
            )  # fmt: skip
    return made


def tax_rows() -> list[Row]:
    made = []
    added = {"linear": (0.31, 0.262), "ntk": (0.035, 0.04), "dynamic_ntk": (0.0, 0.0), "yarn": (0.042, 0.037)}
    for scheme, values in added.items():
        for length, value in zip((128, 256), values, strict=True):
            details = {"windows": 32, "tokens": 2048, "seeds": 0, "patched": 2.3 + value, "unpatched": 2.3}
            made.append(
                Row(task="tax", protocol="last", scheme=scheme, length=length, metric="loss", value=value,
                    stderr=0.008 if value else 0.0, n=32, details=details)
            )  # fmt: skip
    return made
