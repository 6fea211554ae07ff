"""The target graph fed through numpy: a path of its own, with no binding in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, feeds, kv_name, kv_output_name
from slipstream.runtime.bundle.manifest import KVBuffer
from slipstream.runtime.ort.backend import OnnxRuntimeEngine

from .reference import Array

_POISON = 1e4  # large, finite, and within float16
_POISON_INT8 = 127


def poison(buffer: KVBuffer) -> float:
    """What stands in KV rows that must not be seen."""
    return _POISON_INT8 if buffer.dtype == "int8" else _POISON


class TargetRun:
    """One sequence, with poison in every KV row that was not written. kv: the buffers by input name, [1, H, S, D]."""

    def __init__(self, engine: OnnxRuntimeEngine, capacity: int) -> None:
        """capacity: rows of the KV buffers (S)."""
        self._session, self._per_layer_table = engine.target, engine.per_layer_table
        self.kv: dict[str, Array] = {}
        self.length = 0
        for buffer in engine.manifest.kv:
            for part in ("key", "value"):
                shape = (1, buffer.num_kv_heads, capacity, buffer.head_dim)
                self.kv[kv_name(buffer.layer, part)] = np.full(shape, poison(buffer), buffer.dtype)
        self._layers = [buffer.layer for buffer in engine.manifest.kv]

    def call(self, ids: Sequence[int], scored_rows: Sequence[int]) -> dict[str, Array]:
        """Feed tokens after those before; the graph's outputs by name, KV aside, for scored_rows of this call."""
        names = [output.name for output in self._session.get_outputs()]
        rows = {}
        if self._per_layer_table is not None:
            rows[PER_LAYER_INPUT] = self._per_layer_table.rows(np.array([ids]))
        call = {"token": [ids[:1]], "draft": [ids[1:]], "past_length": [self.length], "scored_rows": [scored_rows]}
        fed = feeds("target", {**call, **self.kv, **rows}, has_per_layer_rows=bool(rows))
        values = self._session.run(names, fed)
        out = dict(zip(names, values, strict=True))
        for layer in self._layers:
            for part in ("key", "value"):
                self.kv[kv_name(layer, part)] = out.pop(kv_output_name(layer, part))
        self.length += len(ids)
        return out
