"""A pass for ONNX Runtime: the factor at each layer's end moves into what reads the residual stream.

Every layer multiplies the stream by its scalar. The stream is carried unmultiplied instead, as x / c
with c the product of the scalars so far: what is added to it comes out of a norm, whose weight takes
the division, and what reads it is a norm, whose epsilon takes it, or a product, which takes c as its
factor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipstream.engines.graph_edit import CONTRIB_DOMAIN, constant, insert, operand, with_role
from slipstream.runtime.bundle.graph_roles import LAYER_SCALAR

_LARGEST = 1024.0  # a stream further from its true scale than this keeps its node, and starts again at 1


def fold_layer_scalars(model: ir.Model) -> bool:
    """Drop the multiplications by layer scalars of a float32 model; whether it was changed.

    Before: x' = Mul(Add(...), scalar) with a scalar of shape [1], read by RMSNormalization, by MatMul and by Add
    whose other term is a norm's. After: those Mul are gone, FusedMatMul stands for MatMul on a float matrix, and
    norms' weights are new initializers. A reader of another kind gets a Mul of its own.
    Raises BackendError where no node says that it is such a Mul.
    """
    graph, scalars = model.graph, with_role(model.graph, LAYER_SCALAR)
    if operand(scalars[0], 0).dtype != ir.DataType.FLOAT:
        return False
    scales: dict[ir.Value, float] = {}  # c of each value that is carried
    for node in list(graph):
        if node in scalars:
            _drop(graph, node, scales)
        else:
            for position, value in enumerate(node.inputs):
                if value in scales:
                    _carry(graph, node, position, scales)
    return bool(scales)


def _drop(graph: ir.Graph, node: ir.Node, scales: dict[ir.Value, float]) -> None:
    stream, scalar = operand(node, 0), operand(node, 1).const_value
    assert scalar is not None
    scale = scales.get(stream, 1.0) * float(scalar.numpy()[0])
    if 1 / _LARGEST <= scale <= _LARGEST:
        node.outputs[0].replace_all_uses_with(stream)
        graph.remove(node, safe=True)
        scales[stream] = scale
    elif stream in scales:
        node.replace_input_with(1, _factor(graph, scale))


def _carry(graph: ir.Graph, node: ir.Node, position: int, scales: dict[ir.Value, float]) -> None:
    """Make a node read the stream at a position as it is carried."""
    stream = operand(node, position)
    scale = scales[stream]
    if node.op_type == "RMSNormalization":
        epsilon = node.attributes["epsilon"].as_float() / scale**2
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
    elif node.op_type == "Add" and _is_divided(graph, operand(node, 1 - position), scale):
        scales[node.outputs[0]] = scale
    elif node.op_type == "MatMul" and operand(node, 1).const_value is not None:  # a quantized matrix is computed
        node.op_type, node.domain = "FusedMatMul", CONTRIB_DOMAIN
        node.attributes["alpha"] = ir.AttrFloat32("alpha", scale)
        graph.opset_imports[CONTRIB_DOMAIN] = 1
    else:
        assert stream.shape is not None
        name = f"{stream.name}.scaled.{node.outputs[0].name}"
        node.replace_input_with(
            position, insert(node, "Mul", [stream, _factor(graph, scale)], name, list(stream.shape))
        )


def _is_divided(graph: ir.Graph, term: ir.Value, scale: float) -> bool:
    """Divide what is added to the stream by its scale, in the weight of the norm it comes from, if it does."""
    norm = term.producer()
    if norm is None or norm.op_type != "RMSNormalization" or len(term.uses()) != 1 or term.is_graph_output():
        return False
    weight = operand(norm, 1)
    assert weight.const_value is not None
    divided = (weight.const_value.numpy().astype(np.float64) / scale).astype(np.float32)
    norm.replace_input_with(1, constant(graph, f"{weight.name}.over.{scale!r}", divided))
    return True


def _factor(graph: ir.Graph, scale: float) -> ir.Value:
    return constant(graph, f"stream_scale.{scale!r}", np.array([scale], np.float32))
