"""A CUDA device in host memory, for machines without one: memory, streams and captured graphs, strictly.

What a stream is given runs when the stream is synchronized and not before, so that a missing
synchronization shows. What CUDA leaves undefined raises SimulatorError. It knows no kernels:
``tests/simulator/machine.py`` enqueues engines as work of their own.
"""

# ruff: noqa: N801, N802, N803, N815 (names are CUDA's)

from __future__ import annotations

import ctypes
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from itertools import count, pairwise
from threading import RLock, get_ident
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

ALIGNMENT = 256
JUNK = 0xA5  # what memory holds before it is written: relying on zeros shows
_QUARANTINE_BYTES = 64 << 20

Region = tuple[int, int]  # address and size in bytes
Bytes = npt.NDArray[np.uint8]


class SimulatorError(AssertionError):
    """Something that a GPU would not have forgiven."""


def bytes_at(address: int, size: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def overlap(one: Region, other: Region) -> bool:
    return max(one[0], other[0]) < min(one[0] + one[1], other[0] + other[1])


@dataclass(eq=False)
class Source:
    """Who enqueued work, such as an execution context. version: counts its changes."""

    version: int = 0
    is_alive: bool = True


@dataclass(frozen=True)
class Work:
    """What a stream does in its turn. regions: all memory that it names."""

    regions: tuple[Region, ...]
    run: Callable[[], None]
    source: Source | None = None
    version: int = 0


@dataclass
class _Allocation:
    address: int
    size: int
    kind: str  # "device" or "pinned"
    storage: Bytes


class _Handle:
    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


class cudaStream_t(_Handle): ...


class cudaGraph_t(_Handle): ...


class cudaGraphExec_t(_Handle): ...


@dataclass
class _Stream:
    queue: deque[Work] = field(default_factory=deque)
    captured: list[Work] | None = None
    thread: int = 0  # that captures: the capture forbids things to that thread only


@dataclass
class _Graph:
    stream: int
    work: list[Work]


class Device:
    """State of the device, and counters for tests.

    copies: kind ("HostToDevice", ...) and bytes of every copy that ran, replayed ones too.
    launches: graphs launched. captures: graphs captured. errors: every violation, raised or not.
    is_abandoned: before its test begins and after it ended, when memory may be freed in any order.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allocations: dict[int, _Allocation] = {}
        self.streams: dict[int, _Stream] = {}
        self.graphs: dict[int, _Graph] = {}
        self.executables: dict[int, _Graph] = {}
        self.holders: WeakSet[Any] = WeakSet()  # objects whose _regions() must stay allocated
        self.copies: list[tuple[str, int]] = []
        self.launches = self.captures = 0
        self.errors: list[str] = []
        self.is_abandoned = True
        self._freed: deque[_Allocation] = deque()  # kept, so that its addresses are not given out again
        self.numbers = count(1)

    def fail(self, message: str) -> NoReturn:
        self.errors.append(message)
        raise SimulatorError(message)

    @property
    def device_bytes(self) -> int:
        return sum(a.size for a in self.allocations.values() if a.kind == "device")

    @property
    def is_capturing(self) -> bool:
        captures = [stream for stream in self.streams.values() if stream.captured is not None]
        return any(stream.thread == get_ident() for stream in captures)

    def outside_capture(self, what: str) -> None:
        if self.is_capturing:
            self.fail(f"{what} while a stream is being captured")

    def allocate(self, size: int, kind: str) -> int:
        self.outside_capture("an allocation")
        if size <= 0:
            self.fail(f"an allocation of {size} bytes")
        storage = np.full(size + 2 * ALIGNMENT, JUNK, np.uint8)
        address = storage.ctypes.data + (-storage.ctypes.data % ALIGNMENT)
        self.allocations[address] = _Allocation(address, size, kind, storage)
        return address

    def free(self, address: int, kind: str) -> None:
        if self.is_abandoned:
            return
        self.outside_capture("freeing memory")
        allocation = self.allocations.get(address)
        if allocation is None or allocation.kind != kind:
            self.fail(f"freeing {address:#x}, which is not the start of live {kind} memory")
        if kind == "device":  # as cudaFree does
            for stream in self.streams.values():
                self.run(stream)
        region = (address, allocation.size)
        for user, regions in self._users():
            if any(overlap(region, other) for other in regions):
                self.fail(f"freeing {kind} memory that {user} names")
        del self.allocations[address]
        allocation.storage[:] = JUNK
        self._freed.append(allocation)
        while sum(freed.size for freed in self._freed) > _QUARANTINE_BYTES:
            self._freed.popleft()

    def all_graphs(self) -> list[_Graph]:
        return [*self.graphs.values(), *self.executables.values()]

    def _users(self) -> Iterator[tuple[str, Any]]:
        for stream in self.streams.values():
            yield from (("queued work", work.regions) for work in stream.queue)
        for graph in self.all_graphs():
            yield from (("a live graph", work.regions) for work in graph.work)
        for holder in list(self.holders):
            yield f"a live {type(holder).__name__}", holder._regions()

    def require(self, address: int, size: int, what: str) -> None:
        """The region must lie in one live allocation of device memory."""
        if not self._is_inside((address, size), "device"):
            self.fail(f"{what}: {size} bytes at {address:#x} are not inside one live device allocation")

    def require_host(self, address: int, size: int, what: str) -> None:
        """The region must be host memory, page-locked when captured."""
        region = (address, size)
        if self._is_inside(region, "pinned"):
            return
        if any(overlap(region, (a.address, a.size)) for a in [*self.allocations.values(), *self._freed]):
            self.fail(f"{what}: {size} bytes at {address:#x} are not host memory, or were freed")
        if self.is_capturing:
            self.fail(f"{what}: a graph can name page-locked host memory only")

    def _is_inside(self, region: Region, kind: str) -> bool:
        start, size = region
        of_kind = (a for a in self.allocations.values() if a.kind == kind)
        return any(a.address <= start and start + size <= a.address + a.size for a in of_kind)

    def stream(self, handle: Any) -> _Stream:
        if int(handle) not in self.streams:
            self.fail(f"{int(handle)} is no live stream")
        return self.streams[int(handle)]

    def push(self, handle: Any, work: Work) -> None:
        stream = self.stream(handle)
        (stream.queue if stream.captured is None else stream.captured).append(work)

    def run(self, stream: _Stream) -> None:
        while stream.queue:
            work = stream.queue.popleft()
            if work.source is not None and not work.source.is_alive:
                self.fail("work ran after its execution context was destroyed")
            work.run()

    def uses_of(self, source: Source) -> list[str]:
        queued = [work for stream in self.streams.values() for work in [*stream.queue, *(stream.captured or ())]]
        graphs = [work for graph in self.all_graphs() for work in graph.work]
        places = {"a stream's queue": queued, "a live graph": graphs}
        return [place for place, works in places.items() if any(work.source is source for work in works)]


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class cudaDeviceAttr(IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


Answer = tuple[Any, ...]  # status and results
_OK = cudaError_t.cudaSuccess


class cudaDeviceProp:
    def __init__(self, name: bytes) -> None:
        self.name = name


LOCK = RLock()  # CUDA and TensorRT may be called from several threads


def serialized(cls: type) -> type:
    """One call at a time, of all classes together."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _locked(method))
    return cls


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return method(*args, **kwargs)

    return call


@serialized
class CudaRuntime:
    """What stands in for the module ``cuda.bindings.runtime``. num_devices: 0 for a machine without a GPU."""

    cudaStreamNonBlocking = 1

    def __init__(self, device: Device, compute_capability: str, num_devices: int) -> None:
        enums: list[type] = [cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode, cudaDeviceAttr]
        for part in [*_Handle.__subclasses__(), *enums]:
            setattr(self, part.__name__, part)
        self._device = device
        self._capability = (int(compute_capability[2:-1]), int(compute_capability[-1:]))
        self._num_devices = num_devices

    def cudaGetDeviceCount(self) -> Answer:
        return (_OK, self._num_devices) if self._num_devices else (cudaError_t.cudaErrorNoDevice, None)

    def cudaGetDevice(self) -> Answer:
        return _OK, 0

    def cudaSetDevice(self, device: int) -> Answer:
        assert device == 0
        return (_OK,)

    def cudaGetDeviceProperties(self, device: int) -> Answer:
        assert device == 0
        return _OK, cudaDeviceProp(b"NVIDIA Simulator")

    def cudaDeviceGetAttribute(self, attr: cudaDeviceAttr, device: int) -> Answer:
        assert device == 0
        return _OK, self._capability[int(attr == cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor)]

    def cudaDriverGetVersion(self) -> Answer:
        return _OK, 13000

    cudaRuntimeGetVersion = cudaDriverGetVersion

    def cudaMemGetInfo(self) -> Answer:
        return _OK, self._device.total_bytes - self._device.device_bytes, self._device.total_bytes

    def cudaGetErrorString(self, error: cudaError_t) -> Answer:
        return _OK, {2: b"out of memory", 100: b"no CUDA-capable device is detected"}.get(int(error), b"no error")

    def cudaStreamCreateWithFlags(self, flags: int) -> Answer:
        assert flags == self.cudaStreamNonBlocking
        handle = cudaStream_t(next(self._device.numbers))
        self._device.streams[int(handle)] = _Stream()
        return _OK, handle

    def cudaStreamSynchronize(self, stream: Any) -> Answer:
        self._device.outside_capture("synchronizing")
        self._device.run(self._device.stream(stream))
        return (_OK,)

    def cudaStreamDestroy(self, stream: Any) -> Answer:
        state = self._device.stream(stream)
        if state.queue or state.captured is not None:
            self._device.fail("a stream was destroyed with work in it: synchronize first")
        if any(graph.stream == int(stream) for graph in self._device.all_graphs()):
            self._device.fail("a stream was destroyed before a graph captured on it")
        del self._device.streams[int(stream)]
        return (_OK,)

    def cudaMalloc(self, size: int) -> Answer:
        if self._device.device_bytes + size > self._device.total_bytes:
            return cudaError_t.cudaErrorMemoryAllocation, None
        return _OK, self._device.allocate(size, "device")

    def cudaFree(self, devPtr: Any) -> Answer:
        self._device.free(int(devPtr), "device")
        return (_OK,)

    def cudaMallocHost(self, size: int) -> Answer:
        return _OK, self._device.allocate(size, "pinned")

    def cudaFreeHost(self, ptr: Any) -> Answer:
        self._device.free(int(ptr), "pinned")
        return (_OK,)

    def cudaMemcpyAsync(self, dst: Any, src: Any, count: int, kind: cudaMemcpyKind, stream: Any) -> Answer:
        return self.cudaMemcpy2DAsync(dst, count, src, count, count, 1, kind, stream)

    def cudaMemcpy2DAsync(
        self, dst: Any, dpitch: int, src: Any, spitch: int, width: int, height: int, kind: cudaMemcpyKind, stream: Any
    ) -> Answer:
        device = self._device
        name = cudaMemcpyKind(kind).name.removeprefix("cudaMemcpy")
        sides = (int(src), spitch), (int(dst), dpitch)
        for side, (address, pitch) in zip(name.split("To"), sides, strict=True):
            check = device.require if side == "Device" else device.require_host
            check(address, self._span(pitch, width, height), f"a {name} copy")
        pieces = [(address + i * pitch, width) for address, pitch in sides for i in range(height)]
        if any(overlap(one, other) for one, other in pairwise(sorted(pieces))):
            device.fail(f"a {name} copy whose source and target overlap")

        def run() -> None:
            for i in range(height):
                bytes_at(int(dst) + i * dpitch, width)[:] = bytes_at(int(src) + i * spitch, width)
            device.copies.append((name, width * height))

        spans = tuple((address, self._span(pitch, width, height)) for address, pitch in sides)
        device.push(stream, Work(spans, run))
        return (_OK,)

    def cudaMemset2DAsync(self, devPtr: Any, pitch: int, value: int, width: int, height: int, stream: Any) -> Answer:
        address, size = int(devPtr), self._span(pitch, width, height)
        self._device.require(address, size, "a memset")

        def run() -> None:
            for i in range(height):
                bytes_at(address + i * pitch, width)[:] = value

        self._device.push(stream, Work(((address, size),), run))
        return (_OK,)

    def _span(self, pitch: int, width: int, height: int) -> int:
        if width > pitch or width < 0 or height < 1:
            self._device.fail(f"{height} pieces of {width} bytes at a pitch of {pitch}")
        return pitch * (height - 1) + width

    def cudaStreamBeginCapture(self, stream: Any, mode: cudaStreamCaptureMode) -> Answer:
        self._device.outside_capture("a second capture")
        assert isinstance(mode, cudaStreamCaptureMode)
        state = self._device.stream(stream)
        state.captured, state.thread = [], get_ident()
        return (_OK,)

    def cudaStreamEndCapture(self, stream: Any) -> Answer:
        state = self._device.stream(stream)
        assert state.captured is not None
        graph = cudaGraph_t(next(self._device.numbers))
        self._device.graphs[int(graph)], state.captured = _Graph(int(stream), state.captured), None
        return _OK, graph

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> Answer:
        assert flags == 0
        executable = cudaGraphExec_t(next(self._device.numbers))
        self._device.executables[int(executable)] = self._device.graphs[int(graph)]
        self._device.captures += 1
        return _OK, executable

    def cudaGraphDestroy(self, graph: Any) -> Answer:
        del self._device.graphs[int(graph)]
        return (_OK,)

    def cudaGraphLaunch(self, graphExec: Any, stream: Any) -> Answer:
        device = self._device
        device.outside_capture("launching a graph")
        if int(graphExec) not in device.executables:
            device.fail("a graph was launched after it was destroyed")
        for work in device.executables[int(graphExec)].work:
            if work.source is not None and work.source.version != work.version:
                device.fail("a graph was launched whose execution context was changed since: one context per graph")
            device.push(stream, work)
        device.launches += 1
        return (_OK,)

    def cudaGraphExecDestroy(self, graphExec: Any) -> Answer:
        work = self._device.executables[int(graphExec)].work
        queued = [other for stream in self._device.streams.values() for other in stream.queue]
        if any(one is other for one in work for other in queued):
            self._device.fail("a graph was destroyed while its work was queued: synchronize first")
        del self._device.executables[int(graphExec)]
        return (_OK,)
