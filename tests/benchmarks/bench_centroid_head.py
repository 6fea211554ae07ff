"""Draft steps of E2B's assistant in its true shape: with its centroid head, and with a dense one.

    python -m tests.benchmarks.bench_centroid_head [--out FILE]

Random weights; the target has two layers, since a draft step only reads its embedding and its KV. Both heads
take turns, as exported; medians of five rounds. The ratios are the result, the times belong to the machine. Memory is
what loading a graph adds to the process beside mapped pages. Needs 6 GB of disk for a while, where temporary files go.
Exits with 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime

from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.synth.presets import PairConfigs, configs_of
from slipstream.export.synth.synth import synthesize
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from tests.benchmarks.bench_onnxruntime import held_tensors
from tests.support.progress import SilentProgress

from .measuring import machine
from .yardstick import Yardstick

ROUNDS, CALLS_PER_ROUND = 5, 20
HELD_TOKENS = 300
BAR = 0.25  # of the dense head's draft step, on one thread
_HEADS = ("centroid", "dense")
_SHORT_TARGET = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "per_layer_config": {"1": {"head_dim": 512}},
    "num_kv_shared_layers": 0,
    "intermediate_size": 256,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 2048,
}


def configs_with(head: str) -> PairConfigs:
    """E2B's assistant with the head of this name, for a target of E2B's width that is as short as a pair allows."""
    e2b = configs_of("e2b")
    text = {**e2b.target["text_config"], **_SHORT_TARGET}
    assistant = {**e2b.assistant, "use_ordered_embeddings": head == "centroid"}
    return replace(e2b, target={**e2b.target, "text_config": text}, assistant=assistant)


def exported(head: str, folder: Path) -> Bundle:
    pair = folder / f"{head}-pair"
    synthesize(configs_with(head), pair, "full", SilentProgress())
    settings = ExportSettings(num_draft_tokens=1)
    export_pair(open_pair(pair / "target", pair / "assistant"), folder / head, settings, SilentProgress())
    for file in pair.rglob("*.safetensors"):
        file.unlink()
    return open_bundle(folder / head)


def anonymous_mib() -> float:
    """Memory of this process that is no mapped file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


def draft_step(bundle: Bundle, num_threads: int) -> Callable[[], None]:
    """One call of the one-step graph, everything it reads bound and its top logits left out, as the runtime does."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # the graph that waits must not spin
    file = next(graph.file for graph in bundle.manifest.draft_graphs if graph.num_steps == 1)
    session = onnxruntime.InferenceSession(bundle.path(file), options, providers=["CPUExecutionProvider"])
    tensors = {**held_tensors(bundle, HELD_TOKENS), "draft": np.zeros((1, 0), np.int64)}
    binding = session.io_binding()
    for node in session.get_inputs():
        binding.bind_ortvalue_input(node.name, onnxruntime.OrtValue.ortvalue_from_numpy(tensors[node.name]))
    for node in session.get_outputs():
        if "top" not in node.name:
            binding.bind_output(node.name)
    return lambda: session.run_with_iobinding(binding)


def measure(bundles: dict[str, Bundle], num_threads: int) -> dict[str, Any]:
    steps, loaded_mib = {}, {}
    for head, bundle in bundles.items():
        before = anonymous_mib()
        steps[head] = draft_step(bundle, num_threads)
        loaded_mib[head] = anonymous_mib() - before
    times: dict[str, list[float]] = {head: [] for head in steps}
    watch = Yardstick(num_threads)
    for number in range(ROUNDS + 1):
        for head, step in steps.items():
            start = perf_counter()
            for _ in range(CALLS_PER_ROUND):
                step()
            if number:  # the first round warms up
                times[head].append((perf_counter() - start) / CALLS_PER_ROUND * 1e3)
        watch.read()
    medians = {head: statistics.median(values) for head, values in times.items()}
    return {
        "milliseconds": medians,
        "centroid_over_dense": medians["centroid"] / medians["dense"],
        "private_mib": loaded_mib,
        "rounds": times,
        "yardstick": watch.report(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "centroid_head.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        bundles = {head: exported(head, Path(folder)) for head in _HEADS}
        by_threads = {str(threads): measure(bundles, threads) for threads in (1, 2)}
    result = {
        "assistant": "E2B: hidden 256, 4 layers, vocabulary 262144, 2048 centroids, top 32; float32",
        "held_tokens": HELD_TOKENS,
        "threads": by_threads,
        **machine(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for threads, measured in by_threads.items():
        times = ", ".join(f"{head} {ms:.2f} ms" for head, ms in measured["milliseconds"].items())
        found = f"centroid_over_dense {measured['centroid_over_dense']:.3f}"
        print(f"{threads} threads: {times}; {found}; {measured['yardstick']['run']}")
    ratio = by_threads["1"]["centroid_over_dense"]
    print(f"bar {BAR:g}{'   MISSED' if ratio > BAR else ''}")
    sys.exit(1 if ratio > BAR else 0)


if __name__ == "__main__":
    main()
