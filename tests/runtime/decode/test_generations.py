"""One generation after the other over a scripted backend: whatever is accepted, the text is the target's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.decode.generation import Request
from slipstream.runtime.decode.results import Chunk, FinishReason, Result
from slipstream.runtime.errors import BackendError, NonFiniteError
from tests.support.fakes import Fault, ScriptedBackend, Target, hash_target, make_codec, plain_tokens, scripted_target
from tests.support.pairs import EOS
from tests.support.sequences import Asked, OneSequence

CODEC = make_codec()
VOCABULARY = CODEC.encode_more("abcdethe a")  # single letters and longer pieces, one text piece each
A, B, C, D, E = CODEC.encode_more("abcde")
ENDLESS = Request(num_draft_tokens=3, max_new_tokens=100, stop_token_ids=(EOS,), stop_strings=())


def sequence_of(backend: ScriptedBackend, tokens: Sequence[int]) -> OneSequence:
    return OneSequence(backend, CODEC, tokens)


def expected_end(
    target: Target, prompt: Sequence[int], request: Request, max_length: int
) -> tuple[list[int], str, FinishReason]:
    """The plain sequence, cut by the rules one token at a time."""
    tokens: list[int] = []
    while True:
        tokens.append(target([*prompt, *tokens]))
        if tokens[-1] in request.stop_token_ids:
            return tokens, CODEC.decode(tokens[:-1]), "stop_token"
        text = CODEC.decode(tokens)
        starts = [text.index(stop) for stop in request.stop_strings if stop in text]
        if starts:
            return tokens, text[: min(starts)], "stop_string"
        if len(tokens) == request.max_new_tokens:
            return tokens, text, "length"
        if len(prompt) + len(tokens) == max_length:
            return tokens, text, "context"


def check_consistent(sequence: OneSequence, backend: ScriptedBackend) -> None:
    """KV for a prefix of the tokens, the last one at most not among them."""
    assert len(backend.rows[0]) <= max(len(sequence.tokens) - 1, 0)
    assert backend.rows[0] == sequence.tokens[: len(backend.rows[0])]


@dataclass(frozen=True)
class Case:
    """One generation: a target, what its rounds accept, and the limits round it."""

    seed: int
    prompt: list[int]
    accepts: list[int]
    max_length: int
    prefill_chunk: int
    request: Request

    @property
    def target(self) -> Target:
        return hash_target(self.seed, VOCABULARY)

    @property
    def k(self) -> int:
        assert self.request.num_draft_tokens is not None
        return self.request.num_draft_tokens

    def backend(self, fault: Fault | None = None) -> ScriptedBackend:
        return ScriptedBackend(
            self.target,
            accepts=self.accepts,
            max_length=self.max_length,
            prefill_chunk=self.prefill_chunk,
            max_draft_tokens=6,
            fault=fault,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prompt = draw(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=12))
    return Case(
        seed=draw(st.integers(0, 999)),
        prompt=prompt,
        accepts=draw(st.lists(st.integers(0, 6), max_size=10)),
        max_length=len(prompt) + draw(st.integers(1, 24)),
        prefill_chunk=draw(st.integers(1, 8)),
        request=Request(
            num_draft_tokens=draw(st.integers(0, 6)),
            max_new_tokens=draw(st.integers(1, 24)),
            stop_token_ids=tuple(draw(st.lists(st.sampled_from([EOS, *VOCABULARY]), max_size=1))),
            stop_strings=tuple(draw(st.lists(st.text(alphabet="abcdeth ", min_size=1, max_size=3), max_size=2))),
            rejects_drafts=draw(st.booleans()),
        ),
    )


def run(
    sequence: OneSequence, request: Request, cancelled: threading.Event | None = None
) -> tuple[Result, list[Chunk]]:
    return sequence.run(request, cancelled), sequence.chunks


# What is generated


@settings(deadline=None, max_examples=400)
@given(cases())
def test_output_is_the_targets_own_cut_by_the_rules(case: Case) -> None:
    backend = case.backend()
    sequence = sequence_of(backend, case.prompt)
    result, chunks = run(sequence, case.request)
    tokens, text, finish_reason = expected_end(case.target, case.prompt, case.request, case.max_length)
    assert (result.token_ids, result.text, result.finish_reason) == (tokens, text, finish_reason)
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert "".join(chunk.text for chunk in chunks) == text
    assert sequence.tokens == [*case.prompt, *tokens]
    assert (result.num_prompt_tokens, result.num_draft_tokens) == (len(case.prompt), case.request.num_draft_tokens)
    check_consistent(sequence, backend)


@settings(deadline=None, max_examples=300)
@given(cases())
def test_k_stays_as_asked_and_the_room_bounds_what_is_accepted(case: Case) -> None:
    """A round adds up to K + 1 tokens: none of them beyond the cap or the context. Its rows are always as many."""
    backend = case.backend()
    _, chunks = run(sequence_of(backend, case.prompt), case.request)
    is_bound = not case.request.rejects_drafts
    assert backend.rounds == [(case.k, (is_bound * count + 1,)) for count in offered(case, chunks)]


def offered(case: Case, chunks: Sequence[Chunk]) -> list[int]:
    """For each round the drafts that the cap and the context leave room for, beside the target's own token."""
    num_tokens, counts = 0, []
    for chunk in chunks[:-1]:
        num_tokens += len(chunk.token_ids)
        room = min(case.request.max_new_tokens, case.max_length - len(case.prompt)) - num_tokens
        counts.append(min(case.k, room - 1))
    return counts


@settings(deadline=None, max_examples=300)
@given(cases())
def test_acceptance_counts_what_was_offered_and_accepted(case: Case) -> None:
    backend = case.backend()
    result, chunks = run(sequence_of(backend, case.prompt), case.request)
    num_positions = case.k
    counted, accepted = [0] * num_positions, [0] * num_positions
    for (_, (limit,)), num_offered, chunk, num_right in zip(
        backend.rounds, offered(case, chunks), chunks[1:], [*case.accepts, *[6] * len(backend.rounds)], strict=False
    ):
        for position in range(num_offered):
            counted[position] += 1
            # metrics are cut with the tokens: an accepted draft after the end does not count
            accepted[position] += position < min(num_right, limit - 1, len(chunk.token_ids))
    assert result.acceptance.num_rounds == len(backend.rounds)
    assert result.acceptance.offered == counted
    assert result.acceptance.accepted == accepted


def test_acceptance_is_cut_where_the_tokens_are() -> None:
    """The stop token is the first of three accepted drafts: the two after it were never output."""
    backend = ScriptedBackend(scripted_target(1, [A, EOS, C, D, E]), accepts=[3])
    result, _ = run(sequence_of(backend, [B]), ENDLESS)
    assert result.token_ids == [A, EOS]
    assert result.acceptance.accepted == [1, 0, 0]


@settings(deadline=None, max_examples=100)
@given(cases())
def test_every_token_is_an_accepted_draft_or_a_targets_own(case: Case) -> None:
    """1 from prefill, 1 per round and the accepted drafts, unless the end cut a round."""
    request = replace(case.request, stop_token_ids=(), stop_strings=())
    result, _ = run(sequence_of(case.backend(), case.prompt), request)
    acceptance = result.acceptance
    assert len(result.token_ids) == 1 + acceptance.num_rounds + sum(acceptance.accepted)


@pytest.mark.parametrize("num_draft_tokens", range(7))
@pytest.mark.parametrize("num_accepted", range(7))
def test_rejected_drafts_do_not_count_against_the_cap(num_draft_tokens: int, num_accepted: int) -> None:
    backend = ScriptedBackend(hash_target(0, VOCABULARY), accepts=[num_accepted] * 20)
    request = replace(ENDLESS, num_draft_tokens=num_draft_tokens, max_new_tokens=17)
    result, _ = run(sequence_of(backend, [A]), request)
    assert (len(result.token_ids), result.finish_reason) == (17, "length")


def test_rejects_drafts_offers_k_rows_and_accepts_none() -> None:
    backend = ScriptedBackend(hash_target(0, VOCABULARY))
    request = replace(ENDLESS, max_new_tokens=9, rejects_drafts=True)
    result, _ = run(sequence_of(backend, [A]), request)
    assert backend.rounds == [(3, (1,))] * 8
    assert result.acceptance.accepted == [0, 0, 0]
    assert result.acceptance.offered == [7, 6, 5]
    assert result.token_ids == plain_tokens(hash_target(0, VOCABULARY), [A], 9)


def test_k_zero_decodes_plainly() -> None:
    backend = ScriptedBackend(hash_target(0, VOCABULARY))
    result, _ = run(sequence_of(backend, [A]), replace(ENDLESS, num_draft_tokens=0, max_new_tokens=5))
    assert backend.rounds == [(0, (1,))] * 4
    assert (result.acceptance.offered, result.acceptance.num_rounds) == ([], 4)


@settings(deadline=None, max_examples=100)
@given(cases(), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=2, max_size=6))
def test_k_may_change_from_one_generation_to_the_next(case: Case, turns: list[tuple[int, int]]) -> None:
    """K = 0 leaves the assistant ready to resume."""
    total = sum(cap for _, cap in turns)
    backend = replace(case, max_length=len(case.prompt) + total).backend()
    sequence = sequence_of(backend, case.prompt)
    for num_draft_tokens, cap in turns:
        run(sequence, replace(ENDLESS, num_draft_tokens=num_draft_tokens, max_new_tokens=cap))
    assert sequence.tokens == [*case.prompt, *plain_tokens(case.target, case.prompt, total)]


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("num_accepted", range(4))
def test_a_stop_token_ends_wherever_it_stands_in_a_round(position: int, num_accepted: int) -> None:
    script = [A, B, C, D, A, B, C, D, A, B, C, D]
    script[position] = EOS
    backend = ScriptedBackend(scripted_target(2, script), accepts=[num_accepted] * 20)
    sequence = sequence_of(backend, [D, E])
    result, _ = run(sequence, ENDLESS)
    assert result.finish_reason == "stop_token"
    assert result.token_ids == script[: position + 1]
    assert sequence.tokens == [D, E, *script[: position + 1]]
    check_consistent(sequence, backend)


@pytest.mark.parametrize("num_accepted", range(4))
def test_a_stop_string_over_two_rounds_is_cut(num_accepted: int) -> None:
    backend = ScriptedBackend(scripted_target(1, [A, B, C, D, E, A, B]), accepts=[num_accepted] * 20)
    result, chunks = run(sequence_of(backend, [E]), replace(ENDLESS, stop_strings=("cd",)))
    assert (result.text, result.finish_reason, result.token_ids) == ("ab", "stop_string", [A, B, C, D])
    assert "".join(chunk.text for chunk in chunks) == "ab"


@pytest.mark.parametrize("num_draft_tokens", range(7))
def test_the_context_can_be_filled_to_its_last_token(num_draft_tokens: int) -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY), max_length=20)
    sequence = sequence_of(backend, [A] * 5)
    result, _ = run(sequence, replace(ENDLESS, num_draft_tokens=num_draft_tokens))
    assert (len(sequence.tokens), result.finish_reason) == (20, "context")


def test_the_last_free_place_takes_one_token() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY), max_length=6)
    sequence = sequence_of(backend, [A] * 5)
    result, _ = run(sequence, ENDLESS)
    assert (len(result.token_ids), result.finish_reason, backend.rounds) == (1, "context", [])


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 30), st.integers(1, 8))
def test_a_prompt_is_fed_in_chunks(num_tokens: int, prefill_chunk: int) -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY), prefill_chunk=prefill_chunk)
    run(sequence_of(backend, [A] * num_tokens), replace(ENDLESS, max_new_tokens=1))
    sizes = [size for _, size in backend.prefills]
    assert sum(sizes) == num_tokens
    assert all(size == prefill_chunk for size in sizes[:-1])


def test_timings_are_the_backends_own_of_this_generation() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A])
    run(sequence, replace(ENDLESS, num_draft_tokens=0, max_new_tokens=4))
    result, _ = run(sequence, replace(ENDLESS, num_draft_tokens=0, max_new_tokens=3))
    assert (result.timings.draft, result.timings.verify) == (4.0, 8.0)
    assert result.timings.prefill >= 0
    assert result.timings.decode >= 0


# Several turns


@settings(deadline=None, max_examples=200)
@given(cases(), st.lists(st.tuples(st.lists(st.sampled_from(VOCABULARY), max_size=5), st.integers(1, 5)), max_size=5))
def test_turns_equal_one_prompt_with_everything(case: Case, turns: list[tuple[list[int], int]]) -> None:
    backend = replace(case, max_length=80).backend()
    sequence = sequence_of(backend, case.prompt)
    expected = list(case.prompt)
    for text, cap in turns:
        sequence.tokens += text
        expected += text
        run(sequence, replace(case.request, max_new_tokens=cap, stop_token_ids=(), stop_strings=()))
        expected += plain_tokens(case.target, expected, cap)
        assert sequence.tokens == expected
        check_consistent(sequence, backend)


def test_the_next_turn_feeds_only_what_has_no_kv() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY), max_length=64)
    sequence = sequence_of(backend, [A] * 8)
    run(sequence, replace(ENDLESS, max_new_tokens=4))
    backend.prefills.clear()
    sequence.tokens += [B, C]
    run(sequence, replace(ENDLESS, max_new_tokens=1))
    assert backend.prefills == [(0, 3)]  # the last token of the answer, and the new ones


def test_going_on_after_a_stop_token_works() -> None:
    backend = ScriptedBackend(scripted_target(1, [A, EOS, C, D, E]), accepts=[3])
    sequence = sequence_of(backend, [B])
    run(sequence, ENDLESS)
    result, _ = run(sequence, replace(ENDLESS, max_new_tokens=2))
    assert result.token_ids == [C, D]


@settings(deadline=None, max_examples=200)
@given(cases(), st.integers(0, 14), st.lists(st.sampled_from(VOCABULARY), max_size=8), st.integers(0, 20))
def test_other_tokens_give_what_a_fresh_sequence_gives(
    case: Case, num_kept: int, tail: list[int], refuses_below: int
) -> None:
    """Whatever is common, and whether or not the backend can go back that far."""
    backend = replace(case, max_length=80).backend()
    sequence = sequence_of(backend, case.prompt)
    run(sequence, replace(case.request, max_new_tokens=6))
    new = [*sequence.tokens[:num_kept], *tail] or [A]
    sequence.tokens = list(new)
    backend.refuses_below = refuses_below
    request = replace(ENDLESS, num_draft_tokens=0, max_new_tokens=1, stop_token_ids=())
    result, _ = run(sequence, request)
    assert result.token_ids == plain_tokens(case.target, new, 1)
    check_consistent(sequence, backend)


def test_the_common_prefix_is_not_fed_again() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [*[A] * 16, D, E, A])
    run(sequence, replace(ENDLESS, max_new_tokens=4))
    backend.prefills.clear()
    num_resets = backend.num_resets
    sequence.tokens = [*[A] * 16, E, E, E, E]
    result, _ = run(sequence, replace(ENDLESS, max_new_tokens=1))
    assert (backend.prefills, backend.num_resets, result.num_reused_tokens) == ([(0, 4)], num_resets, 16)


def test_the_same_prompt_feeds_its_last_token_again() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A, B, C])
    run(sequence, replace(ENDLESS, max_new_tokens=4))
    backend.prefills.clear()
    sequence.tokens = [A, B, C]
    result, _ = run(sequence, replace(ENDLESS, max_new_tokens=4))
    assert (backend.prefills, result.num_reused_tokens) == ([(0, 1)], 2)
    assert result.token_ids == plain_tokens(hash_target(1, VOCABULARY), [A, B, C], 4)


def test_a_continuation_rewinds_nothing() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A, B, C])
    run(sequence, replace(ENDLESS, num_draft_tokens=0, max_new_tokens=4))
    backend.refuses_below = len(backend.rows[0])
    num_resets = backend.num_resets
    sequence.tokens += [D, E]
    run(sequence, replace(ENDLESS, max_new_tokens=1))
    assert backend.num_resets == num_resets


def test_everything_is_fed_when_the_backend_refuses_the_rewind() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A, B, C, D, E, A])
    run(sequence, replace(ENDLESS, num_draft_tokens=0, max_new_tokens=4))
    backend.prefills.clear()
    backend.refuses_below = 6
    sequence.tokens = [A, B, C, E, E, E, E]
    result, _ = run(sequence, replace(ENDLESS, num_draft_tokens=0, max_new_tokens=3))
    assert (backend.prefills, result.num_reused_tokens) == ([(0, 7)], 0)
    assert result.token_ids == plain_tokens(hash_target(1, VOCABULARY), [A, B, C, E, E, E, E], 3)


# Ends from outside


def check_resumes(case: Case, sequence: OneSequence, backend: ScriptedBackend) -> None:
    """What came out is the plain sequence's start, and going on gives the rest of it."""
    check_consistent(sequence, backend)
    num_done = len(sequence.tokens) - len(case.prompt)
    plain = plain_tokens(case.target, case.prompt, num_done + 4)
    assert sequence.tokens == [*case.prompt, *plain[:num_done]]
    backend.max_length += 8
    result, _ = run(sequence, replace(ENDLESS, num_draft_tokens=case.request.num_draft_tokens, max_new_tokens=4))
    assert result.token_ids == plain[num_done:]
    check_consistent(sequence, backend)


@settings(deadline=None, max_examples=300)
@given(cases(), st.integers(0, 12))
def test_cancelled_at_any_moment_it_can_go_on(case: Case, check: int) -> None:
    backend = case.backend()
    sequence = sequence_of(backend, case.prompt)
    result, chunks = run(sequence, case.request, Asked(check))
    undisturbed = case.backend()
    run(sequence_of(undisturbed, case.prompt), case.request)
    # asked before each turn, which is a call, or two where a prompt has been fed and its first round follows
    assert backend.num_calls <= min(check + 1, undisturbed.num_calls)
    assert result.finish_reason == "cancelled" or backend.num_calls == undisturbed.num_calls
    tokens, text, finish_reason = expected_end(case.target, case.prompt, case.request, case.max_length)
    assert result.token_ids == tokens[: len(result.token_ids)]
    assert "".join(chunk.text for chunk in chunks) == result.text
    if result.finish_reason != "cancelled":
        assert (result.token_ids, result.text, result.finish_reason) == (tokens, text, finish_reason)
    else:
        assert result.text == CODEC.decode(result.token_ids)
    check_resumes(case, sequence, backend)


def test_cancelled_before_the_first_turn_it_runs_nothing() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A, B])
    result, chunks = run(sequence, ENDLESS, Asked(0))
    assert (result.finish_reason, result.token_ids, result.text, backend.prefills) == ("cancelled", [], "", [])
    assert chunks == []


def test_cancelled_between_prefill_chunks_it_keeps_those_fed() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY), prefill_chunk=2)
    sequence = sequence_of(backend, [A, B, C, D, E])
    result, _ = run(sequence, ENDLESS, Asked(1))
    assert (result.finish_reason, result.token_ids, backend.rows[0]) == ("cancelled", [], [A, B])
    run(sequence, replace(ENDLESS, max_new_tokens=1))
    assert backend.prefills == [(0, 2), (0, 2), (0, 1)]


def test_a_limit_of_time_ends_a_generation() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A])
    result, _ = run(sequence, replace(ENDLESS, max_seconds=0.0))
    assert (result.finish_reason, len(result.token_ids)) == ("time", 5)  # the turn after the first tells
    check_consistent(sequence, backend)


@settings(deadline=None, max_examples=300)
@given(cases(), st.integers(0, 12), st.booleans(), st.booleans())
def test_failed_at_any_call_it_can_go_on(case: Case, call: int, is_late: bool, is_nan: bool) -> None:
    """A NaN is noticed before anything is kept; where a device fails, what was committed is fed anew."""
    error = NonFiniteError("NaN") if is_nan else BackendError("the device is gone")
    backend = case.backend(Fault(call, error, is_late=is_late and not is_nan))
    sequence = sequence_of(backend, case.prompt)
    raised: Exception | None = None
    try:
        run(sequence, case.request)
    except (NonFiniteError, BackendError) as caught:
        raised = caught
    assert (raised is None) == (backend.num_calls <= call)
    assert type(raised) in (type(error), type(None))
    assert sequence.result is not None
    assert sequence.result.token_ids == [token for chunk in sequence.chunks for token in chunk.token_ids]
    assert sequence.result.finish_reason == ("error" if raised is not None else expected_end_reason(case))
    backend.fault = None
    check_resumes(case, sequence, backend)


def test_a_failed_generation_has_what_was_committed_as_its_result() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY))
    sequence = sequence_of(backend, [A])
    run(sequence, replace(ENDLESS, max_new_tokens=1))
    backend.fault = Fault(2, NonFiniteError("NaN"))
    with pytest.raises(NonFiniteError, match="NaN at position 2"):
        run(sequence, ENDLESS)
    assert sequence.result is not None
    assert (sequence.result.finish_reason, sequence.result.token_ids) == ("error", sequence.tokens[2:])


def expected_end_reason(case: Case) -> FinishReason:
    return expected_end(case.target, case.prompt, case.request, case.max_length)[2]


def test_a_prefill_that_fails_is_not_decoding() -> None:
    backend = ScriptedBackend(hash_target(1, VOCABULARY), fault=Fault(0, NonFiniteError("x")))
    sequence, prefill = sequence_of(backend, [A]), backend.prefill

    def slow(slot: int, tokens: Sequence[int]) -> int:
        sleep(0.02)
        return prefill(slot, tokens)

    backend.prefill = slow  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError):
        run(sequence, ENDLESS)
    assert sequence.result is not None
    assert sequence.result.timings.prefill >= 0.02
    assert sequence.result.timings.decode < 0.01
