"""The true E2B shape, full depth, int4, on the CPU: export with its peak, load with its memory, steps with their cost.

    python -m tests.benchmarks.bench_e2b --folder FOLDER [--out FILE]

FOLDER needs about 20 GB; a random pair that is there already is used again. Export runs as a user runs it, in a
process of its own whose anonymous memory is watched. Exits with 1 when that exceeds three times the largest tensor
and 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from slipstream import GenerationSettings, load
from slipstream.export.synth.presets import configs_of
from slipstream.export.synth.synth import synthesize
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress

from .measuring import Steps, alternating, machine, memory_kib
from .yardstick import Yardstick

LARGEST_TENSOR = 262_144 * 35 * 256 * 2  # bytes of the per-layer table, as published in bfloat16
LIMIT = 3 * LARGEST_TENSOR + 2 * 2**30
HELD, MOST_ROWS, TURNS, BLOCK_SIZE = 200, 5, 5, 32


def watched(command: list[str]) -> dict[str, float]:
    """Run a command; its seconds, and the largest anonymous and mapped memory it was seen with."""
    start, anonymous, mapped = perf_counter(), 0, 0
    with subprocess.Popen(command) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            try:
                lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
                anonymous = max(anonymous, int(lines["RssAnon"].split()[0]))
                mapped = max(mapped, int(lines["RssFile"].split()[0]))
            except (OSError, KeyError):  # it has just ended
                break
            sleep(0.02)
    if process.wait():
        sys.exit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return {
        "seconds": round(perf_counter() - start, 1),
        "peak_anonymous_gib": round(anonymous / 2**20, 2),
        "peak_mapped_gib": round(mapped / 2**20, 2),
    }


def loaded(bundle: Path) -> dict[str, Any]:
    """Memory and costs of the bundle in this process."""
    before, start = memory_kib(), perf_counter()
    with load(bundle) as pair:
        seconds = perf_counter() - start
        at_load = memory_kib()
        times, report = _steps(pair)
        result = pair.generate("The fox", GenerationSettings(max_new_tokens=24))
        after = memory_kib()
    return {
        "load_seconds": round(seconds, 2),
        "pss_gib": {name: round((at_load[name] - before[name]) / 2**20, 2) for name in before},
        "pss_gib_after_decoding": {name: round((after[name] - before[name]) / 2**20, 2) for name in before},
        "ms": {name: round(statistics.median(values), 2) for name, values in times.items()},
        "yardstick": report,
        "generated_tokens": len(result.token_ids),
        "num_draft_tokens": result.num_draft_tokens,
    }


def _steps(pair: Pair) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Milliseconds by operation, and what the yardstick says of the run."""
    steps = Steps(pair, HELD, MOST_ROWS)
    operations = {f"target_{rows}_rows": steps.target(rows) for rows in range(1, MOST_ROWS + 1)}
    operations["draft_step"] = steps.draft(1)
    watch = Yardstick(len(os.sched_getaffinity(0)))
    times = alternating(operations, TURNS, watch, passes=2)
    return times, watch.report(times)


def measure(folder: Path) -> dict[str, Any]:
    pair, bundle = folder / "pair", folder / "bundle"
    if not pair.exists():
        synthesize(configs_of("e2b"), pair, "full", SilentProgress())
    shutil.rmtree(bundle, ignore_errors=True)
    command = [sys.executable, "-m", "slipstream", "export", str(pair / "target"), str(pair / "assistant")]
    options = ["-o", str(bundle), "--weights", "int4", "--block-size", str(BLOCK_SIZE)]
    export = watched([*command, *options])
    build = watched([sys.executable, "-m", "slipstream", "build", str(bundle), "--engine", "onnxruntime"])
    return {
        "export": export,
        "limit_anonymous_gib": round(LIMIT / 2**30, 2),
        "build": build,
        "files_gib": {path.name: round(path.stat().st_size / 2**30, 3) for path in sorted(bundle.glob("*.bin"))},
        **loaded(bundle),
        "held": HELD,
        "block_size": BLOCK_SIZE,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "e2b.json")
    parser.add_argument("--folder", type=Path, required=True, help="where pair and bundle go")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    result = measure(arguments.folder)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    sys.exit(result["export"]["peak_anonymous_gib"] > result["limit_anonymous_gib"])


if __name__ == "__main__":
    main()
