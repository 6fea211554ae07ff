"""What a round costs on a GPU, and its parts: medians of wall-clock seconds between two synchronizations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import pytest

from slipstream.runtime.backend.choosing import Choice
from slipstream.runtime.backend.cuda import Stream
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.ort.backend import OnnxRuntimeBackend
from slipstream.runtime.trt.backend import TensorRTBackend


def costs(backend: PairBackend, k: int, num_steps: int) -> dict[str, Any]:
    """Rounds reject every draft, so that each adds one row; the parts run uncaptured and change nothing."""
    plain = _rounds(backend, 0, num_steps)
    drafted = _rounds(backend, k, num_steps)
    with _parts(backend, k) as (draft, verify):
        return {
            "plain": plain,
            "round": drafted,
            "draft_ms": _median_ms(backend, draft, num_steps),
            "verify_ms": _median_ms(backend, verify, num_steps),
            "rows_held": backend.length[0],
        }


def _rounds(backend: PairBackend, k: int, num_steps: int) -> dict[str, Any]:
    """Costs of one kind of round.

    first_ms: of those before the graphs were captured. host_ms: without waiting for the GPU.
    copies, copied_bytes: medians of what the host enqueues; a captured graph holds its own.
    """
    with _observed() as seen:
        first = [_timed(lambda: backend.round(k, [1])) for _ in range(4)]
        walls, waits, copies = [], [], []
        for _ in range(num_steps):
            seen.clear()
            walls.append(_timed(lambda: backend.round(k, [1])))
            waits.append(seen.wait_seconds)
            copies.append(list(seen.copies))
    hosts = [wall - wait for wall, wait in zip(walls, waits, strict=True)]
    return {
        "ms": milliseconds(statistics.median(walls)),
        "worst_ms": milliseconds(max(walls)),
        "host_ms": milliseconds(statistics.median(hosts)),
        "first_ms": [milliseconds(seconds) for seconds in first],
        "copies": statistics.median(map(len, copies)),
        "copied_bytes": statistics.median(map(sum, copies)),
        "is_captured": _is_captured(backend, k),
    }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _is_captured(backend: PairBackend, k: int) -> bool | None:
    """Whether the rounds of this K and bucket are graphs; None for an engine that captures none."""
    if not isinstance(backend, TensorRTBackend):
        return None
    rounds = [r for (count, _, bucket, *_), r in backend._captured.items() if (count, bucket) == (k, backend.bucket)]
    return len(rounds) == 2 and all(captured._graph is not None for parts in rounds for captured in parts)


class _Seen:
    """copies: bytes of each that the host enqueued. wait_seconds: that it waited for the GPU."""

    def __init__(self) -> None:
        self.copies: list[int] = []
        self.wait_seconds = 0.0

    def clear(self) -> None:
        self.copies, self.wait_seconds = [], 0.0


@contextmanager
def _observed() -> Iterator[_Seen]:
    """Every copy and every wait of all streams."""
    seen, copy, synchronize = _Seen(), Stream.copy, Stream.synchronize

    def counted(stream: Stream, target: int, source: int, size: int, kind: str) -> None:
        seen.copies.append(size)
        copy(stream, target, source, size, kind)

    def timed(stream: Stream) -> None:
        start = perf_counter()
        synchronize(stream)
        seen.wait_seconds += perf_counter() - start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "copy", counted)
        patch.setattr(Stream, "synchronize", timed)
        yield seen


@contextmanager
def _parts(backend: PairBackend, k: int) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """The draft of one round, and its verification with the choice, each alone and uncaptured."""
    call = backend._round_call(k, 1)
    if isinstance(backend, TensorRTBackend):
        bound = backend._bind_round(call, "choose_greedy")
        draft, *rest = (context.enqueue for captured in bound for context in captured._contexts)
        try:
            yield draft, lambda: _run_all(rest)
        finally:
            backend.memory.synchronize()
            for captured in bound:
                captured.close()
        return
    assert isinstance(backend, OnnxRuntimeBackend)
    drafts, targets = backend._bound_round(call, Choice.of([]))
    yield lambda: _run_all(graph.run for graph in drafts), lambda: _run_all(graph.run for graph in targets)
    backend.memory.synchronize()


def _run_all(runs: Iterable[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _timed(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _median_ms(backend: PairBackend, enqueue: Callable[[], None], num_steps: int) -> float:
    def run() -> None:
        enqueue()
        backend.memory.synchronize()

    for _ in range(2):
        run()
    return milliseconds(statistics.median(_timed(run) for _ in range(num_steps)))
