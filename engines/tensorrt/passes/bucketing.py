"""A pass over the portable graphs: attention over a bucket of a static KV capacity.

TensorRT wants the capacity of an in-place cache static, and attention over all of it would cost the whole context at
every step. After this pass each attention reads the first rows of its buffers only, as many as the new inputs
``sliding_rows`` and ``full_rows`` hold (their values are 0, 1, 2, ...). On ONNX Runtime's CPU provider the slice is a
copy, so there the buffers themselves grow by buckets and the portable graph is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from slipstream.engines.graph_edit import insert, integers, operand, with_role
from slipstream.runtime.bundle.graph_io import BUCKET_SUFFIX, INPUTS, ROWS_INPUT, layer_types
from slipstream.runtime.bundle.graph_roles import CACHED_ATTENTION, LAYER_TYPE, SHARED_ATTENTION
from slipstream.runtime.bundle.manifest import KVBuffer


def attend_to_buckets(model: ir.Model, kv: Sequence[KVBuffer], capacity: Mapping[str, int]) -> bool:
    """Fix the KV capacity and attend to a bucket of it; whether the model was changed.

    Before: KV inputs have dynamic capacities, whose size feeds the masks, and attention reads
    whole buffers. After: capacities are static, masks and attention have the bucket's size.
    capacity: rows by layer type. A model that already has the bucket inputs is left alone.
    Raises BackendError when no attention of the model says its layer's type.
    """
    graph = model.graph
    if any(value.name in ROWS_INPUT.values() for value in graph.inputs):
        return False
    layer_type = layer_types(kv)
    _fix_capacity(graph, capacity)
    read = {layer_type[str(value.name)] for value in graph.inputs if value.name in layer_type}
    first, int64 = next(iter(graph)), ir.DataType.INT64
    shapes = {binding.name: binding.shape for binding in INPUTS}
    rows = {kind: ir.val(name, int64, shapes[name]) for kind, name in ROWS_INPUT.items() if kind in read}
    graph.inputs.extend(rows.values())
    ends = {kind: insert(first, "Shape", [value], f"{value.name}_count", [1], int64) for kind, value in rows.items()}
    for node in list(graph):
        if node.op_type == "Shape" and operand(node, 0).name in layer_type and node.attributes.get_int("start") == 2:
            node.outputs[0].replace_all_uses_with(ends[layer_type[str(operand(node, 0).name)]])
    for node in with_role(graph, CACHED_ATTENTION, SHARED_ATTENTION):
        for position in (1, 2):
            end = ends[node.metadata_props[LAYER_TYPE]]
            node.replace_input_with(position, _first_rows(graph, node, operand(node, position), end))
    graph.sort()
    return True


def _fix_capacity(graph: ir.Graph, capacity: Mapping[str, int]) -> None:
    sizes = {f"{kind}_capacity": rows for kind, rows in capacity.items()}
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([sizes.get(str(dim), dim) for dim in value.shape])


def _first_rows(graph: ir.Graph, reader: ir.Node, value: ir.Value, end: ir.Value) -> ir.Value:
    """value [B, H, S, D] cut to its first ``end`` rows, made once per value."""
    name = f"{value.name}{BUCKET_SUFFIX}"
    for node, _ in value.uses():
        if node.op_type == "Slice" and node.outputs[0].name == name:
            return node.outputs[0]
    node = ir.Node("", "Slice", [value, integers(graph, [0]), end, integers(graph, [2])], name=name)
    node.outputs[0].name = name
    graph.insert_before(reader, node)
    return node.outputs[0]
