"""A pass over the portable graphs: the target's embedding table as an input.

Target and assistant graphs both hold the table. As an engine's weight it would be in GPU
memory twice; as an input it is one device buffer that both engines are bound to.
"""

from __future__ import annotations

import onnx_ir as ir

from slipstream.runtime.bundle.graph_io import EMBEDDING_INPUT


def embedding_as_input(model: ir.Model, embedding_file: str) -> bool:
    """Turn the initializer that lies in embedding_file into the input "embedding_table"; whether the model was changed.

    Before: one initializer is external data of that file. After: none is, and the last input
    has its shape and type. A model that already has the input is left alone.
    """
    graph = model.graph
    found = [
        value
        for value in graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor) and value.const_value.location == embedding_file
    ]
    if not found and any(value.name == EMBEDDING_INPUT for value in graph.inputs):
        return False
    assert len(found) == 1, f"{embedding_file} holds {len(found)} initializers, one is expected"
    table = found[0]
    assert table.const_value is not None
    replacement = ir.Value(
        name=EMBEDDING_INPUT,
        shape=ir.Shape(table.const_value.shape.numpy()),
        type=ir.TensorType(table.const_value.dtype),
    )
    table.replace_all_uses_with(replacement)
    del graph.initializers[str(table.name)]
    graph.inputs.append(replacement)
    return True
