"""Mixture-of-experts layers (26B-A4B): the router, and experts that are gathered row by row.

The experts of a row are picked from their table inside an ONNX Loop over the rows, so memory
is that of one row's experts whatever the length of a prefill chunk. The cost is stated: each
row reads its own top-k experts, also when its neighbour has just read the same ones. That is
the form for ONNX Runtime; TensorRT gets another, see ``engines/tensorrt/passes/group_experts.py``.

Tracing can't write a Loop, so the experts are traced as one placeholder node, which
``expand_experts`` replaces by standard operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from slipstream.export.checkpoint.config import Experts as ExpertsConfig
from slipstream.export.checkpoint.config import TextConfig
from slipstream.runtime.bundle.graph_roles import EXPERTS, ROLE

from . import ops
from .initializers import constant
from .layers import Linear, Recipe, RMSNorm, UnitNorm, weight

_PLACEHOLDER = ("slipstream", "Experts")


class Router(nn.Module):
    """Picks top-k experts per row and their shares, in float32."""

    def __init__(self, config: TextConfig, experts: ExpertsConfig, source: str) -> None:
        super().__init__()
        self.top_k = experts.top_k
        self.norm = UnitNorm(config.hidden_size, config.rms_norm_eps)
        self.project = Linear(config.hidden_size, experts.num_experts, f"{source}.proj")
        self.scale = weight(Recipe((f"{source}.scale",), "as_is", (config.hidden_size,)))
        self.expert_scale = weight(Recipe((f"{source}.per_expert_scale",), "as_is", (experts.num_experts,)))
        self.root = config.hidden_size**-0.5

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, N] -> chosen experts int64 [T, k] and their shares [T, k]."""
        normed = self.norm(rows) * self.scale * self.root
        shares, chosen = torch.topk(torch.softmax(self.project(normed).float(), dim=-1), self.top_k, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares.to(rows.dtype) * ops.pick(self.expert_scale, chosen)


class MixtureOfExperts(nn.Module):
    """Router and experts beside a layer's shared MLP; see transformers' Gemma4TextDecoderLayer."""

    def __init__(self, config: TextConfig, experts: ExpertsConfig, source: str) -> None:
        super().__init__()
        self.width = config.hidden_size
        self.router = Router(config, experts, f"{source}.router")
        count, inner = experts.num_experts, experts.intermediate_size
        self.gate_up = weight(Recipe((f"{source}.experts.gate_up_proj",), "as_is", (count, 2 * inner, self.width)))
        self.down = weight(Recipe((f"{source}.experts.down_proj",), "as_is", (count, self.width, inner)))
        self.post_shared_norm = RMSNorm(config, f"{source}.post_feedforward_layernorm_1")
        self.pre_norm = RMSNorm(config, f"{source}.pre_feedforward_layernorm_2")
        self.post_norm = RMSNorm(config, f"{source}.post_feedforward_layernorm_2")

    def forward(self, residual: Tensor, shared: Tensor) -> Tensor:
        """residual [B, Q, N] before the MLP, shared [B, Q, N] the shared MLP's output -> both ways joined."""
        batch, num_rows, _ = residual.shape
        rows = ops.reshape(residual, (-1, self.width), (batch * num_rows, self.width))
        chosen, shares = self.router(rows)
        kind, inputs = "::".join(_PLACEHOLDER), (self.pre_norm(rows), chosen, shares, self.gate_up, self.down)
        mixed = torch.onnx.ops.symbolic(kind, inputs, {}, dtype=rows.dtype, shape=rows.shape, version=1)
        mixed = mixed.reshape(batch, num_rows, self.width)
        joined: Tensor = self.post_shared_norm(shared) + self.post_norm(mixed)
        return joined


def expand_experts(model: ir.Model) -> bool:
    """Replace placeholders by loops of standard operators; whether there were any."""
    graph = model.graph
    nodes = [node for node in graph if (node.domain, node.op_type) == _PLACEHOLDER]
    for number, node in enumerate(nodes):
        output, prefix = node.outputs[0], f"experts.{number}"
        always, body = constant(graph, f"{prefix}.always", np.array(True)), _body(node.inputs, prefix)
        shape = ir.node("Shape", [node.inputs[0]], {"start": 0, "end": 1}, name=f"{prefix}.shape")
        count = ir.node("Squeeze", shape.outputs, name=f"{prefix}.count")
        loop = ir.node("Loop", [count.outputs[0], always], {"body": body}, name=prefix)
        loop.outputs[0].type, loop.outputs[0].shape = output.type, output.shape
        for made in (shape, count, loop):
            made.outputs[0].name = f"{made.name}.out"
            made.metadata_props.update(node.metadata_props)
            graph.insert_before(node, made)
        output.replace_all_uses_with(loop.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    model.opset_imports.pop(_PLACEHOLDER[0], None)
    return bool(nodes)


def _body(inputs: Sequence[ir.Value | None], prefix: str) -> ir.Graph:
    """One row: its experts gathered, applied, weighted and summed. Gathers have the role of what they gather."""
    rows, chosen, shares, gate_up, down = inputs
    assert rows is not None
    index, keep = ir.val(f"{prefix}.row", ir.DataType.INT64, []), ir.val(f"{prefix}.keep", ir.DataType.BOOL, [])
    body = _Body(ir.Graph([index, keep], [], nodes=[], name=f"{prefix}.body"), prefix)
    last, first = body.constant("last", [-1]), body.constant("experts", [0])
    column = body.op("Unsqueeze", [body.gather("rows", rows, index), last])  # [N, 1]
    picked = body.gather("chosen", chosen, index)  # [k]
    gate_and_up = body.op("MatMul", [body.gather("gate_up", gate_up, picked), column])  # [k, 2I, 1]
    gate, up = body.op_multi_out("Split", [gate_and_up], {"axis": 1, "num_outputs": 2}, num_outputs=2)
    active = body.op("Mul", [body.op("Gelu", [gate], {"approximate": "tanh"}), up])
    out = body.op("MatMul", [body.gather("down", down, picked), active])  # [k, N, 1]
    share = body.op("Unsqueeze", [body.gather("shares", shares, index), last])  # [k, 1]
    weighted = body.op("Mul", [body.op("Squeeze", [out, last]), share])  # [k, N]
    again, total = body.op("Identity", [keep]), body.op("ReduceSum", [weighted, first], {"keepdims": 0})
    again.type, again.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
    assert rows.shape is not None
    total.type, total.shape = rows.type, ir.Shape([rows.shape[1]])
    for number, node in enumerate(body.graph):  # names that no other loop has
        node.name = f"{prefix}.{number}"
        for output in node.outputs:
            output.name = f"{node.name}.{output.index()}"
    body.graph.outputs.extend([again, total])
    return body.graph


class _Body(ir.tape.Tape):
    """Adds nodes and constants to a loop's body."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        super().__init__(graph)
        self.graph, self._prefix = graph, prefix

    def constant(self, name: str, numbers: list[int]) -> ir.Value:
        return constant(self.graph, f"{self._prefix}.{name}", np.array(numbers, np.int64))

    def gather(self, role: str, source: ir.Value | None, index: ir.Value) -> ir.Value:
        return self.op("Gather", [source, index], {"axis": 0}, metadata_props={ROLE: f"{EXPERTS}.{role}"})
