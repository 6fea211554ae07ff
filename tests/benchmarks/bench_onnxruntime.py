"""Costs of the graphs for ONNX Runtime: each rewrite against the graphs without it, on two pairs.

    python -m tests.benchmarks.bench_onnxruntime [--out FILE]

A step is the target at one row, verify at K + 1 rows, a round K draft steps and a verify. The final
graphs are measured against the portable ones, and without each rewrite in turn. All variants alternate in short
turns, and are loaded twice, since a session's speed depends on where its weights came to lie; "portable_again" is the
same graphs loaded once more and shows what the measurement is worth. Ratios are below 1 where "after" is faster.
Exits with 1 when the final graphs are slower than the portable ones somewhere.

Rewrites that did not measure better were deleted; their ratios stay in the results with kept = false.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers

from slipstream.demo import PAIR
from slipstream.engines.onnxruntime.build import REWRITES, rewritten, serialized
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.bundle.capacity import capacity_bucket, full_limit, sliding_limit
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, kv_name, kv_output_name
from slipstream.runtime.bundle.manifest import Bundle, Manifest, open_bundle
from slipstream.runtime.bundle.onnxruntime_record import WEIGHTS_FOLDER
from tests.support.pairs import make_tokenizer
from tests.support.progress import SilentProgress

from .measuring import machine
from .yardstick import Yardstick

K = 4
PAIRS = ("demo", "larger")
TURNS = {"demo": 25, "larger": 6}
CALLS_PER_TURN = {"demo": 20, "larger": 1}
CONTEXTS = {"demo": (100, 900), "larger": (100, 2000)}
THREADS = {"demo": (1,), "larger": (1, 2)}
LOADS = 2
WORST = 1.03  # a ratio above it is a loss, whatever the noise
_CHUNK, _MOST_DRAFTS = 256, 16  # what the runtime plans its buffers with
_S, _F = "sliding_attention", "full_attention"
_LARGER: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 640,
    "intermediate_size": 2560,
    "num_hidden_layers": 10,
    "layer_types": [*[_S] * 5, _F, *[_S] * 3, _F],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_LARGER_ASSISTANT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": [_S, _S, _S, _F],
    "final_logit_softcapping": None,
}


def make_larger_pair(folder: Path) -> tuple[Path, Path]:
    """A random pair of 66 M weights and a dense assistant, with the head sizes and the window of the released ones."""
    torch.manual_seed(0)
    text = transformers.Gemma4TextConfig(**_LARGER)
    assistant_text = transformers.Gemma4TextConfig(**(_LARGER | _LARGER_ASSISTANT))
    config: Any = transformers.Gemma4AssistantConfig(text_config=assistant_text, backbone_hidden_size=text.hidden_size)
    for name, model in (
        ("target", transformers.Gemma4ForCausalLM(text)),
        ("assistant", transformers.Gemma4AssistantForCausalLM(config)),
    ):
        model.save_pretrained(folder / name)
        make_tokenizer().save(str(folder / name / "tokenizer.json"))
        settings = {"bos_token_id": 2, "eos_token_id": [1], "pad_token_id": 0, "num_assistant_tokens": K}
        (folder / name / "generation_config.json").write_text(json.dumps(settings))
    return folder / "target", folder / "assistant"


class Variant:
    """The graphs after some rewrites, at one held context; each operation is a call without copies."""

    def __init__(self, bundle: Bundle, rewrites: Sequence[str], num_threads: int) -> None:
        self.manifest = bundle.manifest
        self.sessions = {
            graph: _session(serialized(rewritten(bundle, graph, rewrites, num_threads)[0]), bundle, num_threads)
            for graph in (self.manifest.target_graph, self._draft_graph())
        }

    def operations(self, held: int, tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, Callable[[], None]]:
        target, draft = self.sessions[self.manifest.target_graph], self.sessions[self._draft_graph()]
        drafting = _bound(draft, tensors, {"draft": np.zeros((1, 0), np.int64)})
        verifying = _bound(target, tensors, _target_inputs(self.manifest, K + 1))

        def round_() -> None:
            drafting()
            verifying()

        return {"step": _bound(target, tensors, _target_inputs(self.manifest, 1)), "verify": verifying, "round": round_}

    def _draft_graph(self) -> str:
        return next(graph.file for graph in self.manifest.draft_graphs if graph.num_steps == K)


def _session(model: bytes, bundle: Bundle, num_threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.folder))
    # Two graphs take turns: the threads of the one that waits must not spin on the other's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _target_inputs(manifest: Manifest, num_rows: int) -> dict[str, np.ndarray[Any, Any]]:
    table = manifest.per_layer_table
    rows = {} if table is None else {PER_LAYER_INPUT: np.zeros((1, num_rows, table.width), np.float32)}
    return {
        **rows,
        "draft": np.full((1, num_rows - 1), 9, np.int64),
        "scored_rows": np.arange(num_rows)[np.newaxis],
        "draft_length": np.zeros(1, np.int64),
    }


def held_tensors(bundle: Bundle, held: int) -> dict[str, np.ndarray[Any, Any]]:
    """KV of ``held`` random rows in buffers as large as the runtime's, and the state between two rounds."""
    manifest, random = bundle.manifest, np.random.default_rng(0)
    limit = {
        "sliding": sliding_limit(manifest.sliding_window, _CHUNK, _MOST_DRAFTS),
        "full": full_limit(manifest.max_length, _CHUNK, _MOST_DRAFTS),
    }
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


Times = dict[str, dict[str, list[float]]]  # microseconds by operation and variant, one entry a turn


def measure(
    variants: Mapping[str, dict[str, Callable[[], None]]], turns: int, calls: int, clock: Callable[[], float]
) -> Times:
    names = list(variants)
    times: Times = {operation: {name: [] for name in names} for operation in variants[names[0]]}
    for turn in range(turns + 1):
        for operation, taken in times.items():
            for name in names if turn % 2 else reversed(names):
                run = variants[name][operation]
                run()
                start = clock()
                for _ in range(calls):
                    run()
                if turn:  # the first turn warms up
                    taken[name].append((clock() - start) / calls * 1e6)
    return times


def measure_setting(bundle: Bundle, pair: str, num_threads: int, watch: Yardstick) -> dict[int, Times]:
    """Times by held context, of the portable graphs, the final ones, and those without each rewrite."""
    rewrites: dict[str, list[str]] = {"portable": [], "final": list(REWRITES)}
    for name in _active(bundle, num_threads):
        rewrites[f"without {name}"] = [other for other in REWRITES if other != name]
    rewrites["portable_again"] = []
    # With one thread its own time is what a call costs, whatever else the machine is doing.
    clock = thread_time if num_threads == 1 else perf_counter
    pooled: dict[int, Times] = {}
    for load in range(LOADS):
        order = list(rewrites) if load % 2 else list(reversed(rewrites))
        first = Variant(bundle, [], num_threads)  # the first one loaded is the slowest, whichever it is
        variants = {name: Variant(bundle, rewrites[name], num_threads) for name in order}
        for held in CONTEXTS[pair]:
            tensors = held_tensors(bundle, held)
            operations = {name: variants[name].operations(held, tensors) for name in rewrites}
            times = measure(operations, TURNS[pair], CALLS_PER_TURN[pair], clock)
            for operation, taken in times.items():
                for name, values in taken.items():
                    pooled.setdefault(held, {}).setdefault(operation, {}).setdefault(name, []).extend(values)
            watch.read()
        del first
    return pooled


def _active(bundle: Bundle, num_threads: int) -> list[str]:
    """Rewrites that change a graph when all are applied."""
    graphs = (bundle.manifest.target_graph, *(graph.file for graph in bundle.manifest.draft_graphs))
    done = {name for graph in graphs for name in rewritten(bundle, graph, REWRITES, num_threads)[1]}
    return [name for name in REWRITES if name in done]


def figures(measured: Mapping[int, Times]) -> dict[str, list[float]]:
    """All values of a setting by one name each, for the yardstick."""
    return {
        f"{operation} of {name}, {held} held": values
        for held, times in measured.items()
        for operation, taken in times.items()
        for name, values in taken.items()
    }


def ratios(times: Times, after: str, before: str) -> dict[str, dict[str, float]]:
    """By operation: the median of the ratios within a turn, and the ratio of the fastest turns."""
    return {
        operation: {
            "median": round(statistics.median(a / b for a, b in zip(taken[after], taken[before], strict=True)), 3),
            "fastest": round(min(taken[after]) / min(taken[before]), 3),
        }
        for operation, taken in times.items()
    }


def summarize(measured: Mapping[str, dict[int, Times]]) -> dict[str, Any]:
    """Ratios of every rewrite, of the final graphs and of the control, by setting."""
    settings = {f"{name}, {held} held": times for name, by_held in measured.items() for held, times in by_held.items()}
    rewrites = []
    for name in REWRITES:
        found = {
            setting: ratios(times, "final", f"without {name}")
            for setting, times in settings.items()
            if f"without {name}" in times["step"]
        }
        rewrites.append({"name": name, "kept": True, "ratios": found})
    return {
        "final_over_portable": {setting: ratios(times, "final", "portable") for setting, times in settings.items()},
        "portable_again_over_portable": {
            setting: ratios(times, "portable_again", "portable") for setting, times in settings.items()
        },
        "rewrites": rewrites,
        "median_us": {
            setting: {
                operation: {name: round(statistics.median(values), 1) for name, values in taken.items()}
                for operation, taken in times.items()
            }
            for setting, times in settings.items()
        },
    }


def run_all(folder: Path) -> dict[str, Any]:
    measured: dict[str, dict[int, Times]] = {}
    reports: dict[str, Any] = {}
    for pair in PAIRS:
        checkpoints = (PAIR / "target", PAIR / "assistant") if pair == "demo" else make_larger_pair(folder)
        settings = ExportSettings(num_draft_tokens=K)
        export_pair(open_pair(*checkpoints), folder / f"{pair}_bundle", settings, SilentProgress())
        bundle = open_bundle(folder / f"{pair}_bundle")
        for num_threads in THREADS[pair]:
            name = f"{pair}, {num_threads} thread{'s' if num_threads > 1 else ''}"
            print(f"measuring {name}")
            watch = Yardstick(num_threads)
            measured[name] = measure_setting(bundle, pair, num_threads, watch)
            reports[name] = watch.report(figures(measured[name]))
    return {
        "num_draft_tokens": K,
        **summarize(measured),
        "yardstick": reports,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "onnxruntime_build.json")
    out = parser.parse_args().out
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(Path(folder))
    if out.exists():
        earlier = json.loads(out.read_text(encoding="utf-8"))["rewrites"]
        result["rewrites"] += [rewrite for rewrite in earlier if not rewrite["kept"]]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    is_slower = False
    for setting, found in result["final_over_portable"].items():
        shown = "   ".join(f"{operation} {ratio['fastest']:.3f}" for operation, ratio in found.items())
        print(f"{setting:28} {shown}")
        is_slower |= any(min(ratio.values()) > WORST for ratio in found.values())
    for name, report in result["yardstick"].items():
        print(f"{name:28} {report['run']}")
    sys.exit(is_slower)


if __name__ == "__main__":
    main()
