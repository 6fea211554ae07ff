"""A machine with a GPU for tests that have none: CUDA, TensorRT and ONNX Runtime's CUDA provider on host memory.

``install`` puts it in place of TensorRT and CUDA, ``simulate_builds`` makes ``slipstream build``
write engines for it. Work runs when its stream is synchronized; what a GPU would not forgive
raises SimulatorError. The parts are in ``device.py``, ``cuda.py``, ``graphs.py`` and
``tensorrt.py``.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from slipstream.engines.tensorrt import build
from slipstream.runtime.backend.cuda import Cuda
from slipstream.runtime.trt import flavour as flavour_module

from . import tensorrt, tensorrt_types
from .cuda import CudaRuntime
from .device import SimulatorError, bytes_at
from .graphs import install_cuda_provider

MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}

__all__ = ["Simulator", "SimulatorError", "bytes_at", "install", "simulate_builds"]


class Simulator(tensorrt.TensorRTDevice):
    """The device, its counters and what tests can set; module: what stands in for TensorRT."""

    def __init__(self, flavour: str, compute_capability: str, total_bytes: int) -> None:
        super().__init__(flavour, compute_capability, total_bytes)
        self.module: Any = _module(self)

    def onnxruntime_cuda(self, monkeypatch: pytest.MonkeyPatch, *, is_loadable: bool = True) -> None:
        """Give onnxruntime a CUDA provider. is_loadable: False for one that falls back to the CPU in silence."""
        install_cuda_provider(self, monkeypatch, is_loadable=is_loadable)

    def check_closed(self) -> None:
        """Everything was given back, in order, and nothing went wrong on the way."""
        assert self.errors == []
        kinds = "allocations streams graphs executables contexts engines runtimes".split()
        assert {kind: len(getattr(self, kind)) for kind in kinds if getattr(self, kind)} == {}


def _module(simulator: Simulator) -> Any:
    """What stands in for ``tensorrt_rtx`` or ``tensorrt``."""
    module: Any = types.ModuleType(MODULES[simulator.flavour])
    names = "DataType Dims EngineInspector ExecutionContextAllocationStrategy IAttentionInputLayer ICudaEngine "
    names += (
        "IExecutionContext ILogger IRuntimeConfig LayerInformationFormat LayerType ProfilingVerbosity TensorIOMode "
    )
    names += "TensorLocation"
    if simulator.flavour == "tensorrt-rtx":
        names += " ComputeCapability DynamicShapesKernelSpecializationStrategy IRuntimeCache"
    for name in names.split():
        setattr(module, name, getattr(tensorrt_types, name, None) or getattr(tensorrt, name))
    if simulator.flavour == "tensorrt-rtx":
        module.IRuntimeConfig, module.IExecutionContext = tensorrt.RtxRuntimeConfig, tensorrt.RtxExecutionContext
    for name, dtype in tensorrt_types.DTYPES.items():
        setattr(module, name, dtype)
    module.Runtime = type("Runtime", (tensorrt.Runtime,), {"_simulator": simulator})
    module.__version__ = tensorrt.VERSIONS[simulator.flavour]
    return module


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    flavour: str = "tensorrt-rtx",
    compute_capability: str = "sm89",
    total_bytes: int = 1 << 30,
    num_devices: int = 1,
) -> Simulator:
    """Put the simulator in place of a TensorRT and of CUDA. num_devices: 0 for a machine without a GPU."""
    simulator = Simulator(flavour, compute_capability, total_bytes)
    runtime = CudaRuntime(simulator, compute_capability, num_devices)
    bindings = types.SimpleNamespace(runtime=runtime)
    modules = {"cuda": types.SimpleNamespace(bindings=bindings), "cuda.bindings": bindings}
    for name, module in (modules | {"cuda.bindings.runtime": runtime, MODULES[flavour]: simulator.module}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flavour_module, "_loggers", {})
    monkeypatch.setattr(simulator, "is_abandoned", False)
    return simulator


def simulate_builds(monkeypatch: pytest.MonkeyPatch, flavour: str = "tensorrt-rtx") -> None:
    """Let build_engines write engines for the simulator: everything but the builder itself is as it is."""
    runtime = getattr(sys.modules.get(MODULES[flavour]), "Runtime", object)
    if not issubclass(runtime, tensorrt.Runtime):
        monkeypatch.setitem(sys.modules, MODULES[flavour], Simulator(flavour, "sm89", 1 << 30).module)
        monkeypatch.setattr(flavour_module, "_loggers", {})
    monkeypatch.setattr(build, "network_from_onnx", _network)
    monkeypatch.setattr(build, "engine_from_network", _engine)
    monkeypatch.setattr(build, "probe_attention", lambda trt, shapes, capability: shapes)


def _network(trt: Any, model: ir.Model, graph: Path) -> Any:
    dims = {str(value.name): [str(dim) for dim in value.shape or ()] for value in model.graph.inputs}
    path = graph.with_name(f".{graph.stem}.{sha256(str(dims).encode()).hexdigest()[:8]}.onnx")
    ir.save(model, path)
    return types.SimpleNamespace(path=path, dimensions=dims)


def _engine(trt: Any, parsed: Any, profiles: Sequence[Mapping[str, Any]], options: Any, on_step: Any) -> bytes:
    used = {dim for dims in parsed.dimensions.values() for dim in dims if not dim.isdigit()}
    capability = options.capability
    device = Cuda().compute_capability if capability is None else capability.name.lower()
    plan = {
        "environment": [trt.flavour, trt.version, device],
        "model": str(parsed.path.resolve()),
        "profiles": [{dim: list(profile[dim]) for dim in used} for profile in profiles],
    }
    return json.dumps(plan).encode()
