"""Types of what tests/conftest.py gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MadeOnce = Callable[[str, Callable[[Path], None]], Path]  # a folder by name, made by the first who asks
PairFolder = Callable[[str], tuple[Path, Path]]  # a target's folder and its assistant's, by the pair's name
