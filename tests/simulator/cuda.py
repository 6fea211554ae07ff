"""What stands in for ``cuda.bindings.runtime``: its functions over a simulated device."""

# ruff: noqa: N801, N802, N803, N815 (names are CUDA's)

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from threading import get_ident
from typing import Any

from .device import CudaGraph, Device, Stream, Work, bytes_at, overlap, serialized


class _Handle:
    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


class cudaStream_t(_Handle): ...


class cudaGraph_t(_Handle): ...


class cudaGraphExec_t(_Handle): ...


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
        self._device.thread.is_active = True  # the calling thread's is what is asked for
        return _OK, 0

    def cudaSetDevice(self, device: int) -> Answer:
        assert device == 0
        self._device.thread.is_active = True
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
        self._device.require_active("a stream")
        handle = cudaStream_t(next(self._device.numbers))
        self._device.streams[int(handle)] = Stream()
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
        self._device.graphs[int(graph)], state.captured = CudaGraph(int(stream), state.captured), None
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
