"""The record beside the graphs that ``slipstream build --engine onnxruntime`` writes, and the check before their use.

Those graphs have the inputs and outputs of the portable ones and hold no matrices: they name the bundle's own files and
FILTERS, which ONNX Runtime finds when the model is given as bytes and ``WEIGHTS_FOLDER`` is set to the bundle's folder.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field

from slipstream.runtime.errors import BackendError

from .engine_record import ENGINE_FOLDER, RECORD
from .files import SMALL_FILE_BYTES, FileName, file_sha256
from .json_reader import JsonError
from .manifest import MANIFEST, Bundle, Record

ONNXRUNTIME_FOLDER = "onnxruntime-cpu"  # inside the folder of engines
FILTERS = "filters.bin"  # matrices in the layout that this CPU's convolutions read
LAYOUT = "layout.onnx"  # a graph that shows the layout of filters
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # a session option of ONNX Runtime
# What a quantized matrix is multiplied with on the CPU: rows rounded to int8 block by block, or as they are.
ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"
FLOAT32_ACTIVATIONS, INT8_ACTIVATIONS = "1", "4"


class OptimizedGraph(Record):
    """graph: the portable graph it stands for. passes: that changed it, in order."""

    file: FileName
    graph: FileName
    sha256: str
    size_bytes: int
    passes: list[str]


class Filters(Record):
    """Matrices as filters, in FILTERS. block: channels that lie together, as this kind of CPU reads them."""

    block: int
    layout_sha256: str
    size_bytes: int
    sha256: str


class OnnxRuntimeRecord(Record):
    """bundle_sha256: of the manifest the graphs were built from. num_threads: they share their work out to.

    filters: None where no graph reads such matrices.
    rows_run: rows of a call over one sequence -> the larger number that takes less time, and is run in its place.
    """

    bundle_sha256: str
    slipstream_version: str
    onnxruntime_version: str
    num_threads: int
    graphs: list[OptimizedGraph]
    filters: Filters | None
    rows_run: dict[Annotated[int, Field(strict=False)], int]  # JSON's keys are strings


def optimized_folder(bundle: Bundle) -> Path:
    return bundle.folder / ENGINE_FOLDER / ONNXRUNTIME_FOLDER


def open_optimized(bundle: Bundle, installed: str | None) -> OnnxRuntimeRecord | None:
    """The record of a bundle's graphs for ONNX Runtime, or None where there are none.

    installed: version of ONNX Runtime, None without it; another one may lack their operators.
    Raises BackendError when they were built from another bundle or with another version, or changed since.
    ``check_matrices`` reads large ones too.
    """
    folder, way_out = optimized_folder(bundle), _way_out(bundle)
    if not folder.exists() and not folder.is_symlink():  # a link that leads nowhere is damage
        return None
    try:
        record = OnnxRuntimeRecord.read(folder / RECORD)
    except FileNotFoundError as error:
        raise BackendError(f"{folder / RECORD} is missing", way_out) from error
    except JsonError as error:
        raise BackendError(f"{folder / RECORD} {error}", way_out) from error
    if record.bundle_sha256 != file_sha256(bundle.folder / MANIFEST):
        raise BackendError(f"{folder} was built from another export of this bundle", way_out)
    if installed not in (None, record.onnxruntime_version):
        raise BackendError(
            f"{folder} was built with ONNX Runtime {record.onnxruntime_version}, {installed} is installed", way_out
        )
    hashes = {graph.file: graph.sha256 for graph in record.graphs}
    if record.filters is not None:
        hashes[LAYOUT] = record.filters.layout_sha256
    for file, sha256 in hashes.items():
        if not (folder / file).is_file() or file_sha256(folder / file) != sha256:
            raise BackendError(f"{folder / file} is missing or was changed since it was built", way_out)
    path = folder / FILTERS
    if record.filters is not None and (not path.is_file() or path.stat().st_size != record.filters.size_bytes):
        raise BackendError(f"{path} is missing or has another size than it was built with", way_out)
    check_matrices(bundle, record, SMALL_FILE_BYTES)
    return record


def check_matrices(bundle: Bundle, record: OnnxRuntimeRecord | None, most_bytes: float = math.inf) -> None:
    """Compare the SHA-256 of FILTERS with the record. Raises BackendError. most_bytes: a larger file is not read."""
    path, filters = optimized_folder(bundle) / FILTERS, None if record is None else record.filters
    if filters is not None and filters.size_bytes <= most_bytes and file_sha256(path) != filters.sha256:
        raise BackendError(f"{path} was changed since it was built", _way_out(bundle))


def _way_out(bundle: Bundle) -> str:
    return f"Run slipstream build {bundle.folder} --engine onnxruntime again, or delete {optimized_folder(bundle)}"
