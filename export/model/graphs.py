"""Traces modules to ONNX models whose initializers are placeholders, each with the recipe of its content.

Tracing runs on meta tensors: no weight is read here. Sizes are traced at 2 or more and
stay dynamic: batch, draft length, scored rows and the KV capacity of each layer type.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch.export import Dim

from slipstream.export.checkpoint.config import TextConfig
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.manifest import KVBuffer
from slipstream.runtime.sampling import NUM_CANDIDATES

from .assistant import Assistant
from .layers import Recipe, recipes_of
from .moe import expand_experts
from .ops import OPSET
from .roles import name_roles
from .sampling import ChooseGreedy, ChooseSampled, Draw
from .sampling_full import ChooseProcessed
from .target import Target

_TRACED = {
    "batch": 2,
    "num_draft_tokens": 3,
    "num_rows": 4,
    "num_scored_rows": 4,
    "num_drafted": 3,
    "sliding_capacity": 24,
    "full_capacity": 40,
}
_TRACED_FOR_ANY_BUNDLE = {"hidden_size": 8, "vocab_size": 96, "num_draft_top_logits": 16}
_LEAST = {"batch": 1, "vocab_size": NUM_CANDIDATES + 1}  # of dynamic dimensions

SamplingModule = ChooseGreedy | ChooseSampled | ChooseProcessed | Draw
_Module = Target | Assistant | SamplingModule


@dataclass(frozen=True)
class TracedGraph:
    """An ONNX model, and the recipe of each initializer that comes from a checkpoint."""

    model: ir.Model
    recipes: dict[str, Recipe]


def target_graph(module: Target, kv: Sequence[KVBuffer]) -> TracedGraph:
    """Trace a target over its KV buffers. See ``runtime/bundle/graph_io.py`` for the interface it gets."""
    config = module.config
    width = len(config.layers) * config.ple_dim
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "per_layer_width": width}
    inputs = graph_io.inputs("target", has_per_layer_rows=module.takes_per_layer_rows)
    return _trace(module, inputs, graph_io.outputs("target"), kv, sizes)


def assistant_graph(module: Assistant, target: TextConfig, donors: Sequence[KVBuffer]) -> TracedGraph:
    """Trace an assistant over its target's donor buffers, the sliding one first."""
    sizes = {"hidden_size": target.hidden_size}
    return _trace(module, graph_io.inputs("assistant"), graph_io.outputs("assistant"), donors, sizes)


def sampling_graph(module: SamplingModule) -> ir.Model:
    """Trace a graph that draws: without weights, and with every size dynamic, so that it serves every bundle."""
    dynamic = {**_TRACED, **_TRACED_FOR_ANY_BUNDLE}
    return _converted(module, graph_io.inputs(module.name), graph_io.outputs(module.name), (), dynamic, {})


def _trace(
    module: Target | Assistant,
    inputs: Sequence[graph_io.Binding],
    outputs: Sequence[graph_io.Binding],
    kv: Sequence[KVBuffer],
    sizes: Mapping[str, int],
) -> TracedGraph:
    """Trace a module that has weights; nodes say their roles."""
    model = _converted(module, inputs, outputs, kv, _TRACED, sizes)
    name_roles(model, module.config)
    expand_experts(model)
    recipes = recipes_of(module)
    lost = sorted(set(recipes) - set(model.graph.initializers))
    assert not lost, f"the exporter dropped or merged the weights {lost}"
    return TracedGraph(model, recipes)


def _converted(
    module: _Module,
    inputs: Sequence[graph_io.Binding],
    outputs: Sequence[graph_io.Binding],
    kv: Sequence[KVBuffer],
    dynamic: Mapping[str, int],
    sizes: Mapping[str, int],
) -> ir.Model:
    """Trace a module and convert what was traced, its dimensions and initializers named.

    dynamic: dimensions that stay symbols, with the size they are traced at. sizes: of those that are fixed.
    """
    exported = _exported(module, inputs, kv, dynamic, sizes)
    names = [[b.name for b in graph_io.for_layers(bindings, kv)] for bindings in (inputs, outputs)]
    options: dict[str, Any] = {"dynamo": True, "opset_version": OPSET, "verbose": False}
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # axis names shared by several inputs; a deprecation inside torch
        logger = logging.getLogger("torch.onnx")  # it warns about every torchvision operator that is not installed
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        program = torch.onnx.export(exported, input_names=names[0], output_names=names[1], **options)
    assert program is not None
    _name_dimensions(program.model, graph_io.for_layers(inputs, kv))
    return program.model


def _exported(
    module: _Module,
    inputs: Sequence[graph_io.Binding],
    kv: Sequence[KVBuffer],
    dynamic: Mapping[str, int],
    sizes: Mapping[str, int],
) -> torch.export.ExportedProgram:
    """Trace a module whose forward takes the inputs by name, KV tensors as lists "keys" and "values"."""
    dims: dict[str, Any] = {name: Dim(name, min=_LEAST.get(name)) for name in dynamic}
    dims["num_rows"] = 1 + dims["num_draft_tokens"]
    arguments: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for binding in inputs:
        made = graph_io.for_layers([binding], kv)
        dtype = module.dtype if binding.dtype == "bundle" else getattr(torch, made[0].dtype)
        tensors = [torch.zeros(b.sized({**dynamic, **sizes}), dtype=dtype) for b in made]
        symbols = [{i: dims[size] for i, size in enumerate(b.shape) if size in dims} for b in made]
        name = f"{binding.name.rpartition('.')[2]}s" if binding.is_kv else binding.name
        arguments[name], shapes[name] = (tensors, symbols) if binding.is_kv else (tensors[0], symbols[0])
    # Exported here and not inside torch.onnx.export, which falls back to static sizes in silence.
    return torch.export.export(module.eval(), (), arguments, dynamic_shapes=shapes, strict=False)


def _name_dimensions(model: ir.Model, inputs: Sequence[graph_io.Binding]) -> None:
    """Call dynamic dimensions by their names; the exporter knows them as s0, s1, ..."""
    names: dict[str, str] = {}
    for value, binding in zip(model.graph.inputs, inputs, strict=True):
        assert value.shape is not None
        for found, size in zip(value.shape, binding.shape, strict=True):
            if isinstance(size, str) and str(found).isidentifier():  # a derived one is made of others
                names[str(found)] = size
    symbol = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    for value in (output for node in model.graph for output in node.outputs):
        if value.shape is not None:
            named = [d if isinstance(d, int) else symbol.sub(lambda m: names[m[0]], str(d)) for d in value.shape]
            value.shape = ir.Shape(named)
    for value, binding in zip(model.graph.inputs, inputs, strict=True):  # profiles give each its range by name
        assert value.shape is not None
        sizes = zip(value.shape, binding.shape, strict=True)
        value.shape = ir.Shape([found if isinstance(found, int) else size for found, size in sizes])
