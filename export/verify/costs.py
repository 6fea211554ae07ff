"""What rounding costs: how far int4 or int8 weights, and activations rounded to int8, move the target's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.runtime.ort.backend import OnnxRuntimeEngine

from .reference import Array, Reference
from .report import Cost
from .target_run import TargetRun, top_logits

_MOST_TOKENS = 64  # of a text


class WeightCost:
    """Logits of transformers' target before its weights are rounded, to be compared with those after it."""

    def __init__(self, reference: Reference, texts: Sequence[Sequence[int]]) -> None:
        self._reference = reference
        self._texts = [text[:_MOST_TOKENS] for text in texts]
        self._before = [reference.logits(text) for text in self._texts]

    def measure(self, what: str) -> Cost:
        """Over every logit of the texts; the reference's weights are rounded by now."""
        after = [self._reference.logits(text) for text in self._texts]
        suppressed = self._reference.suppress_tokens
        before, after = ([np.delete(rows, suppressed, axis=1) for rows in side] for side in (self._before, after))
        return _cost(what, np.concatenate(after) - np.concatenate(before), np.concatenate(before))


def activation_cost(used: OnnxRuntimeEngine, exact: OnnxRuntimeEngine, texts: Sequence[Sequence[int]]) -> Cost:
    """What the activations that text is generated with cost against float32 ones, over the top tokens of both."""
    gaps, scores = [], []
    for text in texts:
        ids = text[:_MOST_TOKENS]
        rows = [TargetRun(engine, len(ids)).call(ids, range(len(ids)))["logits"][0] for engine in (used, exact)]
        (found, tokens), (expected, wanted) = (top_logits(logits, used.manifest.logit_softcap) for logits in rows)
        is_same = tokens[:, :, None] == wanted[:, None, :]
        gaps.append((found[:, :, None] - expected[:, None, :])[is_same])
        scores.append(expected.ravel())
    return _cost("int8 activations", np.concatenate(gaps), np.concatenate(scores))


def _cost(what: str, gaps: Array, scores: Array) -> Cost:
    scale = float(np.abs(scores).max())
    return Cost(what, float(np.sqrt(np.mean(gaps**2))) / scale, float(np.abs(gaps).max()) / scale)
