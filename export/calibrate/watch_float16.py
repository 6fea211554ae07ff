"""A pass for calibration: the largest magnitude of every float16 value that a graph computes, as one more output.

ONNX Runtime's CPU provider computes a float16 graph in float32 and rounds less often than a GPU
does, so the outputs can look finite where float16 overflows in between. Not seen: attention
scores, which stay inside their operator, and what a loop over experts holds before its result.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipstream.export.model.initializers import constant

LARGEST_OUTPUT = "calibration.largest"
_MOVES = frozenset(
    "Concat Expand Gather GatherElements Reshape Slice Split Squeeze TensorScatter Transpose Unsqueeze".split()
)  # what they give was there before


def watch_float16(model: ir.Model) -> list[str]:
    """Add the output, float32 [number of values], where there is any; where in the graph each is made, in order."""
    graph = model.graph
    weight_of = {value: name for name, value in graph.initializers.items() if ".weight" in name}
    places: list[str] = []
    largest: list[ir.Value] = []
    place = "before the first weight"
    for node in list(graph):
        operands = [value for value in node.inputs if value is not None]
        weights = [weight_of[value] for value in operands if value in weight_of]
        if all(value.is_initializer() or value in weight_of for value in operands):
            weight_of |= {output: name for output in node.outputs for name in weights[:1]}  # unpacked, not computed
            continue
        place = f"at {weights[0]}" if weights else place
        watched = [] if node.op_type in _MOVES else [v for v in node.outputs if v.dtype == ir.DataType.FLOAT16]
        largest += [_largest(graph, node, value) for value in watched]
        places += [place] * len(watched)
    if largest:
        output = ir.val(LARGEST_OUTPUT, ir.DataType.FLOAT, [len(largest)])
        graph.append(ir.node("Concat", largest, {"axis": 0}, outputs=[output]))
        graph.outputs.append(output)
    return places


def _largest(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Value:
    """Add nodes for the largest magnitude of a value: [1] float32. They run right behind the value's own node, so that
    it is not kept until the end of the run.
    """
    wide = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    size = ir.node("Abs", wide.outputs)
    flat = ir.node("Reshape", [size.outputs[0], constant(graph, "calibration.minus_one", np.array([-1], np.int64))])
    largest = ir.node("ReduceMax", flat.outputs, {"keepdims": 1})
    graph.insert_after(node, [wide, size, flat, largest])
    return largest.outputs[0]
