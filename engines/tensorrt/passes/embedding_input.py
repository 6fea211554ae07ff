"""A pass over the portable graphs: the target's embedding table as an input.

Target and assistant graphs both hold the table. As an engine's weight it would be in GPU
memory twice; as an input it is one device buffer that both engines are bound to.
"""

from __future__ import annotations

import onnx_ir as ir

from slipstream.engines.graph_edit import operand, with_role
from slipstream.runtime.bundle.graph_io import EMBEDDING_INPUT
from slipstream.runtime.bundle.graph_roles import EMBEDDING


def embedding_as_input(model: ir.Model) -> bool:
    """Turn the embedding's table into the input "embedding_table"; whether the model was changed.

    Before: the embedding gathers rows of an initializer, which a tied head reads too. After: both read the last
    input, which has its shape and type. A model that already has the input is left alone.
    Raises BackendError when no node is the embedding.
    """
    graph = model.graph
    [table] = {operand(node, 0) for node in with_role(graph, EMBEDDING) if node.op_type == "Gather"}
    if table.name == EMBEDDING_INPUT:
        return False
    assert table.const_value is not None
    replacement = ir.val(EMBEDDING_INPUT, table.const_value.dtype, table.const_value.shape.numpy())
    table.replace_all_uses_with(replacement)
    del graph.initializers[str(table.name)]
    graph.inputs.append(replacement)
    return True
