"""The simulator forgives nothing: each of its rules is broken once here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.runtime.backend import cuda as cuda_module
from slipstream.runtime.backend.cuda import Cuda, CudaMemory, Stream
from slipstream.runtime.errors import BackendError
from slipstream.runtime.trt.flavour import load_flavour

from . import machine as simulator_module
from .machine import Simulator, SimulatorError, install
from .tensorrt_types import ComputeCapability

CAPACITY, HEAD_DIM = 8, 4  # as in the graph below


def save_graph(folder: Path) -> Path:
    """One KV update in place; ``sum`` [batch] sums what it wrote."""
    model = ir.from_onnx_text("""
        <ir_version: 12, opset_import: ["" : 24]>
        step (float[batch, 1, 1, 4] row, int64[batch] past_length, float[batch, 1, 8, 4] "kv.0.key")
            => (float[batch, 1, 1, 4] double, float[batch, 1, 8, 4] "next_kv.0.key")
        {
            "next_kv.0.key" = TensorScatter <axis: int = 2> ("kv.0.key", row, past_length)
            double = Add(row, row)
        }
    """)
    ir.save(model, folder / "step.onnx")
    return folder / "step.onnx"


class Machine:
    """The tiny engine with everything bound as it should be."""

    def __init__(self, simulator: Simulator, plan: bytes) -> None:
        self.simulator = simulator
        self.cuda = Cuda()
        self.stream = Stream(self.cuda)
        self.memory = CudaMemory(self.stream)
        self.trt = load_flavour("tensorrt-rtx")
        self.runtime = self.trt.module.Runtime(self.trt.logger)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.shapes = {"row": (2, 1, 1, 4), "past_length": (2,), "kv.0.key": (2, 1, CAPACITY, HEAD_DIM)}
        shapes = self.shapes | {"double": self.shapes["row"]}
        dtypes = {"past_length": "int64"}
        self.tensors = {name: self.memory.allocate(s, dtypes.get(name, "float32")) for name, s in shapes.items()}
        self.tensors["next_kv.0.key"] = self.tensors["kv.0.key"]
        self.workspace = self.memory.allocate((self.engine.get_device_memory_size_for_profile_v2(0),), "uint8")
        self.context = self.new_context()
        self.memory.synchronize()

    def new_context(self, strategy: str = "USER_MANAGED", kernels: str = "EAGER") -> Any:
        module = self.trt.module
        config = self.engine.create_runtime_config()
        strategies = module.ExecutionContextAllocationStrategy
        config.set_execution_context_allocation_strategy(getattr(strategies, strategy))
        specialization = module.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = getattr(specialization, kernels)
        return self.engine.create_execution_context(config)

    def bind(self) -> None:
        self.context.set_optimization_profile_async(0, self.stream.handle)
        for name, shape in self.shapes.items():
            self.context.set_input_shape(name, shape)
        for name, tensor in self.tensors.items():
            self.context.set_tensor_address(name, tensor.address)
        self.context.set_device_memory(self.workspace.address, self.workspace.shape[0])

    def run(self) -> None:
        assert self.context.execute_async_v3(self.stream.handle)

    def capture(self) -> cuda_module.CapturedGraph:
        return self.stream.capture(self.run)

    def read(self, name: str) -> npt.NDArray[Any]:
        return self.memory.read(self.tensors[name])


@pytest.fixture
def plan(tmp_path: Path) -> bytes:
    trt: Any = type("Flavour", (), {"flavour": "tensorrt-rtx", "version": "1.7.1.116"})
    graph = save_graph(tmp_path)
    parsed = simulator_module._network(trt, ir.load(graph), graph)
    options: Any = type("Options", (), {"capability": ComputeCapability.SM89})
    return simulator_module._engine(trt, parsed, [{"batch": (1, 1, 2)}], options, None)


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    return install(monkeypatch)


@pytest.fixture
def machine(simulator: Simulator, plan: bytes) -> Machine:
    return Machine(simulator, plan)


@pytest.fixture
def bound(machine: Machine) -> Machine:
    machine.bind()
    machine.memory.write(machine.tensors["row"], np.full((2, 1, 1, 4), 3, np.float32))
    return machine


def test_work_runs_when_the_stream_is_synchronized_and_not_before(bound: Machine) -> None:
    pinned = bound.memory.allocate_pinned(256)
    host = simulator_module.bytes_at(pinned, 32).view(np.float32)
    host[:] = 1
    bound.run()
    bound.stream.copy(pinned, bound.tensors["double"].address, 32, "DeviceToHost")
    assert (host.tolist(), bound.simulator.executions["step"]) == ([1] * 8, 0)
    bound.memory.synchronize()
    assert (host.tolist(), bound.simulator.executions["step"]) == ([6] * 8, 1)
    assert bound.simulator.copies[-1] == ("DeviceToHost", 32)


def test_the_cache_is_updated_in_place_by_runs_and_by_replays(bound: Machine) -> None:
    bound.memory.write(bound.tensors["past_length"], np.array([0, 5]))
    bound.run()
    graph = bound.capture()
    bound.memory.write(bound.tensors["past_length"], np.array([7, 7]))
    graph.launch()
    held = bound.read("kv.0.key")
    assert [np.nonzero(rows[0, :, 0])[0].tolist() for rows in held] == [[0, 7], [5, 7]]
    assert (bound.simulator.enqueues, bound.simulator.captures, bound.simulator.launches) == (1, 1, 1)
    assert bound.simulator.executions["step"] == 2


def test_what_is_closed_in_order_leaves_nothing(bound: Machine) -> None:
    bound.run()
    graph = bound.capture()
    with pytest.raises(AssertionError):
        bound.simulator.check_closed()
    bound.memory.synchronize()
    graph.close()
    del bound.context, bound.engine, bound.runtime
    bound.memory.close()
    bound.stream.close()
    bound.simulator.check_closed()


Breach = Callable[[Machine], Any]


def captured(call: Breach) -> Breach:
    """The call while a stream is being captured."""
    return lambda m: m.stream.capture(lambda: call(m))


def moved(name: str, address: Callable[[Machine], int]) -> Breach:
    """A run with one tensor elsewhere."""

    def breach(m: Machine) -> None:
        m.context.set_tensor_address(name, address(m))
        m.run()

    return breach


def unbound(m: Machine) -> None:
    m.context = m.new_context()
    m.context.set_optimization_profile_async(0, m.stream.handle)
    m.context.set_device_memory(m.workspace.address, m.workspace.shape[0])
    m.run()


def without_workspace(m: Machine) -> None:
    m.context = m.new_context()
    m.run()


def changed_after_capture(m: Machine) -> None:
    m.run()
    graph = m.capture()
    m.context.set_tensor_address("row", m.tensors["double"].address)
    graph.launch()


def captured_unflushed(m: Machine) -> None:
    m.run()
    for name, shape in m.shapes.items():
        m.context.set_input_shape(name, (1, *shape[1:]))
    m.capture()


def captured_lazily(m: Machine) -> None:
    m.context = m.new_context(kernels="LAZY")
    m.bind()
    m.run()
    m.capture()


def freed_under_a_graph(m: Machine) -> None:
    source, target = m.cuda.call("cudaMalloc", 64), m.cuda.call("cudaMalloc", 64)
    m.stream.capture(lambda: m.stream.copy(target, source, 64, "DeviceToDevice"))
    m.cuda.call("cudaFree", source)


def freed_pinned_in_a_queue(m: Machine) -> None:
    pinned = m.memory.allocate_pinned(64)
    m.stream.copy(m.tensors["row"].address, pinned, 32, "HostToDevice")
    m.cuda.call("cudaFreeHost", pinned)


def freed_twice(m: Machine) -> None:
    tensor = m.memory.allocate((64,), "uint8")
    m.cuda.call("cudaFree", tensor.address)
    m.memory.free(tensor.address)


def read_after_free(m: Machine) -> None:
    tensor = m.memory.allocate((64,), "uint8")
    m.memory.free(tensor.address)
    m.memory.read(tensor)


def copied_from_pageable_memory_in_a_graph(m: Machine) -> None:
    host = np.zeros(32, np.uint8)
    m.stream.capture(lambda: m.stream.copy(m.tensors["row"].address, host.ctypes.data, 32, "HostToDevice"))


def launched_after_its_end(m: Machine) -> None:
    m.run()
    graph = m.capture()
    graph.close()
    graph.launch()


def destroyed_in_flight(m: Machine) -> None:
    m.run()
    graph = m.capture()
    graph.launch()
    graph.close()


def stream_closed_under_a_graph(m: Machine) -> None:
    m.run()
    m.capture()
    m.memory.synchronize()
    m.stream.close()


def stream_closed_with_work(m: Machine) -> None:
    m.run()
    m.stream.close()


def with_two_batches(m: Machine) -> None:
    m.context.set_input_shape("row", (1, 1, 1, 4))
    m.run()


def used_without_its_engine(m: Machine) -> None:
    del m.engine
    m.context.set_input_shape("past_length", (1,))


BREACHES: list[tuple[str, Breach]] = [
    ("without addresses or shapes of row, past_length, .*kv.0.key.*double", unbound),
    ("without workspace memory", without_workspace),
    ("not 256-byte aligned", lambda m: m.context.set_tensor_address("row", m.tensors["row"].address + 128)),
    ("not inside one live device allocation", lambda m: m.context.set_tensor_address("row", 1 << 40)),
    ("row: 32 bytes .* not inside one live", moved("row", lambda m: int(m.cuda.call("cudaMalloc", 16)))),
    ("kv.0.key are one buffer", moved("next_kv.0.key", lambda m: m.workspace.address)),
    ("the output double overlaps row", moved("double", lambda m: m.tensors["row"].address)),
    ("the output double overlaps .*kv.0.key", moved("double", lambda m: m.tensors["kv.0.key"].address)),
    ("overlaps the workspace", moved("double", lambda m: m.workspace.address)),
    ("workspace of 256 bytes", lambda m: m.context.set_device_memory(m.workspace.address, 256)),
    ("is no input", lambda m: m.context.set_input_shape("double", (1, 1, 1, 4))),
    ("neither input nor output", lambda m: m.context.set_tensor_address("other", m.workspace.address)),
    ("profile 0", lambda m: m.context.set_input_shape("row", (3, 1, 1, 4))),
    ("profile 0", lambda m: m.context.set_input_shape("kv.0.key", (2, 1, 7, 4))),
    ("batch is 1 and, in past_length, 2", with_two_batches),
    ("belongs to one", lambda m: m.context.set_optimization_profile_async(1, m.stream.handle)),
    ("there is no profile 1", lambda m: m.new_context().set_optimization_profile_async(1, m.stream.handle)),
    ("before the profile", lambda m: m.new_context().set_input_shape("past_length", (1,))),
    ("user-managed memory only", lambda m: m.new_context("STATIC")),
    ("no live stream", lambda m: m.context.execute_async_v3(99)),
    ("one context per graph", changed_after_capture),
    ("did not run once", captured_unflushed),
    ("lazy kernel specialization", captured_lazily),
    ("after it was destroyed", launched_after_its_end),
    ("destroyed while its work was queued", destroyed_in_flight),
    ("after its engine was destroyed", used_without_its_engine),
    ("with work in it", stream_closed_with_work),
    ("before a graph captured on it", stream_closed_under_a_graph),
    ("synchronizing while .* captured", captured(lambda m: m.memory.synchronize())),
    ("an allocation while .* captured", captured(lambda m: m.memory.allocate((1,), "uint8"))),
    ("freeing memory while .* captured", captured(lambda m: m.memory.free(m.workspace.address))),
    ("an engine while .* captured", captured(lambda m: m.runtime.deserialize_cuda_engine(b""))),
    ("the shape of row while .* captured", captured(lambda m: m.context.set_input_shape("row", (1, 1, 1, 4)))),
    ("a live RtxExecutionContext names", lambda m: m.memory.free(m.tensors["row"].address)),
    ("a live RtxExecutionContext names", lambda m: m.memory.free(m.workspace.address)),
    ("a live graph names", freed_under_a_graph),
    ("queued work names", freed_pinned_in_a_queue),
    ("not the start of live device memory", freed_twice),
    ("not inside one live", read_after_free),
    ("page-locked host memory only", copied_from_pageable_memory_in_a_graph),
    ("not host memory", lambda m: m.stream.copy(m.workspace.address, m.tensors["row"].address, 8, "HostToDevice")),
    ("not inside one live", lambda m: m.stream.copy(m.workspace.address, m.workspace.address, 1 << 20, "DeviceToHost")),
    ("overlap", lambda m: m.stream.copy(m.workspace.address, m.workspace.address + 8, 16, "DeviceToDevice")),
    ("9 bytes at a pitch of 8", lambda m: m.stream.fill(m.workspace.address, 8, 9, 2)),
]


@pytest.mark.parametrize(("message", "breach"), BREACHES, ids=[f"{i} {text}" for i, (text, _) in enumerate(BREACHES)])
def test_a_broken_rule_is_caught(message: str, breach: Breach, bound: Machine) -> None:
    with pytest.raises(SimulatorError, match=message):
        breach(bound)
    assert bound.simulator.errors


def test_destruction_out_of_order_is_recorded(bound: Machine) -> None:
    bound.run()
    del bound.context
    assert bound.simulator.errors == ["an execution context was destroyed while its work is in a stream's queue"]
    with pytest.raises(SimulatorError, match="after its execution context was destroyed"):
        bound.memory.synchronize()


def test_an_engine_and_a_runtime_outlive_what_they_made(machine: Machine) -> None:
    del machine.runtime
    del machine.engine
    assert machine.simulator.errors == [
        "a runtime was destroyed before its engine",
        "an engine was destroyed before its execution context",
    ]


def test_new_memory_holds_junk_and_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = install(monkeypatch, total_bytes=1024)
    cuda = Cuda()
    address = cuda.call("cudaMalloc", 512)
    assert set(simulator_module.bytes_at(address, 512)) == {0xA5}
    assert cuda.free_bytes() == (512, 1024)
    with pytest.raises(BackendError, match="cudaMalloc failed: out of memory"):
        cuda.call("cudaMalloc", 513)
    assert simulator.errors == []


@pytest.mark.parametrize("device", ["sm90", "sm120"])
def test_the_device_is_what_was_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, compute_capability=device)
    assert Cuda().compute_capability == device
    install(monkeypatch, num_devices=0)
    with pytest.raises(BackendError, match="no CUDA-capable device"):
        Cuda()


def test_a_foreign_engine_is_refused_with_a_message(plan: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, compute_capability="sm86")
    trt = load_flavour("tensorrt-rtx")
    runtime = trt.module.Runtime(trt.logger)
    for content in (plan, b"\x00\xff"):
        assert runtime.deserialize_cuda_engine(content) is None
        assert trt.last_errors() == "this is no engine for tensorrt-rtx 1.7.1.116 sm86"


def test_a_runtime_cache_saves_compiling_on_the_same_device_only(machine: Machine) -> None:
    config = machine.engine.create_runtime_config()
    cache = config.create_runtime_cache()
    assert config.set_runtime_cache(cache)
    config.set_execution_context_allocation_strategy(machine.trt.module.ExecutionContextAllocationStrategy.USER_MANAGED)
    machine.context = machine.engine.create_execution_context(config)
    machine.bind()
    machine.run()
    machine.run()
    assert machine.simulator.compilations == 1
    content = bytes(cache.serialize())
    assert config.create_runtime_cache().deserialize(content)
    for foreign in (b"junk", content.replace(b"sm89", b"sm86")):
        assert not config.create_runtime_cache().deserialize(foreign)


def test_results_and_layers_can_be_tampered_with(bound: Machine) -> None:
    bound.simulator.tamper = lambda graph, outputs: outputs["double"].fill(len(graph))
    bound.simulator.extra_layers.append({"Name": "copy", "LayerType": "Reformat"})
    bound.run()
    assert bound.read("double").tolist() == [[[[4.0] * 4]]] * 2
    form = bound.trt.module.LayerInformationFormat.JSON
    shown = bound.engine.create_engine_inspector().get_engine_information(form)
    assert [kind in shown for kind in ("TensorScatter", "Reformat", "next_kv.0.key")] == [True] * 3


@pytest.fixture
def cuda_session(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    machine.simulator.onnxruntime_cuda(monkeypatch)
    options = {"user_compute_stream": str(machine.stream.handle)}
    providers = [("CUDAExecutionProvider", options)]
    return ort.InferenceSession(tmp_path / "step.onnx", providers=providers, enable_fallback=0)


def bind_session(machine: Machine, session: Any, device_type: str = "cuda") -> Any:
    binding = session.io_binding()
    for name, tensor in machine.tensors.items():
        element = np.int64 if name == "past_length" else np.float32
        bind = binding.bind_input if name in machine.shapes else binding.bind_output
        bind(name, device_type, 0, element, tensor.shape, tensor.address)
    return binding


def test_the_cuda_provider_runs_in_the_streams_turn(machine: Machine, cuda_session: Any) -> None:
    assert cuda_session.get_providers()[0] == ort.get_available_providers()[0] == "CUDAExecutionProvider"
    machine.memory.write(machine.tensors["row"], np.ones((2, 1, 1, 4), np.float32))
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    binding = bind_session(machine, cuda_session)
    cuda_session.run_with_iobinding(binding, options)
    address = machine.tensors["double"].address
    values = simulator_module.bytes_at(address, 32).view(np.float32)
    assert values.max() == 0
    machine.memory.synchronize()
    assert values.tolist() == [2] * 8
    machine.memory.write(machine.tensors["row"], np.full((2, 1, 1, 4), 4, np.float32))
    cuda_session.run_with_iobinding(binding)  # without the option ONNX Runtime waits for the stream
    assert values.tolist() == [8] * 8


def test_the_cuda_provider_is_as_strict(machine: Machine, cuda_session: Any) -> None:
    with pytest.raises(SimulatorError, match="bound to cpu memory"):
        bind_session(machine, cuda_session, "cpu")
    machine.tensors["double"] = machine.tensors["row"]
    with pytest.raises(SimulatorError, match="the output double overlaps row"):
        cuda_session.run_with_iobinding(bind_session(machine, cuda_session))
    with pytest.raises(SimulatorError, match="run without row"):
        cuda_session.run_with_iobinding(cuda_session.io_binding())
