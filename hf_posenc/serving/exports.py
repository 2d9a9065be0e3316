"""`export`: the module for each format."""

from __future__ import annotations

from .proof import Proof
from .readers import READERS, reader_of


def export_checkpoint(source: str, target: str, to: str, dtype: str, fix: str | None = None) -> Proof | None:
    """Write the checkpoint at `source` for a runtime; the proof, or None if the runtime is not installed."""
    if fix is not None:
        from .gguf.fix import fix_gguf

        return fix_gguf(source, target, fix)
    if to == "gguf":
        from .gguf.export import export_gguf

        return export_gguf(source, target, dtype)
    if to == "onnx":
        from .onnx.export import export_onnx

        return export_onnx(source, target)
    from .folders import export_folder

    return export_folder(source, target, to)


def proof_advice(runtime: str, target: str, source: str) -> str:
    """How to check an export in a runtime that is not installed here."""
    if runtime not in READERS:
        return f"Not proved here: {runtime} cannot be asked by this package. Compare a few answers by hand."
    again = f"hf-posenc verify {target} --with {runtime} --against {source}"
    return f"Not proved here: {runtime} is not installed. To prove it: {reader_of(runtime).install}, then {again}"
