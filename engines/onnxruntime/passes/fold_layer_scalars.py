"""A pass for ONNX Runtime: the factor at each layer's end moves into what reads the residual.

Every layer multiplies the residual stream by its scalar. The stream is carried unmultiplied
instead, as x / c with c the product of the scalars so far: what is added to it comes out of a
norm, whose weight takes the division, and what reads it is a norm, whose epsilon takes it,
or a product, which takes c as its factor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipstream.engines.graph_edit import CONTRIB_DOMAIN, constant, operand

_LARGEST = 1024.0  # a stream further from its true scale than this keeps its node, and starts again at 1


def fold_layer_scalars(model: ir.Model) -> bool:
    """Drop the multiplications by layer scalars; whether the model was changed.

    Before: x' = Mul(Add(...), scalar) with a scalar of shape [1], read by RMSNormalization, by
    MatMul and by Add whose other term is a norm's. After: those Mul are gone, FusedMatMul stands
    for the MatMul, and the norms' weights are new initializers. A reader of another kind, or a
    MatMul on a quantized matrix, gets a Mul of its own.
    """
    graph = model.graph
    scales: dict[ir.Value, float] = {}
    is_changed = False
    for node in list(graph):
        if _is_layer_scalar(node):
            is_changed |= _drop(graph, node, scales)
        else:
            _carry(graph, node, scales)
    return is_changed


def _is_layer_scalar(node: ir.Node) -> bool:
    if node.op_type != "Mul" or node.outputs[0].is_graph_output():
        return False
    producer, factor = operand(node, 0).producer(), operand(node, 1)
    is_sum = producer is not None and producer.op_type == "Add" and len(operand(node, 0).uses()) == 1
    tensor = factor.const_value
    is_scalar = tensor is not None and tuple(tensor.shape) == (1,) and tensor.dtype == ir.DataType.FLOAT
    return is_sum and is_scalar and not operand(node, 0).is_graph_output()


def _drop(graph: ir.Graph, node: ir.Node, scales: dict[ir.Value, float]) -> bool:
    stream, tensor = operand(node, 0), operand(node, 1).const_value
    assert tensor is not None
    scale = scales.get(stream, 1.0) * float(tensor.numpy()[0])
    if not 1 / _LARGEST <= scale <= _LARGEST:
        is_carried = stream in scales
        node.replace_input_with(1, _factor(graph, scale, stream) if is_carried else operand(node, 1))
        return is_carried
    node.outputs[0].replace_all_uses_with(stream)
    graph.remove(node, safe=True)
    scales[stream] = scale
    return True


def _carry(graph: ir.Graph, node: ir.Node, scales: dict[ir.Value, float]) -> None:
    """Make a node read the stream as it is carried."""
    for position, value in enumerate(node.inputs):
        scale = None if value is None else scales.get(value)
        if scale is None or value is None:
            continue
        if node.op_type == "RMSNormalization" and position == 0:
            epsilon = node.attributes["epsilon"].as_float() / scale**2
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
        elif node.op_type == "Add" and _divide_term(graph, operand(node, 1 - position), scale):
            scales[node.outputs[0]] = scale
        elif node.op_type in ("MatMul", "FusedMatMul") and position == 0 and not _is_quantized(operand(node, 1)):
            node.op_type, node.domain = "FusedMatMul", CONTRIB_DOMAIN
            node.attributes["alpha"] = ir.AttrFloat32("alpha", scale)
            graph.opset_imports[CONTRIB_DOMAIN] = 1
        else:
            product = ir.Node("", "Mul", [value, _factor(graph, scale, value)])
            product.outputs[0].name, product.outputs[0].type = f"{value.name}.scaled.{node.outputs[0].name}", value.type
            product.outputs[0].shape = value.shape
            graph.insert_before(node, product)
            node.replace_input_with(position, product.outputs[0])


def _is_quantized(matrix: ir.Value) -> bool:
    """ONNX Runtime fuses it with a MatMul only."""
    producer = matrix.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _divide_term(graph: ir.Graph, term: ir.Value, scale: float) -> bool:
    """Divide what is added to the stream by its scale, in the weight of the norm it comes from."""
    norm = term.producer()
    if norm is None or norm.op_type != "RMSNormalization" or len(term.uses()) != 1 or term.is_graph_output():
        return False
    weight = operand(norm, 1)
    if weight.const_value is None:
        return False
    content = weight.const_value.numpy()
    divided = (content.astype(np.float64) / scale).astype(content.dtype)
    norm.replace_input_with(1, constant(graph, f"{weight.name}.over.{scale!r}", divided))
    return True


def _factor(graph: ir.Graph, scale: float, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return constant(graph, f"stream_scale.{scale!r}.{like.dtype.name}", np.array([scale], like.dtype.numpy()))
