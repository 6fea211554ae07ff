"""Which slot a prompt goes to, and what is there already."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.decode.slots import Slots, common_prefix
from slipstream.runtime.errors import RewindError
from tests.support.fakes import ScriptedBackend, hash_target

TARGET = hash_target(0, [1, 2, 3])


def slots_of(num_slots: int, *held: list[int]) -> tuple[Slots, ScriptedBackend]:
    """Slots that hold these tokens, the first used longest ago, but for the last one of each, and are free."""
    backend = ScriptedBackend(TARGET, num_slots=num_slots, max_length=4000, prefill_chunk=4000)
    slots = Slots(backend)
    for tokens in held:
        number = slots.take(tokens)
        backend.prefill(number, tokens[backend.length[number] :])
        backend.rewind(number, len(tokens) - 1)
        slots.leave(number, tokens)
    return slots, backend


def test_new_prompts_take_the_lowest_slot_that_was_never_used() -> None:
    slots, _ = slots_of(3)
    assert [slots.take([token, token]) for token in (7, 8, 9)] == [0, 1, 2]
    assert not slots.has_free


def test_a_prompt_goes_on_where_its_beginning_is() -> None:
    slots, backend = slots_of(3, [1, 2, 3, 4], [5, 6, 7, 8])
    assert slots.take([5, 6, 7, 8, 9]) == 1
    assert (backend.rows[1], backend.num_forks) == ([5, 6, 7], 0)


def test_a_text_is_spared_while_there_is_a_slot_that_holds_nothing() -> None:
    slots, backend = slots_of(2, [1, 2, 3, 4])
    assert slots.take([1, 2, 9]) == 1
    assert (backend.rows, backend.num_forks) == ([[1, 2, 3], [1, 2]], 1)


def test_without_one_it_is_taken_over() -> None:
    slots, backend = slots_of(2, [1, 2, 3, 4], [5, 6, 7])
    assert slots.take([1, 2, 9]) == 0
    assert (backend.rows, backend.num_forks) == ([[1, 2], [5, 6]], 0)


def test_what_another_generation_uses_is_forked_from() -> None:
    slots, backend = slots_of(2, [1, 2, 3, 4])
    assert slots.take([1, 2, 3, 4, 5]) == 0
    assert slots.take([1, 2, 3, 9]) == 1
    assert backend.rows[1] == [1, 2, 3]


def test_the_one_used_longest_ago_goes_first_and_kept_ones_last() -> None:
    slots, _ = slots_of(3, [1, 1], [2, 2], [3, 3])
    slots.take([1, 1, 1])
    slots.leave(0, [1, 1, 1], is_kept=True)
    slots.take([2, 2, 2])
    slots.leave(1, [2, 2, 2])
    assert [slots.take([token, token]) for token in (7, 8, 9)] == [2, 1, 0]


def test_a_kept_text_is_forked_from_even_where_it_could_be_taken_over() -> None:
    slots, backend = slots_of(2, [1, 2, 3])
    slots.take([1, 2, 3])
    slots.leave(0, [1, 2, 3], is_kept=True)
    assert slots.take([1, 2, 3, 4]) == 1
    assert backend.rows == [[1, 2], [1, 2]]


def test_a_kept_text_stays_while_others_come_and_go() -> None:
    slots, backend = slots_of(2, [1, 2, 3])
    slots.take([1, 2, 3])
    slots.leave(0, [1, 2, 3], is_kept=True)
    for token in range(4, 9):
        tokens = [1, 2, 3, token]
        assert slots.take(tokens) == 1
        backend.prefill(1, tokens[backend.length[1] :])
        slots.leave(1, tokens)
    assert backend.rows[0] == [1, 2]


def test_a_refused_rewind_costs_a_prefill_and_nothing_else() -> None:
    slots, backend = slots_of(1, [1, 2, 3, 4, 5])
    backend.refuses_below = 4
    assert slots.take([1, 2, 9]) == 0
    assert backend.rows == [[]]


def test_where_the_longest_match_refuses_the_next_best_is_forked_from(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, backend = slots_of(3, [1] * 20)
    slots.take([1] * 20)
    slots.leave(0, [1] * 20, is_kept=True)
    assert slots.take([1] * 30) == 1
    backend.prefill(1, [1] * 10)
    slots.leave(1, [1] * 30)
    check = backend.check_rewind

    def refuse(slot: int, length: int) -> None:
        check(slot, length)
        if slot == 1:
            raise RewindError("its window has moved on")

    monkeypatch.setattr(backend, "check_rewind", refuse)
    assert slots.take([*[1] * 25, 2]) == 2
    assert backend.rows == [[1] * 19, [1] * 29, [1] * 19]


@pytest.mark.parametrize(("shared", "reused"), [(1, 0), (15, 0), (16, 16), (29, 29)])
def test_a_few_shared_tokens_are_no_match(shared: int, reused: int) -> None:
    """A slot that is emptied may shrink its buffers: every prompt shares its first tokens with every other."""
    slots, backend = slots_of(1, [1] * 30)
    num_resets = backend.num_resets
    assert slots.take([1] * shared + [2] * 30) == 0
    assert (backend.rows, backend.num_resets - num_resets) == ([[1] * reused], int(not reused))


def test_forgotten_a_slot_shares_nothing() -> None:
    slots, backend = slots_of(1, [1, 2, 3])
    slots.forget(0)
    assert slots.take([1, 2, 3]) == 0
    assert backend.rows == [[]]


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 2000])
@pytest.mark.parametrize("more", [0, 1, 700])
def test_prefixes_are_compared_to_their_end(length: int, more: int) -> None:
    one, other = [1] * length + [2] * more, [1] * length + [3] * more
    assert common_prefix(one, other) == length


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=12), st.integers(1, 3))
def test_rows_are_always_the_prompts_and_never_its_last(prompts: list[list[int]], num_slots: int) -> None:
    backend = ScriptedBackend(TARGET, num_slots=num_slots, prefill_chunk=64)
    slots = Slots(backend)
    for prompt in prompts:
        number = slots.take(prompt)
        rows = backend.rows[number]
        assert len(rows) < len(prompt)
        assert rows == prompt[: len(rows)]
        backend.prefill(number, prompt[len(rows) :])
        slots.leave(number, prompt)
