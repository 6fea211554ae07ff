"""Engines by name, and the records beside TensorRT's: what they were built for, and whether they were compared.

``engines/tensorrt/build.py`` and ``engines/parity/compare.py`` write them, the runtime reads them before it
loads an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slipstream.runtime.errors import BackendError

from .files import FileName, file_sha256
from .graph_io import ChooseName
from .json_reader import JsonError
from .manifest import MANIFEST, Bundle, Manifest, Record

RECORD, STAMP = "record.json", "parity.json"
_HASHED_BYTES = 64 * 2**20
ENGINE_FOLDER = "engines"  # inside the bundle
Flavour = Literal["tensorrt", "tensorrt-rtx"]
EngineName = Literal["onnxruntime", "onnxruntime-cuda", Flavour]  # what --engine names


def check_runs(manifest: Manifest, engine: EngineName) -> None:
    """Raises BackendError for a bundle in a number format that ONNX Runtime has no kernels for."""
    if manifest.weights.format == "nvfp4" and engine in ("onnxruntime", "onnxruntime-cuda"):
        raise BackendError(
            "this bundle's weights are NVFP4, which ONNX Runtime has no kernels for",
            "Build engines with --engine tensorrt or tensorrt-rtx, for a GPU from sm100 on",
        )
    if manifest.dtype == "bfloat16" and engine == "onnxruntime":
        raise BackendError(
            "this bundle is bfloat16, which ONNX Runtime's CPU provider can't multiply",
            "Export the pair with --dtype float32 for the CPU",
        )


class AttentionShape(Record):
    """Attention of one shape, and whether TensorRT has one kernel for it or takes it apart.

    is_fused: as probed with a few rows over a short static buffer; other sizes may be decided otherwise.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    is_fused: bool


class EngineFile(Record):
    """profiles: smallest, likeliest and largest size by dimension, one entry per optimization profile."""

    file: FileName
    graph: FileName
    size_bytes: int
    sha256: str
    build_seconds: float
    profiles: dict[str, dict[str, tuple[int, int, int]]]


class EngineSettings(Record):
    """max_length: tokens per sequence. workspace_mib: scratch memory a build may plan with."""

    flavour: Flavour
    device: str
    max_length: int
    max_batch: int
    num_draft_tokens: int
    workspace_mib: int


class EngineRecord(Record):
    """bundle_sha256: of the manifest the engines were built from.
    device_name: the GPU they were built on, "" where none was needed.
    capacity: rows of the KV buffers by layer type; static in the engines.
    choosing: engines of the graphs that choose tokens, by their name.
    peak_memory_mib: the largest the building process has been.
    """

    bundle_sha256: str
    slipstream_version: str
    engine_version: str
    settings: EngineSettings
    device_name: str
    dtype: str
    capacity: dict[str, int]
    attention: list[AttentionShape]
    target: EngineFile
    assistant: EngineFile
    choosing: dict[ChooseName, EngineFile]
    peak_memory_mib: int

    @property
    def engines(self) -> tuple[EngineFile, ...]:
        """All of them."""
        return self.target, self.assistant, *self.choosing.values()


class ParityStamp(Record):
    """Written when every compared call of these engines agreed with ONNX Runtime on this GPU.

    device: the GPU's name. largest_difference: of top logits, relative to their scale. tolerance: what was allowed.
    num_calls, num_tokens: compared. near_ties: tokens that differed where the reference's two
    best logits were closer than twice the tolerance.
    """

    target_sha256: str
    assistant_sha256: str
    engine_version: str
    device: str
    driver_version: int
    slipstream_version: str
    reference: str
    largest_difference: float
    tolerance: float
    num_calls: int
    num_tokens: int
    near_ties: int


def engine_folder(bundle: Bundle, flavour: Flavour, device: str) -> Path:
    return bundle.folder / ENGINE_FOLDER / f"{flavour}-{device}"


def open_record(bundle: Bundle, flavour: Flavour, device: str, engine_version: str) -> EngineRecord:
    """The record of the engines for this device, checked. Raises BackendError with the way out."""
    folder = engine_folder(bundle, flavour, device)
    again = f"slipstream build {bundle.folder} --engine {flavour}"
    if flavour == "tensorrt-rtx":
        again += f" --device {device}"
    try:
        record = EngineRecord.read(folder / RECORD)
    except FileNotFoundError as error:
        others = sorted(path.parent.name for path in folder.parent.glob(f"tensorrt*/{RECORD}"))
        there = f"; there are {', '.join(others)}" if others else ""
        raise BackendError(
            f"{bundle.folder} has no {flavour} engines for this GPU ({device}){there}", f"Build them: {again}"
        ) from error
    except JsonError as error:
        raise BackendError(f"{folder / RECORD} {error}", f"Build again: {again}") from error
    if record.bundle_sha256 != file_sha256(bundle.folder / MANIFEST):
        raise BackendError(f"the bundle was exported anew since {folder} was built", f"Build again: {again}")
    if record.engine_version != engine_version:
        raise BackendError(
            f"{folder} was built with {flavour} {record.engine_version}, installed is {engine_version}",
            f"Install that version, or build again: {again}",
        )
    for engine in (record.target, record.assistant):
        path = folder / engine.file
        is_there = path.is_file() and path.stat().st_size == engine.size_bytes
        # large engines are hashed by verify only: reading them twice would double the time to load
        if not is_there or (engine.size_bytes <= _HASHED_BYTES and file_sha256(path) != engine.sha256):
            raise BackendError(f"{path} is missing or damaged", f"Copy it again, or build again: {again}")
    return record


def read_stamp(folder: Path, record: EngineRecord, gpu: str, driver_version: int) -> ParityStamp | None:
    """The parity stamp of these very engines on this GPU and driver; None when there is none."""
    try:
        stamp = ParityStamp.read(folder / STAMP)
    except (FileNotFoundError, JsonError):
        return None
    hashes = stamp.target_sha256, stamp.assistant_sha256
    is_same = hashes == (record.target.sha256, record.assistant.sha256)
    return stamp if is_same and (stamp.device, stamp.driver_version) == (gpu, driver_version) else None
