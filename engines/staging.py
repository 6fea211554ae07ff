"""Folders that appear complete or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of ``folder`` when the block succeeds and vanishes when it does not."""
    folder.parent.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = work.with_name(f"{work.name}.old")
    try:
        yield work
        work.chmod(0o755)
        if folder.exists():
            folder.rename(old)
        work.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
