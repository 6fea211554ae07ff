"""ONNX operators that torch has no exact counterpart for, as torch functions.

Each wraps one standard-domain operator through ``torch.onnx.ops.symbolic``, so the exported
graph holds exactly that node. They run only under export: there is nothing to execute here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

OPSET = 24


def node(
    op_type: str,
    inputs: tuple[Tensor, ...],
    attributes: Mapping[str, int | float | str],
    shape: Sequence[int | torch.SymInt] | None = None,
) -> Tensor:
    """A node whose output has the type of its first input, and its shape where no other is given."""
    first = inputs[0]
    made = first.shape if shape is None else tuple(shape)
    return torch.onnx.ops.symbolic(op_type, inputs, dict(attributes), dtype=first.dtype, shape=made, version=OPSET)


def rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """RMSNormalization over the last axis, computed in float32 whatever the dtype of x."""
    return node("RMSNormalization", (x, scale), {"axis": -1, "epsilon": epsilon, "stash_type": 1})


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention with scale 1. softmax_precision is left out: TensorRT's parser refuses it.

    query [B, H, Q, D]; key, value [B, Hkv, S, D]; visible bool [B, 1, Q, S].
    """
    return node("Attention", (query, key, value, visible), {"scale": 1.0})


def reshape(x: Tensor, dims: Sequence[int], shape: Sequence[int | torch.SymInt]) -> Tensor:
    """Reshape by a constant: 0 in dims copies the input's dimension, so no shape arithmetic is exported.

    shape: the resulting shape, for the tracer.
    """
    return node("Reshape", (x, torch.tensor(dims, dtype=torch.int64)), {}, shape)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [E, ...] at an index of any shape, as one Gather: torch's indexing would reshape a copy of it."""
    return node("Gather", (table, index), {"axis": 0}, (*index.shape, *table.shape[1:]))


def head(x: Tensor, table: Tensor) -> Tensor:
    """x [N, D] against a table [V, D]: a Gemm that reads the table as it lies on disk.

    ONNX Runtime's CPU provider still packs a copy for itself when it loads the graph.
    """
    return node("Gemm", (x, table), {"transB": 1}, (x.shape[0], table.shape[0]))
