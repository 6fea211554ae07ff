"""Folders that appear complete or not at all, for export, synth and build.

Work goes on in a hidden folder beside the final one. Its lock dies with its process, so what a killed
process left is told from what another one is writing, and removed by the next to write the same folder.
File systems without such locks (some network ones) keep it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.runtime.errors import RequestError

_OLD = ".old"


def check_writable(folder: Path) -> None:
    """Raises RequestError where ``staged`` could not begin: to be called before long work."""
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        probe = parent / f"{_prefix(folder)}{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise RequestError(f"{folder} can't be written: {error}. Choose another folder") from error


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of ``folder`` when the block succeeds and vanishes when it does not.

    Raises RequestError for what the disk refuses.
    """
    try:
        parent = folder.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent, waits=True):
            _remove_leftovers(folder, parent)
            work = parent / f"{_prefix(folder)}{secrets.token_hex(4)}"
            work.mkdir()
        with _locked(work):
            yield from _replacing(folder, work)
    except OSError as error:
        raise RequestError(f"{folder} can't be written: {error}. Nothing was left behind") from error


def _replacing(folder: Path, work: Path) -> Iterator[Path]:
    old = work.with_name(work.name + _OLD)
    try:
        yield work
        with _locked(work.parent, waits=True):
            if folder.exists():
                folder.rename(old)
            work.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.staging-"


def _remove_leftovers(folder: Path, parent: Path) -> None:
    """Remove what killed processes left, and take back a folder that one of them had moved away."""
    left = sorted(path for path in parent.iterdir() if path.name.startswith(_prefix(folder)))
    for path in left:
        if path.name.endswith(_OLD) and not folder.exists():
            path.rename(folder)
    for path in left:
        if path.is_dir():
            with _locked(path) as is_ours:
                if is_ours:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, waits: bool = False) -> Iterator[bool]:
    """Hold a folder's lock; whether it was given: not where another process has it, or the file system has none."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)
