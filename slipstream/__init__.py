"""slipstream: Gemma 4 and its assistant drafter, from checkpoint pair to lossless speculative decoding.

Names are imported when they are first used, so that the command line can be interrupted while it starts.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# ONNX Runtime reads it once, while it is imported: nothing of slipstream may import that before this line has run.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from .runtime.decode.results import Acceptance, Chunk, Result, Timings
    from .runtime.decode.settings import GenerationSettings
    from .runtime.decode.streams import AsyncStream, Stream
    from .runtime.errors import (
        BackendError,
        BundleError,
        BusyError,
        CheckpointError,
        ContextFullError,
        MissingExtraError,
        NonFiniteError,
        RequestError,
        SlipstreamError,
    )
    from .runtime.session import Pair, Session, load

    __version__: str

__all__ = [
    "Acceptance", "AsyncStream", "BackendError", "BundleError", "BusyError", "CheckpointError", "Chunk",
    "ContextFullError", "GenerationSettings", "MissingExtraError", "NonFiniteError", "Pair", "RequestError", "Result",
    "Session", "SlipstreamError", "Stream", "Timings", "__version__", "load",
]  # fmt: skip
_ROOMS = ("session", "errors", "decode.results", "decode.settings", "decode.streams")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name in __all__:
        for room in _ROOMS:
            module = importlib.import_module(f"{__name__}.runtime.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
