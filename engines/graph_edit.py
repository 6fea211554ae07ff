"""What the passes over ONNX graphs share: constants by value, nodes put in place, operands by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

CONTRIB_DOMAIN = "com.microsoft"


def operand(node: ir.Node, position: int) -> ir.Value:
    """An input that the operator requires."""
    value = node.inputs[position]
    assert value is not None
    return value


def size(value: ir.Value, axis: int) -> int | None:
    """Size of a dimension where it is static."""
    dim = None if value.shape is None else value.shape[axis]
    return dim if isinstance(dim, int) else None


def constant(graph: ir.Graph, name: str, content: NDArray[np.generic]) -> ir.Value:
    """An initializer of this name, made at its first use."""
    if name not in graph.initializers:
        tensor = ir.tensor(content, name=name)
        value = ir.Value(name=name, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.initializers[name] = value
    return graph.initializers[name]


def integers(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    """A constant of int64, shared by every pass that needs the same one."""
    return constant(graph, "int64." + "_".join(map(str, numbers)), np.array(numbers, np.int64))


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value],
    name: str,
    shape: Sequence[int | str | ir.SymbolicDim | None],
    dtype: ir.DataType | None = None,
) -> ir.Value:
    """A standard node ahead of another one; its only output, whose type is that of the first input unless given."""
    node = ir.Node("", op_type, inputs, name=name)
    output = node.outputs[0]
    output.name, output.shape = name, ir.Shape(list(shape))
    output.type = ir.TensorType(dtype) if dtype is not None else inputs[0].type
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return output
