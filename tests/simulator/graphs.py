"""ONNX graphs on simulated device memory: what engines are made of, and ONNX Runtime's CUDA provider.

Everything runs on the CPU provider, on the addresses that it is bound to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.runtime.backend.tensors import num_bytes
from slipstream.runtime.bundle.dtypes import NUMPY

from .device import ALIGNMENT, Device, Region, Work, overlap

_InferenceSession = ort.InferenceSession  # the real one, whatever a test puts in its place
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    dims: tuple[int | str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Dimensions are numbers, names or sums of both, such as "num_drafted + 3"."""
        return tuple(sum(int(sizes.get(term, term)) for term in str(dim).split(" + ")) for dim in self.dims)


@dataclass(frozen=True)
class Binding:
    """A tensor of a call: where it is bound and how large it is."""

    dtype: str
    shape: tuple[int, ...]
    address: int

    @property
    def region(self) -> Region:
        return self.address, num_bytes(self.shape, self.dtype)


class Graph:
    """An ONNX file as what an engine is made of."""

    def __init__(self, path: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.name = Path(path).name.lstrip(".").split(".")[0]  # edited graphs are hidden files
        self.session = _InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: _tensor(value) for value in self.session.get_inputs()}
        self.outputs = {value.name: _tensor(value) for value in self.session.get_outputs()}
        nodes = list(ir.load(path).graph)
        self.layers = [
            {
                "Name": node.name,
                "LayerType": node.op_type,
                "Inputs": [{"Name": value.name} for value in node.inputs if value is not None],
                "Outputs": [{"Name": value.name} for value in node.outputs],
            }
            for node in nodes
        ]
        updates = [node for node in nodes if node.op_type == "TensorScatter" and node.inputs[0] is not None]
        pairs = {str(node.outputs[0].name): str(node.inputs[0].name) for node in updates if node.inputs[0]}
        self.aliases = {new: old for new, old in pairs.items() if new in self.outputs and old in self.inputs}

    def run(self, bindings: Mapping[str, Binding]) -> None:
        call = self.session.io_binding()
        for name, bound in bindings.items():
            bind = call.bind_input if name in self.inputs else call.bind_output
            element: Any = 16 if bound.dtype == "bfloat16" else NUMPY[bound.dtype]
            bind(name, "cpu", 0, element, bound.shape, bound.address)
        self.session.run_with_iobinding(call)


def _tensor(value: Any) -> _Tensor:
    names = {"float": "float32", "int64": "int64", "bool": "bool", "float16": "float16", "bfloat16": "bfloat16"}
    return _Tensor(names[value.type.removeprefix("tensor(").removesuffix(")")], tuple(value.shape))


def load_graph(path: str | Path) -> Graph:
    return _load(str(path), Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _load(path: str, modified_ns: int) -> Graph:
    return Graph(path)


def check_bindings(device: Device, graph: Graph, bindings: Mapping[str, Binding]) -> None:
    """Every tensor lies in live device memory; what is written overlaps nothing but its own in-place input."""
    for name, bound in bindings.items():
        if bound.address % ALIGNMENT:
            device.fail(f"{name} is at {bound.address:#x}, which is not {ALIGNMENT}-byte aligned")
        device.require(*bound.region, name)
    for name in (name for name in graph.outputs if name in bindings):
        pair = graph.aliases.get(name)
        if pair is not None and bindings[name].address != bindings[pair].address:
            device.fail(f"{name} and {pair} are one buffer, and have two addresses")
        for other, bound in bindings.items():
            if other not in (name, pair) and overlap(bindings[name].region, bound.region):
                device.fail(f"the output {name} overlaps {other}")


class _CudaBinding:
    """Stands in for IOBinding: every tensor in device memory."""

    def __init__(self, device: Device, graph: Graph) -> None:
        self._device = device
        self._graph = graph
        self.tensors: dict[str, Binding] = {}

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        if (device_type, device_id) != ("cuda", 0):
            self._device.fail(f"{name} is bound to {device_type} memory: the provider would copy it at each call")
        wanted = (self._graph.inputs | self._graph.outputs)[name].dtype
        if element_type != (16 if wanted == "bfloat16" else NUMPY[wanted]):
            self._device.fail(f"{name} is {wanted}, and bound as {element_type}")
        self.tensors[name] = Binding(wanted, tuple(shape), buffer_ptr)

    bind_output = bind_input


class _CudaSession:
    """Stands in for InferenceSession with the CUDA provider: a run is work of the stream that it was given."""

    def __init__(self, device: Device, path: Any, options: Mapping[str, Any], providers: list[str]) -> None:
        self._device = device
        self._graph = load_graph(path)
        self._stream = int(options["user_compute_stream"])
        self._providers = providers

    def get_providers(self) -> list[str]:
        return self._providers

    def io_binding(self) -> _CudaBinding:
        return _CudaBinding(self._device, self._graph)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return []

    def get_inputs(self) -> Any:
        return self._graph.session.get_inputs()

    def get_outputs(self) -> Any:
        return self._graph.session.get_outputs()

    def run_with_iobinding(self, iobinding: _CudaBinding, run_options: Any = None) -> None:
        """An output that is not bound goes nowhere."""
        device, graph, tensors = self._device, self._graph, dict(iobinding.tensors)
        if missing := [name for name in graph.inputs if name not in tensors]:
            device.fail(f"a graph was run without {', '.join(missing)}")
        check_bindings(device, graph, tensors)
        device.push(self._stream, Work(tuple(bound.region for bound in tensors.values()), lambda: graph.run(tensors)))
        key = "disable_synchronize_execution_providers"
        if run_options is None or run_options.get_run_config_entry(key) != "1":
            device.run(device.stream(self._stream))  # as ONNX Runtime does at the end of a run


def install_cuda_provider(device: Device, monkeypatch: pytest.MonkeyPatch, *, is_loadable: bool = True) -> None:
    """Give onnxruntime a CUDA provider. is_loadable: False for one that falls back to the CPU in silence."""

    def session(path: Any, sess_options: Any = None, providers: Any = None, enable_fallback: int = 1) -> Any:
        assert not enable_fallback, "ONNX Runtime's own fallback prints to stdout and goes on with the CPU"
        asked = {(p if isinstance(p, str) else p[0]): ({} if isinstance(p, str) else p[1]) for p in providers or [_CPU]}
        if _CUDA not in asked:
            return _InferenceSession(path, sess_options, providers=providers, enable_fallback=0)
        return _CudaSession(device, path, asked[_CUDA], [_CUDA, _CPU] if is_loadable else [_CPU])

    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [_CUDA, _CPU])
