"""What an export is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.bundle.dtypes import DType


@dataclass(frozen=True)
class ExportSettings:
    """dtype: of weights, KV and hidden rows.
    max_length: tokens per sequence; None takes the model's.
    num_draft_tokens: default K and the steps unrolled in one graph; None takes generation_config's.
    draft_position: where the assistant's query stands: "pending" is N, "last" is N - 1.
    weights: how matrices are stored; "float" quantizes none and takes those that are quantized already as they are.
    block_size: values that share a scale, where "int8" or "int4" quantizes.
    ple: where a per-layer embedding table is looked up: by the runtime on the "host", or in the graph ("device").
    kv: "int8" stores KV in a quarter of float32's bytes, on ONNX Runtime only.
    """

    dtype: DType = "float32"
    max_length: int | None = None
    num_draft_tokens: int | None = None
    draft_position: Literal["pending", "last"] = "pending"
    weights: contract.WeightFormat = "float"
    block_size: int = 32
    ple: Literal["host", "device"] = "host"
    kv: Literal["float", "int8"] = "float"
