"""CUDA through cuda-python: device memory, one stream, captured graphs. The only file that imports it.

Never run on hardware here: ``tests/simulator/machine.py`` stands in for the driver, and a contract
test compares what is called with the real bindings' signatures.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.runtime.bundle.dtypes import ITEM_BYTES, NUMPY, Array
from slipstream.runtime.errors import BackendError, MissingExtraError

from .tensors import Memory, Mirror, Spec, Tensor, aligned, num_bytes, of_slot

_BINDINGS = "cuda.bindings.runtime"


class Cuda:
    """The current GPU.

    name: the GPU's. compute_capability: as in "sm89". driver_version, runtime_version: as CUDA numbers
        them, such as 13000.
    """

    def __init__(self) -> None:
        """Raises MissingExtraError without cuda-python, BackendError without a usable GPU."""
        try:
            self.api: Any = importlib.import_module(_BINDINGS)
        except ImportError as error:
            raise MissingExtraError(
                f"running on a GPU needs cuda-python ({error})",
                "pip install 'slipstream[gpu]', or the tensorrt or tensorrt-rtx extra",
            ) from error
        try:
            num_devices = self.call("cudaGetDeviceCount")
        except BackendError as error:
            raise BackendError(f"there is no usable NVIDIA GPU here: {error.found}", error.advice) from error
        if num_devices < 1:
            raise BackendError("there is no NVIDIA GPU here", "slipstream doctor shows what there is")
        self.device: int = self.call("cudaGetDevice")
        attributes = self.api.cudaDeviceAttr
        major = self.call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, self.device)
        minor = self.call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, self.device)
        self.compute_capability = f"sm{major}{minor}"
        name = self.call("cudaGetDeviceProperties", self.device).name
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        self.driver_version: int = self.call("cudaDriverGetVersion")
        self.runtime_version: int = self.call("cudaRuntimeGetVersion")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a CUDA function and return what it gives beside its status. Raises BackendError."""
        status, *results = getattr(self.api, name)(*arguments)
        if status != self.api.cudaError_t.cudaSuccess:
            _, text = self.api.cudaGetErrorString(status)
            words = text.decode() if isinstance(text, bytes) else str(text)
            raise BackendError(f"CUDA: {name} failed: {words}", "slipstream doctor shows what is installed")
        return results[0] if len(results) == 1 else tuple(results)

    def activate(self) -> None:
        """Make this GPU the calling thread's: each thread starts with the first one."""
        self.call("cudaSetDevice", self.device)

    def free_bytes(self) -> tuple[int, int]:
        """Free and total memory of the GPU, in bytes."""
        free, total = self.call("cudaMemGetInfo")
        return int(free), int(total)


class _NoCollection:
    """Holds Python's garbage collection off while any thread captures: what it frees may be GPU memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_captures = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_captures == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_captures += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_captures -= 1
            if self._num_captures == 0 and self._was_enabled:
                gc.enable()


_NO_COLLECTION = _NoCollection()  # one for the process, as the collection is


class Stream:
    """A CUDA stream. ``capture`` turns what a function enqueues into a graph that one call launches."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._stream: Any = cuda.call("cudaStreamCreateWithFlags", cuda.api.cudaStreamNonBlocking)
        self.handle = int(self._stream)

    def synchronize(self) -> None:
        self.cuda.call("cudaStreamSynchronize", self._stream)

    def copy(self, target: int, source: int, size: int, kind: str) -> None:
        """Enqueue a copy of size bytes; kind as in "HostToDevice"."""
        kinds = self.cuda.api.cudaMemcpyKind
        self.cuda.call("cudaMemcpyAsync", target, source, size, getattr(kinds, f"cudaMemcpy{kind}"), self._stream)

    def copy_pitched(
        self, target: tuple[int, int], source: tuple[int, int], width: int, height: int, kind: str = "DeviceToDevice"
    ) -> None:
        """Enqueue a copy of height pieces of width bytes. target, source: address and pitch."""
        kinds = self.cuda.api.cudaMemcpyKind
        name = getattr(kinds, f"cudaMemcpy{kind}")
        self.cuda.call("cudaMemcpy2DAsync", *target, *source, width, height, name, self._stream)

    def fill(self, address: int, pitch: int, width: int, height: int) -> None:
        """Enqueue zeroing height pieces of width bytes."""
        self.cuda.call("cudaMemset2DAsync", address, pitch, 0, width, height, self._stream)

    def capture(self, enqueue: Callable[[], None]) -> CapturedGraph:
        """The work that enqueue() puts on this stream, as a graph; nothing of it runs yet."""
        # thread-local: other threads of the process may go on allocating meanwhile
        mode = self.cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        with _NO_COLLECTION:
            self.cuda.call("cudaStreamBeginCapture", self._stream, mode)
            try:
                enqueue()
            except BaseException:
                self._abandon_capture()
                raise
            graph = self.cuda.call("cudaStreamEndCapture", self._stream)
        try:
            executable = self.cuda.call("cudaGraphInstantiate", graph, 0)
        finally:
            self.cuda.call("cudaGraphDestroy", graph)
        return CapturedGraph(self.cuda, executable, self._stream)

    def _abandon_capture(self) -> None:
        """End a capture after an error, which is raised; what CUDA then says of the capture is dropped."""
        _, graph = self.cuda.api.cudaStreamEndCapture(self._stream)
        if graph is not None and int(graph):
            self.cuda.api.cudaGraphDestroy(graph)

    def close(self) -> None:
        self.cuda.call("cudaStreamDestroy", self._stream)


class CapturedGraph:
    """A captured graph: valid for the shapes and addresses it was captured with."""

    def __init__(self, cuda: Cuda, executable: Any, stream: Any) -> None:
        self._cuda, self._executable, self._stream = cuda, executable, stream

    def launch(self) -> None:
        self._cuda.call("cudaGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        self._cuda.call("cudaGraphExecDestroy", self._executable)


class DeviceTensor(Tensor):
    """A tensor in GPU memory, freed with its last reference or with its memory."""

    def __init__(self, memory: CudaMemory, shape: Sequence[int], dtype: str, address: int) -> None:
        super().__init__(shape, dtype, address)
        self._memory = memory

    def __del__(self) -> None:
        self._memory.free(self.address)


class _DeviceMirror(Mirror):
    """A block of device memory with a pinned twin on the host."""

    def __init__(self, memory: CudaMemory, specs: Mapping[str, Spec]) -> None:
        self._size = sum(aligned(num_bytes(*spec)) for spec in specs.values())
        self._stream = memory.stream
        self._block = memory.allocate((self._size,), "uint8")
        self._pinned = memory.allocate_pinned(self._size)
        storage = np.ctypeslib.as_array((ctypes.c_uint8 * self._size).from_address(self._pinned))
        storage[:] = 0
        self.arrays, self.tensors, offset = {}, {}, 0
        for name, (shape, dtype) in specs.items():
            size = num_bytes(shape, dtype)
            self.arrays[name] = storage[offset : offset + size].view(NUMPY[dtype]).reshape(tuple(shape))
            self.tensors[name] = Tensor(shape, dtype, self._block.address + offset)
            offset += aligned(size)

    def upload(self) -> None:
        self._stream.copy(self._block.address, self._pinned, self._size, "HostToDevice")

    def download(self) -> None:
        self._stream.copy(self._pinned, self._block.address, self._size, "DeviceToHost")


class CudaMemory(Memory):
    """GPU memory whose work is ordered on one stream."""

    device = "cuda"

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._cuda = stream.cuda
        self._live: set[int] = set()
        self._pinned: list[int] = []

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceTensor:
        size = aligned(num_bytes(shape, dtype))
        try:
            address = int(self._cuda.call("cudaMalloc", size))
        except BackendError as error:
            free, total = self._cuda.free_bytes()
            raise BackendError(
                f"the GPU has no room for {size >> 20} MiB more: {free >> 20} of {total >> 20} MiB are free. Build or "
                f"export with a smaller --max-length or --max-batch, or close other sessions and programs ({error})"
            ) from error
        self._live.add(address)
        self.stream.fill(address, size, size, 1)
        return DeviceTensor(self, shape, dtype, address)

    def allocate_pinned(self, size: int) -> int:
        """Address of page-locked host memory, which copies overlap with and graphs may name."""
        address = int(self._cuda.call("cudaMallocHost", size))
        self._pinned.append(address)
        return address

    def free(self, address: int) -> None:
        if address in self._live:
            self._live.discard(address)
            self._cuda.call("cudaFree", address)

    def mirror(self, specs: Mapping[str, Spec]) -> _DeviceMirror:
        return _DeviceMirror(self, specs)

    def read(self, tensor: Any) -> Array:
        values = np.empty(tensor.shape, NUMPY[tensor.dtype])
        self.stream.copy(values.ctypes.data, tensor.address, values.nbytes, "DeviceToHost")
        self.synchronize()
        return values

    def read_rows(self, tensor: Any, start: int, stop: int) -> Array:
        """Rows of a KV tensor, every sequence and head: [B, H, stop - start, D]; for verification."""
        batch, heads, _, head_dim = tensor.shape
        values = np.empty((batch, heads, stop - start, head_dim), NUMPY[tensor.dtype])
        width = (stop - start) * _row_bytes(tensor)
        source = tensor.address + start * _row_bytes(tensor), _head_bytes(tensor)
        self.stream.copy_pitched((values.ctypes.data, width), source, width, batch * heads, "DeviceToHost")
        self.synchronize()
        return values

    def write(self, tensor: Any, values: Array) -> None:
        content = np.ascontiguousarray(np.broadcast_to(values, tensor.shape), NUMPY[tensor.dtype])
        self.stream.copy(tensor.address, content.ctypes.data, content.nbytes, "HostToDevice")
        self.synchronize()

    def load_file(self, path: Path, shape: Sequence[int], dtype: str) -> DeviceTensor:
        """A tensor with the content of a file, read through a mapping."""
        tensor = self.allocate(shape, dtype)
        content = np.memmap(path, np.uint8, mode="r")
        if content.nbytes != num_bytes(shape, dtype):
            raise BackendError(f"{path} has {content.nbytes} bytes; {dtype} {tuple(shape)} is expected")
        self.write(tensor, content.view(NUMPY[dtype]).reshape(tensor.shape))
        return tensor

    def copy_rows(self, source: Any, target: Any, num_rows: int) -> None:
        batch, heads, _, _ = source.shape
        width = num_rows * _row_bytes(source)
        self.stream.copy_pitched(
            (target.address, _head_bytes(target)), (source.address, _head_bytes(source)), width, batch * heads
        )

    def move_rows(self, tensor: Any, slot: int, start: int, num_rows: int) -> None:
        assert start >= num_rows, "the live window must not overlap its new place"
        pitch, heads = _head_bytes(tensor), tensor.shape[1]
        front = tensor.address + slot * heads * pitch
        self.stream.copy_pitched(
            (front, pitch), (front + start * _row_bytes(tensor), pitch), num_rows * _row_bytes(tensor), heads
        )

    def zero_rows(self, tensor: Any, slot: int, start: int, stop: int) -> None:
        pitch, heads = _head_bytes(tensor), tensor.shape[1]
        num_rows = min(stop, tensor.shape[2]) - start
        if num_rows > 0:
            first = tensor.address + slot * heads * pitch + start * _row_bytes(tensor)
            self.stream.fill(first, pitch, num_rows * _row_bytes(tensor), heads)

    def fork_rows(self, tensor: Any, source: int, slot: int, num_rows: int) -> None:
        pitch, heads = _head_bytes(tensor), tensor.shape[1]
        target, origin = ((tensor.address + each * heads * pitch, pitch) for each in (slot, source))
        self.stream.copy_pitched(target, origin, num_rows * _row_bytes(tensor), heads)

    def write_slot(self, tensor: Any, slot: int, values: Array) -> None:
        self.write(of_slot(tensor, slot), values[np.newaxis])

    def copy_to_slot(self, source: Any, target: Any, slot: int) -> None:
        size = num_bytes(source.shape, source.dtype)
        self.stream.copy(target.address + slot * size, source.address, size, "DeviceToDevice")

    def activate(self) -> None:
        self._cuda.activate()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        with ExitStack() as stack:  # to the end whatever fails
            while self._pinned:
                stack.callback(self._cuda.call, "cudaFreeHost", self._pinned.pop())
            for address in self._live:
                stack.callback(self.free, address)
            stack.callback(self.synchronize)


def _row_bytes(tensor: Any) -> int:
    """Bytes of one row of a KV tensor [B, H, S, D]."""
    return int(tensor.shape[3]) * ITEM_BYTES[tensor.dtype]


def _head_bytes(tensor: Any) -> int:
    return int(tensor.shape[2]) * _row_bytes(tensor)
