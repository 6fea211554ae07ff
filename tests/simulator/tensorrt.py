"""TensorRT's runtime objects over ONNX graphs on simulated device memory.

Results are ONNX Runtime's; what this is for are the rules: addresses, alignment, profiles,
in-place pairs, capture, lifetimes. Names that start without an underscore are TensorRT's, and
``tests/simulator/test_contract.py`` compares them with the real bindings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet, ref

import numpy.typing as npt

from slipstream.runtime.bundle.dtypes import NUMPY

from .device import ALIGNMENT, JUNK, Device, Region, Source, Work, bytes_at, overlap, serialized
from .graphs import Binding, Graph, check_bindings, load_graph
from .tensorrt_types import (
    DTYPES,
    DataType,
    Dims,
    DynamicShapesKernelSpecializationStrategy,
    ExecutionContextAllocationStrategy,
    ILogger,
    LayerInformationFormat,
    ProfilingVerbosity,
    TensorIOMode,
    TensorLocation,
)

VERSIONS = {"tensorrt-rtx": "1.7.1.116", "tensorrt": "11.0.0.114"}
_WORKSPACE_BYTES = 1 << 16


class TensorRTDevice(Device):
    """A device with a TensorRT on it.

    enqueues: calls of execute_async_v3 outside of capture. executions: runs by graph, replayed ones too.
    compilations: shapes that a context met first and that its runtime cache did not hold.
    is_capturable: what is_stream_capturable says. extra_layers: what the inspector shows beside the graph's nodes.
    tamper: called after an engine ran, with its graph's name and its outputs, which it may change.
    """

    def __init__(self, flavour: str, compute_capability: str, total_bytes: int) -> None:
        super().__init__(total_bytes)
        self.flavour = flavour
        self.compute_capability = compute_capability
        self.enqueues = self.compilations = 0
        self.executions: Counter[str] = Counter()
        self.is_capturable = True
        self.extra_layers: list[Any] = []
        self.tamper: Callable[[str, dict[str, npt.NDArray[Any]]], None] | None = None
        self.runtimes: WeakSet[Runtime] = WeakSet()
        self.engines: WeakSet[ICudaEngine] = WeakSet()
        self.contexts: WeakSet[IExecutionContext] = WeakSet()

    @property
    def environment(self) -> tuple[str, str, str]:
        """What engines and runtime caches are tied to."""
        return self.flavour, VERSIONS[self.flavour], self.compute_capability


class Runtime:
    _simulator: TensorRTDevice  # of a subclass, see machine.py

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self._simulator.runtimes.add(self)

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        self._simulator.outside_capture("loading an engine")
        try:
            plan = json.loads(bytes(serialized_engine))
        except ValueError:
            plan = {}
        if plan.get("environment") != list(self._simulator.environment):
            message = f"this is no engine for {' '.join(self._simulator.environment)}"
            self._logger.log(ILogger.Severity.ERROR, message)
            return None
        return ICudaEngine(self, plan)

    def __del__(self) -> None:
        if any(engine._runtime() in (None, self) for engine in self._simulator.engines):
            self._simulator.errors.append("a runtime was destroyed before its engine")


@serialized
class ICudaEngine:
    def __init__(self, runtime: Runtime, plan: Mapping[str, Any]) -> None:
        self._runtime = ref(runtime)
        self._simulator = runtime._simulator
        self._graph = load_graph(plan["model"])
        self._tensors = self._graph.inputs | self._graph.outputs
        self._profiles: list[dict[str, tuple[int, int, int]]] = plan["profiles"]
        self._simulator.engines.add(self)

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        names: list[str] = list(self._tensors)
        return names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._graph.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self._tensors[name].dtype]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(dim if isinstance(dim, int) else -1 for dim in self._tensors[name].dims)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        ranges = self._profiles[profile_index]
        return [
            Dims(self._graph.inputs[name].shape({dim: sizes[i] for dim, sizes in ranges.items()})) for i in range(3)
        ]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._graph.aliases.get(name)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return _WORKSPACE_BYTES * (1 + profile_index)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector([*self._graph.layers, *self._simulator.extra_layers])

    def create_runtime_config(self) -> IRuntimeConfig:
        return (RtxRuntimeConfig if self._simulator.flavour == "tensorrt-rtx" else IRuntimeConfig)(self._simulator)

    def create_execution_context(self, runtime_config: IRuntimeConfig) -> IExecutionContext:
        self._simulator.outside_capture("creating an execution context")
        kind = RtxExecutionContext if self._simulator.flavour == "tensorrt-rtx" else IExecutionContext
        return kind(self, runtime_config)

    def __del__(self) -> None:
        if any(context._engine() in (None, self) for context in self._simulator.contexts):
            self._simulator.errors.append("an engine was destroyed before its execution context")


class EngineInspector:
    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers

    def get_engine_information(self, format: LayerInformationFormat) -> str:  # noqa: A002 (TensorRT's name)
        assert format is LayerInformationFormat.JSON
        return json.dumps({"Layers": self._layers})


class IRuntimeConfig:
    def __init__(self, simulator: TensorRTDevice) -> None:
        self._simulator = simulator
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        self._cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._strategy = strategy


class RtxRuntimeConfig(IRuntimeConfig):
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache(self._simulator)

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True


class IRuntimeCache:
    def __init__(self, simulator: TensorRTDevice) -> None:
        self._environment = list(simulator.environment)
        self._kernels: set[str] = set()

    def serialize(self) -> memoryview:
        return memoryview(json.dumps([self._environment, sorted(self._kernels)]).encode())

    def deserialize(self, blob: Any) -> bool:
        try:
            environment, kernels = json.loads(bytes(blob))
        except ValueError:
            return False
        if environment != self._environment:
            return False
        self._kernels.update(kernels)
        return True


@serialized
class IExecutionContext:
    nvtx_verbosity = ProfilingVerbosity.DETAILED

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        self._engine = ref(engine)
        self._simulator = engine._simulator
        self._graph = engine._graph
        self._config = config
        self._compiled: set[str] = set() if config._cache is None else config._cache._kernels
        self._source = Source()
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory: Region | None = None
        self._is_settled = False  # whether it ran since its shapes changed
        if config._strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            self._simulator.fail("the simulator knows execution contexts with user-managed memory only")
        self._simulator.contexts.add(self)
        self._simulator.holders.add(self)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._simulator.outside_capture("setting a profile")
        self._simulator.stream(stream_handle)
        if self._profile not in (None, profile_index):
            self._simulator.fail("an execution context changed its profile: it belongs to one")
        if not 0 <= profile_index < self._alive_engine().num_optimization_profiles:
            self._simulator.fail(f"there is no profile {profile_index}")
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._simulator.outside_capture(f"setting the shape of {name}")
        if self._profile is None:
            self._simulator.fail("a shape was set before the profile")
        if name not in self._graph.inputs:
            self._simulator.fail(f"{name} is no input")
        smallest, _, largest = self._alive_engine().get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(smallest) or not all(
            low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
        ):
            self._simulator.fail(f"{name} has shape {shape}, profile {self._profile} {smallest} to {largest}")
        if self._shapes.get(name) != tuple(shape):
            self._shapes[name] = tuple(shape)
            self._source.version += 1
            self._is_settled = False
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._graph.inputs and name not in self._graph.outputs:
            self._simulator.fail(f"{name} is neither input nor output")
        if memory % ALIGNMENT:
            self._simulator.fail(f"{name} is at {memory:#x}, which is not {ALIGNMENT}-byte aligned")
        self._simulator.require(memory, 1, name)
        if self._addresses.get(name) != memory:
            self._addresses[name] = memory
            self._source.version += 1
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        if self._profile is None:
            self._simulator.fail("workspace memory was set before the profile")
        needed = self._alive_engine().get_device_memory_size_for_profile_v2(self._profile)
        if memory % ALIGNMENT or size < needed:
            self._simulator.fail(f"workspace of {size} bytes at {memory:#x}: {needed}, aligned, are needed")
        self._simulator.require(memory, size, "workspace")
        if self._memory != (memory, size):
            self._memory = (memory, size)
            self._source.version += 1

    def infer_shapes(self) -> list[str]:
        dynamic = [name for name, tensor in self._graph.inputs.items() if any(isinstance(d, str) for d in tensor.dims)]
        return [name for name in dynamic if name not in self._shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        simulator, memory = self._simulator, self._memory
        if memory is None:
            simulator.fail("an engine was run without workspace memory")
        bindings = self._bindings()
        check_bindings(simulator, self._graph, bindings)
        if any(overlap(memory, bound.region) for bound in bindings.values()):
            simulator.fail("a tensor overlaps the workspace")
        if simulator.stream(stream_handle).captured is None:
            self._is_settled = True
            simulator.enqueues += 1
            self._compile()
        else:
            self._check_capturable()
        regions = (memory, *(bound.region for bound in bindings.values()))
        run = _execution(simulator, self._graph, bindings, memory)
        simulator.push(stream_handle, Work(regions, run, self._source, self._source.version))
        return True

    def _regions(self) -> list[Region]:
        """Memory that must outlive the context."""
        return [*((address, 1) for address in self._addresses.values()), *([self._memory] if self._memory else [])]

    def _bindings(self) -> dict[str, Binding]:
        tensors = self._graph.inputs | self._graph.outputs
        if missing := [name for name in tensors if name not in self._addresses] + self.infer_shapes():
            self._simulator.fail(f"an engine was run without addresses or shapes of {', '.join(missing)}")
        sizes: dict[str, int] = {}
        for name, shape in self._shapes.items():
            for dim, size in zip(self._graph.inputs[name].dims, shape, strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    self._simulator.fail(f"{dim} is {sizes[dim]} and, in {name}, {size}")
        return {name: Binding(t.dtype, t.shape(sizes), self._addresses[name]) for name, t in tensors.items()}

    def _compile(self) -> None:
        kernels = f"{self._graph.name} {self._profile} {sorted(self._shapes.items())}"
        self._simulator.compilations += kernels not in self._compiled
        self._compiled.add(kernels)

    def _check_capturable(self) -> None:
        strategy = getattr(self._config, "dynamic_shapes_kernel_specialization_strategy", None)
        if strategy is DynamicShapesKernelSpecializationStrategy.LAZY:
            self._simulator.fail("captured with lazy kernel specialization, which swaps kernels later")
        if not self._simulator.is_capturable:
            self._simulator.fail("captured though is_stream_capturable says no")
        if not self._is_settled:
            self._simulator.fail("captured with shapes that did not run once: deferred updates can't be captured")

    def _alive_engine(self) -> ICudaEngine:
        return self._engine() or self._simulator.fail("an execution context was used after its engine was destroyed")

    def __del__(self) -> None:
        self._source.is_alive = False
        for place in self._simulator.uses_of(self._source):
            self._simulator.errors.append(f"an execution context was destroyed while its work is in {place}")


class RtxExecutionContext(IExecutionContext):
    def is_stream_capturable(self, stream: int) -> bool:
        self._simulator.stream(stream)
        return self._simulator.is_capturable


def _execution(
    simulator: TensorRTDevice, graph: Graph, bindings: Mapping[str, Binding], memory: Region
) -> Callable[[], None]:
    def run() -> None:
        bytes_at(*memory)[:] = JUNK
        graph.run(bindings)
        simulator.executions[graph.name] += 1
        if simulator.tamper is not None:
            outputs = {name: bindings[name] for name in graph.outputs}
            views = {name: bytes_at(*b.region).view(NUMPY[b.dtype]).reshape(b.shape) for name, b in outputs.items()}
            simulator.tamper(graph.name, views)

    return run
