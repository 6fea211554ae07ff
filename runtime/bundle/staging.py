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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from slipstream.runtime.errors import RequestError

_OLD = ".old"


def check_writable(folder: Path) -> None:
    """Raises RequestError where ``staged`` could not begin: to be called before long work."""
    place = real_place(folder)
    parent = next(parent for parent in place.parents if parent.exists())
    try:
        probe = parent / f"{_prefix(place)}{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise RequestError(f"{folder} can't be written: {error}. Choose another folder") from error


def real_place(folder: Path) -> Path:
    """Where a folder is, or will be made: what links lead to, so that it is replaced there and the links stay.

    Raises RequestError for a link that leads nowhere, and for what is no folder.
    """
    try:
        place = folder.resolve()
        is_lost = folder.is_symlink() and (place.is_symlink() or not place.parent.is_dir())
        is_other = place.exists() and not place.is_dir()
    except (OSError, RuntimeError) as error:  # Python before 3.13 has a RuntimeError for links in a circle
        raise RequestError(f"{folder} can't be written: {error}. Choose another folder") from error
    if is_lost:
        raise RequestError(f"{folder} is a link to {place}, which can't be made: make its folder, or remove the link")
    if is_other:
        raise RequestError(f"{place} is not a folder, so it is not replaced by one: choose another name")
    return place


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of ``folder`` when the block succeeds and vanishes when it does not.

    Where folder is a link, that is what the link leads to. Raises RequestError for what the disk refuses.
    """
    place = real_place(folder)
    made = [path for path in place.parents if not path.exists()]  # innermost first
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with _locked(place.parent, waits=True):
                _remove_leftovers(place, place.parent)
                work = place.with_name(f"{_prefix(place)}{secrets.token_hex(4)}")
                work.mkdir()
                held.enter_context(_locked(work))
            yield from _replacing(place, work)
    except OSError as error:
        raise RequestError(f"{folder} can't be written: {error}. Nothing was left behind") from error
    finally:
        for path in made:
            with suppress(OSError):  # it holds the folder
                path.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all, whoever else writes it meanwhile. Raises OSError."""
    fresh = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")
    with ExitStack() as held:
        with _locked(path.parent, waits=True):
            _remove_leftovers(path, path.parent)
            fresh.touch()
            held.callback(fresh.unlink, missing_ok=True)
            held.enter_context(_locked(fresh))
        fresh.write_bytes(content)
        fresh.replace(path)


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
        with suppress(FileNotFoundError), _locked(path) as is_ours:  # its owner may just have renamed it
            if is_ours and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif is_ours:
                path.unlink()


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
