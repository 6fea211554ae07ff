"""What slots give: tokens per second of all streams together, and the time to the first token under load.

    python -m tests.benchmarks.bench_slots [--out FILE] [--bundle FOLDER] [--tokens 96] [--threads 2]

16 prompts through 1, 2, 4 and 8 slots, as many streams as slots at any time, drafted (K = 4) and plain; one process,
alternating, medians of ROUNDS. Without --bundle the demo pair and ``mid`` in int4 are exported. Exits with 1 when the
bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from slipstream import load
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.synth.presets import configs_of
from slipstream.export.synth.synth import synthesize
from slipstream.runtime.decode.generation import Request
from slipstream.runtime.decode.results import Result
from slipstream.runtime.decode.streams import Stream
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress

from .measuring import machine
from .yardstick import Yardstick

SLOTS, DRAFT_COUNTS, ROUNDS, PROMPT = (1, 2, 4, 8), (4, 0), 5, 24
BAR = 2.5  # of mid in int4, drafted: 8 slots over one


class Load:
    """A pair of some slots and what its generations took. num_prompts: in each run, for any number of slots."""

    def __init__(self, bundle: Path, num_slots: int, num_threads: int, num_tokens: int, num_prompts: int) -> None:
        self.pair, self.num_slots = load(bundle, num_slots=num_slots, num_threads=num_threads), num_slots
        self.num_tokens, self.num_prompts = num_tokens, num_prompts
        self.first_token: list[float] = []
        self._run = 0

    def run(self, num_draft_tokens: int) -> float:
        """Tokens per second of all streams together, from the first submission to the last token."""
        request = Request(num_draft_tokens, self.num_tokens, (), ())
        self._run += 1
        random = np.random.default_rng(self._run)  # new prompts: nothing is reused
        prompts = random.integers(8, self.pair.manifest.vocab_size, (self.num_prompts, PROMPT)).tolist()
        start = perf_counter()
        with ThreadPoolExecutor(self.num_slots) as clients:
            results = list(clients.map(lambda ids: answer(self.pair, ids, request), prompts))
        seconds = perf_counter() - start
        self.first_token += [result.timings.queued + result.timings.prefill for result in results]
        return sum(len(result.token_ids) for result in results) / seconds


def answer(pair: Pair, ids: list[int], request: Request) -> Result:
    return Stream(lambda deliver: pair.submit(ids, request, deliver)).finish()


def measure(bundle: Path, num_threads: int, num_tokens: int) -> dict[str, Any]:
    loads = {slots: Load(bundle, slots, num_threads, num_tokens, num_prompts=16) for slots in SLOTS}
    speeds: dict[tuple[int, int], list[float]] = {(slots, k): [] for slots in SLOTS for k in DRAFT_COUNTS}
    watch = Yardstick(num_threads)
    for number in range(ROUNDS + 1):
        for (slots, k), values in speeds.items():
            speed = loads[slots].run(k)
            if number:  # the first binds and allocates
                values.append(speed)
            else:
                loads[slots].first_token.clear()
        watch.read()
    for each in loads.values():
        each.pair.close()
    found = {key: statistics.median(values) for key, values in speeds.items()}
    return {
        "tokens_per_second": {f"K={k}": {str(s): round(found[s, k], 1) for s in SLOTS} for k in DRAFT_COUNTS},
        "over_one_slot": {f"K={k}": {str(s): round(found[s, k] / found[1, k], 2) for s in SLOTS} for k in DRAFT_COUNTS},
        "first_token_ms": {
            str(slots): {
                "median": round(statistics.median(each.first_token) * 1e3, 1),
                "worst": round(max(each.first_token) * 1e3, 1),
            }
            for slots, each in loads.items()
        },
        "yardstick": watch.report({f"K={k}, {slots} slots": values for (slots, k), values in speeds.items()}),
    }


def make_bundles(folder: Path) -> dict[str, Path]:
    pair = Path(__file__).parents[2] / "export" / "demo_pair"
    bundles = {"demo": folder / "demo", "mid_int4": folder / "mid_int4"}
    progress = SilentProgress()
    export_pair(open_pair(pair / "target", pair / "assistant"), bundles["demo"], ExportSettings(), progress)
    synthesize(configs_of("mid"), folder / "mid", "full", progress)
    mid = open_pair(folder / "mid" / "target", folder / "mid" / "assistant")
    export_pair(mid, bundles["mid_int4"], ExportSettings(weights="int4", num_draft_tokens=4), progress)
    return bundles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "slots.json")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundles = {asked.bundle.name: asked.bundle} if asked.bundle else make_bundles(Path(folder))
        found = {name: measure(bundle, asked.threads, asked.tokens) for name, bundle in bundles.items()}
    report = {**found, "threads": asked.threads, "new_tokens": asked.tokens, **machine()}
    asked.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    drafted = found.get("mid_int4", {}).get("over_one_slot", {}).get("K=4", {}).get("8")
    if drafted is not None and drafted < BAR:
        sys.exit(f"mid_int4: 8 slots give {drafted} times one slot's; {BAR} is the bar")


if __name__ == "__main__":
    main()
