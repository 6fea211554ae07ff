"""A pass for ONNX Runtime: large float32 matrices in the layout that its convolutions read.

A step over few rows is bound by reading the matrices. ONNX Runtime's matrix products read a packed
copy of their own, at two thirds to four fifths of the rate that its convolutions on channels in
blocks reach (its NCHWc layout), which read the filters as they lie in the file. So the matrices are
written once more, as filters, and the products become convolutions over rows.
The size of a block is the CPU's; a build for another one is refused when it is loaded.
"""

from __future__ import annotations

import onnx_ir as ir

from slipstream.engines.graph_edit import insert, integers, operand, size
from slipstream.engines.onnxruntime.filter_file import FilterFile
from slipstream.runtime.bundle.graph_roles import GATE_UP, ROLE

BLOCKED_DOMAIN = "com.microsoft.nchwc"
# Such convolutions take six rows at a time, then three, then one by one: four and five cost more than six.
ROWS_RUN = {4: 6, 5: 6}


def block_matrices(model: ir.Model, filters: FilterFile, least_bytes: int) -> bool:
    """Make convolutions of the products with float32 matrices; whether the model was changed.

    least_bytes: of matrices in a graph; below, it is left as it is.

    Before: y = x @ matrix with x [B, Q, K] or [Q, K]. After: x is reordered to K channels of Q
    positions, convolved with a filter of one position, and ordered back. Between the products of
    a gated MLP nothing is reordered: gate and up are halves of the channels there.
    """
    products = [node for node in model.graph if _is_product(node, filters.block)]
    if sum(_num_bytes(matrix) for matrix in {operand(node, 1) for node in products}) < least_bytes:
        return False
    blocked: set[ir.Value] = set()
    for node in products:
        _rewrite(model.graph, node, filters, blocked)
    model.graph.opset_imports[BLOCKED_DOMAIN] = 1
    return True


def _is_product(node: ir.Node, block: int) -> bool:
    """x @ matrix with a matrix of whole blocks from a file; the matrix of a head's Gemm is transposed."""
    if node.op_type not in ("MatMul", "Gemm") or node.outputs[0].is_graph_output():
        return False
    rows, matrix = operand(node, 0), operand(node, 1)
    if rows.shape is None or matrix.shape is None:
        return False
    is_stored = isinstance(matrix.const_value, ir.ExternalTensor) and matrix.dtype == ir.DataType.FLOAT
    is_matrix = len(matrix.shape) == 2 and all(int(str(dim)) % block == 0 for dim in matrix.shape)
    return is_stored and is_matrix and len(rows.shape) in (2, 3)


def _num_bytes(matrix: ir.Value) -> int:
    return 0 if matrix.const_value is None else matrix.const_value.nbytes


def _rewrite(graph: ir.Graph, node: ir.Node, filters: FilterFile, blocked: set[ir.Value]) -> None:
    """Make a convolution of one product. blocked: values that earlier ones left in blocks of channels."""
    rows, output = operand(node, 0), node.outputs[0]
    kernel = filters.add(graph, operand(node, 1), is_transposed=node.op_type == "Gemm")
    assert output.shape is not None
    front = integers(graph, [0, 1] if len(output.shape) == 2 else [1])
    channels = rows if rows in blocked else _channels(node, rows, front)
    assert channels.shape is not None
    batch, _, _, num_rows = channels.shape
    width, name = size(kernel, 0), output.name
    shape, inputs = [batch, width, 1, num_rows], [channels, kernel]
    convolved = insert(node, "Conv", inputs, f"{name}.conv", shape, domain=BLOCKED_DOMAIN, kernel_shape=[1, 1])
    gate = _gate(node, width, filters.block)
    if gate:
        gate[0].replace_input_with(0, convolved)
        gate[0].attributes["axis"] = ir.AttrInt64("axis", 1)
        for value in (value for inner in gate for value in inner.outputs):
            value.shape = ir.Shape([batch, width // 2, 1, num_rows])
        blocked.add(gate[-1].outputs[0])
    else:
        shape, inputs = [batch, 1, num_rows, width], [convolved]
        images = insert(
            node, "ReorderOutput", inputs, f"{name}.out", shape, None, BLOCKED_DOMAIN, channels=width, channels_last=1
        )
        output.replace_all_uses_with(insert(node, "Squeeze", [images, front], f"{name}.rows", list(output.shape)))
    graph.remove(node, safe=True)


def _channels(node: ir.Node, rows: ir.Value, front: ir.Value) -> ir.Value:
    """rows [B, Q, K] or [Q, K], reordered to blocks of K channels of Q positions: [B, K, 1, Q]. front: axes to add."""
    assert rows.shape is not None
    batch, num_rows, width = [1, *rows.shape] if len(rows.shape) == 2 else rows.shape
    name, shape = f"{node.outputs[0].name}.in", [batch, width, 1, num_rows]
    images = insert(node, "Unsqueeze", [rows, front], f"{name}.images", [batch, 1, num_rows, width])
    return insert(node, "ReorderInput", [images], name, shape, domain=BLOCKED_DOMAIN, channels_last=1)


def _gate(node: ir.Node, width: int, block: int) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Split, Gelu and Mul of a gated MLP, where node gives its two halves and what reads them can stay in blocks."""
    if node.metadata_props.get(ROLE) != GATE_UP:
        return None
    [split] = node.outputs[0].consumers()
    [gelu] = split.outputs[0].consumers()
    [product] = gelu.outputs[0].consumers()
    [down] = product.outputs[0].consumers()
    return (split, gelu, product) if width // 2 % block == 0 and _is_product(down, block) else None
