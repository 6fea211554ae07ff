"""Matched runs of a pair: each K over the same prompts in turn, again and again, until their ratio is known.

Every run of a prompt feeds it whole and gives the same text: plain and drafted ones differ in time alone, and a text
that differs is told. Times are taken where tokens are committed, on the thread that runs the graphs. The ratio of a
pass compares runs that were seconds apart, so that a machine that slows down or speeds up moves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.runtime.decode.draft_policy import DraftPolicy
from slipstream.runtime.decode.generation import Event, Generation, Request
from slipstream.runtime.decode.results import Chunk, Result, total_acceptance
from slipstream.runtime.decode.scheduler import Scheduler
from slipstream.runtime.errors import BackendError, NonFiniteError
from slipstream.runtime.session import Pair

from .intervals import FEWEST, Median, median

WANTED = 0.03  # half of the interval of each ratio, as a share of it


@dataclass
class _Pass:
    """All prompts of a workload at one K."""

    results: list[Result]
    gaps: list[float]  # seconds between two chunks of a text

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token of each text came from its prefill."""
        seconds = sum(result.timings.decode for result in self.results)
        return sum(len(result.token_ids) - 1 for result in self.results) / seconds if seconds else 0.0

    @property
    def texts(self) -> list[list[int]]:
        return [result.token_ids for result in self.results]


@dataclass
class Row:
    """What a workload at one K gave."""

    workload: str
    num_draft_tokens: int
    passes: list[_Pass] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        return [result for each in self.passes for result in each.results]

    @property
    def tokens_per_second(self) -> Median:
        return median([each.tokens_per_second for each in self.passes])

    def over(self, plain: Row) -> Median:
        """How many times as fast as plain decoding, pass by pass."""
        pairs = zip(self.passes, plain.passes, strict=False)
        return median([mine.tokens_per_second / other.tokens_per_second for mine, other in pairs])

    def to_dict(self, plain: Row | None) -> dict[str, Any]:
        """As ``slipstream bench --json`` writes it; docs/bench.md says what each name means."""
        results, acceptance = self.results, total_acceptance(self.results)
        timings = [result.timings for result in results]
        phases = {name: sum(getattr(each, name) for each in timings) for name in ("prefill", "draft", "verify")}
        phases["host"] = sum(each.decode for each in timings) - phases["draft"] - phases["verify"]
        drafted = sum(n * rounds for n, rounds in enumerate(acceptance.rounds_offering))
        return {
            "workload": self.workload,
            "num_draft_tokens": self.num_draft_tokens,
            "passes": len(self.passes),
            "tokens_per_second": self.tokens_per_second.to_dict(),
            "over_plain": None if plain is None else self.over(plain).to_dict(),
            "same_text_as_plain": None if plain is None else self.passes[0].texts == plain.passes[0].texts,
            "first_token_ms": _percentiles([each.prefill for each in timings]),
            "between_chunks_ms": _percentiles([gap for each in self.passes for gap in each.gaps]),
            "tokens_per_round": acceptance.tokens_per_round,
            "acceptance": acceptance.by_position,
            "tokens": {
                "drafted": drafted,
                "accepted": sum(acceptance.accepted),
                "committed": sum(len(result.token_ids) for result in results),
            },
            "phases_seconds": phases,
        }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds; None of nothing."""
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds) * 1e3, [50, 95, 99])
    return dict(zip(("p50", "p95", "p99"), map(float, values), strict=True))


class Bench:
    """Prompts by workload, and the K to compare; 0 is measured in any case, as the others are compared with it.

    rows: by workload and K, filled by ``run``. stopped: why it ended early, "" where it did not.
    """

    def __init__(
        self, pair: Pair, prompts: Mapping[str, Sequence[Sequence[int]]], requests: Mapping[int, Request]
    ) -> None:
        """prompts: token ids by workload. requests: by K, alike in all else, with a seed where tokens are drawn."""
        self._pair, self._prompts, self._requests = pair, prompts, requests
        backend, engine = pair.new_backend(1), pair.engine
        self._scheduler = Scheduler(
            backend, DraftPolicy((0,), 0), name=engine.name, notes=lambda: (*engine.notes, *backend.notes)
        )
        self.rows = {(name, k): Row(name, k) for name in prompts for k in requests}
        self.stopped = ""
        self.seconds = 0.0

    def run(self, most_seconds: float, on_pass: Callable[[Bench], None] = lambda _: None) -> None:
        """Measure until every ratio is known well enough, or the time is over.

        The first pass warms up and is not kept. on_pass: called after each one that is. What has been measured stays
        when the engine fails on the way, or who waits has enough.
        """
        start = perf_counter()
        try:
            self._pass(keeps=False)
            while True:
                self._pass(keeps=True)
                self.seconds = perf_counter() - start
                on_pass(self)
                if self.is_known or self.seconds >= most_seconds:
                    return
        except (BackendError, NonFiniteError) as error:
            self.stopped = str(error)
        except KeyboardInterrupt:
            self.stopped = "interrupted"

    @property
    def num_passes(self) -> int:
        return min(len(row.passes) for row in self.rows.values())

    @property
    def notes(self) -> list[str]:
        """What the user of these results has to know."""
        return list(dict.fromkeys(n for row in self.rows.values() for result in row.results for n in result.notes))

    @property
    def widest(self) -> float | None:
        """Half of the widest interval of a ratio, as a share of it; None while there are too few passes."""
        if self.num_passes < FEWEST:
            return None
        within = [row.over(self.plain(row)).is_within for row in self.rows.values() if row.num_draft_tokens]
        return max((width for width in within if width is not None), default=0.0)

    @property
    def is_known(self) -> bool:
        return self.widest is not None and self.widest <= WANTED

    def plain(self, row: Row) -> Row:
        return self.rows[row.workload, 0]

    def _pass(self, *, keeps: bool) -> None:
        """Every workload at every K, one after the other; kept as a whole or not at all."""
        found = {key: self._run(*key) for key in self.rows}
        if keeps:
            for key, each in found.items():
                self.rows[key].passes.append(each)

    def _run(self, workload: str, num_draft_tokens: int) -> _Pass:
        results, gaps = [], []
        for tokens in self._prompts[workload]:
            self._scheduler.forget()  # the prompt is fed whole, each time
            times: list[float] = []

            def deliver(event: Event, times: list[float] = times) -> None:
                if isinstance(event, Chunk):
                    times.append(perf_counter())

            request = self._requests[num_draft_tokens]
            made = Generation(tokens, request, self._pair.codec, self._pair.engine.max_length, deliver=deliver)
            results.append(self._scheduler.generate(made))
            gaps += np.diff(times).tolist()
        return _Pass(results, gaps)
