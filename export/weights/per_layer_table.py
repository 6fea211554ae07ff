"""The per-layer embedding table (PLE) as a file of its own, which the runtime maps and gathers from.

The graph of E2B and E4B then holds the rest of the model only: the table is half of the
checkpoint, a call reads a row of it per token, and TensorRT can't hold it (2^31 elements).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.export.checkpoint.config import TextConfig
from slipstream.export.checkpoint.tensors import Checkpoint
from slipstream.export.model.layers import Recipe
from slipstream.export.model.target import PER_LAYER_SOURCE
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.manifest import PerLayerTableFile

from .recipes import DTYPES

FILE = "per_layer_embedding.bin"
_ROWS_AT_ONCE = 4096


def per_layer_recipe(config: TextConfig) -> Recipe:
    """What the table is made of: [V, L * P]."""
    return Recipe((f"{PER_LAYER_SOURCE}.weight",), "as_is", (config.vocab_size, len(config.layers) * config.ple_dim))


def table_record(recipe: Recipe, checkpoint: Checkpoint, dtype: DType) -> PerLayerTableFile:
    """How the table is stored: as the bundle's dtype, but bfloat16 stays so where the bundle's is wider."""
    is_narrower = dtype == "float32" and checkpoint.headers[recipe.sources[0]].dtype == "BF16"
    return PerLayerTableFile(file=FILE, dtype="bfloat16" if is_narrower else dtype, width=recipe.shape[1])


def write_table(
    record: PerLayerTableFile, recipe: Recipe, checkpoint: Checkpoint, folder: Path, advance: Callable[[int], None]
) -> None:
    """Write the table in row blocks. ``advance`` is told the bytes written."""
    table = checkpoint.read(recipe.sources[0])
    with (folder / record.file).open("wb") as file:
        for rows in table.split(_ROWS_AT_ONCE):
            content = rows.to(DTYPES[record.dtype]).contiguous().view(torch.uint8)
            file.write(content.numpy().data.cast("B"))
            advance(content.numel())
