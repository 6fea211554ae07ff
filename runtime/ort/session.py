"""ONNX Runtime sessions: the one place where they are configured and opened, and where its errors become ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from slipstream.runtime.bundle.onnxruntime_record import ACCURACY_LEVEL, WEIGHTS_FOLDER
from slipstream.runtime.errors import BackendError
from slipstream.runtime.machine.host import num_usable_cores

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"
_ERRORS_ONLY = 3  # ONNX Runtime's severities: 2 warning, 3 error


def session_options(
    folder: Path | None = None, *, num_threads: int = 0, accuracy_level: str | None = None
) -> ort.SessionOptions:
    """Options of a quiet session.

    folder: where the weights of a model given as bytes are. num_threads: within an operator; 0 takes every usable core.
    accuracy_level: what quantized matrices are multiplied with, see ``ACCURACY_LEVEL``; None leaves it alone.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads or num_usable_cores()
    options.log_severity_level = _ERRORS_ONLY
    if folder is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    if accuracy_level is not None:
        options.add_session_config_entry(ACCURACY_LEVEL, accuracy_level)
    return options


def open_session(
    model: Path | bytes,
    options: ort.SessionOptions,
    what: object,
    *,
    provider: str = CPU_PROVIDER,
    provider_options: Mapping[str, str] | None = None,
) -> ort.InferenceSession:
    """A session over a graph on one provider, without ONNX Runtime's own fallback to another one.

    what: the graph, for the message. Raises BackendError when ONNX Runtime refuses it.
    """
    try:
        # its own fallback prints to stdout and goes on with the CPU
        return ort.InferenceSession(
            model, options, providers=[(provider, dict(provider_options or {}))], enable_fallback=0
        )
    except Exception as error:  # onnxruntime has one class per status code and no common base
        raise BackendError(f"ONNX Runtime {ort.__version__} can't load {what}: {error}") from error


def run_bound(session: ort.InferenceSession, binding: Any, options: ort.RunOptions | None = None) -> None:
    """Run a graph over tensors bound by address. Raises BackendError when ONNX Runtime fails."""
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:  # see open_session
        raise BackendError(f"ONNX Runtime failed while running a graph: {error}") from error
