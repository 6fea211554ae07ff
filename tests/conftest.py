"""Pairs and bundles that tests share: made once per test process, by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from slipstream.demo import PAIR as DEMO_PAIR
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from tests.support.pairs import make_pair

# What a result's JSON form has, in this order.
RESULT_KEYS = [
    "text",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_draft_tokens",
    "acceptance",
    "tokens_per_round",
    "timings",
    "engine",
    "notes",
]
TIMING_KEYS = ["prefill", "draft", "verify", "decode", "tokens_per_second"]


class SilentProgress:
    def start(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
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


@pytest.fixture(scope="session")
def pair_folder(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[str], tuple[Path, Path]]:
    """Folders of a random pair of tests/support/pairs.py, or of the shipped "demo" pair."""

    def get(name: str) -> tuple[Path, Path]:
        if name == "demo":
            return DEMO_PAIR / "target", DEMO_PAIR / "assistant"
        folder = made_once(f"pair-{name}", lambda work: make_pair(work, name))
        return folder / "target", folder / "assistant"

    return get


@pytest.fixture(scope="session")
def bundle_folder(
    pair_folder: Callable[[str], tuple[Path, Path]], made_once: Callable[[str, Callable[[Path], None]], Path]
) -> Callable[..., Path]:
    """A bundle of a pair, float32 unless settings say otherwise. Tests must not change it."""

    def get(name: str, **settings: Any) -> Path:
        def export(work: Path) -> None:
            export_pair(open_pair(*pair_folder(name)), work, ExportSettings(**settings), SilentProgress())

        return made_once("-".join(["bundle", name, *(f"{key}={value}" for key, value in settings.items())]), export)

    return get


def rewrite_hash(bundle: Bundle, name: str) -> Bundle:
    """Make a damaged file look like the bundle's own."""
    path = bundle.folder / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {
        "sha256": file_sha256(bundle.path(name)),
        "size_bytes": bundle.path(name).stat().st_size,
    }
    path.write_text(json.dumps(content))
    return open_bundle(bundle.folder)
