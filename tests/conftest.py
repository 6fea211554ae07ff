"""Pairs and bundles that tests share: made once per test process, by name."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from slipstream.demo import PAIR as DEMO_PAIR
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from tests.support.fixtures import MadeOnce, PairFolder
from tests.support.pairs import make_pair
from tests.support.progress import SilentProgress
from tests.support.traces import keep_traces


def pytest_collection_finish() -> None:
    """Leave out what imports made when garbage is collected: torch alone makes a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """A folder by name, made by the first of all test processes that asks. Tests must not change it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder, work = base / name, base / f"{name}.new"
        with FileLock(base / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(work, ignore_errors=True)  # of a run that was interrupted
                make(work)
                work.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session", autouse=True)
def kept_traces(made_once: MadeOnce) -> Iterator[None]:
    """Every export of a test process traces what no test traced before, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        keep_traces(patch, made_once)
        yield


@pytest.fixture(scope="session")
def pair_folder(made_once: MadeOnce) -> PairFolder:
    """Folders of a random pair of tests/support/pairs.py, or of the shipped "demo" pair."""

    def get(name: str) -> tuple[Path, Path]:
        if name == "demo":
            return DEMO_PAIR / "target", DEMO_PAIR / "assistant"
        folder = made_once(f"pair-{name}", lambda work: make_pair(work, name))
        return folder / "target", folder / "assistant"

    return get


@pytest.fixture(scope="session")
def bundle_folder(pair_folder: PairFolder, made_once: MadeOnce) -> Callable[..., Path]:
    """A bundle of a pair, float32 unless settings say otherwise. Tests must not change it."""

    def get(name: str, **settings: Any) -> Path:
        def export(work: Path) -> None:
            export_pair(open_pair(*pair_folder(name)), work, ExportSettings(**settings), SilentProgress())

        return made_once("-".join(["bundle", name, *(f"{key}={value}" for key, value in settings.items())]), export)

    return get
