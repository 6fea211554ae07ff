"""From re-authored modules to ONNX models whose weights are still recipes.

Tracing runs on meta tensors: no weight is read here. Sizes are traced at 2 or more and
stay dynamic: batch, draft length, scored rows and the KV capacity of each layer type.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim

from slipstream.export.checkpoint.config import Layer, TextConfig
from slipstream.runtime.bundle import graph_io

from .assistant import Assistant
from .layers import Recipe, recipes_of
from .moe import expand_experts
from .ops import OPSET
from .target import Target

_BATCH, _DRAFT, _SCORED = 2, 3, 4
_CAPACITY = {"sliding": 24, "full": 40}


@dataclass(frozen=True)
class TracedGraph:
    """An ONNX model, and the recipe of each initializer that comes from a checkpoint."""

    model: ir.Model
    recipes: dict[str, Recipe]


def target_graph(module: Target) -> TracedGraph:
    """Trace a target. See ``runtime/bundle/graph_io.py`` for the interface it gets."""
    layers = module.config.kv_layers
    keys, values, kv_shapes = _kv_arguments(layers, module.dtype)
    batch, num_draft_tokens = Dim("batch", min=1), Dim("num_draft_tokens")
    arguments = {
        "token": (torch.zeros(_BATCH, 1, dtype=torch.int64), {0: batch}),
        "draft": (torch.zeros(_BATCH, _DRAFT, dtype=torch.int64), {0: batch, 1: num_draft_tokens}),
        "past_length": (torch.zeros(_BATCH, dtype=torch.int64), {0: batch}),
        "base": (torch.zeros(_BATCH, dtype=torch.int64), {0: batch}),
        "scored_rows": (torch.zeros(_BATCH, _SCORED, dtype=torch.int64), {0: batch, 1: Dim("num_scored_rows")}),
        "draft_length": (torch.zeros(_BATCH, dtype=torch.int64), {0: batch}),
    }
    more = {}
    if module.takes_per_layer_rows:
        width = len(module.config.layers) * module.config.ple_dim
        rows = torch.zeros(_BATCH, 1 + _DRAFT, width, dtype=module.dtype)
        more[graph_io.PER_LAYER_INPUT] = (rows, {0: batch, 1: 1 + num_draft_tokens})
    kv_inputs = [graph_io.kv_name(layer.index, part) for part in ("key", "value") for layer in layers]
    kv_outputs = [graph_io.kv_output_name(layer.index, part) for layer in layers for part in ("key", "value")]
    return _trace(
        module,
        arguments,
        (keys, values, kv_shapes(batch)),
        more,
        [*graph_io.TARGET_INPUTS, *kv_inputs, *more],
        [*graph_io.TARGET_OUTPUTS, *kv_outputs],
    )


def assistant_graph(module: Assistant, target: TextConfig) -> TracedGraph:
    """Trace an assistant over its target's donor layers."""
    donors = [target.donor("sliding"), target.donor("full")]
    keys, values, kv_shapes = _kv_arguments(donors, module.dtype)
    batch = Dim("batch", min=1)
    arguments = {
        "token": (torch.zeros(_BATCH, 1, dtype=torch.int64), {0: batch}),
        "draft": (torch.zeros(_BATCH, _DRAFT, dtype=torch.int64), {0: batch, 1: Dim("num_drafted")}),
        "hidden": (torch.zeros(_BATCH, 1, target.hidden_size, dtype=module.dtype), {0: batch}),
        "position": (torch.zeros(_BATCH, dtype=torch.int64), {0: batch}),
        "past_length": (torch.zeros(_BATCH, dtype=torch.int64), {0: batch}),
        "base": (torch.zeros(_BATCH, dtype=torch.int64), {0: batch}),
    }
    kv_inputs = [graph_io.kv_name(layer.index, part) for part in ("key", "value") for layer in donors]
    return _trace(
        module,
        arguments,
        (keys, values, kv_shapes(batch)),
        {},
        [*graph_io.ASSISTANT_INPUTS, *kv_inputs],
        list(graph_io.ASSISTANT_OUTPUTS),
    )


def _kv_arguments(layers: Sequence[Layer], dtype: torch.dtype):  # type: ignore[no-untyped-def]
    def buffer(layer: Layer) -> torch.Tensor:
        return torch.zeros(_BATCH, layer.num_kv_heads, _CAPACITY[layer.type], layer.head_dim, dtype=dtype)

    def shapes(batch: Dim) -> list[dict[int, Dim]]:
        capacity = {name: Dim(f"{name}_capacity") for name in _CAPACITY}
        return [{0: batch, 2: capacity[layer.type]} for layer in layers]

    return [buffer(layer) for layer in layers], [buffer(layer) for layer in layers], shapes


def _trace(  # type: ignore[no-untyped-def]
    module: nn.Module, arguments, kv, more, input_names: list[str], output_names: list[str]
) -> TracedGraph:
    """arguments, more: tensors with their dynamic dimensions, before and after the KV buffers."""
    keys, values, kv_shapes = kv
    # Exported here and not inside torch.onnx.export, which falls back to static sizes in silence.
    exported = torch.export.export(
        module.eval(),
        (*[tensor for tensor, _ in arguments.values()], keys, values, *[tensor for tensor, _ in more.values()]),
        dynamic_shapes=(
            *[shape for _, shape in arguments.values()],
            kv_shapes,
            kv_shapes,
            *[shape for _, shape in more.values()],
        ),
        strict=False,
    )
    with warnings.catch_warnings(), _quiet(logging.getLogger("torch.onnx")):
        warnings.simplefilter("ignore")  # axis names shared by several inputs; a deprecation inside torch
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            input_names=input_names,
            output_names=output_names,
            verbose=False,
        )
    assert program is not None
    inputs = [*(shape for _, shape in arguments.values()), *kv_shapes, *kv_shapes, *(s for _, s in more.values())]
    _name_dimensions(program.model, inputs)
    expand_experts(program.model)
    recipes = recipes_of(module)
    lost = sorted(set(recipes) - set(program.model.graph.initializers))
    assert not lost, f"the exporter dropped or merged the weights {lost}"
    return TracedGraph(program.model, recipes)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Errors only: the exporter warns about every torchvision operator that is not installed."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _name_dimensions(model: ir.Model, input_shapes: Sequence[dict[int, Dim]]) -> None:
    """Call dynamic dimensions by their names; the exporter knows them as s0, s1, ..."""
    names: dict[str, str] = {}
    for value, dims in zip(model.graph.inputs, input_shapes, strict=True):
        assert value.shape is not None
        for axis, dim in dims.items():
            if str(value.shape[axis]).isidentifier():  # a derived one is made of others
                names[str(value.shape[axis])] = dim.__name__
    symbol = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            named = [d if isinstance(d, int) else symbol.sub(lambda m: names[m[0]], str(d)) for d in value.shape]
            value.shape = ir.Shape(named)
    for value in model.graph.inputs:  # a profile gives each dimension of an input its range by name
        assert value.shape is not None
        value.shape = ir.Shape(["num_rows" if dim == "num_draft_tokens + 1" else dim for dim in value.shape])
