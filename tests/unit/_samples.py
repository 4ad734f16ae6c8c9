"""Captured outputs of other machines, which lie beside the repository where they are at hand at all."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
FOLDER = SHARED / "data" / "topology"


def sample(name: str) -> str:
    """The text of the sample; without it the test is skipped."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no sample {name}: the captured outputs are not part of the repository")
    return path.read_text(encoding="utf-8")


def facts(name: str) -> str:
    """The text of the page of facts; without it the test is skipped."""
    path = SHARED / "facts" / name
    if not path.exists():
        pytest.skip(f"no page {name}: the facts are not part of the repository")
    return path.read_text(encoding="utf-8")
