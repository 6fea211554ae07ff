"""What an engine can't run of a bundle, whatever the machine's size."""

from __future__ import annotations

from slipstream.runtime.bundle.engine_record import EngineName
from slipstream.runtime.bundle.manifest import Manifest
from slipstream.runtime.errors import BackendError


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
