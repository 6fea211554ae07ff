"""CUDA streams and memory on the simulator: captures that nothing is freed in."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from slipstream.runtime.backend.cuda import Cuda, CudaMemory, Stream
from slipstream.runtime.errors import BackendError
from tests.simulator.machine import Simulator, install


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    return install(monkeypatch)


@pytest.fixture
def memory(sim: Simulator) -> Iterator[CudaMemory]:
    memory = CudaMemory(Stream(Cuda()))
    memory.synchronize()
    yield memory
    memory.close()
    memory.stream.close()
    sim.check_closed()


class Cycle:
    """Garbage that only a collection finds, with a tensor in it."""

    def __init__(self, memory: CudaMemory) -> None:
        self.tensor = memory.allocate((4,), "float32")
        self.itself = self


def test_nothing_is_collected_before_a_capture_has_ended(memory: CudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = [Cycle(memory)]
    memory.synchronize()
    call, collected = Cuda.call, list[bool]()

    def collecting_call(cuda: Cuda, name: str, *arguments: object) -> object:
        if name == "cudaStreamEndCapture":
            collected.append(gc.isenabled())
            if gc.isenabled():  # as its allocations may make it do
                gc.collect()
        return call(cuda, name, *arguments)

    monkeypatch.setattr(Cuda, "call", collecting_call)
    memory.stream.capture(garbage.clear).close()
    assert collected == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_collection_off_while_another_goes_on(memory: CudaMemory, fails: bool) -> None:
    other, begun, done, seen = Stream(memory.stream.cuda), threading.Event(), threading.Event(), list[bool]()

    def wait() -> None:
        begun.set()
        done.wait(10)
        seen.append(gc.isenabled())

    thread = threading.Thread(target=lambda: other.capture(wait).close())

    def overlap() -> None:
        thread.start()
        begun.wait(10)
        if fails:
            raise BackendError("refused")

    with pytest.raises(BackendError, match="refused") if fails else nullcontext():
        memory.stream.capture(overlap).close()
    done.set()
    thread.join(10)
    other.close()
    assert seen == [False]
    assert gc.isenabled()


def test_a_capture_leaves_collection_off_where_it_was(memory: CudaMemory) -> None:
    gc.disable()
    try:
        memory.stream.capture(lambda: None).close()
        assert not gc.isenabled()
    finally:
        gc.enable()
