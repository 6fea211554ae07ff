"""How many rows a call of the target runs where some are asked for.

A product of one row is added up in another order than the same row among others on most CPUs, and with some block
sizes so is the last one of an odd number. By itself that changes the last bits. But quantized matrices are multiplied
with activations rounded to int8, and int8 KV is rounded too: a last bit decides between two steps, and what follows
differs by whole steps. Where a bundle rounds, rows therefore run in numbers that this CPU computes bit for bit alike,
so that the text does not depend on K. What more rows hold is junk above the length, as padding always was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

from slipstream.runtime.bundle.capacity import MAX_DRAFT_TOKENS
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.manifest import Manifest

from .session import open_session, session_options

# Output "attention": x as queries of one sequence. Outputs "int4_32" and so on, by bits and block size: x times a
# matrix at accuracy level 4, for every block size that is served. Its text is in tests/runtime/ort/test_row_counts.py.
_PROBE = Path(__file__).with_name("row_counts.onnx")
_WIDTH = 640  # of x


class RowCounts:
    """Rows asked for -> rows run.

    faster: rows of a call over one sequence -> the larger number that takes less time, from a build's record.
    products: what must be alike for all rows, as the probe names its outputs; see ``rounded_products``.
    """

    def __init__(self, faster: Mapping[int, int], products: Sequence[str]) -> None:
        self._faster = faster
        self._products = products

    def run(self, num_rows: int, batch: int, most: int) -> int:
        """Rows per sequence to run where num_rows are asked for; most: that buffers have room for."""
        wanted = self._faster.get(num_rows, num_rows) if batch == 1 else num_rows
        wanted = wanted if wanted <= most else num_rows
        return next((rows for rows in range(wanted, most + 1) if self.are_alike(rows, batch)), num_rows)

    def are_alike(self, num_rows: int, batch: int) -> bool:
        """Whether calls of this size compute each row as calls of other such sizes do. Attention sees one sequence."""
        rows = {name: num_rows if name == "attention" else num_rows * batch for name in self._products}
        return all(is_computed_alike(name, count) for name, count in rows.items())


def rounded_products(manifest: Manifest, *, int8_activations: bool) -> tuple[str, ...]:
    """Outputs of the probe whose last bits decide how a bundle's values are rounded; none where nothing is."""
    weights = manifest.weights
    if int8_activations and weights.is_integer:
        return "attention", f"{weights.format}_{weights.block_size}"
    return ("attention",) if manifest.has_int8_kv else ()


@cache
def is_computed_alike(product: str, num_rows: int) -> bool:
    """Whether this CPU gives each of num_rows rows the bits that it has among MAX_DRAFT_TOKENS + 1 rows."""
    expected = _product(product, MAX_DRAFT_TOKENS + 1)
    return np.array_equal(_product(product, num_rows), np.resize(expected, (num_rows, expected.shape[1])))


def _product(name: str, num_rows: int) -> Array:
    """An output of the probe [num_rows, N], where row i of x is row i % (MAX_DRAFT_TOKENS + 1)."""
    x = np.random.default_rng(0).standard_normal((MAX_DRAFT_TOKENS + 1, _WIDTH)).astype(np.float32)
    result: Array = _probe().run([name], {"x": np.resize(x, (num_rows, _WIDTH))})[0]
    return result


@cache
def _probe() -> ort.InferenceSession:
    return open_session(_PROBE, session_options(num_threads=1), _PROBE)
