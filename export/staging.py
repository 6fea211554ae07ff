"""Folders that export writes: complete, or not there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.runtime.errors import CheckpointError


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """What the disk refuses, as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}. Nothing was left behind") from error


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder that becomes ``out`` when the block succeeds and vanishes when it does not."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=parent))
    fresh, old = work / "new", work / "old"
    fresh.mkdir()
    try:
        yield fresh
        if out.exists():
            out.rename(old)
        fresh.rename(out)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(work, ignore_errors=True)
