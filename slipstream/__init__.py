"""slipstream: Gemma 4 and its assistant drafter, from checkpoint pair to lossless speculative decoding."""

from importlib.metadata import version

from .runtime.decode.results import Acceptance, Chunk, Result, Timings
from .runtime.errors import SlipstreamError
from .runtime.session import GenerationSettings, Pair, Session, load

__version__ = version("slipstream")

__all__ = [
    "Acceptance",
    "Chunk",
    "GenerationSettings",
    "Pair",
    "Result",
    "Session",
    "SlipstreamError",
    "Timings",
    "__version__",
    "load",
]
