"""Which graph a call chooses with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.runtime.backend.choosing import Choice
from slipstream.runtime.backend.contract import GREEDY, Sampling
from slipstream.runtime.sampling import NUM_CANDIDATES

DRAWN = replace(GREEDY, temperature=1.0, top_k=NUM_CANDIDATES)
WIDE = replace(DRAWN, top_k=NUM_CANDIDATES + 1)
PENALIZED = replace(GREEDY, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("samplings", "expected"),
    [
        ([GREEDY, GREEDY], Choice("choose_greedy", is_drawn=False, is_masked=False)),
        ([GREEDY, DRAWN], Choice("choose_sampled", is_drawn=True, is_masked=False)),
        ([replace(GREEDY, top_k=NUM_CANDIDATES + 1)], Choice("choose_greedy", is_drawn=False, is_masked=False)),
        ([DRAWN, PENALIZED], Choice("choose_processed", is_drawn=True, is_masked=False)),
        ([PENALIZED, replace(GREEDY, is_masked=True)], Choice("choose_processed", is_drawn=False, is_masked=True)),
        ([replace(GREEDY, num_logprobs=0)], Choice("choose_processed", is_drawn=False, is_masked=False)),
        ([GREEDY, WIDE], Choice("choose_full", is_drawn=True, is_masked=False)),
        ([WIDE, PENALIZED], Choice("choose_full", is_drawn=True, is_masked=False)),
    ],
)
def test_a_call_orders_whole_rows_only_where_a_sequence_needs_it(samplings: list[Sampling], expected: Choice) -> None:
    assert Choice.of(samplings) == expected
    assert Choice.of(reversed(samplings)) == expected
    assert expected.is_processed == (expected.graph in {"choose_processed", "choose_full"})
