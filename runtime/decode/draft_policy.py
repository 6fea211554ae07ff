"""How many tokens to draft: measured costs of rounds against each sequence's own acceptance.

A round of K drafts takes cost(K) and adds 1 + p1 + p1 p2 + ... + p1 ... pK tokens to a sequence, where p is the chance
of each draft to be accepted after those before it (Leviathan, Kalman, Matias, "Fast inference from transformers via
speculative decoding", 2023, section 3.5, where all p are one). The K with the most tokens per second is taken, 0 where
drafting loses. All sequences of a round draft as many: a batch pays the rows of its largest K anyway. Text does not
depend on K, so nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_FORGET = 0.9  # of what earlier rounds of a sequence accepted, per round
_FIRST_RATE = 0.6  # of a pair that was never seen drafting
_PRIOR_ROUNDS = 2.0  # what is known of other sequences counts as so many drafts
_SMOOTHING = 0.2  # of a cost, per round
_GAIN = 1.05  # that a new K must promise
_DECIDE_EVERY = 8  # rounds between two decisions
_PROBE_EVERY = 64  # rounds after which one runs with another K, to see whether its cost or acceptance has changed


class AcceptanceRates:
    """The chance of each draft of a sequence to be accepted where those before it were, by position."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._accepted = [rate * _PRIOR_ROUNDS for rate in prior]
        self._looked_at = [_PRIOR_ROUNDS for _ in prior]

    @property
    def values(self) -> list[float]:
        return [accepted / looked_at for accepted, looked_at in zip(self._accepted, self._looked_at, strict=True)]

    def record(self, num_offered: int, num_accepted: int) -> None:
        """One round. Drafts after the first rejected one say nothing, and those beyond the policy's are nobody's."""
        accepted, looked_at = self._accepted, self._looked_at
        for position in range(min(num_accepted + 1, num_offered, len(accepted))):
            accepted[position] = accepted[position] * _FORGET + (position < num_accepted)
            looked_at[position] = looked_at[position] * _FORGET + 1


def expected_tokens(rates: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens that a round adds."""
    total = chance = 1.0
    for rate in rates[:num_draft_tokens]:
        chance *= rate
        total += chance
    return total


class _Costs:
    """Seconds of a round by K, for rounds over one number of slots."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: set[int] = set()

    def __contains__(self, num_draft_tokens: int) -> bool:
        return num_draft_tokens in self._seconds

    def record(self, num_draft_tokens: int, seconds: float) -> None:
        """The first round of a shape binds and allocates, and is not counted."""
        if num_draft_tokens not in self._seen:
            self._seen.add(num_draft_tokens)
            return
        before = self._seconds.get(num_draft_tokens, seconds)
        self._seconds[num_draft_tokens] = before + _SMOOTHING * (seconds - before)

    def predict(self, num_draft_tokens: int) -> float:
        """Measured, or on the line through the two measured K that are nearest."""
        if num_draft_tokens in self._seconds:
            return self._seconds[num_draft_tokens]
        near, far = sorted(self._seconds, key=lambda known: abs(known - num_draft_tokens))[:2]
        slope = (self._seconds[far] - self._seconds[near]) / (far - near)
        return max(self._seconds[near] + slope * (num_draft_tokens - near), 1e-9)


class DraftPolicy:
    """Chooses K for rounds over a number of slots."""

    def __init__(self, draft_counts: Sequence[int], default: int) -> None:
        """draft_counts: K that the engine runs, 0 among them. default: the bundle's K, and the largest chosen."""
        self._counts = [count for count in draft_counts if count <= default]
        self._default = default
        self._rates = AcceptanceRates([_FIRST_RATE] * default)  # of all sequences, the prior of new ones
        self._costs: dict[int, _Costs] = {}  # by number of slots
        self._chosen: dict[int, int] = {}
        self._num_rounds = 0

    def new_rates(self) -> AcceptanceRates:
        """For a sequence that begins."""
        return AcceptanceRates(self._rates.values)

    def choose(self, num_slots: int, rates: Iterable[AcceptanceRates]) -> int:
        """K of the next round. num_slots: that it runs over. rates: of the sequences in it."""
        costs = self._costs.setdefault(num_slots, _Costs())
        for count in (self._default, 0):  # both have to be known first
            if count not in costs:
                return count
        self._num_rounds += 1
        if num_slots not in self._chosen or self._num_rounds % _DECIDE_EVERY == 0:
            self._decide(num_slots, costs, [each.values for each in rates])
        chosen = self._chosen[num_slots]
        if self._num_rounds % _PROBE_EVERY == 0:
            return 0 if chosen else min(count for count in self._counts if count)
        return chosen

    def record(self, num_slots: int, num_draft_tokens: int, seconds: float) -> None:
        """What a round took."""
        self._costs.setdefault(num_slots, _Costs()).record(num_draft_tokens, seconds)

    def record_acceptance(self, rates: AcceptanceRates, num_offered: int, num_accepted: int) -> None:
        """What a round accepted of one sequence's drafts."""
        rates.record(num_offered, num_accepted)
        self._rates.record(num_offered, num_accepted)

    def _decide(self, num_slots: int, costs: _Costs, rates: Sequence[Sequence[float]]) -> None:
        speeds = {k: sum(expected_tokens(each, k) for each in rates) / costs.predict(k) for k in self._counts}
        best = max(speeds, key=lambda k: speeds[k])
        chosen = self._chosen.get(num_slots)
        if chosen is None or speeds[best] > _GAIN * speeds[chosen]:
            self._chosen[num_slots] = best
