"""What this CPU and this ONNX Runtime do, asked of small graphs and of the loader."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime as ort

from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.manifest import Bundle, check_links
from slipstream.runtime.bundle.onnxruntime_record import LAYOUT, OnnxRuntimeRecord, open_optimized, optimized_folder
from slipstream.runtime.errors import BackendError

from .session import CPU_PROVIDER, CUDA_PROVIDER

# onnxruntime and onnxruntime-gpu share a folder, and whichever is installed last is the one that runs
REINSTALL_ADVICE = "pip uninstall onnxruntime onnxruntime-gpu, then pip install --no-deps onnxruntime-gpu"
CUDA_PROVIDER_ADVICE = f"pip install 'slipstream[gpu]', then {REINSTALL_ADVICE}"
LIBRARY_ADVICE = "Install that library (CUDA or cuDNN), or run on the CPU with --engine onnxruntime"
_SHAPE_OPERATORS = frozenset("Shape Gather Concat Unsqueeze Squeeze Slice Range Add Sub Mul Cast Reshape".split())


def channels_of_a_block(layout: Path) -> int:
    """Channels that lie together in what this CPU's convolutions read, 1 where it has no such layout.

    layout: a graph of filter_file.py; its answer is 0 to 31, two positions of each of 16 channels, as they are stored.
    """
    try:
        [stored] = ort.InferenceSession(layout, providers=[CPU_PROVIDER]).run(None, {})
    except Exception:  # noqa: BLE001 (onnxruntime has one class per status code and no common base)
        return 1
    return int(np.flatnonzero(cast(Array, stored).ravel() == 1)[0])


def open_graphs(bundle: Bundle) -> OnnxRuntimeRecord | None:
    """The record of graphs built for ONNX Runtime's CPU provider, None where there are none.

    Raises BackendError for those of another bundle, ONNX Runtime or kind of CPU, and for damaged ones.
    """
    record, folder = open_optimized(bundle, ort.__version__), optimized_folder(bundle)
    if record is not None and record.filters is not None:
        check_links(bundle, folder)
        block, found = record.filters.block, channels_of_a_block(folder / LAYOUT)
        if found != block:
            raise BackendError(
                f"{folder} was built for CPUs that read {block} channels at once, this one reads {found}",
                "Run slipstream build --engine onnxruntime on this machine",
            )
    return record


def missing_library() -> str | None:
    """Which library the CUDA provider lacks, in the loader's words; None where it has all of them."""
    library = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


def cpu_notes(session: ort.InferenceSession, graph: str) -> tuple[str, ...]:
    """Operators without a CUDA kernel, which ONNX Runtime runs on the CPU; those on shapes belong there."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # before 1.32
        return (f"this onnxruntime does not tell which operators of {graph} run on the CPU",)
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != CUDA_PROVIDER]
    names = sorted({node.op_type for part in parts for node in part.get_nodes()} - _SHAPE_OPERATORS)
    return (f"operators of {graph} run on the CPU: {', '.join(names)}",) if names else ()
