"""The portable graphs in float32 on ONNX Runtime's CPU provider: what engines are compared with.

A bfloat16 bundle's graphs are computed in float32 from its bfloat16 weights, since the CPU
provider can't multiply bfloat16. float16 graphs are treated alike: what is left of the
difference is the engine's own rounding. Not a way to generate text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from slipstream.engines.graph_edit import insert
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.manifest import Bundle
from slipstream.runtime.bundle.onnxruntime_record import FLOAT32_ACTIVATIONS
from slipstream.runtime.machine.host import usual_num_threads
from slipstream.runtime.ort.session import open_session, session_options

from .float4_as_float8 import float4_as_float8

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def in_float32(model: ir.Model) -> bool:
    """Compute a half-precision graph in float32; whether the model was changed.

    Before: weights, inputs and casts are half. After: inputs, outputs and everything between
    are float32; half weights stay as they lie on disk and are cast where they are read.
    """
    graph = model.graph
    half = [value for value in graph.initializers.values() if value.dtype in _HALF]
    weights = [value for value in half if any(node.op_type != "Cast" for node, _ in value.uses())]
    if not weights and not any(value.dtype in _HALF for value in graph.inputs):
        return False
    first = next(iter(graph))
    for value in (*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)):
        if value.dtype in _HALF:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in graph.all_nodes():
        if node.op_type == "Cast" and node.attributes.get_int("to") in _HALF:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    for weight in weights:
        uses, shape, float32 = list(weight.uses()), list(weight.shape or ()), ir.DataType.FLOAT
        cast = insert(first, "Cast", [weight], f"{weight.name}.float32", shape, float32, to=float32)
        for reader, position in uses:
            reader.replace_input_with(position, cast)
    return True


class ReferenceGraph:
    """One graph of a bundle, run on plain arrays."""

    def __init__(self, bundle: Bundle, file: str) -> None:
        """Raises BackendError when ONNX Runtime can't load it."""
        self._graph: graph_io.GraphName = "target" if file == bundle.manifest.target_graph else "assistant"
        model = ir.load(bundle.path(file))
        in_float32(model)
        threads = usual_num_threads(bundle.manifest)
        options = session_options(bundle.folder, num_threads=threads, accuracy_level=FLOAT32_ACTIVATIONS)
        self._widened = float4_as_float8(model)  # the session reads them where they are
        options.add_external_initializers(list(self._widened), list(self._widened.values()))
        content = ir.to_proto(model).SerializeToString()
        self._session = open_session(content, options, f"{file} as the reference")
        self._inputs = [node.name for node in self._session.get_inputs()]
        self._outputs = [node.name for node in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Every output by name. feeds may hold more than the graph reads; what it leaves out is zero."""
        known = {name: value for name, value in feeds.items() if name in self._inputs}
        fed = graph_io.feeds(self._graph, known, has_per_layer_rows=graph_io.PER_LAYER_INPUT in self._inputs)
        values = self._session.run(self._outputs, {name: fed[name] for name in self._inputs})
        return dict(zip(self._outputs, values, strict=True))
