"""Matched runs of a small pair: what is counted, when it ends, and what is kept where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import GenerationSettings, Pair, load
from slipstream.runtime.bench.intervals import FEWEST
from slipstream.runtime.bench.measure import WANTED, Bench
from slipstream.runtime.errors import BackendError
from slipstream.runtime.ort.backend import OnnxRuntimeBackend

PROMPTS = {"short": ["the fox and the", "a"], "long": ["z" * 60]}


@pytest.fixture(scope="module")
def pair(bundle_folder: Callable[[str], Path]) -> Pair:
    return load(bundle_folder("edge"))


def bench_of(pair: Pair, *counts: int) -> Bench:
    settings = GenerationSettings(max_new_tokens=6, temperature=0.0)
    ids = {name: [pair.prompt_ids(prompt) for prompt in prompts] for name, prompts in PROMPTS.items()}
    return Bench(pair, ids, {k: pair.request(replace(settings, num_draft_tokens=k)) for k in counts})


def test_rows_add_up(pair: Pair) -> None:
    bench = bench_of(pair, 0, 2)
    bench.run(0)  # the warm-up, and one pass
    assert set(bench.rows) == {(name, k) for name in PROMPTS for k in (0, 2)}
    assert (bench.num_passes, bench.stopped, bench.widest) == (1, "", None)
    for (name, k), row in bench.rows.items():
        found = row.to_dict(bench.plain(row) if k else None)
        assert found["tokens"]["committed"] == sum(len(result.token_ids) for result in row.results)
        timings = [result.timings for result in row.results]
        assert sum(found["phases_seconds"].values()) == pytest.approx(sum(t.prefill + t.decode for t in timings))
        assert found["phases_seconds"]["draft"] > 0 or not k
        assert all(result.num_reused_tokens == 0 for result in row.results), "prompts are fed whole, each time"
        assert len(found["acceptance"]) == k
        assert 0 <= found["tokens"]["accepted"] <= found["tokens"]["drafted"]
        assert found["same_text_as_plain"] is (True if k else None)
        rounds = sum(result.acceptance.num_rounds for result in row.results)
        assert sum(len(each.gaps) for each in row.passes) == rounds, f"{name}: a chunk each, and the first"


def test_it_goes_on_until_ratios_are_known(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.runtime.bench.measure.WANTED", 100.0)
    bench, seen = bench_of(pair, 0, 1), list[int]()
    bench.run(1e9, lambda bench: seen.append(bench.num_passes))
    assert seen == list(range(1, FEWEST + 1))
    assert bench.widest is not None
    assert bench.widest > WANTED * 1e-6


def test_the_last_pass_is_the_one_in_which_time_is_over(pair: Pair) -> None:
    bench = bench_of(pair, 0)
    bench.run(1e-9)
    assert bench.num_passes == 1


@pytest.mark.parametrize("error", [BackendError("the GPU has fallen off the bus"), KeyboardInterrupt()])
def test_what_was_measured_stays_where_it_fails(
    pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(pair, 0, 2)

    def fail_next(bench: Bench) -> None:
        def fail(*_: object) -> None:
            raise error

        if bench.num_passes == 2:
            monkeypatch.setattr(OnnxRuntimeBackend, "_run_round", fail)

    bench.run(1e9, fail_next)
    assert bench.num_passes == 2
    assert {len(row.passes) for row in bench.rows.values()} == {2}, "a pass is kept as a whole"
    assert bench.stopped == (str(error) or "interrupted")
