"""``slipstream build``: TensorRT engines and their record, beside the graphs of a bundle.

What can't be built is refused first; engines are built in a hidden folder and renamed
when both are there. A build whose record matches is not repeated.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from slipstream.engines.graph_edit import operand, size
from slipstream.engines.outcome import Outcome
from slipstream.engines.tensorrt.passes.group_experts import experts_bytes
from slipstream.runtime.bundle import capacity as limits
from slipstream.runtime.bundle import engine_record as records
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.json_reader import JsonError
from slipstream.runtime.bundle.manifest import MANIFEST, Bundle, Manifest, check_links
from slipstream.runtime.bundle.staging import check_writable, staged
from slipstream.runtime.errors import RequestError
from slipstream.runtime.machine.host import read_state
from slipstream.runtime.machine.plan import check_build, check_disk, engine_weights
from slipstream.runtime.machine.progress import Progress
from slipstream.runtime.sampling.files import choose_path
from slipstream.runtime.trt.flavour import TensorRT, load_flavour

from .attention_probe import probe_attention
from .builder import BuildOptions, Network, Profile, edited_model, engine_from_network, network_from_onnx, with_sizes
from .device import Device, device_to_build_for
from .timing_cache import TimingCache

_EXPERTS_BYTES = 2 << 30  # scratch memory that one prefill call may need for a layer's experts
_LEAST_CAPABILITY = {"fp8": 89, "nvfp4": 100}
_TARGET_ENGINE, _ASSISTANT_ENGINE = "target.engine", "assistant.engine"


def build_engines(
    bundle: Bundle, settings: records.EngineSettings, progress: Progress
) -> Outcome[records.EngineRecord]:
    """Build both engines of a bundle. ``settings.device`` is "" for the current device.

    Raises RequestError for settings that no engine can have, MissingExtraError or BackendError from TensorRT.
    """
    check_links(bundle)
    _check_kv(bundle.manifest)
    trt = load_flavour(settings.flavour)
    device = device_to_build_for(trt, settings.device or None)
    settings = settings.model_copy(update={"device": device.name})
    _check_settings(bundle.manifest, settings)
    folder = records.engine_folder(bundle, settings.flavour, device.name)
    existing = _matching_record(folder, bundle, settings, trt)
    if existing is not None:
        return Outcome(folder, existing, is_new=False)
    check_writable(folder)
    needed = 2 * engine_weights(bundle.manifest)
    check_disk(folder.parent, needed, "writing engines", "copy the bundle to another disk")
    check_build(bundle.manifest, settings.flavour, read_state())
    timing_cache = TimingCache(bundle.folder, trt.version, device.name) if settings.flavour == "tensorrt" else None
    with staged(folder) as work:
        options = BuildOptions(device.capability, settings.workspace_mib, timing_cache)
        record = _Build(trt, bundle, settings, options, work, progress).run(device)
        (work / records.RECORD).write_bytes(record.to_json())
    return Outcome(folder, record, is_new=True, note=timing_cache.note if timing_cache else None)


def _check_kv(manifest: Manifest) -> None:
    if manifest.has_int8_kv:
        raise RequestError(
            "this bundle keeps its KV in int8, which TensorRT's in-place cache does not take: "
            "export with --kv float for engines, or run the bundle with --engine onnxruntime"
        )


def _check_settings(manifest: Manifest, settings: records.EngineSettings) -> None:
    least = _LEAST_CAPABILITY.get(manifest.weights.format, 0)
    if int(settings.device.removeprefix("sm")) < least:
        raise RequestError(
            f"this bundle's weights are {manifest.weights.format}, which GPUs multiply from sm{least} on, and "
            f"{settings.device} does not: export the pair from a float checkpoint, with --weights int4 or int8"
        )
    available = sorted(graph.num_steps for graph in manifest.draft_graphs)
    if settings.num_draft_tokens not in available:
        raise RequestError(
            f"--num-draft-tokens {settings.num_draft_tokens}: the bundle has assistant graphs of "
            f"{' and '.join(map(str, available))} steps; export with -k {settings.num_draft_tokens} for others"
        )
    if not 2 <= settings.max_length <= manifest.max_length:
        raise RequestError(f"--max-length {settings.max_length} is outside 2..{manifest.max_length}, the bundle's")


def _matching_record(
    folder: Path, bundle: Bundle, settings: records.EngineSettings, trt: TensorRT
) -> records.EngineRecord | None:
    try:
        record = records.EngineRecord.read(folder / records.RECORD)
    except (FileNotFoundError, JsonError):
        return None
    is_same = (
        record.bundle_sha256 == file_sha256(bundle.folder / MANIFEST)
        and record.settings == settings
        and (record.slipstream_version, record.engine_version) == (version("slipstream"), trt.version)
        and all(
            (folder / engine.file).is_file() and file_sha256(folder / engine.file) == engine.sha256
            for engine in record.engines
        )
    )
    return record if is_same else None


@dataclass(frozen=True)
class _Build:
    """One build into a work folder: probes, then both engines, then the record."""

    trt: TensorRT
    bundle: Bundle
    settings: records.EngineSettings
    options: BuildOptions
    work: Path
    progress: Progress

    def run(self, device: Device) -> records.EngineRecord:
        manifest, settings = self.bundle.manifest, self.settings
        k = settings.num_draft_tokens
        chunk = _prefill_chunk(self.bundle.path(manifest.target_graph))
        capacity = limits.kv_limits(manifest.sliding_window, settings.max_length, chunk, k)
        profiles = _profiles(settings, chunk, capacity)
        draft, choose = profiles.pop("draft"), profiles.pop("choose")
        assistant = next(graph.file for graph in manifest.draft_graphs if graph.num_steps == k)
        attention = self._probe((manifest.target_graph, assistant))
        return records.EngineRecord(
            bundle_sha256=file_sha256(self.bundle.folder / MANIFEST),
            slipstream_version=version("slipstream"),
            engine_version=self.trt.version,
            settings=settings,
            device_name=device.gpu,
            dtype=manifest.dtype,
            capacity=capacity,
            attention=attention,
            target=self._engine(_TARGET_ENGINE, manifest.target_graph, capacity, profiles),
            assistant=self._engine(_ASSISTANT_ENGINE, assistant, capacity, {"draft": draft}),
            choosing={name: self._choosing_engine(name, choose) for name in graph_io.ENGINE_CHOICES},
            peak_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        )

    def _probe(self, graphs: tuple[str, str]) -> list[records.AttentionShape]:
        """The distinct attention shapes of the graphs, and how TensorRT takes each."""
        self.progress.start("probing attention kernels", 0)
        dtype, shapes = self.bundle.manifest.dtype, set()
        for node in (node for graph in graphs for node in ir.load(self.bundle.path(graph)).graph):
            if node.op_type == "Attention":
                query, key = operand(node, 0), operand(node, 1)
                heads, kv_heads, head_dim = size(query, 1), size(key, 1), size(query, 3)
                sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
                shapes.add(records.AttentionShape(**sizes, dtype=dtype, is_fused=False))
        ordered = sorted(shapes, key=lambda shape: shape.model_dump_json())
        return probe_attention(self.trt, ordered, self.options.capability)

    def _engine(
        self, file: str, graph: str, capacity: Mapping[str, int], profiles: Mapping[str, Profile]
    ) -> records.EngineFile:
        manifest, path = self.bundle.manifest, self.bundle.path(graph)
        weights = manifest.assistant_file if file == _ASSISTANT_ENGINE else manifest.target_file
        options = replace(self.options, workspace_mib=_workspace_mib(manifest, self.settings, weights))
        return self._built(file, path, lambda: edited_model(path, manifest.kv, capacity), profiles, options)

    def _choosing_engine(self, name: graph_io.ChooseName, profile: Profile) -> records.EngineFile:
        """Of a graph that has no weights, and that the package ships."""
        manifest = self.bundle.manifest
        path = choose_path(name, manifest.dtype)
        return self._built(
            f"{name}.engine", path, lambda: with_sizes(ir.load(path), manifest.sizes), {name: profile}, self.options
        )

    def _built(
        self,
        file: str,
        path: Path,
        load: Callable[[], ir.Model],
        profiles: Mapping[str, Profile],
        options: BuildOptions,
    ) -> records.EngineFile:
        self.progress.start(f"building {file} for {self.settings.device}", 0)
        start = time.monotonic()
        parsed = network_from_onnx(self.trt, load(), path)
        content = _interruptible(self.trt, parsed, list(profiles.values()), options)
        (self.work / file).write_bytes(content)
        return records.EngineFile(
            file=file,
            graph=path.name,
            size_bytes=len(content),
            sha256=file_sha256(self.work / file),
            build_seconds=round(time.monotonic() - start, 2),
            profiles={name: dict(profile) for name, profile in profiles.items()},
        )


def _workspace_mib(manifest: Manifest, settings: records.EngineSettings, weights_file: str) -> int:
    """Scratch memory that the builder of an engine may count on.

    Building for another GPU, TensorRT-RTX 1.7.1 ends with OutOfMemory where weights and this have no room for the
    embedding, an input of both engines; assistants of E4B and larger weigh less than their target's embedding.
    """
    if settings.flavour != "tensorrt-rtx":
        return settings.workspace_mib
    files = manifest.files
    missing = files[manifest.embedding_file].size_bytes - files[weights_file].size_bytes
    return settings.workspace_mib + max(missing >> 20, 0)


def _prefill_chunk(graph: Path) -> int:
    """Rows of a prefill call: the most whose experts fit into _EXPERTS_BYTES, or the runtime's fewest.

    Only sizes of the runtime's are taken, because parity compares those. 26B-A4B in bfloat16 may need 1.7 GiB
    for 256 rows.
    """
    model = ir.load(graph)
    chunks = [limits.PREFILL_CHUNK, *(rows for rows in reversed(limits.PREFILL_BUCKETS) if rows < limits.PREFILL_CHUNK)]
    return next((rows for rows in chunks if experts_bytes(model, rows) <= _EXPERTS_BYTES), chunks[-1])


def _profiles(settings: records.EngineSettings, prefill_chunk: int, capacity: Mapping[str, int]) -> dict[str, Profile]:
    """Ranges of every dynamic dimension: prefill chunks of a slot, 1 to K + 1 verify rows of all, draft and choice."""
    k, batch = settings.num_draft_tokens, (1, settings.max_batch, settings.max_batch)
    buckets: dict[str, tuple[int, int, int]] = {}
    for kind, rows in capacity.items():
        smallest = min(limits.SMALLEST_CAPACITY, rows)
        buckets[f"{kind}_bucket"] = (smallest, min(1024, rows), rows)

    def call(num_rows: int, most_rows: int, num_scored_rows: int) -> Profile:
        drafts, rows = (0, num_rows - 1, most_rows - 1), (1, num_rows, most_rows)
        scored = (1, num_scored_rows, num_scored_rows)
        return {"batch": batch, "num_draft_tokens": drafts, "num_rows": rows, "num_scored_rows": scored}

    ranges = {
        "prefill": {**call(prefill_chunk, prefill_chunk, 1), **buckets, "batch": (1, 1, 1)},
        "verify": {**call(k + 1, k + 1, k + 1), **buckets},
        "draft": {"batch": batch, **buckets, "num_drafted": (0, 0, 0)},
        "choose": call(k + 1, max(prefill_chunk, k + 1), k + 1),
    }
    graphs: dict[str, graph_io.GraphName] = {"draft": "assistant", "choose": "choose_sampled"}
    for name, profile in ranges.items():
        inputs = graph_io.inputs(graphs.get(name, "target"), has_per_layer_rows=True, is_engine=True)
        dynamic = graph_io.dynamic_sizes(inputs)
        assert set(profile) == dynamic, f"{name} has ranges for {sorted(profile)}; {sorted(dynamic)} are dynamic"
    return ranges


def _interruptible(trt: TensorRT, parsed: Network, profiles: list[Profile], options: BuildOptions) -> memoryview:
    """Build in a thread, so that Ctrl-C reaches this one and cancels the build cleanly."""
    cancelled = threading.Event()
    with ThreadPoolExecutor(1, "tensorrt-build") as worker:
        built = worker.submit(engine_from_network, trt, parsed, profiles, options, lambda: not cancelled.is_set())
        try:
            return built.result()
        finally:  # of a build that has ended, nothing
            cancelled.set()
