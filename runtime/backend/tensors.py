"""Tensors by address: what a backend binds. Host memory here; ``runtime/backend/cuda.py`` has a GPU's.

A tensor is a zero-filled, 256-byte aligned allocation with a shape and an ONNX element type by name. Binding goes by
address and element type, never through numpy values, so bfloat16 needs no numpy type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from slipstream.runtime.bundle.dtypes import ITEM_BYTES, NUMPY, Array
from slipstream.runtime.errors import BackendError

ALIGNMENT_BYTES = 256  # what TensorRT asks of tensor addresses

Spec = tuple[Sequence[int], str]  # shape and element type


def num_bytes(shape: Sequence[int], dtype: str) -> int:
    return prod(shape) * ITEM_BYTES[dtype]


class Tensor:
    """Shape, element type by name, and where it lies in the memory of its device."""

    def __init__(self, shape: Sequence[int], dtype: str, address: int) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.address = address


def aligned(size: int) -> int:
    """size rounded up to the alignment, and at least one unit: an empty tensor has an address too."""
    return max(-(-size // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES


class View(Tensor):
    """Part of another tensor, which it keeps alive; binding goes by address, so nothing is copied."""

    def __init__(self, whole: Tensor, shape: Sequence[int], first: int = 0) -> None:
        """first: element of ``whole`` that it begins with."""
        end = first * ITEM_BYTES[whole.dtype] + num_bytes(shape, whole.dtype)
        assert end <= num_bytes(whole.shape, whole.dtype), "a view lies within its tensor"
        super().__init__(shape, whole.dtype, whole.address + first * ITEM_BYTES[whole.dtype])
        self._whole = whole


def front(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a tensor as one of their own."""
    return tensor if tuple(shape) == tensor.shape else View(tensor, shape)


def of_slots(tensor: Tensor, num_slots: int) -> Tensor:
    """The part of the first slots of a tensor [B, ...]."""
    return front(tensor, (num_slots, *tensor.shape[1:]))


def of_slot(tensor: Tensor, slot: int) -> Tensor:
    """The part of one slot, [1, ...], of a tensor [B, ...]."""
    shape = (1, *tensor.shape[1:])
    return View(tensor, shape, slot * prod(shape))


class HostTensor(Tensor):
    """A tensor in host memory; ``array`` is a view of it (bfloat16 as its bits in uint16)."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        size = num_bytes(shape, dtype)
        storage = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
        skip = -storage.ctypes.data % ALIGNMENT_BYTES
        super().__init__(shape, dtype, storage.ctypes.data + skip)
        self.array: Array = storage[skip : skip + size].view(NUMPY[dtype]).reshape(self.shape)  # keeps the storage


class Mirror:
    """Small tensors that both sides see: ``arrays`` is the host's view, ``tensors`` the device's. Here they are one.

    upload, download: enqueue one copy of all of them; ``Memory.synchronize`` completes it.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.tensors: dict[str, Any] = {name: HostTensor(shape, dtype) for name, (shape, dtype) in specs.items()}
        self.arrays: dict[str, Array] = {name: tensor.array for name, tensor in self.tensors.items()}

    def upload(self) -> None: ...

    def download(self) -> None: ...


class Memory:
    """Where a backend's tensors live: the host, where work is done when a call returns; a GPU's has its own of all.

    Work is ordered on one stream; rows are axis 2 of KV tensors [B, H, S, D].
    device: as ONNX Runtime calls it, "cpu" or "cuda".
    """

    device = "cpu"

    def allocate(self, shape: Sequence[int], dtype: str) -> Any:
        """A zero-filled tensor. Raises BackendError when there is no room."""
        try:
            return HostTensor(shape, dtype)
        except MemoryError as error:
            raise BackendError(
                f"there is no memory for a tensor of {num_bytes(shape, dtype) >> 20} MiB: use shorter texts or smaller "
                "batches, or close other programs"
            ) from error

    def allocate_all(self, specs: Mapping[str, Spec]) -> dict[str, Any]:
        """Zero-filled tensors by name. Raises BackendError."""
        return {name: self.allocate(*spec) for name, spec in specs.items()}

    def mirror(self, specs: Mapping[str, Spec]) -> Mirror:
        """Zero-filled tensors in one block, by name."""
        return Mirror(specs)

    def read(self, tensor: Any) -> Array:
        """A copy in host memory, complete on return; for verification."""
        content: Array = tensor.array.copy()
        return content

    def write(self, tensor: Any, values: Array) -> None:
        """Fill a tensor from host memory, complete on return; for constants and verification."""
        tensor.array[...] = values

    def copy_rows(self, source: Any, target: Any, num_rows: int) -> None:
        """Copy the first num_rows rows of source to the front of target, every sequence and head."""
        target.array[:, :, :num_rows] = source.array[:, :, :num_rows]

    def move_rows(self, tensor: Any, slot: int, start: int, num_rows: int) -> None:
        """Move rows [start, start + num_rows) of one slot to the front; they must not overlap."""
        assert start >= num_rows, "the live window must not overlap its new place"
        tensor.array[slot, :, :num_rows] = tensor.array[slot, :, start : start + num_rows]

    def zero_rows(self, tensor: Any, slot: int, start: int, stop: int) -> None:
        """Zero rows [start, stop) of one slot; stop may be beyond the end."""
        tensor.array[slot, :, start:stop] = 0

    def fork_rows(self, tensor: Any, source: int, slot: int, num_rows: int) -> None:
        """Copy the first num_rows rows of one slot to another."""
        tensor.array[slot, :, :num_rows] = tensor.array[source, :, :num_rows]

    def write_slot(self, tensor: Any, slot: int, values: Array) -> None:
        """Fill the part of one slot of a tensor [B, ...] from host memory, complete on return."""
        tensor.array[slot] = values

    def copy_to_slot(self, source: Any, target: Any, slot: int) -> None:
        """Copy a tensor [1, ...] to its slot of another [B, ...]."""
        target.array[slot] = source.array[0]

    def activate(self) -> None:
        """Make the device the calling thread's; before anything is enqueued from a thread."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""

    def close(self) -> None:
        """Free every tensor."""
