"""Bundles with engines of the simulator, and decoding below the loop, for the tests of engines."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.engines.tensorrt import build
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle import capacity
from slipstream.runtime.bundle.capacity import PREFILL_CHUNK
from slipstream.runtime.bundle.engine_record import EngineSettings
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from tests.simulator.machine import install, simulate_builds
from tests.support.progress import SilentProgress

LAST = "dense at the last position"  # the pair whose assistant runs at N - 1


def build_simulated(source: Path, folder: Path, *, prefill_chunk: int = PREFILL_CHUNK, **changes: Any) -> Bundle:
    """A copy of a bundle with engines for the simulator. changes: of the settings."""
    bundle = open_bundle(shutil.copytree(source, folder, dirs_exist_ok=True))
    settings: dict[str, Any] = {
        "flavour": "tensorrt-rtx",
        "device": "sm89",
        "max_length": bundle.manifest.max_length,
        "max_batch": 3,
        "num_draft_tokens": bundle.manifest.generation.num_draft_tokens,
        "workspace_mib": 64,
    }
    settings |= changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "PREFILL_CHUNK", prefill_chunk)
        install(patch, flavour=settings["flavour"], compute_capability=settings["device"])
        simulate_builds(patch, settings["flavour"])
        build.build_engines(bundle, EngineSettings(**settings), SilentProgress())
    return bundle


def onnxruntime_backend(bundle: Bundle, num_slots: int = 1) -> PairBackend:
    """What engines are compared with."""
    return OnnxRuntimeEngine(bundle, num_threads=1).new_backend(num_slots)


def feed(backend: PairBackend, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prefill each slot in chunks. Returns each sequence's first token."""
    return [[feed_slot(backend, slot, ids)] for slot, ids in enumerate(prompts)]


def feed_slot(backend: PairBackend, slot: int, ids: Sequence[int]) -> int:
    """Prefill one slot in chunks; the token after them."""
    chunk = backend.prefill_chunk
    return [backend.prefill(slot, ids[start : start + chunk]) for start in range(0, len(ids), chunk)][-1]


@dataclass
class Trace:
    """What a run gave, per sequence: its tokens, and by rows held the draft of each round."""

    tokens: list[list[int]]
    drafts: list[dict[int, list[int]]] = field(default_factory=list)

    def cut(self, num_tokens: int) -> list[list[int]]:
        return [tokens[:num_tokens] for tokens in self.tokens]


def decode(backend: PairBackend, prompts: Sequence[Sequence[int]], num_tokens: int, num_draft_tokens: int) -> Trace:
    """Greedy tokens after the prompts, until every sequence has num_tokens of them."""
    trace = Trace(feed(backend, prompts), [{} for _ in prompts])
    while min(map(len, trace.tokens)) < num_tokens:
        held = list(backend.length)
        step = backend.round(num_draft_tokens, [num_draft_tokens + 1] * backend.num_slots)
        drafts = backend.last_draft(num_draft_tokens) if num_draft_tokens else []
        for sequence, tokens in enumerate(step.tokens):
            trace.tokens[sequence] += tokens
            if drafts:
                trace.drafts[sequence][held[sequence]] = drafts[sequence]
    return trace
