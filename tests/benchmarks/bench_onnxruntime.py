"""Costs of each rewrite of ``slipstream build --engine onnxruntime``: alone, behind ``fuse_cached_attention``, and
where all the others are there ("last").

    python -m tests.benchmarks.bench_onnxruntime [--folder FOLDER] [--only NAME ...] [--out FILE]

A step is the target at one row, a round K draft steps and the target at the rows that are run for K + 1. The graphs
with a rewrite and without it alternate in short turns, and are loaded several times, since a session's speed depends on
where its weights came to lie. A ratio is of the turns that only a fifth were faster than, whatever else the machine was
doing; it is below 1 where the rewrite is faster, and there is one for each load, in ascending order. "same graphs" are
the portable ones against themselves and show what the measurement is worth. E2B is one period of layers and one of
KV-shared layers at true width, with a vocabulary as much shorter as it is less deep.

FOLDER keeps pairs and bundles (8 GB). Results of cases that are not measured stay in FILE, and so do those of rewrites
that were deleted, since the median of their loads gained less than 3 % on every pair. Exits with 1 when that is true of
one that is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from slipstream.demo import PAIR
from slipstream.engines.onnxruntime.build import LEAST_FILTER_BYTES, REWRITES, rewritten, serialized
from slipstream.engines.onnxruntime.filter_file import FilterFile, layout_graph
from slipstream.engines.onnxruntime.passes.block_matrices import ROWS_RUN, block_matrices
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.synth.presets import configs_of
from slipstream.export.synth.synth import synthesize
from slipstream.runtime.bundle.capacity import capacity_bucket, cpu_base_step, kv_limits
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, kv_name, kv_output_name
from slipstream.runtime.bundle.manifest import Bundle, Manifest, open_bundle
from slipstream.runtime.bundle.onnxruntime_record import ACCURACY_LEVEL, INT8_ACTIVATIONS, WEIGHTS_FOLDER
from slipstream.runtime.ort.probes import channels_of_a_block
from tests.support.progress import SilentProgress

from .measuring import machine
from .presets import true_width_configs
from .yardstick import Yardstick

K = 4
LEAST_GAIN = 0.97  # a rewrite is kept for a ratio at or below
_QUIET = 0.2
FIRST, BLOCKED, SAME = "fuse_cached_attention", "block_matrices", "same graphs"
_E2B_VOCAB_SIZE = 65_536
_CHUNK, _MOST_DRAFTS = 256, 16  # what the runtime plans its buffers with


@dataclass(frozen=True)
class Case:
    """contexts: rows held. calls: of each operation in a turn."""

    pair: str
    contexts: tuple[int, ...]
    loads: int = 4
    turns: int = 8
    calls: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


_INT4 = {"weights": "int4", "block_size": 32, "max_length": 8192}
CASES = {
    "demo": Case("demo", (100, 900), loads=6, turns=30, calls=8),
    "mid_int4": Case("mid", (200, 3000), settings=_INT4),
    "mid_float32": Case("mid", (200, 3000), settings={"max_length": 8192}),
    "e2b_int4": Case("e2b", (200, 3000), settings=_INT4),
}


def bundle_of(name: str, folder: Path) -> Bundle:
    """A case's bundle, made where it is not there."""
    case, progress, out = CASES[name], SilentProgress(), folder / name
    pair = PAIR if case.pair == "demo" else folder / f"{case.pair}-pair"
    if not pair.exists():
        configs = true_width_configs("e2b", _E2B_VOCAB_SIZE) if case.pair == "e2b" else configs_of(case.pair)
        synthesize(configs, pair, "full", progress)
    if not out.exists():
        settings = ExportSettings(num_draft_tokens=K, **case.settings)
        export_pair(open_pair(pair / "target", pair / "assistant"), out, settings, progress)
    return open_bundle(out)


class Variant:
    """The graphs after some rewrites, at one held context; each operation is a call without copies."""

    def __init__(self, bundle: Bundle, rewrites: Sequence[str]) -> None:
        self.manifest = bundle.manifest
        self.verified_rows = ROWS_RUN.get(K + 1, K + 1) if BLOCKED in rewrites else K + 1
        self.sessions = {
            graph: _session(serialized(_rewritten(bundle, graph, rewrites)[0]), bundle)
            for graph in (self.manifest.target_graph, _draft_graph(self.manifest))
        }

    def operations(self, held: int, tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, Callable[[], None]]:
        target, draft = self.sessions[self.manifest.target_graph], self.sessions[_draft_graph(self.manifest)]
        drafting = _bound(draft, tensors, {"draft": np.zeros((1, 0), np.int64)})
        verifying = _bound(target, tensors, _target_inputs(self.manifest, self.verified_rows))

        step = _bound(target, tensors, _target_inputs(self.manifest, 1))
        return {"step": step, "draft": drafting, "verify": verifying}


def _draft_graph(manifest: Manifest) -> str:
    return next(graph.file for graph in manifest.draft_graphs if graph.num_steps == K)


def _rewritten(bundle: Bundle, graph: str, rewrites: Sequence[str]) -> tuple[ir.Model, list[str]]:
    model, done = rewritten(bundle, graph, [name for name in rewrites if name in REWRITES], 1)
    if BLOCKED in rewrites and bundle.manifest.weights.format == "float":
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "layout.onnx").write_bytes(layout_graph())
            block = channels_of_a_block(Path(folder) / "layout.onnx")
        path = bundle.folder / f"filters-{graph}.bin"
        path.unlink(missing_ok=True)  # sessions that have it mapped go on reading it
        if block_matrices(model, FilterFile(path, block), LEAST_FILTER_BYTES):
            done.append(BLOCKED)
    return model, done


def _session(model: bytes, bundle: Bundle) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.folder))
    options.add_session_config_entry(ACCURACY_LEVEL, INT8_ACTIVATIONS)
    # Two graphs take turns: the threads of the one that waits must not spin on the other's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _target_inputs(manifest: Manifest, num_rows: int) -> dict[str, np.ndarray[Any, Any]]:
    table = manifest.per_layer_table
    inputs: dict[str, np.ndarray[Any, Any]] = {
        "draft": np.full((1, num_rows - 1), 9, np.int64),
        "scored_rows": np.arange(num_rows)[np.newaxis],
    }
    if table is not None:
        inputs[PER_LAYER_INPUT] = np.random.default_rng(1).standard_normal((1, num_rows, table.width), np.float32)
    return inputs


def held_tensors(bundle: Bundle, held: int) -> dict[str, np.ndarray[Any, Any]]:
    """KV of ``held`` random rows in buffers as large as the runtime's, and the state between two rounds."""
    manifest, random = bundle.manifest, np.random.default_rng(0)
    limit = kv_limits(manifest.sliding_window, manifest.max_length, _CHUNK, _MOST_DRAFTS, cpu_base_step(manifest))
    base = max(0, held - limit["sliding"] // 2) if held + K + 1 > limit["sliding"] else 0
    tensors = {
        "token": np.array([[7]]),
        "hidden": random.standard_normal((1, 1, manifest.hidden_size)).astype(np.float32),
        "position": np.array([held]),
        "past_length": np.array([held]),
        "base": np.array([base]),
    }
    for buffer in manifest.kv:
        rows = held - (base if buffer.type == "sliding" else 0)
        capacity = limit["sliding"] if base and buffer.type == "sliding" else 0
        capacity = capacity or capacity_bucket(rows + K + 1, limit[buffer.type])
        for part in ("key", "value"):
            content = np.zeros((1, buffer.num_kv_heads, capacity, buffer.head_dim), np.float32)
            content[:, :, :rows] = random.standard_normal((rows, buffer.head_dim))
            tensors[kv_name(buffer.layer, part)] = content
    return tensors


def _bound(
    session: onnxruntime.InferenceSession,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    own: Mapping[str, np.ndarray[Any, Any]],
) -> Callable[[], None]:
    """A call with everything bound, as the runtime binds it: KV in place, top logits not at all."""
    binding, given = session.io_binding(), {**tensors, **own}
    in_place = {kv_output_name(*_layer_and_part(name)): content for name, content in tensors.items() if "kv." in name}
    names = {node.name for node in session.get_inputs()}
    kept: list[onnxruntime.OrtValue] = []
    for name in names:
        kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(given[name]))
        binding.bind_ortvalue_input(name, kept[-1])
    for node in session.get_outputs():
        if node.name in in_place:
            kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(in_place[node.name]))
            binding.bind_ortvalue_output(node.name, kept[-1])
        elif "top" not in node.name:
            binding.bind_output(node.name)

    def run() -> None:
        assert kept
        session.run_with_iobinding(binding)

    return run


def _layer_and_part(name: str) -> tuple[int, str]:
    _, layer, part = name.split(".")
    return int(layer), part


def comparisons(bundle: Bundle) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Name, place, and the rewrites before and after, of every rewrite that changes a graph there."""
    yield SAME, "alone", [], []
    graphs = bundle.manifest.target_graph, _draft_graph(bundle.manifest)
    for name in (*REWRITES, BLOCKED):
        others = [other for other in (*REWRITES, BLOCKED) if other != name]
        for place, before in (("alone", []), ("behind", [FIRST]), ("last", others)):
            after = [one for one in (*REWRITES, BLOCKED) if one in (*before, name)]
            is_changed = any(name in _rewritten(bundle, graph, after)[1] for graph in graphs)
            if is_changed and name not in before:
                yield name, place, before, after


Ratios = dict[str, list[float]]  # by operation: of each load, after / before


def compare(bundle: Bundle, case: Case, before: Sequence[str], after: Sequence[str]) -> dict[int, Ratios]:
    """By held context."""
    found: dict[int, Ratios] = {held: {"step": [], "round": []} for held in case.contexts}
    for load in range(case.loads):
        # the one that is loaded first is often the slower one, whichever it is
        variants = {side: Variant(bundle, (before, after)[side]) for side in (load % 2, 1 - load % 2)}
        for held in case.contexts:
            tensors = held_tensors(bundle, held)
            times = _times([variants[side].operations(held, tensors) for side in (0, 1)], case)
            rounds = [times["draft"][side] + times["verify"][side] for side in (0, 1)]
            found[held]["step"].append(round(times["step"][1] / times["step"][0], 3))
            found[held]["round"].append(round(rounds[1] / rounds[0], 3))
    return {held: {name: sorted(values) for name, values in ratios.items()} for held, ratios in found.items()}


def _times(sides: Sequence[Mapping[str, Callable[[], None]]], case: Case) -> dict[str, list[float]]:
    """Seconds that each operation's calls of a turn take on each side."""
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in sides[0]}
    for turn in range(case.turns + 1):
        for name, by_side in taken.items():
            for side in (turn % 2, 1 - turn % 2):
                start = thread_time()
                for _ in range(case.calls):
                    sides[side][name]()
                if turn:  # the first turn warms up
                    by_side[side].append(thread_time() - start)
    return {name: [float(np.quantile(times, _QUIET)) for times in by_side] for name, by_side in taken.items()}


def measure(name: str, folder: Path) -> tuple[dict[str, dict[str, dict[str, Ratios]]], dict[str, Any]]:
    """Ratios of one case by rewrite, place and context, and what the yardstick says of the run."""
    bundle, case, watch = bundle_of(name, folder), CASES[name], Yardstick(1)
    loads: dict[str, list[float]] = {}
    found: dict[str, dict[str, dict[str, Ratios]]] = {}
    for rewrite, place, before, after in comparisons(bundle):
        by_held = compare(bundle, case, before, after)
        found.setdefault(rewrite, {})[place] = {f"{held} held": ratios for held, ratios in by_held.items()}
        loads |= {f"{rewrite} {place}, {held}": ratios["round"] for held, ratios in by_held.items()}
        print(f"{name}, {rewrite} {place}: {by_held}", flush=True)
        watch.read()
    return found, watch.report(loads)


def is_worth_it(by_case: Mapping[str, Mapping[str, Mapping[str, Ratios]]]) -> bool:
    """Whether a rewrite gains enough in a step or a round of any case."""
    return any(
        statistics.median(by_load) <= LEAST_GAIN
        for places in by_case.values()
        for contexts in places.values()
        for ratios in contexts.values()
        for by_load in ratios.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "onnxruntime_build.json")
    parser.add_argument("--folder", type=Path, help="for pairs and bundles, to be used again")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    arguments = parser.parse_args()
    result = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {"rewrites": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in arguments.only:
            found, result.setdefault("yardstick", {})[case] = measure(case, folder)
            for rewrite, places in found.items():
                result["rewrites"].setdefault(rewrite, {})[case] = places
    present = (*REWRITES, BLOCKED)
    result |= {"num_draft_tokens": K, "kept": list(present), **machine()}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    losers = [name for name in present if name in result["rewrites"] and not is_worth_it(result["rewrites"][name])]
    print("\n".join(f"{name} gains less than 3 % everywhere" for name in losers))
    sys.exit(bool(losers))


if __name__ == "__main__":
    main()
