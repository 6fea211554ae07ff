"""K from costs and acceptance, on made-up devices: close to the best fixed K, and 0 where drafting loses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from slipstream.runtime.decode.draft_policy import AcceptanceRates, DraftPolicy, expected_tokens

COUNTS, DEFAULT = range(16), 6
Cost = Callable[[int], float]


def cpu(num_draft_tokens: int) -> float:
    """Rows cost nearly as much as steps."""
    return 1.0 + 0.75 * num_draft_tokens


def gpu(num_draft_tokens: int) -> float:
    """Rows are nearly free."""
    return 1.0 + 0.08 * num_draft_tokens


def dear(num_draft_tokens: int) -> float:
    """A draft costs more than any can give."""
    return 1.0 + 3 * num_draft_tokens


def run(policy: DraftPolicy, cost: Cost, chance: float, num_rounds: int, seed: int = 0) -> tuple[float, list[int]]:
    """Tokens per second of one sequence, and K of each round."""
    dice, rates = random.Random(seed), policy.new_rates()
    tokens, seconds, chosen = 0, 0.0, list[int]()
    for _ in range(num_rounds):
        k = policy.choose(1, [rates])
        num_accepted = next((i for i in range(k) if dice.random() >= chance), k)
        taken = cost(k) * dice.uniform(0.9, 1.1)
        policy.record(1, k, taken)
        policy.record_acceptance(rates, k, num_accepted)
        tokens, seconds = tokens + num_accepted + 1, seconds + taken
        chosen.append(k)
    return tokens / seconds, chosen


def best_fixed(cost: Cost, chance: float) -> float:
    return max(expected_tokens([chance] * k, k) / cost(k) for k in range(DEFAULT + 1))


@pytest.mark.parametrize("cost", [cpu, gpu])
@pytest.mark.parametrize("chance", [0.1, 0.4, 0.7, 0.95])
def test_it_is_nearly_as_fast_as_the_best_fixed_k(cost: Cost, chance: float) -> None:
    speed, _ = run(DraftPolicy(COUNTS, DEFAULT), cost, chance, 2000)
    assert speed > 0.93 * best_fixed(cost, chance)


def test_drafting_that_loses_is_left_off_but_looked_at_now_and_then() -> None:
    _, chosen = run(DraftPolicy(COUNTS, DEFAULT), cpu, 0.2, 1000)
    assert chosen[200:].count(0) > 700
    assert any(chosen[200:])


def test_a_text_that_becomes_easy_is_drafted_again() -> None:
    policy = DraftPolicy(COUNTS, DEFAULT)
    run(policy, gpu, 0.0, 300)
    _, chosen = run(policy, gpu, 0.95, 600, seed=1)
    assert sum(chosen[300:]) / 300 > 4


def test_it_does_not_change_its_mind_all_the_time() -> None:
    _, chosen = run(DraftPolicy(COUNTS, DEFAULT), gpu, 0.7, 1000)
    settled = [k for i, k in enumerate(chosen[100:], 100)]
    changes = sum(a != b for a, b in itertools.pairwise(settled))
    assert changes < 2 * (1000 // 64) + 60


def test_only_what_the_engine_runs_is_chosen() -> None:
    _, chosen = run(DraftPolicy((0, 4), 4), gpu, 0.9, 300)
    assert set(chosen) == {0, 4}


def test_costs_of_batches_are_their_own() -> None:
    policy = DraftPolicy(COUNTS, 4)
    rates = [policy.new_rates() for _ in range(8)]
    for _ in range(400):
        for num_slots, cost in ((1, gpu), (8, dear)):
            k = policy.choose(num_slots, rates[:num_slots])
            policy.record(num_slots, k, cost(k))
            for rate in rates[:num_slots]:
                policy.record_acceptance(rate, k, min(k, 1))  # the first is right, never the second
    alone, together = ([policy.choose(n, rates[:n]) for _ in range(30)] for n in (1, 8))
    assert max(set(alone), key=alone.count) == 1
    assert max(set(together), key=together.count) == 0


def test_rates_follow_what_is_accepted() -> None:
    rates = AcceptanceRates([0.5, 0.5, 0.5, 0.5])
    for _ in range(60):
        rates.record(4, 2)  # two right, the third looked at and wrong, the fourth unseen
    assert rates.values == pytest.approx([1, 1, 0, 0.5], abs=0.01)
    rates.record(0, 0)
    assert rates.values == pytest.approx([1, 1, 0, 0.5], abs=0.01)
    assert expected_tokens([0.5, 0.5, 0.9], 2) == 1.75
