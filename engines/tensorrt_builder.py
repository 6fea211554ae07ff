"""TensorRT networks and engines from the portable graphs; one builder for both flavours.

Neither a GPU nor a driver is needed to parse or, with TensorRT-RTX, to build. What this file
does not do: choose profiles, write engines or run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from slipstream.runtime.bundle import KVBuffer
from slipstream.runtime.engine_record import AttentionShape
from slipstream.runtime.errors import BackendError

from .bucketing import attend_to_buckets
from .flavour import TensorRT

Profile = Mapping[str, tuple[int, int, int]]  # smallest, likeliest and largest size by dimension name


@dataclass(frozen=True)
class Network:
    """A parsed network with what has to outlive it. dimensions: of each input, by name or size."""

    builder: Any
    network: Any
    dimensions: Mapping[str, Sequence[str | int]]


def network_from_onnx(
    trt: TensorRT, graph: Path, kv: Sequence[KVBuffer], capacity: Mapping[str, int], work: Path
) -> Network:
    """Parse a graph with static KV capacities and bucketed attention, and check that nothing was lost.

    capacity: rows by layer type. work: folder for the edited graph; it refers to the weights where they lie.
    Raises BackendError with the parser's message.
    """
    model = ir.load(graph)
    attend_to_buckets(model, kv, capacity)
    edited = graph.with_name(f".{graph.stem}.{work.name}.onnx")  # beside the weights that it names
    ir.save(model, edited)
    module = trt.module
    builder = module.Builder(trt.logger)
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    try:
        _parse(trt, network, edited, graph)
    finally:
        edited.unlink()
    _set_decomposable(module, network)
    _check_network(module, network, model, graph)
    dimensions = {
        str(value.name): [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()]
        for value in model.graph.inputs
    }
    return Network(builder, network, dimensions)


def engine_from_network(
    trt: TensorRT,
    parsed: Network,
    profiles: Sequence[Profile],
    capability: Any,
    workspace_mib: int,
    on_step: Callable[[], bool],
) -> bytes:
    """Build a serialized engine.

    capability: a ComputeCapability member, None for the current device. on_step: called as the
    build goes on; False cancels it. Raises BackendError when there is no engine.
    """
    module = trt.module
    config = parsed.builder.create_builder_config()
    config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, workspace_mib << 20)
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    for profile in profiles:
        shapes = parsed.builder.create_optimization_profile()
        for name, dims in parsed.dimensions.items():
            if any(isinstance(dim, str) for dim in dims):
                ranges = [profile[dim] if isinstance(dim, str) else (dim, dim, dim) for dim in dims]
                shapes.set_shape(name, *zip(*ranges, strict=True))
        config.add_optimization_profile(shapes)
    monitor = _monitor(module, on_step)
    config.progress_monitor = monitor
    engine = parsed.builder.build_serialized_network(parsed.network, config)
    if engine is None:
        raise BackendError(f"{trt.flavour} {trt.version} could not build the engine: {trt.last_errors()}")
    return bytes(engine)


def attention_shapes(graph: Path, dtype: str) -> set[AttentionShape]:
    """The distinct attention shapes of a graph; ``is_fused`` is still open (False)."""
    shapes = set()
    for node in ir.load(graph).graph:
        if node.op_type == "Attention":
            query, key = (value.shape for value in node.inputs[:2] if value is not None)
            assert query is not None
            assert key is not None
            heads, kv_heads, head_dim = (int(str(dim)) for dim in (query[1], key[1], query[3]))
            shapes.add(
                AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, is_fused=False)
            )
    return shapes


def probe_attention(trt: TensorRT, shape: AttentionShape, capability: Any) -> AttentionShape:
    """The shape with ``is_fused`` found out: a network of that one attention, built without leave to take it apart."""
    module = trt.module
    builder = module.Builder(trt.logger)
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    dtype = {"float32": module.float32, "float16": module.float16, "bfloat16": module.bfloat16}[shape.dtype]
    rows, held = 5, 256
    query = network.add_input("query", dtype, (1, shape.num_heads, rows, shape.head_dim))
    key = network.add_input("key", dtype, (1, shape.num_kv_heads, held, shape.head_dim))
    value = network.add_input("value", dtype, (1, shape.num_kv_heads, held, shape.head_dim))
    attention = network.add_attention(query, key, value, module.AttentionNormalizationOp.SOFTMAX, False)
    attention.mask = network.add_input("visible", module.bool, (1, 1, rows, held))
    attention.decomposable = False
    network.mark_output(attention.get_output(0))
    config = builder.create_builder_config()
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    is_fused = builder.build_serialized_network(network, config) is not None
    trt.last_errors()  # a refusal is the answer here
    return shape.model_copy(update={"is_fused": is_fused})


def _parse(trt: TensorRT, network: Any, edited: Path, graph: Path) -> None:
    parser = trt.module.OnnxParser(network, trt.logger)
    if not parser.parse_from_file(str(edited)):
        errors = [parser.get_error(i).desc().splitlines()[0] for i in range(parser.num_errors)]
        raise BackendError(f"{trt.flavour} {trt.version} can't parse {graph}: {'; '.join(errors)}")


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def _set_decomposable(module: Any, network: Any) -> None:
    """Let TensorRT take attention apart where it has no kernel for a shape; a shape that has one keeps it."""
    for layer in _layers(network):
        if layer.type == module.LayerType.ATTENTION_INPUT:
            layer.__class__ = module.IAttentionInputLayer
            layer.attention.decomposable = True


def _check_network(module: Any, network: Any, model: ir.Model, graph: Path) -> None:
    """The parser drops what it does not know in silence: count what must be there. Raises BackendError."""
    layers = _layers(network)
    expected = {
        "inputs": (network.num_inputs, len(model.graph.inputs)),
        "outputs": (network.num_outputs, len(model.graph.outputs)),
        "cache updates": (
            sum(layer.type == module.LayerType.KV_CACHE_UPDATE for layer in layers),
            sum(node.op_type == "TensorScatter" for node in model.graph),
        ),
        "attentions": (
            sum(layer.type == module.LayerType.ATTENTION_INPUT for layer in layers),
            sum(node.op_type == "Attention" for node in model.graph),
        ),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise BackendError(f"TensorRT's parser made {found} {what} of {graph}, which has {wanted}")


def _monitor(module: Any, on_step: Callable[[], bool]) -> Any:
    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None: ...

        def phase_finish(self, phase_name: str) -> None: ...

        def step_complete(self, phase_name: str, step: int) -> bool:
            return on_step()

    return Monitor()
