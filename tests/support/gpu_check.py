"""Everything that needs a GPU, measured on the shipped pair and written to one JSON file.

``make gpu-check`` runs it through ``tests/test_gpu.py``; an ordinary test there runs it through
the simulator. A section that fails is recorded with its error and hides no other. Times are
medians of wall-clock seconds between two synchronizations.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, cast, get_args

import numpy as np
import onnxruntime as ort

from slipstream.demo import PAIR, PROMPTS
from slipstream.engines.parity.compare import compare_engines
from slipstream.engines.tensorrt.build import build_engines
from slipstream.engines.tensorrt.device import device_to_build_for
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.backend.cuda import Cuda
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.engine_record import EngineName, EngineSettings, Flavour, engine_folder
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.decode.settings import GenerationSettings
from slipstream.runtime.errors import BackendError, SlipstreamError
from slipstream.runtime.session import Pair
from slipstream.runtime.trt.flavour import load_flavour
from tests.support.gpu_steps import costs
from tests.support.progress import SilentProgress

ENGINES: tuple[EngineName, ...] = ("tensorrt-rtx", "tensorrt", "onnxruntime-cuda")
PACKAGES = "slipstream cuda-python tensorrt tensorrt-rtx onnxruntime onnxruntime-gpu onnx torch numpy".split()
Report = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    contexts: rows held while steps are timed; num_steps more must not cross a bucket of rows.
    budget_seconds: no engine is begun on later than this.
    """

    engines: tuple[EngineName, ...] = ENGINES
    dtypes: tuple[DType, ...] = ("float32", "bfloat16", "float16")
    contexts: tuple[int, ...] = (40, 150, 300, 600, 900)
    num_steps: int = 20
    num_tokens: int = 64
    max_length: int = 1024
    max_batch: int = 2
    budget_seconds: float = 330.0


def reason_against(engine: EngineName) -> str | None:
    """Why an engine can't run here, in slipstream's own words."""
    try:
        device = Cuda().compute_capability
        if engine in get_args(Flavour):
            flavour = cast(Flavour, engine)
            device_to_build_for(load_flavour(flavour), device if engine == "tensorrt-rtx" else None)
        elif "CUDAExecutionProvider" not in ort.get_available_providers():
            raise BackendError(f"onnxruntime {ort.__version__} has no CUDA provider: pip install 'slipstream[gpu]'")
    except SlipstreamError as error:
        return str(error)
    return None


def check_all(folder: Path, out: Path, scale: Scale) -> Report:
    """Export, build, compare and measure what can run here; out is rewritten after every engine."""
    start = perf_counter()
    report: Report = {"machine": _machine(), "scale": asdict(scale), "engines": {}, "warnings": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reference: list[list[int]] | None = None
        for dtype in scale.dtypes:
            bundle = export_demo(folder / dtype, dtype)
            if reference is None:
                exact = bundle if dtype == "float32" else export_demo(folder / "float32", "float32")
                reference = _greedy(exact, "onnxruntime", scale)["tokens"]
            for engine in scale.engines:
                entry = report["engines"].setdefault(engine, {})
                entry[dtype] = _reasoned(engine, bundle, reference, scale, perf_counter() - start)
                report["warnings"] = sorted({str(warning.message) for warning in caught})
                report["seconds"] = round(perf_counter() - start, 1)
                out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def export_demo(folder: Path, dtype: DType) -> Bundle:
    if not folder.exists():
        pair = open_pair(PAIR / "target", PAIR / "assistant")
        # with the per-layer table in the graph: a round is one launch, and copies what was decided
        export_pair(pair, folder, ExportSettings(dtype=dtype, ple="device"), SilentProgress())
    return open_bundle(folder)


def errors(entry: Report) -> list[str]:
    """Every error of an engine's sections, one line each."""
    return [f"{name}: {part['error']}" for name, part in entry.items() if isinstance(part, dict) and "error" in part]


def _machine() -> Report:
    cuda = Cuda()
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    tool = shutil.which("nvidia-smi")
    query = [str(tool), "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if tool else None
    return {
        "device": cuda.compute_capability,
        "nvidia_smi": shown,
        "driver_version": cuda.driver_version,
        "runtime_version": cuda.runtime_version,
        "total_mib": cuda.free_bytes()[1] >> 20,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _reasoned(engine: EngineName, bundle: Bundle, reference: list[list[int]], scale: Scale, elapsed: float) -> Report:
    reason = reason_against(engine)
    if reason is not None:
        return {"skipped": reason}
    if elapsed > scale.budget_seconds:
        return {"skipped": f"{elapsed:.0f} seconds had passed, {scale.budget_seconds:.0f} are allowed"}
    return _check_engine(engine, bundle, reference, scale)


def _check_engine(engine: EngineName, bundle: Bundle, reference: list[list[int]], scale: Scale) -> Report:
    entry: Report = {}

    def section(name: str, measure: Callable[[], Report]) -> None:
        start = perf_counter()
        try:
            entry[name] = measure()
        except Exception as error:  # noqa: BLE001 (recorded: one failure must not hide what comes after it)
            entry[name] = {"error": f"{type(error).__name__}: {error}"}
        entry[name]["seconds"] = round(perf_counter() - start, 3)

    if engine in get_args(Flavour):
        flavour = cast(Flavour, engine)
        section("build", lambda: _build(bundle, flavour, scale))
        if "error" in entry["build"]:
            return entry
        section("loading", lambda: _loading(bundle, flavour))
        section("parity", lambda: _parity(bundle, flavour))
    section("greedy", lambda: _compare_tokens(_greedy(bundle, engine, scale), reference))
    section("steps", lambda: _steps(bundle, engine, scale))
    return entry


def _build(bundle: Bundle, flavour: Flavour, scale: Scale) -> Report:
    settings = EngineSettings(
        flavour=flavour,
        device=Cuda().compute_capability if flavour == "tensorrt-rtx" else "",
        max_length=scale.max_length,
        max_batch=scale.max_batch,
        num_draft_tokens=bundle.manifest.generation.num_draft_tokens,
        workspace_mib=1024,
    )
    outcome = build_engines(bundle, settings, SilentProgress())
    record = outcome.record
    engines = {"target": record.target, "assistant": record.assistant}
    return {
        "build_seconds": {name: engine.build_seconds for name, engine in engines.items()},
        "size_bytes": {name: engine.size_bytes for name, engine in engines.items()},
        "peak_memory_mib": record.peak_memory_mib,
        "capacity": record.capacity,
        "attention": [shape.model_dump() for shape in record.attention],
        "note": outcome.note,
    }


def _loading(bundle: Bundle, flavour: Flavour) -> Report:
    """Seconds to load and to the end of a first short answer, without and with what an earlier start compiled."""
    cache = engine_folder(bundle, flavour, Cuda().compute_capability) / "runtime.cache"
    found: Report = {}
    for start_kind in ("first", "again"):
        if start_kind == "first":
            cache.unlink(missing_ok=True)
        start = perf_counter()
        with Pair(bundle, engine=flavour) as pair:
            loaded = perf_counter()
            pair.generate(PROMPTS[0], GenerationSettings(max_new_tokens=8))
            answered = perf_counter()
        found[start_kind] = {"load_s": round(loaded - start, 4), "first_answer_s": round(answered - loaded, 4)}
    found["runtime_cache_bytes"] = cache.stat().st_size if cache.is_file() else None
    return found


def _parity(bundle: Bundle, flavour: Flavour) -> Report:
    report = compare_engines(bundle, flavour, SilentProgress())
    with Pair(bundle, engine=flavour) as pair:
        is_stamped = getattr(pair.engine, "is_stamped", False)
    found = {
        "failures": report.failures,
        "num_calls": len(report.calls),
        "largest_difference": max(check.difference for check in report.calls),
        "tolerance": report.tolerance,
        "near_ties": sum(check.near_ties for check in report.calls),
        "is_stamped": is_stamped,
    }
    if report.failures:
        found["error"] = f"{len(report.failures)} calls differ, the first: {report.failures[0]}"
    return found


def _greedy(bundle: Bundle, engine: EngineName, scale: Scale) -> Report:
    with Pair(bundle, engine=engine) as pair:
        settings = GenerationSettings(max_new_tokens=scale.num_tokens)
        results = [pair.generate([{"role": "user", "content": prompt}], settings) for prompt in PROMPTS]
    num_rounds = sum(result.acceptance.num_rounds for result in results)
    timings = [result.timings for result in results]
    outside = sum(timing.decode - timing.draft - timing.verify for timing in timings)
    return {
        "tokens": [result.token_ids for result in results],
        "tokens_per_round": round(sum(len(result.token_ids) - 1 for result in results) / max(num_rounds, 1), 3),
        "outside_graphs_us_per_round": round(outside / max(num_rounds, 1) * 1e6, 1),
        "notes": sorted({note for result in results for note in result.notes}),
        "engine": results[0].engine,
    }


def _compare_tokens(found: Report, reference: list[list[int]]) -> Report:
    """first_difference: by prompt, the position of the first token that ONNX Runtime has otherwise on the CPU."""
    tokens = found.pop("tokens")
    first = [
        next((i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), None)
        for ids, wanted in zip(tokens, reference, strict=True)
    ]
    return {**found, "is_identical": tokens == reference, "first_difference": first}


def _steps(bundle: Bundle, engine: EngineName, scale: Scale) -> Report:
    cuda = Cuda()
    used: Report = {}
    before = cuda.free_bytes()[0]
    with Pair(bundle, engine=engine) as pair:
        used["loaded"] = before - cuda.free_bytes()[0]
        k = pair.engine.num_draft_tokens
        backend = cast(PairBackend, pair.new_backend())
        random = np.random.default_rng(1)
        found = {}
        for context in scale.contexts:
            _fill(backend, random.integers(8, bundle.manifest.vocab_size, context).tolist())
            found[str(context)] = costs(backend, k, scale.num_steps)
        used["one_sequence"] = before - cuda.free_bytes()[0]
        notes = list(backend.notes)
    used["after_close"] = before - cuda.free_bytes()[0]
    return {"num_draft_tokens": k, "contexts": found, "notes": notes, "device_bytes": used}


def _fill(backend: PairBackend, ids: Sequence[int]) -> None:
    backend.reset(0)
    for start in range(0, len(ids), backend.prefill_chunk):
        backend.prefill(0, ids[start : start + backend.prefill_chunk])
