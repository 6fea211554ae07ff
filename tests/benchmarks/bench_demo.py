"""Costs of the demo pair: Python per round, plain against transformers, drafted against plain.

    python -m tests.benchmarks.bench_demo [--out FILE]

Alternating rounds, medians of five; the ratios are the result, the rates belong to the machine.
Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from slipstream import GenerationSettings, load
from slipstream.demo import PAIR, PROMPTS
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress

from .measuring import machine
from .yardstick import Yardstick

ROUNDS = 5
REFERENCE_TOKENS = 60
BARS = {"python_us_per_round": 50.0, "plain_over_transformers": 8.0, "drafted_over_plain": 1.15}


class Contender:
    """One way to decode; ``run`` gives tokens/s of its decoding alone, prefill left out."""

    def __init__(self, pair: Pair, num_draft_tokens: int) -> None:
        self.pair = pair
        self.settings = GenerationSettings(num_draft_tokens=num_draft_tokens)
        self.python_us: list[float] = []
        self.tokens_per_round = 0.0

    def run(self) -> float:
        results = [self.pair.generate([{"role": "user", "content": prompt}], self.settings) for prompt in PROMPTS]
        timings = [result.timings for result in results]
        rounds = sum(result.acceptance.num_rounds for result in results)
        outside = sum(t.decode - t.draft - t.verify for t in timings)
        self.python_us.append(outside / rounds * 1e6)
        num_tokens = sum(len(result.token_ids) - 1 for result in results)
        self.tokens_per_round = num_tokens / rounds
        return num_tokens / sum(t.decode for t in timings)


class Transformers:
    """transformers' plain greedy generate, timed by the difference of a long and a short run."""

    def __init__(self, pair: Pair) -> None:
        load_model: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load_model(PAIR / "target", dtype=torch.float32).eval()
        text = pair.chat_text([{"role": "user", "content": PROMPTS[0]}])
        self.ids = torch.tensor([pair.codec.encode_prompt(text)])

    def run(self) -> float:
        return REFERENCE_TOKENS / (self._seconds(REFERENCE_TOKENS + 1) - self._seconds(1))

    def _seconds(self, num_tokens: int) -> float:
        start = perf_counter()
        self.model.generate(self.ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        return perf_counter() - start


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        export_pair(open_pair(PAIR / "target", PAIR / "assistant"), bundle, ExportSettings(), SilentProgress())
        pair = load(bundle)
    k = pair.manifest.generation.num_draft_tokens
    plain, drafted = Contender(pair, 0), Contender(pair, k)
    contenders: dict[str, Contender | Transformers] = {
        "transformers": Transformers(pair),
        "plain": plain,
        "drafted": drafted,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    watch = Yardstick(num_threads=1)
    for number in range(ROUNDS + 1):
        for name, contender in contenders.items():
            rate = contender.run()
            if number:  # the first round warms up
                rates[name].append(rate)
        watch.read()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "pair": "demo, float32, one thread",
        "num_draft_tokens": k,
        "tokens_per_round": drafted.tokens_per_round,
        "tokens_per_second": medians,
        "python_us_per_round": statistics.median(plain.python_us[1:] + drafted.python_us[1:]),
        "plain_over_transformers": medians["plain"] / medians["transformers"],
        "drafted_over_plain": medians["drafted"] / medians["plain"],
        "rounds": rates,
        "yardstick": watch.report(rates),
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "demo.json")
    out = parser.parse_args().out
    transformers.utils.logging.set_verbosity_error()
    result = measure()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    missed = [
        name for name, bar in BARS.items() if (result[name] > bar if name.startswith("python") else result[name] < bar)
    ]
    for name, bar in BARS.items():
        print(f"{name:26} {result[name]:8.2f}   bar {bar:g}{'   MISSED' if name in missed else ''}")
    print(f"{'the run was':26} {result['yardstick']['run']}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
