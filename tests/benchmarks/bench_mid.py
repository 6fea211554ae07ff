"""Costs of ``mid`` on the CPU against its bars: rows, int4 against its own matrices, rounds against other runtimes.

    python -m tests.benchmarks.bench_mid [--runs N] [--out FILE] [--keep FOLDER]

``mid`` is the random pair of 335 M + 15 M weights of ``slipstream synth mid``. Everything alternates in one run,
medians of five turns. What other runtimes take for it was measured on another machine, where ONNX Runtime took
RIVALS_ONE_ROW ms for a step of one row. Their times are scaled by what it takes here for that step's float32 matrices
alone, as plain products, in the same turns.
With several runs the result is that of the last one, with the range that each ratio had over all, and whether each
run was quiet.
Exits with 1 when the last run missed a bar.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from slipstream.engines.onnxruntime.build import build_onnxruntime
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.synth.presets import configs_of
from slipstream.export.synth.synth import synthesize
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.bundle.onnxruntime_record import WEIGHTS_FOLDER
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress

from .measuring import Operation, Steps, alternating, machine
from .yardstick import Yardstick

K, HELD, TURNS = 4, 200, 5
MAX_LENGTH = 8192
RIVALS_ONE_ROW = 44.4  # ms: 1.34 GB of matrices at 30 GB/s
# ms of a round of 4 drafts and 5 rows on that machine, two cores: llama.cpp b11434, OpenVINO GenAI 2026.4
RIVALS = {"float32": {"llama.cpp": 69.9, "openvino": 51.6}, "int4": {"llama.cpp": 30.5, "openvino": 22.9}}
SETTINGS = {
    "float32": ExportSettings(max_length=MAX_LENGTH, num_draft_tokens=K),
    "int4_32": ExportSettings(max_length=MAX_LENGTH, num_draft_tokens=K, weights="int4", block_size=32),
    "int4_64": ExportSettings(max_length=MAX_LENGTH, num_draft_tokens=K, weights="int4", block_size=64),
    "int4_128": ExportSettings(max_length=MAX_LENGTH, num_draft_tokens=K, weights="int4", block_size=128),
    "int8_kv": ExportSettings(max_length=MAX_LENGTH, num_draft_tokens=K, kv="int8"),
}
AGAINST_RIVALS = ("float32", "int4_32", "int4_64", "int4_128")
BARS = {
    "five_rows_over_one": 1.15,
    "int4_step_over_its_matrices": 1.25,
    "llama_cpp_over_round": 1.25,
    "round_over_openvino": 1.10,
    "large_capacity_over_small": 1.15,
}


def make_bundles(folder: Path) -> dict[str, Path]:
    """The pair, and a bundle of each of SETTINGS with its graphs rewritten; what is there already is kept."""
    progress, pair = SilentProgress(), folder / "pair"
    if not pair.exists():
        synthesize(configs_of("mid"), pair, "full", progress)
    for name, settings in SETTINGS.items():
        if not (folder / name).exists():
            export_pair(open_pair(pair / "target", pair / "assistant"), folder / name, settings, progress)
        build_onnxruntime(open_bundle(folder / name), progress)
    return {name: folder / name for name in SETTINGS}


def quantized_alone(pair: Pair, bundle: Path, folder: Path) -> Operation:
    """The MatMulNBits nodes of a target at one row, with nothing between them."""
    path, options = folder / "optimized.onnx", onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle))
    onnxruntime.InferenceSession(str(bundle / pair.manifest.target_graph), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(path, load_external_data=False).graph  # the embedding is, what was fused is not
    nodes = [node for node in graph.node if node.op_type == "MatMulNBits"]
    widths = [next(a.i for a in node.attribute if a.name == "K") for node in nodes]
    return _alone(graph, nodes, widths, bundle)


def floats_alone(pair: Pair, bundle: Path) -> tuple[Operation, int]:
    """The products with float32 matrices of a portable target at one row, nothing between them, and their bytes."""
    graph = onnx.load(bundle / pair.manifest.target_graph, load_external_data=False).graph
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in shapes]
    matrices = [shapes[node.input[1]] for node in nodes]
    widths = [matrix[node.op_type == "Gemm"] for node, matrix in zip(nodes, matrices, strict=True)]  # it transposes
    return _alone(graph, nodes, widths, bundle), sum(4 * math.prod(matrix) for matrix in matrices)


def _alone(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], widths: list[int], bundle: Path) -> Operation:
    """Nodes of a graph over one random row per width."""
    inputs = [onnx.helper.make_tensor_value_info(f"x{w}", onnx.TensorProto.FLOAT, [1, w]) for w in sorted({*widths})]
    for node, width in zip(nodes, widths, strict=True):
        node.input[0] = f"x{width}"
    outputs = [onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None) for node in nodes]
    used = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    domains = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    alone = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "alone", inputs, outputs, weights), opset_imports=domains, ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle))
    session = onnxruntime.InferenceSession(alone.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    feeds = {value.name: random.standard_normal((1, int(value.name[1:])), np.float32) for value in inputs}
    return lambda: session.run(None, feeds)


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))


def measure(folder: Path) -> dict[str, Any]:
    bundles = make_bundles(folder)
    pairs = {name: Pair(open_bundle(path)) for name, path in bundles.items()}
    operations: dict[str, Operation] = {}
    for name, pair in pairs.items():
        steps = Steps(pair, HELD, K + 1)
        operations |= {
            f"{name}.one_row": steps.target(1),
            f"{name}.five_rows": steps.target(K + 1),
            f"{name}.drafts": steps.draft(K),
            f"{name}.round": steps.round(K),
        }
        if name.startswith("int4"):
            operations[f"{name}.matrices"] = quantized_alone(pair, bundles[name], folder)
    operations |= _capacities(pairs["float32"])
    operations["float32.plain_matrices"], num_bytes = floats_alone(pairs["float32"], bundles["float32"])
    watch = Yardstick(_num_threads())
    times = alternating(operations, TURNS, watch)
    ms = {name: statistics.median(values) for name, values in times.items()}
    return {
        "ms": {name: round(value, 2) for name, value in ms.items()},
        "plain_matrices_gb_per_s": round(num_bytes / ms["float32.plain_matrices"] / 1e6, 1),
        "ratios": ratios(ms),
        "int8_kv_over_float": {
            what: round(ms[f"int8_kv.{what}"] / ms[f"float32.{what}"], 3) for what in ("one_row", "five_rows", "drafts")
        },
        "bars": BARS,
        "held": HELD,
        "num_draft_tokens": K,
        "num_threads": _num_threads(),
        "yardstick": watch.report(times),
        **machine(),
    }


def _capacities(pair: Pair) -> dict[str, Operation]:
    """One row at HELD rows: of a sequence that is new, and of one that held nearly MAX_LENGTH before its reset."""
    used = Steps(pair, HELD, 1)
    held = MAX_LENGTH - 300
    used.backend.cache.place([held], [held - 1000])
    used.backend._prepare([0], 256)
    assert used.backend.cache.capacity["full"] >= held
    used.backend.reset(0)
    used.backend.prefill(0, list(range(8, 8 + HELD)))
    return {"capacity.new": Steps(pair, HELD, 1).target(1), "capacity.used": used.target(1)}


def ratios(ms: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Each bar's ratio by what it is of."""
    found: dict[str, dict[str, float]] = {
        "five_rows_over_one": {"float32": ms["float32.five_rows"] / ms["float32.one_row"]},
        "large_capacity_over_small": {"float32": ms["capacity.used"] / ms["capacity.new"]},
        "int4_step_over_its_matrices": {},
        "llama_cpp_over_round": {},
        "round_over_openvino": {},
    }
    for name in AGAINST_RIVALS:
        rivals = RIVALS["float32" if name == "float32" else "int4"]
        here = {rival: value * ms["float32.plain_matrices"] / RIVALS_ONE_ROW for rival, value in rivals.items()}
        found["llama_cpp_over_round"][name] = here["llama.cpp"] / ms[f"{name}.round"]
        found["round_over_openvino"][name] = ms[f"{name}.round"] / here["openvino"]
        if name != "float32":
            found["int4_step_over_its_matrices"][name] = ms[f"{name}.one_row"] / ms[f"{name}.matrices"]
    return {bar: {name: round(value, 3) for name, value in by_name.items()} for bar, by_name in found.items()}


def ranges(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Least and greatest of each ratio."""
    by_bar: dict[str, dict[str, list[float]]] = {}
    for bar, by_name in found[0].items():
        values = {name: [one[bar][name] for one in found] for name in by_name}
        by_bar[bar] = {name: [min(of), max(of)] for name, of in values.items()}
    return by_bar


def missed(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Bars that are missed; "llama_cpp_over_round" is at least its bar, the others at most.

    The bars for 4-bit weights name no block size: one is missed where no block size meets it. The sizes
    that meet different bars need not be the same.
    """
    misses = []
    for bar, by_name in found.items():
        for kind in ("float32", "int4"):
            values = [value for name, value in by_name.items() if name.startswith(kind)]
            best = (max if bar == "llama_cpp_over_round" else min)(values, default=BARS[bar])
            if best < BARS[bar] if bar == "llama_cpp_over_round" else best > BARS[bar]:
                misses.append(f"{bar} of {kind} is {best} at best, the bar is {BARS[bar]}")
    return misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mid.json")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for pair and bundles, to be used again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = [measure(folder) for _ in range(arguments.runs)]
    result = results[-1] | {
        "num_runs": len(results),
        "runs": [result["yardstick"]["run"] for result in results],
        "range_of_ratios": ranges([result["ratios"] for result in results]),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    for miss in missed(result["ratios"]):
        print(f"MISSED {miss}")
    sys.exit(1 if missed(result["ratios"]) else 0)


if __name__ == "__main__":
    main()
