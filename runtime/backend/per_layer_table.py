"""Lookup of per-layer embeddings (PLE) on the host, in a memory-mapped file.

The table of E2B and E4B is larger than the rest of the model and a call reads a row of it per
token, so it stays outside the graphs: its pages are the system's file cache, shared by all
processes and given back under pressure. Conversion is exact: bfloat16 rows widen to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from slipstream.runtime.bundle.dtypes import NUMPY, Array
from slipstream.runtime.bundle.manifest import Bundle
from slipstream.runtime.errors import BundleError


class PerLayerTable:
    """Rows of a bundle's table, in the bundle's dtype. width: values per row, of all layers."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises BundleError when the file is not of the size that the manifest's shapes need."""
        record, manifest = bundle.manifest.per_layer_table, bundle.manifest
        assert record is not None, "this bundle has its per-layer embeddings in the graph, or none"
        self.width, self.dtype = record.width, manifest.dtype
        if record.dtype != manifest.dtype and (record.dtype, manifest.dtype) != ("bfloat16", "float32"):
            raise BundleError(f"{record.file} is {record.dtype}, which a {manifest.dtype} bundle can't hold exactly")
        try:
            mapped = np.memmap(
                bundle.path(record.file), NUMPY[record.dtype], "r", shape=(manifest.vocab_size, self.width)
            )
        except (OSError, ValueError) as error:
            raise BundleError(f"{bundle.path(record.file)} can't be mapped: {error}. Export the pair again") from error
        self._table: Array = mapped.view(np.ndarray)  # indexing a memmap itself costs microseconds a row
        self._is_widened = record.dtype != manifest.dtype

    def lookup(self, rows: Array) -> Callable[[Array], None]:
        """A function that writes the rows of tokens [B, Q] to rows [B, Q, width] (bfloat16 as its bits).

        Where rows are widened, they are expected to have been zero or written by this function before.
        """
        place = rows.view(np.uint16)[..., 1::2] if self._is_widened else rows  # the upper half of each float32
        # "raise" would gather into a copy first
        return partial(self._table.take, axis=0, out=place, mode="clip")

    def rows(self, tokens: Array) -> Array:
        """Rows of tokens in a new array; for verification."""
        rows = np.zeros((*tokens.shape, self.width), NUMPY[self.dtype])
        self.lookup(rows)(tokens)
        return rows


def open_per_layer_table(bundle: Bundle) -> PerLayerTable | None:
    """None when the target has no PLE, or has it in its graph."""
    return None if bundle.manifest.per_layer_table is None else PerLayerTable(bundle)
