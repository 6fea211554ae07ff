"""Pairs and bundles that tests share: made once per test process, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.demo import PAIR as DEMO_PAIR
from slipstream.export.opening import open_pair
from slipstream.export.pair import ExportSettings, export_pair

from .pairs import make_pair

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
]
TIMING_KEYS = ["prefill", "draft", "verify", "decode", "tokens_per_second"]


class SilentProgress:
    def start(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Folders of a random pair of tests/pairs.py, or of the shipped "demo" pair."""
    made: dict[str, tuple[Path, Path]] = {"demo": (DEMO_PAIR / "target", DEMO_PAIR / "assistant")}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = make_pair(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def bundle_folder(
    pair_folder: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A float32 bundle of a pair. Tests must not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(f"bundle-{name}") / "bundle"
            export_pair(open_pair(*pair_folder(name)), made[name], ExportSettings(), SilentProgress())
        return made[name]

    return get
