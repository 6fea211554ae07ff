"""The target graph fed through numpy: a path of its own, with no binding in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.sampling import NUM_CANDIDATES

from .reference import Array


def poison(dtype: str) -> float:
    """What stands in KV rows that must not be seen. dtype: of their buffer."""
    return 127 if dtype == "int8" else 1e4  # large, finite, and within float16


def top_logits(logits: Array, softcap: float | None) -> tuple[Array, Array]:
    """The candidates [..., T] of rows [..., V] of the target's logits, softcapped, and their ids."""
    tokens = np.argsort(-logits, axis=-1, kind="stable")[..., :NUM_CANDIDATES]
    top = np.take_along_axis(logits, tokens, axis=-1)
    return top if softcap is None else np.tanh(top / softcap) * softcap, tokens


class TargetRun:
    """One sequence, with poison in every KV row that was not written. kv: the buffers by input name, [1, H, S, D]."""

    def __init__(self, engine: OnnxRuntimeEngine, capacity: int) -> None:
        """capacity: rows of the KV buffers (S)."""
        self._session, self._per_layer_table = engine.target, engine.per_layer_table
        self.length = 0
        sizes = {"batch": 1, "sliding_capacity": capacity, "full_capacity": capacity}
        buffers = graph_io.for_layers(graph_io.placed(graph_io.inputs("target"), "cache"), engine.manifest.kv)
        self.kv: dict[str, Array] = {b.name: np.full(b.sized(sizes), poison(b.dtype), b.dtype) for b in buffers}

    def call(self, ids: Sequence[int], scored_rows: Sequence[int]) -> dict[str, Array]:
        """Feed tokens after those before; the graph's outputs by name, KV aside, for scored_rows of this call."""
        names = [output.name for output in self._session.get_outputs()]
        rows = {}
        if self._per_layer_table is not None:
            rows[graph_io.PER_LAYER_INPUT] = self._per_layer_table.rows(np.array([ids]))
        call = {"token": [ids[:1]], "draft": [ids[1:]], "past_length": [self.length], "scored_rows": [scored_rows]}
        fed = graph_io.feeds("target", {**call, **self.kv, **rows}, has_per_layer_rows=bool(rows))
        values = self._session.run(names, fed)
        out = dict(zip(names, values, strict=True))
        self.kv = {name: out.pop(f"next_{name}") for name in self.kv}
        self.length += len(ids)
        return out
