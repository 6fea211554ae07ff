"""A GPU in host memory, for machines without one: memory, streams and captured graphs, strictly.

What a stream is given runs when the stream is synchronized and not before, so that a missing
synchronization shows. What CUDA leaves undefined raises SimulatorError. It knows no kernels:
``cuda.py`` gives it copies, and ``tensorrt.py`` engines as work of their own.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from threading import RLock, get_ident, local
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
class Allocation:
    address: int
    size: int
    kind: str  # "device" or "pinned"
    storage: Bytes


@dataclass
class Stream:
    queue: deque[Work] = field(default_factory=deque)
    captured: list[Work] | None = None
    thread: int = 0  # that captures: the capture forbids things to that thread only


@dataclass
class CudaGraph:
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
        self.allocations: dict[int, Allocation] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, CudaGraph] = {}
        self.executables: dict[int, CudaGraph] = {}
        self.holders: WeakSet[Any] = WeakSet()  # objects whose _regions() must stay allocated
        self.copies: list[tuple[str, int]] = []
        self.launches = self.captures = 0
        self.errors: list[str] = []
        self.is_abandoned = True
        self._freed: deque[Allocation] = deque()  # kept, so that its addresses are not given out again
        self.numbers = count(1)
        self.thread = local()  # is_active: whether this device is the calling thread's

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

    def require_active(self, what: str) -> None:
        """A thread begins with the first device, which need not be this one."""
        if not getattr(self.thread, "is_active", False):
            self.fail(f"{what} on a thread that did not make the device its own: call cudaSetDevice")

    def outside_capture(self, what: str) -> None:
        if self.is_capturing:
            self.fail(f"{what} while a stream is being captured")

    def allocate(self, size: int, kind: str) -> int:
        self.require_active("an allocation")
        self.outside_capture("an allocation")
        if size <= 0:
            self.fail(f"an allocation of {size} bytes")
        storage = np.full(size + 2 * ALIGNMENT, JUNK, np.uint8)
        address = storage.ctypes.data + (-storage.ctypes.data % ALIGNMENT)
        self.allocations[address] = Allocation(address, size, kind, storage)
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

    def all_graphs(self) -> list[CudaGraph]:
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

    def stream(self, handle: Any) -> Stream:
        if int(handle) not in self.streams:
            self.fail(f"{int(handle)} is no live stream")
        return self.streams[int(handle)]

    def push(self, handle: Any, work: Work) -> None:
        self.require_active("work")
        stream = self.stream(handle)
        (stream.queue if stream.captured is None else stream.captured).append(work)

    def run(self, stream: Stream) -> None:
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
