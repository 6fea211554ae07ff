"""TensorRT networks and engines from the portable graphs; one builder for both flavours.

``tensorrt`` and ``tensorrt_rtx`` share one API, so the module is an argument. Neither a GPU
nor a driver is needed to parse or, with TensorRT-RTX, to build. What this file does not do:
choose profiles, write engines or run them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from slipstream.runtime.errors import BackendError


@dataclass(frozen=True)
class Profile:
    """Smallest, likeliest and largest size of each dynamic dimension, by its name in the graph."""

    sizes: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Network:
    """A parsed network with what has to outlive it. kv_updates: cache update layers, one per KV tensor."""

    builder: Any
    network: Any
    dimensions: Mapping[str, Sequence[str | int]]
    kv_updates: int


def network_from_onnx(trt: Any, graph: Path, capacity: Mapping[str, int]) -> Network:
    """Parse a graph with the KV capacities fixed, as TensorRT's cache update needs them static.

    trt: the tensorrt or tensorrt_rtx module. capacity: rows by dimension name
    ("sliding_capacity", "full_capacity"). Raises BackendError with the parser's message.
    """
    model = onnx.load(graph, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in capacity:
                dim.dim_value = capacity[dim.dim_param]
    dimensions = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    with tempfile.NamedTemporaryFile(dir=graph.parent, suffix=".onnx") as file:  # beside the weights it names
        file.write(model.SerializeToString())
        file.flush()
        if not parser.parse_from_file(file.name):
            errors = [parser.get_error(i).desc().splitlines()[0] for i in range(parser.num_errors)]
            raise BackendError(f"TensorRT {trt.__version__} can't parse {graph}: {'; '.join(errors)}")
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True  # a shape that has a fused kernel keeps it
    kv_updates = sum(layer.type == trt.LayerType.KV_CACHE_UPDATE for layer in layers)
    return Network(builder, network, dimensions, kv_updates)


def engine_from_network(trt: Any, parsed: Network, profile: Profile, compute_capability: str) -> bytes:
    """Build a serialized engine for one compute capability ("SM89"). Raises BackendError."""
    config = parsed.builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, compute_capability), 0)
    shapes = parsed.builder.create_optimization_profile()
    for name, dims in parsed.dimensions.items():
        if any(isinstance(dim, str) for dim in dims):
            ranges = [profile.sizes[dim] if isinstance(dim, str) else (dim, dim, dim) for dim in dims]
            shapes.set_shape(name, *zip(*ranges, strict=True))
    config.add_optimization_profile(shapes)
    engine = parsed.builder.build_serialized_network(parsed.network, config)
    if engine is None:
        raise BackendError(f"TensorRT {trt.__version__} could not build an engine for {compute_capability}")
    return bytes(engine)
