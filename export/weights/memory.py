"""What an export takes, in memory and on disk, known from its traced graphs before a byte is written.

Weights are made and written one after another, so memory follows the largest of them and not the model. Mapped
pages of the checkpoint don't count: the system takes them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.export.model.layers import Recipe
from slipstream.runtime.bundle.manifest import PerLayerTableFile
from slipstream.runtime.errors import RequestError
from slipstream.runtime.machine.host import AvailableMemory, bytes_text
from slipstream.runtime.machine.plan import check_disk

from .recipes import DTYPES

_FLOAT32_COPIES = 2  # of the largest tensor: joined from its parts, then laid out anew
_OVERHEAD_BYTES = 256 << 20  # what writing, checking and calibrating take besides


@dataclass(frozen=True)
class ExportPlan:
    """What an export takes, in bytes.

    bundle: its weights on disk. largest: the largest tensor as float32.
    peak: memory of the steps after tracing, beyond what tracing left behind.
    """

    bundle: int
    largest: int
    peak: int


def export_plan(
    recipes: Iterable[Recipe], per_layer_table: tuple[PerLayerTableFile, Recipe] | None, item_bytes: int
) -> ExportPlan:
    """recipes: of both graphs, the embedding once. item_bytes: of a float in the bundle.

    The per-layer table is copied in row blocks: it counts on disk only.
    """
    recipes = list(recipes)
    bundle = sum(recipe.num_bytes(item_bytes) for recipe in recipes)
    if per_layer_table is not None:
        record, table = per_layer_table
        bundle += table.num_bytes(DTYPES[record.dtype].itemsize)
    largest = max(recipe.num_values for recipe in recipes) * DTYPES["float32"].itemsize
    return ExportPlan(bundle, largest, _FLOAT32_COPIES * largest + _OVERHEAD_BYTES)


def check_export(plan: ExportPlan, out: Path, memory: AvailableMemory | None) -> None:
    """Raises RequestError when disk or memory have no room. memory: None where it is unknown."""
    check_disk(out, plan.bundle, "writing the bundle", "write to another disk")
    if memory is not None and memory.available < plan.peak:
        raise RequestError(
            f"the export needs up to {bytes_text(plan.peak)} more memory, since its largest tensor takes "
            f"{bytes_text(plan.largest)} as float32; {bytes_text(memory.available)} are available: close other "
            "programs, or export on a larger machine and copy the bundle"
        )
