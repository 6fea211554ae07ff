"""Checkpoints that tests of the export may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def copied(tmp_path: Path, pair_folder: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    """A copy of the "edge" checkpoints."""
    for path in pair_folder("edge"):
        shutil.copytree(path, tmp_path / "pair" / path.name)
    return tmp_path / "pair" / "target", tmp_path / "pair" / "assistant"
