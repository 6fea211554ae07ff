"""Initializers of ONNX graphs: the one place where they are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray


def initializer(
    graph: ir.Graph,
    name: str,
    dtype: ir.DataType | None,
    shape: Iterable[int | ir.SymbolicDim],
    tensor: ir.TensorProtocol | None = None,
) -> ir.Value:
    """Add an initializer to a graph. tensor: its content, None where that is written later."""
    assert dtype is not None
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
    graph.initializers[name] = value
    return value


def constant(graph: ir.Graph, name: str, content: NDArray[Any]) -> ir.Value:
    """An initializer of this content, added at its first use."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(content, name=name)
    return initializer(graph, name, tensor.dtype, content.shape, tensor)
