"""Graphs that read an already-quantized checkpoint's matrices as they are stored, in standard ONNX.

- int4: as ``export/weights/quantize.py`` has it;
- fp8: ``DequantizeLinear(FLOAT8E4M3FN [K, N], scales float32 [N], axis 1)``;
- nvfp4: ``DequantizeLinear(FLOAT4E2M1 [K, N], scales, axis 0, block 16)`` whose scales are
  ``DequantizeLinear(FLOAT8E4M3FN [K / 16, N], column scales float32 [N], axis 1)``.

One scale for each column, where the checkpoint has one for a whole matrix, keeps matrices exact that are joined
along their outputs and differ in it. Scales stay float32 and the product is cast to the graph's dtype: TensorRT-RTX
1.7.1 keeps the codes in its engine with that cast, and builds no nvfp4 whose output has another dtype than its
scales. Activations stay in the graph's dtype, though both formats were calibrated with quantized ones: a step of a few
rows is bound by the bytes of the weights. Neither float form was ever run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from slipstream.export.checkpoint.quantized import QuantizedCheckpoint
from slipstream.export.checkpoint.tensors import Checkpoint
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.initializers import initializer
from slipstream.export.model.layers import Blocks, Recipe
from slipstream.runtime.errors import CheckpointError

from .quantize import column_scales_name, dequantize_initializer, scales_name


def with_stored_matrices(graph: TracedGraph, checkpoint: Checkpoint) -> TracedGraph:
    """The graph with nodes that undo the checkpoint's quantization; recipes say what is stored how.

    Before: MatMul reads a float initializer. After: where all of its sources are quantized, it reads a dequantized one.
    Raises CheckpointError for a quantized table, and for a joined matrix only some of whose sources are quantized.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return graph
    recipes = dict(graph.recipes)
    for name, recipe in graph.recipes.items():
        blocks = _blocks(recipe, checkpoint)
        if blocks is not None:
            recipes[name] = replace(recipe, blocks=blocks)
            if blocks.format == "int4":
                dequantize_initializer(graph.model.graph, name, blocks)
            else:
                _dequantize_float(graph.model.graph, name, blocks)
    return TracedGraph(graph.model, recipes)


def _blocks(recipe: Recipe, checkpoint: QuantizedCheckpoint) -> Blocks | None:
    held = [source for source in recipe.sources if source in checkpoint.headers]
    stored = [source for source in held if checkpoint.is_quantized(source)]
    if not stored:
        return None
    if recipe.layout != "transposed":
        raise CheckpointError(
            f"{checkpoint.folder}: {stored[0]} is quantized, but it is read as a table, which is served in float only"
        )
    if len(stored) < len(held):
        raise CheckpointError(
            f"{checkpoint.folder}: {' and '.join(stored)} are quantized, but not the rest of {' + '.join(held)}, "
            "which are one matrix here: quantize all of them or none"
        )
    quantization = checkpoint.quantization
    return Blocks(quantization.format, quantization.block_size or recipe.shape[0])


def _dequantize_float(graph: ir.Graph, name: str, blocks: Blocks) -> None:
    """Put the nodes of fp8 or nvfp4 between an initializer and what reads it."""
    codes = graph.initializers[name]
    dtype, shape, uses = codes.dtype, codes.shape, list(codes.uses())
    assert dtype is not None
    assert shape is not None
    num_rows, num_columns = (int(str(dim)) for dim in shape)
    float32, float8 = ir.DataType.FLOAT, ir.DataType.FLOAT8E4M3FN
    if blocks.format == "fp8":
        codes.type = ir.TensorType(float8)
        scales = initializer(graph, scales_name(name), float32, [num_columns])
        nodes = [_node("DequantizeLinear", [codes, scales], {"axis": 1}, f"{name}.dequantized", float32)]
    else:
        codes.type = ir.TensorType(ir.DataType.FLOAT4E2M1)
        scales = initializer(graph, scales_name(name), float8, [num_rows // blocks.size, num_columns])
        columns = initializer(graph, column_scales_name(name), float32, [num_columns])
        nodes = [_node("DequantizeLinear", [scales, columns], {"axis": 1}, f"{name}.scales.dequantized", float32)]
        attributes = {"axis": 0, "block_size": blocks.size}
        inputs = [codes, nodes[0].outputs[0]]
        nodes.append(_node("DequantizeLinear", inputs, attributes, f"{name}.dequantized", float32))
    if dtype != float32:
        nodes.append(_node("Cast", nodes[-1].outputs, {"to": dtype.value}, f"{name}.cast", dtype))
    result = nodes[-1].outputs[0]
    result.shape = shape
    first = {reader for reader, _ in uses}
    graph.insert_before(next(node for node in graph if node in first), nodes)
    for reader, position in uses:
        reader.replace_input_with(position, result)
    codes.const_value = None


def _node(
    operator: str, inputs: Sequence[ir.Value], attributes: Mapping[str, int], name: str, dtype: ir.DataType
) -> ir.Node:
    node = ir.Node("", operator, inputs, [ir.AttrInt64(*item) for item in attributes.items()], name=name)
    node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(dtype)
    return node
