"""Models that come with the package: small, real, and there without a network."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.parent.name for path in HERE.glob("*/config.json")))


def model_path(name: str) -> str:
    """Where a model of the package lies; any other name as it is."""
    return str(HERE / name) if name in NAMES else name
