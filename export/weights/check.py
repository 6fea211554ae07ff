"""Reads every weight that an export will use, before the first byte of a bundle is written.

Refused are NaN, infinity, and values beyond the bundle's dtype: what a header can't tell. Nothing is changed or
kept; tensors are mapped and read in blocks, in the order in which they lie on disk. A damaged value that is still
an ordinary number is not found: checkpoints carry no checksums.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from slipstream.export.checkpoint.quantized import QuantizedHeader
from slipstream.export.checkpoint.tensors import Checkpoint, TensorHeader
from slipstream.export.model.layers import Recipe
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.machine.progress import Progress

_BLOCK_VALUES = 1 << 20  # two to eight MB: stays in a cache, and a progress bar moves
_REDUCED_AS_STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """A checkpoint, and the recipes that are made of its tensors."""

    checkpoint: Checkpoint
    recipes: Collection[Recipe]

    def headers(self) -> list[tuple[str, TensorHeader]]:
        """Name and header of every stored tensor that a recipe uses, as they lie on disk."""
        used = {name for recipe in self.recipes for name in recipe.sources}
        stored: list[tuple[str, TensorHeader]] = []
        for name, header in self.checkpoint.headers.items():
            if name in used:
                tensors = header.parts.values() if isinstance(header, QuantizedHeader) else [header]
                stored += [(name, tensor) for tensor in tensors]
        return stored


def check_values(parts: Sequence[Part], dtype: torch.dtype, progress: Progress) -> None:
    """Refuse weights that can't be stored in dtype, and token orderings that are no permutation.

    Raises CheckpointError with the first, by tensor and file.
    """
    progress.start("checking weights", sum(header.num_bytes for part in parts for _, header in part.headers()))
    for part in parts:
        orderings = {recipe.sources[1] for recipe in part.recipes if recipe.layout == "centroid_order"}
        for name, header in part.headers():
            tensor = header.read()
            if name in orderings and not torch.equal(tensor.long().sort().values, torch.arange(len(tensor))):
                raise CheckpointError(
                    f"{header.file}: {header.key} does not name every token once, so the head's rows can't be put in "
                    "its order: download this file again"
                )
            for block in tensor.reshape(-1).split(_BLOCK_VALUES):
                if block.is_floating_point():  # of whole numbers, every one is a value
                    _check_block(block, dtype, header)
                progress.advance(block.nbytes)


def _check_block(block: torch.Tensor, dtype: torch.dtype, header: TensorHeader) -> None:
    """Refuse values that are not finite, as stored or in dtype. Raises CheckpointError with the tensor's name.

    The smallest and the largest value tell: both are NaN where any value is.
    """
    extremes = torch.stack(torch.aminmax(block if block.dtype in _REDUCED_AS_STORED else block.float()))
    where = f"{header.file}: {header.key}"
    if not extremes.isfinite().all():
        kind = "NaN" if extremes.isnan().any() else "infinity"
        raise CheckpointError(
            f"{where} holds {kind}, which no trained weight is: download this file again, or ask who made it"
        )
    if not extremes.to(dtype).isfinite().all():
        largest = extremes[extremes.abs().argmax()].item()
        name = str(dtype).removeprefix("torch.")
        advice = "export with --dtype bfloat16 or float32" if dtype == torch.float16 else "export with --dtype float32"
        raise CheckpointError(f"{where} reaches {largest:g}, {name} ends at {torch.finfo(dtype).max:g}: {advice}")
