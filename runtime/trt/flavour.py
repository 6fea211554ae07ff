"""The two TensorRT packages behind one name: imported only here, checked for what the graphs need.

``engines/`` builds with them, ``runtime/trt/engine.py`` runs with them.
"""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from slipstream.runtime.bundle.engine_record import Flavour
from slipstream.runtime.errors import BackendError, MissingExtraError

_loggers: dict[Flavour, Any] = {}
_MODULES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclass(frozen=True)
class TensorRT:
    """module: ``tensorrt`` or ``tensorrt_rtx``, which share one API.
    logger: keeps TensorRT's last error messages instead of printing them.
    """

    flavour: Flavour
    module: Any
    logger: Any

    def last_errors(self) -> str:
        """TensorRT's own words on what just failed, and forget them."""
        text = "; ".join(message.splitlines()[0] for message in self.logger.errors) or "it gave no message"
        self.logger.errors.clear()
        return text

    @property
    def version(self) -> str:
        return str(self.module.__version__)


def load_flavour(flavour: Flavour) -> TensorRT:
    """Import a TensorRT. Raises MissingExtraError without the package, BackendError when it is too old."""
    try:
        module = importlib.import_module(_MODULES[flavour])
    except ImportError as error:
        raise MissingExtraError(
            f"--engine {flavour} needs the {_MODULES[flavour]} package ({error})",
            f"pip install 'slipstream[{flavour}]'",
        ) from error
    if not hasattr(module, "IAttentionInputLayer") or not hasattr(module.LayerType, "KV_CACHE_UPDATE"):
        raise BackendError(
            f"{flavour} {module.__version__} has no KV cache update or attention layer",
            "Install TensorRT 11 or TensorRT-RTX 1.7, which slipstream was tried with (on Jetson that means JetPack 7)",
        )
    if flavour not in _loggers:  # TensorRT keeps the first logger of a process
        _loggers[flavour] = _quiet_logger(module)
    return TensorRT(flavour, module, _loggers[flavour])


def _quiet_logger(module: Any) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=3)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.Severity.ERROR, module.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()
