"""What an export is asked for, and what that comes to for one pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.export.checkpoint.opening import CheckpointPair
from slipstream.export.checkpoint.quantization_config import Quantization
from slipstream.export.checkpoint.quantized import QuantizedCheckpoint
from slipstream.export.model.layers import Blocks
from slipstream.export.weights.quantize import blocks_of
from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.bundle.capacity import MAX_DRAFT_TOKENS
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.errors import CheckpointError


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


@dataclass(frozen=True)
class ResolvedSettings:
    """An export's settings with every choice made for one pair.

    draft_position_offset: 0 where the assistant's query stands at N, -1 where it stands at N - 1.
    blocks: what matrices are quantized to; None where they are not.
    stored: how the checkpoints' matrices are quantized already; None where they are not.
    has_table_in_graph: whether a per-layer embedding table is part of the target's graph.
    """

    dtype: DType
    max_length: int
    num_draft_tokens: int
    draft_position_offset: Literal[0, -1]
    blocks: Blocks | None
    stored: Quantization | None
    has_table_in_graph: bool
    kv: Literal["float", "int8"]

    @property
    def is_calibrated(self) -> bool:
        """Whether the graphs are run over a text before the bundle appears."""
        return self.dtype == "float16" or self.kv == "int8"


def resolve(settings: ExportSettings, pair: CheckpointPair) -> ResolvedSettings:
    """Make every choice that depends on the pair. Raises CheckpointError for what does not fit it."""
    largest = pair.target_config.max_positions
    max_length = largest if settings.max_length is None else settings.max_length
    if not 2 <= max_length <= largest:
        raise CheckpointError(f"--max-length {max_length} is outside 2..{largest}, the model's")
    num_draft_tokens = settings.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = pair.generation.num_draft_tokens
    if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise CheckpointError(f"{num_draft_tokens} draft tokens are outside 1..{MAX_DRAFT_TOKENS}: set -k")
    if settings.kv == "int8" and settings.dtype == "bfloat16":
        raise CheckpointError(
            "--kv int8 needs its scales measured on the CPU, which can't multiply bfloat16: "
            "export with --dtype float16 or float32, or with --kv float"
        )
    return ResolvedSettings(
        dtype=settings.dtype,
        max_length=max_length,
        num_draft_tokens=num_draft_tokens,
        draft_position_offset=0 if settings.draft_position == "pending" else -1,
        blocks=blocks_of(settings.weights, settings.block_size),
        stored=_stored_quantization(settings, pair),
        has_table_in_graph=settings.ple == "device",
        kv=settings.kv,
    )


def _stored_quantization(settings: ExportSettings, pair: CheckpointPair) -> Quantization | None:
    """How a pair's matrices are quantized already, None when they are not.

    Raises CheckpointError when the settings would quantize them again or run what the CPU can't, and when two
    checkpoints are quantized differently, since a bundle has one format.
    """
    found = {c.folder: c.quantization for c in (pair.target, pair.assistant) if isinstance(c, QuantizedCheckpoint)}
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{' and '.join(map(str, found))} are quantized differently: {list(found.values())}")
    for folder, quantization in found.items():
        if settings.weights != "float":
            raise CheckpointError(
                f"{folder} is {quantization.format} already, and --weights {settings.weights} would quantize it again: "
                "export it as it is, without --weights"
            )
        if quantization.format == "nvfp4" and (settings.dtype == "float16" or settings.kv == "int8"):
            raise CheckpointError(
                f"{folder} is nvfp4: --dtype float16 and --kv int8 need a run on the CPU, where nothing multiplies it. "
                "Export with --dtype bfloat16 and --kv float"
            )
        return quantization
    return None
