"""A pass for TensorRT: the experts of a whole call at once, instead of a loop over its rows.

TensorRT-RTX 1.7.1 parses the loop of the portable graph, and its builder then crashes. After
this pass a call gathers the weights of as many experts as its T rows can have picked,
min(T k, E), and takes every row through each of them; what a row did not pick is masked.

The cost: one row reads its k experts as in the loop, and once more to gather them. Several
rows read an expert once, however many of them share it, for up to E / k times the loop's
multiplications. Memory is ``experts_bytes``: it grows with the rows up to one layer's experts,
and every layer uses the same. There is no Loop and no If, which CUDA graphs could not capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from slipstream.engines.graph_edit import constant, integers, operand, size, with_role
from slipstream.runtime.bundle.graph_roles import EXPERTS, EXPERTS_INPUTS

_FLOAT = int(ir.DataType.FLOAT)


@dataclass(frozen=True)
class _Experts:
    """What a layer's loop reads: rows [T, N], chosen int64 and shares [T, k], gate_up [E, 2I, N], down [E, N, I]."""

    rows: ir.Value
    chosen: ir.Value
    shares: ir.Value
    gate_up: ir.Value
    down: ir.Value

    @property
    def num_experts(self) -> int:
        return size(self.down, 0)

    @property
    def top_k(self) -> int:
        return size(self.chosen, 1)

    def num_bytes(self, num_rows: int) -> int:
        width, inner, dtype = size(self.down, 1), size(self.down, 2), self.down.dtype
        assert dtype is not None
        values = 3 * inner * width + num_rows * (3 * inner + width)  # of one expert
        return int(min(num_rows * self.top_k, self.num_experts) * values * dtype.itemsize)


def group_experts(model: ir.Model) -> bool:
    """Replace the loops of mixture-of-experts layers; whether there were any.

    Before: a Loop over rows, in whose body each row gathers its own experts. After: standard
    operators in the graph itself give the same. Raises BackendError for a loop that is none of experts.
    """
    found = list(_expert_loops(model.graph))
    for loop, experts in found:
        nodes = _Nodes(model.graph)
        mixed, output = _mixed(nodes, experts, _group(nodes, experts)), loop.outputs[0]
        model.graph.insert_before(loop, nodes.nodes)
        mixed.type, mixed.shape = output.type, output.shape
        output.replace_all_uses_with(mixed, replace_graph_outputs=True)
        model.graph.remove(loop, safe=True)
    if found:
        RemoveUnusedNodesPass()(model)  # what counted the loop's rows
    return bool(found)


def experts_bytes(model: ir.Model, num_rows: int) -> int:
    """Scratch memory of a call of num_rows rows: gathered weights, and each row's values in each expert.

    model: a portable graph, before the pass; 0 where it has no experts. For layers of 26B-A4B in bfloat16 this is
    95 MB for one row, 766 for 8, 1543 for 16 and 1845 for 256; TensorRT-RTX 1.7.1 planned 103, 773, 1539 and 1665.
    """
    return max((experts.num_bytes(num_rows) for _, experts in _expert_loops(model.graph)), default=0)


def _expert_loops(graph: ir.Graph) -> Iterator[tuple[ir.Node, _Experts]]:
    for loop in (node for node in graph if node.op_type == "Loop"):
        body = loop.attributes["body"].as_graph()
        read = {name: operand(with_role(body, f"{EXPERTS}.{name}")[0], 0) for name in EXPERTS_INPUTS}
        yield loop, _Experts(**read)


class _Nodes(ir.tape.Tape):
    """Nodes that will stand ahead of a loop; their constants go to its graph at once."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__()
        self.graph = graph

    def integers(self, *numbers: int) -> ir.Value:
        return integers(self.graph, numbers)


def _group(nodes: _Nodes, experts: _Experts) -> ir.Value:
    """The experts that any row picked, filled up with others to G = min(T k, E): their numbers [G]."""
    count = experts.num_experts
    num_rows = nodes.op("Shape", [experts.rows], {"start": 0, "end": 1})
    num_picks = nodes.op("Mul", [num_rows, nodes.integers(experts.top_k)])
    end = nodes.op("Min", [num_picks, nodes.integers(count)])
    picks = nodes.op("Unsqueeze", [experts.chosen, nodes.integers(-1)])  # [T, k, 1]
    is_picked = nodes.op("Cast", [nodes.op("Equal", [picks, nodes.integers(*range(count))])], {"to": _FLOAT})
    by_expert = nodes.op("ReduceMax", [is_picked, nodes.integers(0, 1)], {"keepdims": 0})  # [E]
    order = nodes.op_multi_out("TopK", [by_expert, nodes.integers(count)], num_outputs=2)[1]  # those picked come first
    return nodes.op("Slice", [order, nodes.integers(0), end])


def _mixed(nodes: _Nodes, experts: _Experts, group: ir.Value) -> ir.Value:
    """Every row through every expert of the group [G], weighted by its share there, which may be none: [T, N]."""
    dtype = experts.rows.dtype
    assert dtype is not None
    none = constant(nodes.graph, f"no_share.{dtype.name}", np.zeros(1, dtype.numpy()))
    is_pick = nodes.op("Equal", [experts.chosen, nodes.op("Unsqueeze", [group, nodes.integers(1, 2)])])  # [G, T, k]
    by_pick = nodes.op("Where", [is_pick, experts.shares, none])
    by_row = nodes.op("ReduceSum", [by_pick, nodes.integers(-1)], {"keepdims": 0})
    share = nodes.op("Unsqueeze", [by_row, nodes.integers(1)])  # [G, 1, T]
    columns = nodes.op("Transpose", [experts.rows], {"perm": [1, 0]})
    gate_up = nodes.op("MatMul", [nodes.op("Gather", [experts.gate_up, group], {"axis": 0}), columns])  # [G, 2I, T]
    gate, up = nodes.op_multi_out("Split", [gate_up], {"axis": 1, "num_outputs": 2}, num_outputs=2)
    active = nodes.op("Mul", [nodes.op("Gelu", [gate], {"approximate": "tanh"}), up])
    # an expert that was not asked may overflow, and infinity times a share of zero is not zero
    asked = nodes.op("Where", [nodes.op("Equal", [share, none]), none, active])
    out = nodes.op("MatMul", [nodes.op("Gather", [experts.down, group], {"axis": 0}), asked])  # [G, N, T]
    total = nodes.op("ReduceSum", [nodes.op("Mul", [out, share]), nodes.integers(0)], {"keepdims": 0})
    return nodes.op("Transpose", [total], {"perm": [1, 0]})
