"""ONNX operators that torch has no exact counterpart for, as torch functions.

Each wraps one standard-domain operator through ``torch.onnx.ops.symbolic``, so the exported
graph holds exactly that node. They run only under export: there is nothing to execute here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

OPSET = 24


def rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """RMSNormalization over the last axis, computed in float32 whatever the dtype of x."""
    return torch.onnx.ops.symbolic(
        "RMSNormalization",
        (x, scale),
        {"axis": -1, "epsilon": epsilon, "stash_type": 1},
        dtype=x.dtype,
        shape=x.shape,
        version=OPSET,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RotaryEmbedding (half-split). x [B, H, Q, D]; cos, sin [B, Q, D / 2]."""
    return torch.onnx.ops.symbolic(
        "RotaryEmbedding", (x, cos, sin), {"interleaved": 0}, dtype=x.dtype, shape=x.shape, version=OPSET
    )


def scatter_rows(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """TensorScatter: cache [B, H, S, D] with rows [B, H, Q, D] written from index start [B] on."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (cache, rows, start),
        {"axis": 2, "mode": "linear"},
        dtype=cache.dtype,
        shape=cache.shape,
        version=OPSET,
    )


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention with scale 1. softmax_precision is left out: TensorRT's parser refuses it.

    query [B, H, Q, D]; key, value [B, Hkv, S, D]; visible bool [B, 1, Q, S].
    """
    return torch.onnx.ops.symbolic(
        "Attention",
        (query, key, value, visible),
        {"scale": 1.0},
        dtype=query.dtype,
        shape=query.shape,
        version=OPSET,
    )


def reshape(x: Tensor, dims: Sequence[int], shape: Sequence[int | torch.SymInt]) -> Tensor:
    """Reshape by a constant: 0 in dims copies the input's dimension, so no shape arithmetic is exported.

    shape: the resulting shape, for the tracer.
    """
    return torch.onnx.ops.symbolic(
        "Reshape", (x, torch.tensor(dims, dtype=torch.int64)), {}, dtype=x.dtype, shape=tuple(shape), version=OPSET
    )


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [E, ...] at an index of any shape, as one Gather: torch's indexing would reshape a copy of it."""
    return torch.onnx.ops.symbolic(
        "Gather", (table, index), {"axis": 0}, dtype=table.dtype, shape=(*index.shape, *table.shape[1:]), version=OPSET
    )


def head(x: Tensor, table: Tensor) -> Tensor:
    """x [N, D] against a table [V, D]: a Gemm that reads the table as it lies on disk.

    ONNX Runtime's CPU provider still packs a copy for itself when it loads the graph.
    """
    return torch.onnx.ops.symbolic(
        "Gemm", (x, table), {"transB": 1}, dtype=x.dtype, shape=(x.shape[0], table.shape[0]), version=OPSET
    )
