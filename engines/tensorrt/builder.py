"""TensorRT networks and engines from the portable graphs; one builder for both flavours.

Neither a GPU nor a driver is needed to parse or, with TensorRT-RTX, to build. What this file
does not do: choose profiles, write engines or run them. Polygraphy's loaders are not used:
they choose between the two flavours once per process and print to stdout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from slipstream.engines.tensorrt.passes.bucketing import attend_to_buckets
from slipstream.engines.tensorrt.passes.embedding_input import embedding_as_input
from slipstream.engines.tensorrt.passes.group_experts import group_experts
from slipstream.runtime.bundle.manifest import KVBuffer
from slipstream.runtime.errors import BackendError
from slipstream.runtime.trt.flavour import TensorRT

from .attention_probe import set_capability
from .timing_cache import TimingCache

_MOST_ELEMENTS = 1 << 31
Profile = Mapping[str, tuple[int, int, int]]  # smallest, likeliest and largest size by dimension name


@dataclass(frozen=True)
class Network:
    """A parsed network with what has to outlive it. dimensions: of each input, by name or size."""

    builder: Any
    network: Any
    dimensions: Mapping[str, Sequence[str | int]]


def edited_model(graph: Path, kv: Sequence[KVBuffer], capacity: Mapping[str, int]) -> ir.Model:
    """A portable graph as TensorRT gets it.

    Attention reads buckets of a static capacity, experts are grouped by call, the embedding is an input.
    """
    model = ir.load(graph)
    attend_to_buckets(model, kv, capacity)
    group_experts(model)
    embedding_as_input(model)
    return model


def with_sizes(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """A graph that serves every bundle, for one of them: sizes in place of dimensions by name."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        dims = value.shape or ()
        value.shape = ir.Shape([dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in dims])
    return model


def network_from_onnx(trt: TensorRT, model: ir.Model, graph: Path) -> Network:
    """Parse an edited model of a graph, and check that nothing was lost.

    graph: the file that the model was read from; its weights lie beside it. Raises BackendError with the parser's
    message.
    """
    _check_limits(model, graph)
    module = trt.module
    builder = module.Builder(trt.logger)
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt, network, model, graph)
    for layer in _layers(network):  # a shape that TensorRT has a kernel for keeps it
        if layer.type == module.LayerType.ATTENTION_INPUT:
            layer.__class__ = module.IAttentionInputLayer
            layer.attention.decomposable = True
    _check_network(module, network, model, graph)
    dimensions = {
        str(value.name): [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()]
        for value in model.graph.inputs
    }
    return Network(builder, network, dimensions)


@dataclass(frozen=True)
class BuildOptions:
    """What engines are built with. capability: a ComputeCapability member, None for the current device."""

    capability: Any
    workspace_mib: int
    timing_cache: TimingCache | None


def engine_from_network(
    trt: TensorRT, parsed: Network, profiles: Sequence[Profile], options: BuildOptions, on_step: Callable[[], bool]
) -> memoryview:
    """Build a serialized engine; its bytes are TensorRT's own, not copied.

    on_step: called as the build goes on; False cancels it. Raises BackendError when there is no engine.
    """
    module = trt.module
    config = parsed.builder.create_builder_config()
    config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    config.clear_flag(module.BuilderFlag.TF32)  # float32 means float32: TF32 keeps ten bits of the mantissa
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # the runtime looks for copies of KV tensors
    set_capability(config, options.capability)
    if options.timing_cache is not None:
        options.timing_cache.attach(config)
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
        errors = trt.last_errors()
        hint = f". Give it more than --workspace {options.workspace_mib}" if "OutOfMemory" in errors else ""
        raise BackendError(f"{trt.flavour} {trt.version} could not build the engine: {errors}{hint}")
    if options.timing_cache is not None:
        options.timing_cache.save(config)
    return memoryview(engine)


def _parse(trt: TensorRT, network: Any, model: ir.Model, graph: Path) -> None:
    parser = trt.module.OnnxParser(network, trt.logger)
    if not parser.parse(ir.to_proto(model).SerializeToString(), str(graph)):
        errors = [parser.get_error(i).desc().splitlines()[0] for i in range(parser.num_errors)]
        raise BackendError(f"{trt.flavour} {trt.version} can't parse {graph}: {'; '.join(errors)}")


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def _check_network(module: Any, network: Any, model: ir.Model, graph: Path) -> None:
    """Refuse a network that lacks layers of the graph, which the parser drops in silence. Raises BackendError."""
    kinds, operators = [layer.type for layer in _layers(network)], [node.op_type for node in model.graph]
    expected = {
        "inputs": (network.num_inputs, len(model.graph.inputs)),
        "outputs": (network.num_outputs, len(model.graph.outputs)),
        "cache updates": (kinds.count(module.LayerType.KV_CACHE_UPDATE), operators.count("TensorScatter")),
        "attentions": (kinds.count(module.LayerType.ATTENTION_INPUT), operators.count("Attention")),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise BackendError(f"TensorRT's parser made {found} {what} of {graph}, which has {wanted}")
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    types = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs) if value.dtype}
    for tensor in tensors:
        wanted_type = getattr(module, types[tensor.name].numpy().name)
        if tensor.is_shape_tensor:
            raise BackendError(
                f"TensorRT wants the values of {tensor.name} of {graph} on the host, where they never are"
            )
        if tensor.dtype != wanted_type:
            raise BackendError(f"TensorRT's parser made {tensor.name} of {graph} {tensor.dtype}, not {wanted_type}")


def _check_limits(model: ir.Model, graph: Path) -> None:
    """Raises BackendError for weights that TensorRT can't hold, before it is asked to."""
    for value in model.graph.initializers.values():
        count = 0 if value.const_value is None else value.const_value.size
        if count >= _MOST_ELEMENTS:
            raise BackendError(
                f"{value.name} of {graph} has {count} elements; TensorRT takes fewer than {_MOST_ELEMENTS}. "
                "A per-layer embedding stays out of the graph with export --ple host, the default"
            )


def _monitor(module: Any, on_step: Callable[[], bool]) -> Any:
    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None: ...

        def phase_finish(self, phase_name: str) -> None: ...

        def step_complete(self, phase_name: str, step: int) -> bool:
            return on_step()

    return Monitor()
