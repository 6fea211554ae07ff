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
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.export.checkpoint.config import Experts as ExpertsConfig
from slipstream.export.checkpoint.config import TextConfig

from . import ops
from .layers import Linear, Recipe, RMSNorm, weight

_PLACEHOLDER = ("slipstream", "Experts")


class Router(nn.Module):
    """Picks top-k experts per row and their shares, in float32."""

    unit: Tensor

    def __init__(self, config: TextConfig, experts: ExpertsConfig, source: str) -> None:
        super().__init__()
        self.top_k = experts.top_k
        self.epsilon = config.rms_norm_eps
        self.project = Linear(config.hidden_size, experts.num_experts, f"{source}.proj")
        self.scale = weight(Recipe((f"{source}.scale",), "as_is", (config.hidden_size,)))
        self.expert_scale = weight(Recipe((f"{source}.per_expert_scale",), "as_is", (experts.num_experts,)))
        self.root = config.hidden_size**-0.5
        self.register_buffer("unit", torch.ones(config.hidden_size), persistent=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, N] -> chosen experts int64 [T, k] and their shares [T, k]."""
        normed = ops.rms_norm(rows, self.unit, self.epsilon) * self.scale * self.root
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

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, f"{source}.{name}")

        self.post_shared_norm = norm("post_feedforward_layernorm_1")
        self.pre_norm = norm("pre_feedforward_layernorm_2")
        self.post_norm = norm("post_feedforward_layernorm_2")

    def forward(self, residual: Tensor, shared: Tensor) -> Tensor:
        """residual [B, Q, N] before the MLP, shared [B, Q, N] the shared MLP's output -> both ways joined."""
        batch, num_rows, _ = residual.shape
        rows = ops.reshape(residual, (-1, self.width), (batch * num_rows, self.width))
        chosen, shares = self.router(rows)
        mixed = torch.onnx.ops.symbolic(
            "::".join(_PLACEHOLDER),
            (self.pre_norm(rows), chosen, shares, self.gate_up, self.down),
            {},
            dtype=rows.dtype,
            shape=rows.shape,
            version=1,
        )
        mixed = mixed.reshape(batch, num_rows, self.width)
        joined: Tensor = self.post_shared_norm(shared) + self.post_norm(mixed)
        return joined


def expand_experts(model: ir.Model) -> bool:
    """Replace placeholders by loops of standard operators; whether there were any."""
    graph = model.graph
    nodes = [node for node in graph if (node.domain, node.op_type) == _PLACEHOLDER]
    for number, node in enumerate(nodes):
        output, before = node.outputs[0], ir.Node("", "Shape", [node.inputs[0]], name=f"experts.{number}.shape")
        before.attributes["start"], before.attributes["end"] = ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)
        count = ir.Node("", "Squeeze", before.outputs, name=f"experts.{number}.count")
        always = _constant(f"experts.{number}.always", np.array(True))
        graph.initializers[str(always.name)] = always
        body = _body(node.inputs, f"experts.{number}")
        loop = ir.Node("", "Loop", [count.outputs[0], always], [ir.AttrGraph("body", body)], name=f"experts.{number}")
        loop.outputs[0].type, loop.outputs[0].shape = output.type, output.shape
        for made in (before, count, loop):
            made.outputs[0].name = f"{made.name}.out"
            graph.insert_before(node, made)
        output.replace_all_uses_with(loop.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    model.opset_imports.pop(_PLACEHOLDER[0], None)
    return bool(nodes)


def _body(inputs: Sequence[ir.Value | None], prefix: str) -> ir.Graph:
    """One row: its experts gathered, applied, weighted and summed.

    ``group_experts.py`` of TensorRT's passes knows the five inputs by the operators that read what is gathered.
    """
    rows, chosen, shares, gate_up, down = inputs
    assert rows is not None
    body = _Body(prefix)
    index, keep = body.value("row", ir.DataType.INT64, []), body.value("keep", ir.DataType.BOOL, [])
    last, experts, axis0 = body.constant("last", [-1]), body.constant("experts", [0]), [ir.AttrInt64("axis", 0)]
    column = body.node("Unsqueeze", [body.node("Gather", [rows, index], axis0), last])  # [N, 1]
    picked = body.node("Gather", [chosen, index], axis0)  # [k]
    gate_and_up = body.node("MatMul", [body.node("Gather", [gate_up, picked], axis0), column])  # [k, 2I, 1]
    split = body.split(gate_and_up)
    active = body.node("Mul", [body.node("Gelu", [split[0]], [ir.AttrString("approximate", "tanh")]), split[1]])
    out = body.node("MatMul", [body.node("Gather", [down, picked], axis0), active])  # [k, N, 1]
    share = body.node("Unsqueeze", [body.node("Gather", [shares, index], axis0), last])  # [k, 1]
    weighted = body.node("Mul", [body.node("Squeeze", [out, last]), share])  # [k, N]
    total = body.node("ReduceSum", [weighted, experts], [ir.AttrInt64("keepdims", 0)])
    assert rows.shape is not None
    total.type, total.shape = rows.type, ir.Shape([rows.shape[1]])
    again = body.node("Identity", [keep])
    again.type, again.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
    return ir.Graph(
        [index, keep], [again, total], nodes=body.nodes, initializers=body.initializers, name=f"{prefix}.body"
    )


class _Body:
    """Nodes and constants of a loop's body, with names that no other loop has."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []

    def value(self, name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        return ir.Value(name=f"{self._prefix}.{name}", type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def constant(self, name: str, numbers: list[int]) -> ir.Value:
        value = _constant(f"{self._prefix}.{name}", np.array(numbers, np.int64))
        self.initializers.append(value)
        return value

    def node(self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr] = ()) -> ir.Value:
        return self._add(ir.Node("", op_type, inputs, attributes))[0]

    def split(self, value: ir.Value) -> Sequence[ir.Value]:
        attributes = [ir.AttrInt64("axis", 1), ir.AttrInt64("num_outputs", 2)]
        return self._add(ir.Node("", "Split", [value], attributes, num_outputs=2))

    def _add(self, node: ir.Node) -> Sequence[ir.Value]:
        node.name = f"{self._prefix}.{len(self.nodes)}"
        for number, output in enumerate(node.outputs):
            output.name = f"{node.name}.{number}"
        self.nodes.append(node)
        return node.outputs


def _constant(name: str, content: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(content, name=name)
    return ir.Value(name=name, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
