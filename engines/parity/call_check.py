"""What one call of an engine showed against the reference: differences, near-ties, the first thing that missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.runtime.bundle.dtypes import Array


@dataclass(frozen=True)
class CallCheck:
    """How one call of an engine differs from the reference.

    difference: the largest, relative to the scale, of top logits and the next hidden row.
    near_ties: tokens that differ where the reference's choice is within twice the tolerance.
    problem: what missed, None when nothing did.
    """

    call: str
    batch: int
    rows: int
    context: int
    difference: float
    num_tokens: int
    near_ties: int
    problem: str | None


class CallChecker:
    """Compares one call's results with the reference's and keeps the largest difference."""

    def __init__(self, call: str, batch: int, rows: int, context: int, tolerance: float) -> None:
        self._what = (call, batch, rows, context)
        self._tolerance = tolerance
        self._difference, self._num_tokens, self._near_ties = 0.0, 0, 0
        self._problem: str | None = None

    def close_to(self, what: str, found: Array, wanted: Array) -> None:
        scale = max(float(np.abs(wanted).max()), 1e-6)
        difference = float(np.abs(found - wanted).max()) / scale
        self._difference = max(self._difference, difference)
        if not difference <= self._tolerance:  # NaN is a miss too
            self._miss(f"{what} differs by {difference:.1e} of its scale, allowed {self._tolerance:.0e}")

    def exactly(self, what: str, found: Array, wanted: Array) -> None:
        if (found != wanted).any():
            self._miss(f"{what} is {found.ravel()[:8].tolist()}, not {wanted.ravel()[:8].tolist()}")

    def not_finite(self) -> CallCheck:
        self._difference = float("inf")
        self._miss("the engine produced NaN or infinity")
        return self.result()

    def logits(self, found: Array, tokens: Array, expected: dict[str, Array]) -> None:
        """Logits of the tokens that both sides have among their best; the very best must be there."""
        for (sequence, row), best in np.ndenumerate(tokens[:, :, 0]):
            logits = expected["top_logits"][sequence, row]
            wanted = dict(zip(expected["top_tokens"][sequence, row].tolist(), logits, strict=True))
            if best not in wanted:
                self._miss(f"row {row} of sequence {sequence} takes {best}, far from the reference's best")
            shared = [i for i, token in enumerate(tokens[sequence, row].tolist()) if token in wanted]
            values = np.array([wanted[int(tokens[sequence, row, i])] for i in shared])
            if shared:
                self.close_to("a top logit", found[sequence, row, shared], values)

    def tokens(self, found: Sequence[Sequence[int]], expected: dict[str, Array]) -> None:
        """Committed tokens against the reference's own token of the same row."""
        for sequence, ids in enumerate(found):
            for row, token in enumerate(ids):
                best, logits = (expected[name][sequence, row] for name in ("top_tokens", "top_logits"))
                self._token(token, f"row {row} of sequence {sequence}", best, logits)

    def draft(self, found: Array, expected: dict[str, Array]) -> None:
        """Drafts up to the first that differs: steps after it started from another token."""
        for sequence in range(found.shape[0]):
            for position in range(found.shape[1]):
                tokens = expected["draft_top_tokens"][sequence, position]
                token = int(found[sequence, position])
                what = f"draft {position} of sequence {sequence}"
                self._token(token, what, tokens, expected["draft_top_logits"][sequence, position])
                if token != int(tokens[0]):
                    break

    def _token(self, token: int, what: str, tokens: Array, logits: Array) -> None:
        self._num_tokens += 1
        if token == int(tokens[0]):
            return
        margins = {int(t): float(logits[0] - logit) for t, logit in zip(tokens, logits, strict=True)}
        allowed = 2 * self._tolerance * max(float(np.abs(logits).max()), 1e-6)
        if margins.get(token, np.inf) > allowed:
            margin = f"{margins[token]:.2e}" if token in margins else "not among its best"
            self._miss(f"{what} is {token}, the reference's {int(tokens[0])}, margin {margin}, allowed {allowed:.1e}")
        else:
            self._near_ties += 1

    def _miss(self, problem: str) -> None:
        self._problem = self._problem or problem

    def result(self) -> CallCheck:
        call, batch, rows, context = self._what
        return CallCheck(call, batch, rows, context, self._difference, self._num_tokens, self._near_ties, self._problem)
