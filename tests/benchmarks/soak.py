"""Many streams over few slots, with cancels and failures: nothing lost, mixed or stuck, and memory flat.

    python -m tests.benchmarks.soak [--seconds 120] [--slots 8] [--streams 64] [--bundle FOLDER]

Clients ask for prompts whose text was made alone before; each answer must be the beginning of that text. A third are
cancelled somewhere, and now and then one sequence's KV is made NaN, which fails that one alone. Exits with 1 on a miss.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from slipstream import GenerationSettings, NonFiniteError, load
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.backend.contract import Step
from slipstream.runtime.ort.backend import OnnxRuntimeBackend
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress

from .measuring import memory_kib

NUM_PROMPTS, NUM_TOKENS, FAIL_EVERY = 24, 48, 400  # rounds
_GROWTH_MIB = 16


class Faults:
    """Makes a value row of one decoding sequence NaN in every FAIL_EVERY-th round, and mends it after."""

    def __init__(self, backend_round: Callable[..., Step]) -> None:
        self._round, self._count, self.num_injected = backend_round, 0, 0
        self.longest_turn = 0.0

    def __call__(self, backend: OnnxRuntimeBackend, k: int, limits: list[int]) -> Step:
        self._count += 1
        start = monotonic()
        decoding = [slot for slot, limit in enumerate(limits) if limit]
        if self._count % FAIL_EVERY or not decoding:
            step = self._round(backend, k, limits)
            self.longest_turn = max(self.longest_turn, monotonic() - start)
            return step
        slot, self.num_injected = decoding[self._count % len(decoding)], self.num_injected + 1
        rows = next(tensor for name, tensor in backend.cache.tensors.items() if name.endswith("value")).array[slot]
        held = backend.length[slot] - backend.cache.base[slot] - 1
        saved = rows[:, held].copy()
        rows[:, held] = np.nan
        step = self._round(backend, k, limits)
        rows[:, held] = saved
        assert step.failed == [slot], "the sequence fails, and no other"
        return step


def expected_texts(pair: Pair) -> dict[tuple[int, bool], list[int]]:
    """By prompt, and whether it is drawn."""
    return {
        (number, is_drawn): pair.generate(prompt(number), settings(number, is_drawn=is_drawn)).token_ids
        for number in range(NUM_PROMPTS)
        for is_drawn in (False, True)
    }


def prompt(number: int) -> str:
    return f"Tell me a story about {number} foxes " + "and their lanterns " * (number % 7)


def settings(number: int, *, is_drawn: bool) -> GenerationSettings:
    if is_drawn:
        return GenerationSettings(max_new_tokens=NUM_TOKENS, temperature=1.0, seed=number)
    return GenerationSettings(max_new_tokens=NUM_TOKENS, temperature=0.0)


def soak(bundle: Path, num_slots: int, num_streams: int, seconds: float) -> dict[str, Any]:
    faults = Faults(OnnxRuntimeBackend.round)
    with load(bundle, num_threads=1) as alone:
        wanted = expected_texts(alone)
    outcomes: Counter[str] = Counter()
    misses: list[str] = []
    memory: list[int] = []
    OnnxRuntimeBackend.round = lambda *given: faults(*given)  # type: ignore[method-assign]  # noqa: PLW0108 (a method)
    try:
        with load(bundle, num_slots=num_slots, num_threads=1) as pair:
            end = monotonic() + seconds

            def client(seed: int) -> None:
                dice = random.Random(seed)
                while monotonic() < end:
                    key = dice.randrange(NUM_PROMPTS), dice.random() < 0.5
                    stream = pair.stream(prompt(key[0]), settings(key[0], is_drawn=key[1]))
                    stop = dice.randrange(NUM_TOKENS) if dice.random() < 0.33 else None
                    tokens: list[int] = []
                    try:
                        for chunk in stream:
                            tokens += chunk.token_ids
                            if stop is not None and len(tokens) >= stop:
                                stream.cancel()
                        outcomes[stream.result.finish_reason] += 1
                        is_whole = stream.result.finish_reason != "cancelled"
                    except NonFiniteError:
                        outcomes["not finite"] += 1
                        is_whole = False
                    text = wanted[key]
                    if tokens != (text if is_whole else text[: len(tokens)]):
                        misses.append(f"prompt {key}: {tokens[:8]}... is not {text[:8]}...")

            threads = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(num_streams)]
            for thread in threads:
                thread.start()
            while monotonic() < end:
                sleep(min(1.0, seconds / 10))
                memory.append(memory_kib()["Pss_Anon"])
            for thread in threads:
                thread.join(60)
            stuck = sum(thread.is_alive() for thread in threads)
    finally:
        del OnnxRuntimeBackend.round  # the inherited one is there again
    later = memory[len(memory) // 3 :]
    return {
        "streams": num_streams,
        "slots": num_slots,
        "seconds": seconds,
        "outcomes": dict(outcomes),
        "failures_injected": faults.num_injected,
        "misses": misses[:5],
        "stuck": stuck,
        "grown_mib": round((max(later) - later[0]) / 2**10, 1),
        "longest_round_ms": round(faults.longest_turn * 1e3, 1),
    }


def failures(found: dict[str, Any]) -> list[str]:
    lines = list(found["misses"])
    if found["stuck"]:
        lines.append(f"{found['stuck']} clients are stuck")
    if found["outcomes"].get("not finite", 0) != found["failures_injected"]:
        lines.append(f"{found['failures_injected']} failures were injected, and not as many sequences failed")
    if found["grown_mib"] > _GROWTH_MIB:
        lines.append(f"memory grew by {found['grown_mib']} MiB")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--bundle", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = asked.bundle or Path(folder) / "demo"
        if asked.bundle is None:
            pair = Path(__file__).parents[2] / "export" / "demo_pair"
            export_pair(open_pair(pair / "target", pair / "assistant"), bundle, ExportSettings(), SilentProgress())
        found = soak(bundle, asked.slots, asked.streams, asked.seconds)
    print(json.dumps(found, indent=2))
    if missed := failures(found):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
