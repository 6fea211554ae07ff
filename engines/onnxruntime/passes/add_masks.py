"""A pass for ONNX Runtime: boolean attention masks become numbers to add, once per mask.

Its Attention turns a boolean mask into such numbers at every node; all layers of one type
share one mask, so the conversion is done once instead.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipstream.engines.graph_edit import constant, insert, operand, with_role
from slipstream.runtime.bundle.graph_roles import CACHED_ATTENTION, SHARED_ATTENTION


def add_masks(model: ir.Model) -> bool:
    """Convert the mask of every Attention; whether the model was changed.

    Before: masks are bool [B, 1, Q, S], true where a row is visible. After: they have the
    query's type, 0 where visible and the type's lowest number elsewhere, which keeps a row
    that sees nothing finite, as a boolean mask does.
    Raises BackendError where no node says that it is one.
    """
    converted: dict[ir.Value, ir.Value] = {}
    for node in with_role(model.graph, SHARED_ATTENTION, CACHED_ATTENTION):
        if node.op_type == "Attention" and operand(node, 3).dtype == ir.DataType.BOOL:  # others are fused
            mask = operand(node, 3)
            if mask not in converted:
                converted[mask] = _additive(model.graph, node, mask)
            node.replace_input_with(3, converted[mask])
    return bool(converted)


def _additive(graph: ir.Graph, node: ir.Node, mask: ir.Value) -> ir.Value:
    dtype = operand(node, 0).dtype
    assert dtype is not None
    assert mask.shape is not None
    visible = constant(graph, "mask.visible", np.zeros((), dtype.numpy()))
    hidden = constant(graph, "mask.hidden", np.array(np.finfo(dtype.numpy()).min, dtype.numpy()))
    return insert(node, "Where", [mask, visible, hidden], f"{mask.name}.additive", list(mask.shape), dtype)
