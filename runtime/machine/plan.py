"""Memory a bundle takes at a given length and number of slots, before anything is loaded or allocated.

KV figures are exact. What ONNX Runtime adds to the weights on the CPU was measured on a pair of 350 M parameters
(preset mid) and is an estimate elsewhere. Of the bundle only the manifest and the records of engines are read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import (
    MAX_DRAFT_TOKENS,
    PREFILL_CHUNK,
    capacity_bucket,
    cpu_base_step,
    kv_limits,
)
from slipstream.runtime.bundle.dtypes import ITEM_BYTES
from slipstream.runtime.bundle.engine_record import ENGINE_FOLDER, RECORD, EngineName, EngineRecord, Flavour
from slipstream.runtime.bundle.json_reader import JsonError
from slipstream.runtime.bundle.manifest import Bundle, KVBuffer, Manifest
from slipstream.runtime.bundle.staging import real_place
from slipstream.runtime.errors import BackendError, RequestError

from .host import AvailableMemory, bytes_text

BuildEngine = Literal["onnxruntime", Flavour]
Place = Literal["host", "gpu"]
_PLANNED_LENGTH = 4096

# ONNX Runtime's CPU provider packs every matrix into memory of its own: per stored byte, once loaded and while
# loading. float16 becomes float32; quantized matrices exist as its fusion rewrote them, too, while it loads.
_FLOAT_PACKED = {"float32": (1.0, 1.0), "float16": (2.0, 2.4), "bfloat16": (1.0, 1.0)}
_QUANTIZED_BITS = {"int4": 4, "int8": 8, "fp8": 8, "nvfp4": 4}
_QUANTIZED_WHILE_LOADING = 2.0
_PACKED_BYTES_PER_BLOCK = 8  # beside what the file has
_PACKED_MARGIN = 1.05
_ACTIVATIONS_PER_HIDDEN = 80  # values that live at once in a prefill call, per row and value of the hidden state
_COPIES_OF_WHOLE_ROWS = 16  # of logits, of their order, of counts and biases, at once in choose_full
_RAM_PER_WEIGHT_BYTE = 4  # what TensorRT's builders were seen to need on small boards


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes for ``num_slots`` sequences of ``length`` tokens each.

    place: "host" for ONNX Runtime's CPU provider; "gpu" where weights, KV and workspace lie in the GPU's memory.
    weights: in their files, memory-mapped: matrices, norms, and the embedding once for both graphs.
    released: the part of weights that is read while loading only.
    packed: copies of weights that the engine makes for itself, or reads from a file of its own as mapped pages.
    loading: needed beyond them while it loads.
    kv_sliding, kv_full: buffers at the capacity that the length needs. kv_start: all of them, while empty.
    growth: the largest new buffer while the old ones are held.
    workspace: activations of a prefill call, or TensorRT's scratch memory; at most.
    whole_rows: more in calls with a sequence that needs the whole row of logits: penalties, biases, a JSON schema,
        log-probabilities, top_k of 0 or above 64. Not part of ``total``, since most need none.
    per_layer_table: mapped on the host. Not part of ``total``: its pages are file cache, which the system takes back.
    """

    place: Place
    length: int
    num_slots: int
    weights: int
    embedding: int
    released: int = 0
    packed: int = 0
    loading: int = 0
    kv_sliding: int
    kv_full: int
    kv_start: int
    growth: int = 0
    workspace: int
    whole_rows: int = 0
    per_layer_table: int

    @property
    def kv(self) -> int:
        return self.kv_sliding + self.kv_full

    @property
    def held_weights(self) -> int:
        """Weights as they stay in memory: what is mapped and read again, and the engine's copies."""
        return self.weights - self.released + self.packed

    @property
    def start(self) -> int:
        """Peak while loading, and with the buffers of empty slots."""
        return self.held_weights + self.loading + self.kv_start

    @property
    def total(self) -> int:
        """Peak while running."""
        return self.held_weights + self.kv + self.growth + self.workspace

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "start": self.start, "total": self.total}


def run_plan(bundle: Bundle, engine: EngineName, num_slots: int = 1) -> MemoryPlan | None:
    """The memory that running a bundle takes, and where; None where engines to run are missing.

    TensorRT engines have a length of their own; of several devices' the largest are planned for.
    """
    if engine == "tensorrt" or engine == "tensorrt-rtx":  # noqa: PLR1714 (narrows the type)
        plans = engine_plans(bundle, engine, num_slots)
        return max(plans.values(), key=lambda plan: plan.total, default=None)
    return memory_plan(bundle.manifest, num_slots=num_slots, place="host" if engine == "onnxruntime" else "gpu")


def memory_plan(
    manifest: Manifest, length: int | None = None, num_slots: int = 1, *, place: Place = "host"
) -> MemoryPlan:
    """Plan for ONNX Runtime, on the CPU ("host") or with CUDA. length: None takes 4096, or all that a bundle holds."""
    length = length or min(manifest.max_length, _PLANNED_LENGTH)
    rows = length + max(PREFILL_CHUNK, MAX_DRAFT_TOKENS + 1)  # the last prefill call may be padded to a chunk
    base_step = cpu_base_step(manifest) if place == "host" else 1
    limits = kv_limits(manifest.sliding_window, manifest.max_length, PREFILL_CHUNK, MAX_DRAFT_TOKENS, base_step)
    capacity = {kind: capacity_bucket(rows, limit) for kind, limit in limits.items()}
    empty = {kind: capacity_bucket(1, limit) for kind, limit in limits.items()}
    kv, kv_start = _kv_bytes(manifest, capacity, num_slots), _kv_bytes(manifest, empty, num_slots)
    embedding = _size(manifest, manifest.embedding_file)
    weights = engine_weights(manifest) + embedding
    packed, loading = _packed(manifest) if place == "host" else (_uploaded_again(manifest), 0)
    workspace = _activations(manifest, capacity, num_slots)
    if place == "host" and manifest.dtype == "float16":  # each graph widens the embedding for its lookup
        workspace += 2 * embedding * (1 + len(manifest.draft_graphs))
    return MemoryPlan(
        place=place,
        length=length,
        num_slots=num_slots,
        weights=weights,
        embedding=embedding,
        released=weights - embedding if place == "host" else 0,
        packed=packed,
        loading=loading,
        kv_sliding=kv["sliding"],
        kv_full=kv["full"],
        kv_start=sum(kv_start.values()),
        growth=max(_tensor_bytes(buffer, capacity[buffer.type], num_slots) for buffer in manifest.kv),
        workspace=workspace,
        whole_rows=_whole_rows(manifest, num_slots),
        per_layer_table=_table(manifest),
    )


def engine_plan(manifest: Manifest, record: EngineRecord, num_slots: int = 1) -> MemoryPlan:
    """Plan for TensorRT engines: KV at its static capacity, scratch memory as the build allowed it."""
    embedding = manifest.vocab_size * manifest.hidden_size * ITEM_BYTES[manifest.dtype]
    kv = _kv_bytes(manifest, record.capacity, num_slots)
    return MemoryPlan(
        place="gpu",
        length=record.settings.max_length,
        num_slots=num_slots,
        weights=sum(engine.size_bytes for engine in record.engines) + embedding,
        embedding=embedding,
        kv_sliding=kv["sliding"],
        kv_full=kv["full"],
        kv_start=sum(kv.values()),
        workspace=record.settings.workspace_mib << 20,
        per_layer_table=_table(manifest),
    )


def engine_plans(bundle: Bundle, flavour: Flavour | None = None, num_slots: int = 1) -> dict[str, MemoryPlan]:
    """Plans of the TensorRT engines that a bundle has, by folder; a record that can't be read has none."""
    plans = {}
    for path in sorted((bundle.folder / ENGINE_FOLDER).glob(f"tensorrt*/{RECORD}")):
        try:
            record = EngineRecord.read(path)
        except (FileNotFoundError, JsonError):  # told when they are loaded
            continue
        if flavour in (None, record.settings.flavour):
            plans[path.parent.name] = engine_plan(bundle.manifest, record, num_slots)
    return plans


def build_peak(manifest: Manifest, engine: BuildEngine) -> int:
    """Memory of ``slipstream build``: TensorRT's builder, or ONNX Runtime trying each rewritten graph in turn."""
    if engine == "onnxruntime":
        return sum(_packed_target(manifest)) + _size(manifest, manifest.embedding_file)
    return _RAM_PER_WEIGHT_BYTE * engine_weights(manifest)


def engine_weights(manifest: Manifest) -> int:
    """Weights that go into TensorRT engines: all but the tables that are looked up."""
    return _size(manifest, manifest.target_file) + _size(manifest, manifest.assistant_file)


def check_build(manifest: Manifest, engine: BuildEngine, memory: AvailableMemory | None) -> None:
    """Raises RequestError when a machine has too little memory for a build. memory: None where that is unknown."""
    needed = build_peak(manifest, engine)
    if memory is not None and needed > memory.available:
        where = "a larger machine" if engine != "tensorrt" else "a larger machine with the same GPU"
        raise RequestError(
            f"building needs about {bytes_text(needed)} of memory, {bytes_text(memory.available)} are available: "
            f"{_ways_out(manifest, f'build on {where}')}"
        )


def check_disk(place: Path, needed: int, what: str, otherwise: str) -> None:
    """Raises RequestError when the disk that a folder is to be made on has no room.

    needed: bytes. what: is written there. otherwise: what to do but make room.
    """
    parent = next(folder for folder in real_place(place).parents if folder.exists())
    if not parent.is_dir():
        raise RequestError(f"{parent} is a file, so {place} can't be made below it: choose another folder")
    free = shutil.disk_usage(parent).free
    if free < needed * 1.02:
        raise RequestError(
            f"{what}: {bytes_text(needed)} of disk are needed, {parent} has {bytes_text(free)} free: "
            f"make room, or {otherwise}"
        )


def check_start(plan: MemoryPlan, manifest: Manifest, memory: AvailableMemory | None) -> None:
    """Raises BackendError when a machine has too little memory to load a bundle for the CPU.

    memory: None where that is unknown.
    """
    if plan.place == "gpu" or memory is None or plan.start <= memory.available:
        return
    raise BackendError(
        f"loading needs about {bytes_text(plan.start)} of memory ({bytes_text(plan.held_weights)} for the weights, "
        f"{bytes_text(plan.loading)} more while they load, {bytes_text(plan.kv_start)} for the first KV buffers), "
        f"{bytes_text(memory.available)} are available: {_ways_out(manifest)}. slipstream inspect shows the whole plan"
    )


def what_to_change(plan: MemoryPlan, manifest: Manifest) -> str:
    """What makes a plan smaller, the larger part first."""
    shorter = "plan for fewer tokens (inspect --length; generate with shorter prompts and -n)"
    parts = [shorter] if plan.length > 1 else []
    if plan.num_slots > 1:
        parts.append("fewer slots")
    if not manifest.has_int8_kv:
        parts.append("export with --kv int8")
    is_first = plan.held_weights > plan.kv + plan.growth
    parts = [*_smaller_weights(manifest), *parts] if is_first else [*parts, *_smaller_weights(manifest)]
    return ", or ".join(["close other programs", *parts])


def _ways_out(manifest: Manifest, *others: str) -> str:
    return ", or ".join(["close other programs", *others, *_smaller_weights(manifest)])


def _smaller_weights(manifest: Manifest) -> list[str]:
    """Advice to quantize; none for a bundle that is quantized already."""
    return ["export with --weights int4"] if manifest.weights.format == "float" else []


def _tensor_bytes(buffer: KVBuffer, capacity: int, batch: int) -> int:
    key = next(b for b in graph_io.for_layers(graph_io.INPUTS, [buffer]) if b.is_kv)
    return prod(key.sized({"batch": batch, f"{buffer.type}_capacity": capacity})) * ITEM_BYTES[key.dtype]


def _kv_bytes(manifest: Manifest, capacity: Mapping[str, int], batch: int) -> dict[str, int]:
    """Keys and values, by layer type."""
    total = dict.fromkeys(capacity, 0)
    for buffer in manifest.kv:
        total[buffer.type] += 2 * _tensor_bytes(buffer, capacity[buffer.type], batch)
    return total


def _size(manifest: Manifest, file: str) -> int:
    return manifest.files[file].size_bytes


def _table(manifest: Manifest) -> int:
    return 0 if manifest.per_layer_table is None else _size(manifest, manifest.per_layer_table.file)


def _packing(manifest: Manifest) -> tuple[float, float]:
    """Bytes of ONNX Runtime's copies per stored byte of a matrix: once loaded, and while loading."""
    weights = manifest.weights
    if weights.format == "float":
        return _FLOAT_PACKED[manifest.dtype]
    blocks = 0.0
    if weights.block_size is not None:
        blocks = 8 * _PACKED_BYTES_PER_BLOCK / (_QUANTIZED_BITS[weights.format] * weights.block_size)
    held = _PACKED_MARGIN + blocks
    return held, max(held, _QUANTIZED_WHILE_LOADING)


def _packed_target(manifest: Manifest) -> tuple[int, int]:
    """ONNX Runtime's copies of the target's matrices on the CPU: once loaded, and more while loading."""
    held, while_loading = _packing(manifest)
    stored = _size(manifest, manifest.target_file)
    if manifest.weights.format == "float":
        stored += _size(manifest, manifest.embedding_file)  # as the head's matrix
    return round(held * stored), round((while_loading - held) * stored)


def _packed(manifest: Manifest) -> tuple[int, int]:
    """As _packed_target, with each assistant graph's own copies."""
    held, _ = _packing(manifest)
    packed, loading = _packed_target(manifest)
    return packed + round(held * _size(manifest, manifest.assistant_file)) * len(manifest.draft_graphs), loading


def _uploaded_again(manifest: Manifest) -> int:
    """CUDA sessions hold weights each for themselves: the embedding, and the assistant's in each graph of its own."""
    num_graphs = len(manifest.draft_graphs)
    embedding, assistant = manifest.embedding_file, manifest.assistant_file
    return num_graphs * _size(manifest, embedding) + (num_graphs - 1) * _size(manifest, assistant)


def _activations(manifest: Manifest, capacity: Mapping[str, int], num_slots: int) -> int:
    """At most, of a call: hidden rows and what layers make of them, attention scores of one layer, logits."""
    num_heads = 2 * manifest.hidden_size // min(buffer.head_dim for buffer in manifest.kv)  # no Gemma 4 has more
    verified = num_slots * (MAX_DRAFT_TOKENS + 1)
    values = max(PREFILL_CHUNK, verified) * (
        _ACTIVATIONS_PER_HIDDEN * manifest.hidden_size + num_heads * capacity["full"]
    )
    values += verified * manifest.vocab_size
    widened = [b for b in manifest.kv if b.dtype == "int8"]  # read as float32, one layer at a time
    values += num_slots * max((2 * b.num_kv_heads * b.head_dim * capacity[b.type] for b in widened), default=0)
    return values * ITEM_BYTES["float32"]


def _whole_rows(manifest: Manifest, num_slots: int) -> int:
    """At most: what choose_full makes of the logits of a round, and three rows for each slot that stay."""
    num_rows = num_slots * (_COPIES_OF_WHOLE_ROWS * (MAX_DRAFT_TOKENS + 1) + 3)
    return num_rows * manifest.vocab_size * ITEM_BYTES["float32"]
