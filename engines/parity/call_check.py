"""What one call of an engine showed against the reference: differences, near-ties, the first thing that missed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.runtime.bundle.dtypes import Array

_SUPPRESSED = -1.0e37  # no logit of a model is below
_MOST_CANDIDATES = 64  # of a row, among which a near-tie is looked for


@dataclass(frozen=True)
class CallCheck:
    """How one call of an engine differs from the reference.

    difference: the largest, relative to the scale, of logits and the next hidden row.
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

    def logits(self, found: Array, wanted: Array) -> None:
        """Logits [B, R, V], those of suppressed tokens aside."""
        is_there = wanted > _SUPPRESSED
        self.close_to("a logit", found[is_there], wanted[is_there])

    def tokens(self, found: Array, logits: Array) -> None:
        """The target's own tokens [B, R] against the reference's logits [B, R, V] of the same rows."""
        for (sequence, row), token in np.ndenumerate(found):
            best = np.argsort(-logits[sequence, row], kind="stable")[:_MOST_CANDIDATES]
            self._token(int(token), f"row {row} of sequence {sequence}", best, logits[sequence, row, best])

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
