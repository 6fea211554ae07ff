"""What the passes over ONNX graphs share: nodes looked up by role, constants, and nodes put in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipstream.runtime.bundle.graph_roles import LAYER, ROLE
from slipstream.runtime.errors import BackendError

CONTRIB_DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators


def operand(node: ir.Node, position: int) -> ir.Value:
    """The input of a node at a position that its operator requires."""
    value = node.inputs[position]
    assert value is not None
    return value


def size(value: ir.Value, axis: int) -> int:
    """Size of a dimension that is static."""
    dim = None if value.shape is None else value.shape[axis]
    assert isinstance(dim, int), f"dimension {axis} of {value.name} is dynamic"
    return dim


def with_role(graph: ir.Graph, *roles: str) -> list[ir.Node]:
    """The nodes of roles of ``runtime/bundle/graph_roles.py``, in order. Raises BackendError when there are none."""
    found = [node for node in graph if node.metadata_props.get(ROLE) in roles]
    if not found:
        raise BackendError(f"{graph.name} has no node whose {ROLE} is {' or '.join(roles)}: export the pair again")
    return found


def within_layer(graph: ir.Graph, layer: str, role: str) -> ir.Node:
    """The node of a role in a layer. Raises BackendError when there are none or several."""
    found = [node for node in with_role(graph, role) if node.metadata_props.get(LAYER) == layer]
    if len(found) != 1:
        raise BackendError(
            f"{graph.name} has {len(found)} nodes of {ROLE} {role} and {LAYER} {layer}, one is expected: "
            "export the pair again"
        )
    return found[0]


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer of a tensor's name, shape and type."""
    value = ir.val(tensor.name, const_value=tensor)
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, content: NDArray[np.generic]) -> ir.Value:
    """An initializer of this name, made at its first use."""
    return graph.initializers.get(name) or initializer(graph, ir.tensor(content, name=name))


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
    domain: str = "",
    **attributes: int | float | Sequence[int],
) -> ir.Value:
    """Put a node ahead of another one; its only output, of this dtype or else of the first input's."""
    node = ir.Node(domain, op_type, inputs, ir.convenience.convert_attributes(attributes), name=name)
    output = node.outputs[0]
    output.name, output.shape = name, ir.Shape(list(shape))
    output.type = ir.TensorType(dtype) if dtype is not None else inputs[0].type
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return output


def insert_split(
    before: ir.Node, value: ir.Value, sizes: Sequence[int], axis: int, names: Sequence[str]
) -> Sequence[ir.Value]:
    """A Split of ``value`` along an axis, ahead of a node; its outputs."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    attributes = [ir.AttrInt64("axis", axis)]
    node = ir.Node("", "Split", [value, integers(graph, sizes)], attributes, num_outputs=len(sizes))
    graph.insert_before(before, node)
    assert value.shape is not None
    for output, name, width in zip(node.outputs, names, sizes, strict=True):
        output.name, output.type = name, value.type
        output.shape = ir.Shape([*value.shape[:axis], width, *value.shape[axis + 1 :]])
    return node.outputs
