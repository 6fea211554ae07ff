"""Tensors by address: what a backend binds. Host memory here; devices bring their own.

A tensor is a zero-filled, 256-byte aligned allocation with a shape and an ONNX element type
by name. Binding goes by address and element type, never through numpy values, so bfloat16
needs no numpy type.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .bundle import ITEM_BYTES

ALIGNMENT_BYTES = 256  # what TensorRT asks of tensor addresses

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int64": np.int64, "bool": np.bool_}


class Memory(Protocol):
    """Where a backend's tensors live. Rows are along axis 2 of KV tensors [B, H, S, D]."""

    def allocate(self, shape: Sequence[int], dtype: str) -> Any:
        """A zero-filled tensor."""

    def copy_rows(self, source: Any, target: Any, num_rows: int) -> None:
        """Copy the first num_rows rows of source to the front of target, every sequence and head."""

    def move_rows(self, tensor: Any, sequence: int, start: int, num_rows: int) -> None:
        """Move rows [start, start + num_rows) of one sequence to the front; they must not overlap."""

    def zero_rows(self, tensor: Any, sequence: int, start: int, stop: int) -> None:
        """Zero rows [start, stop) of one sequence; stop may be beyond the end."""


class HostTensor:
    """A tensor in host memory; ``array`` is a view of it (bfloat16 as its bits in uint16)."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        num_bytes = prod(self.shape) * ITEM_BYTES[dtype]
        storage = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
        skip = -storage.ctypes.data % ALIGNMENT_BYTES
        self.array: npt.NDArray[Any] = storage[skip : skip + num_bytes].view(_NUMPY[dtype]).reshape(self.shape)
        self.address: int = storage.ctypes.data + skip
        self._storage = storage


class HostMemory:
    """Memory of the CPU backends."""

    def allocate(self, shape: Sequence[int], dtype: str) -> HostTensor:
        return HostTensor(shape, dtype)

    def copy_rows(self, source: HostTensor, target: HostTensor, num_rows: int) -> None:
        target.array[:, :, :num_rows] = source.array[:, :, :num_rows]

    def move_rows(self, tensor: HostTensor, sequence: int, start: int, num_rows: int) -> None:
        assert start >= num_rows, "the live window must not overlap its new place"
        tensor.array[sequence, :, :num_rows] = tensor.array[sequence, :, start : start + num_rows]

    def zero_rows(self, tensor: HostTensor, sequence: int, start: int, stop: int) -> None:
        tensor.array[sequence, :, start:stop] = 0
