"""TensorRT's enumerations and small types, as far as the runtime uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any


class DataType(Enum):
    FLOAT, HALF, BF16, INT64, BOOL = 0, 1, 7, 8, 4


DTYPES = dict(zip("float32 float16 bfloat16 int64 bool".split(), DataType, strict=True))


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(Enum):
    DEVICE, HOST = range(2)


class ProfilingVerbosity(Enum):
    LAYER_NAMES_ONLY, NONE, DETAILED = range(3)


class LayerInformationFormat(Enum):
    ONELINE, JSON = range(2)


class ExecutionContextAllocationStrategy(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class DynamicShapesKernelSpecializationStrategy(Enum):
    LAZY, EAGER, NONE = range(3)


class LayerType(Enum):
    ATTENTION_INPUT, KV_CACHE_UPDATE = 51, 54


class ComputeCapability(Enum):
    SM75, SM80, SM86, SM89, SM120, SM121 = 75, 80, 86, 89, 120, 121


class IAttentionInputLayer: ...


class ILogger:
    class Severity(Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class Dims:
    """A shape as TensorRT gives it: equal to a tuple, but none."""

    def __init__(self, shape: Any) -> None:
        self._shape = tuple(shape)

    def __len__(self) -> int:
        return len(self._shape)

    def __getitem__(self, index: int | slice) -> Any:
        return self._shape[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and self._shape == tuple(other)

    __hash__ = None  # type: ignore[assignment] # as the real one's

    def __repr__(self) -> str:
        return str(self._shape)
