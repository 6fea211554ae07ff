"""Many generations over the slots of a scripted backend: each is its solo run, whatever the others do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.backend.contract import Mask, Sampling
from slipstream.runtime.decode.draft_policy import DraftPolicy
from slipstream.runtime.decode.generation import Event, Generation, Request
from slipstream.runtime.decode.results import Chunk, Result
from slipstream.runtime.decode.scheduler import Scheduler
from slipstream.runtime.errors import (
    BackendError,
    BusyError,
    ContextFullError,
    NonFiniteError,
    RequestError,
    RewindError,
)
from tests.support.fakes import Fault, ScriptedBackend, hash_target, make_codec, plain_tokens

CODEC = make_codec()
VOCABULARY = CODEC.encode_more("abcdethe a")
A, B, C, D, E = CODEC.encode_more("abcde")
TARGET = hash_target(5, VOCABULARY)
ENDLESS = Request(num_draft_tokens=3, max_new_tokens=20, stop_token_ids=(), stop_strings=())


def scheduler_of(backend: ScriptedBackend, max_waiting: int = 64) -> Scheduler:
    return Scheduler(backend, DraftPolicy(range(16), 4), name="scripted", max_waiting=max_waiting)


@dataclass
class Listener:
    """A generation with everything that it delivered."""

    generation: Generation = field(init=False)
    events: list[Event] = field(default_factory=list)

    @classmethod
    def of(
        cls, backend: ScriptedBackend, tokens: Sequence[int], request: Request = ENDLESS, **options: object
    ) -> Listener:
        made = cls()
        made.generation = Generation(
            tokens,
            request,
            CODEC,
            backend.max_length,
            deliver=made.events.append,
            **options,  # type: ignore[arg-type]
        )
        return made

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Chunk) for token in event.token_ids]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and not isinstance(self.last, Chunk)

    def check(self) -> None:
        """It ended once, with what its target says after its prompt, as far as it came."""
        assert self.has_ended
        assert sum(not isinstance(event, Chunk) for event in self.events) == 1
        generation = self.generation
        prompt = generation.tokens[: generation.num_prompt_tokens]
        assert self.token_ids == plain_tokens(TARGET, prompt, len(self.token_ids))
        result = generation.result
        assert result is not None
        assert result.token_ids == self.token_ids
        if isinstance(self.last, Result) and result.finish_reason == "length":
            assert len(self.token_ids) == generation.request.max_new_tokens


def run_all(scheduler: Scheduler) -> None:
    for _ in range(5000):
        if not scheduler.step():
            return
    raise AssertionError("the scheduler is stuck")


def started(backend: ScriptedBackend, prompts: Sequence[Sequence[int]], request: Request = ENDLESS) -> list[Listener]:
    """Generations over a scheduler, all submitted and run to their ends."""
    scheduler = scheduler_of(backend)
    listeners = [Listener.of(backend, ids, request) for ids in prompts]
    for listener in listeners:
        scheduler.submit(listener.generation)
    run_all(scheduler)
    return listeners


PROMPTS = [[A, B, C], [B] * 20, [C, D], [A, B, C, D, E, A, B], [E]]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_draft_tokens", [None, 0, 3])
def test_each_text_is_its_solo_run(num_slots: int, num_draft_tokens: int | None) -> None:
    backend = ScriptedBackend(TARGET, num_slots=num_slots, accepts=[0, 3, 1, 2, 0] * 50, prefill_chunk=4)
    for listener in started(backend, PROMPTS, replace(ENDLESS, num_draft_tokens=num_draft_tokens)):
        listener.check()
        assert isinstance(listener.last, Result)
        assert len(listener.token_ids) == 20


def test_each_k_is_a_generations_own_and_the_round_has_the_largest() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2)
    scheduler = scheduler_of(backend)
    for k, ids in ((1, [A]), (5, [B])):
        scheduler.submit(Listener.of(backend, ids, replace(ENDLESS, num_draft_tokens=k)).generation)
    run_all(scheduler)
    assert (5, (2, 6)) in backend.rounds


def test_others_go_on_between_the_chunks_of_a_long_prompt() -> None:
    """A chunk and a round take turns, so the pause in a stream is one chunk."""
    backend = ScriptedBackend(TARGET, num_slots=2, prefill_chunk=2)
    scheduler = scheduler_of(backend)
    short, long = Listener.of(backend, [A]), Listener.of(backend, [B] * 30)
    scheduler.submit(short.generation)
    scheduler.step()
    scheduler.submit(long.generation)
    for _ in range(4):
        before = len(short.token_ids), len(backend.prefills)
        scheduler.step()
        assert len(short.token_ids) > before[0]
        assert len(backend.prefills) == before[1] + 1
    run_all(scheduler)
    short.check()
    long.check()


def test_long_prompts_starve_no_short_ones() -> None:
    """Chunks take turns among prompts."""
    backend = ScriptedBackend(TARGET, num_slots=3, prefill_chunk=2)
    scheduler = scheduler_of(backend)
    listeners = [Listener.of(backend, ids) for ids in ([A] * 40, [B] * 40, [C])]
    for listener in listeners:
        scheduler.submit(listener.generation)
    for _ in range(3):
        scheduler.step()
    assert listeners[2].token_ids
    run_all(scheduler)


def test_those_who_came_first_are_admitted_first() -> None:
    backend = ScriptedBackend(TARGET, num_slots=1)
    order: list[int] = []
    scheduler = scheduler_of(backend)
    prompts = [[A, VOCABULARY[number]] for number in range(5)]
    for prompt in prompts:
        scheduler.submit(Generation(prompt, ENDLESS, CODEC, 64, on_end=lambda ended: order.append(ended.tokens[1])))
    run_all(scheduler)
    assert order == VOCABULARY[:5]


def test_a_full_queue_is_refused_at_once_and_says_so() -> None:
    backend = ScriptedBackend(TARGET)
    scheduler = scheduler_of(backend, max_waiting=2)
    listeners = [Listener.of(backend, [A]) for _ in range(3)]
    scheduler.submit(listeners[0].generation)
    scheduler.submit(listeners[1].generation)
    with pytest.raises(BusyError, match="2 generations wait already, as many as may: try again later, or load"):
        scheduler.submit(listeners[2].generation)
    run_all(scheduler)
    assert [listener.has_ended for listener in listeners] == [True, True, False]


def test_a_wait_that_is_too_long_ends_with_an_error() -> None:
    backend = ScriptedBackend(TARGET)
    scheduler = scheduler_of(backend)
    first, second = Listener.of(backend, [A]), Listener.of(backend, [B], timeout=0.0)
    scheduler.submit(first.generation)
    scheduler.step()
    scheduler.submit(second.generation)
    run_all(scheduler)
    assert isinstance(second.last, BusyError)
    assert "did not end within 0.0 s" in str(second.last)
    first.check()


def test_without_patience_a_free_slot_is_taken_all_the_same() -> None:
    backend = ScriptedBackend(TARGET)
    scheduler, listener = scheduler_of(backend), Listener.of(backend, [A], timeout=0)
    scheduler.submit(listener.generation)
    run_all(scheduler)
    listener.check()
    assert isinstance(listener.last, Result)


def test_cancelled_while_waiting_feeding_or_decoding_others_are_as_before() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2, prefill_chunk=2)
    scheduler = scheduler_of(backend)
    decoding, feeding, waiting, other = (Listener.of(backend, ids) for ids in ([A], [B] * 20, [C], [D]))
    for listener in (decoding, feeding, waiting, other):
        scheduler.submit(listener.generation)
    for _ in range(4):
        scheduler.step()
    for listener in (decoding, feeding, waiting):
        listener.generation.cancel()
    scheduler.step()
    assert [listener.has_ended for listener in (decoding, feeding, waiting, other)] == [True, True, True, False]
    run_all(scheduler)
    for listener in (decoding, feeding, waiting, other):
        listener.check()
        assert listener.generation.result is not None
    assert other.generation.result is not None
    assert other.generation.result.finish_reason == "length"


def test_a_row_that_is_not_finite_fails_its_sequence_alone() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2, fault=Fault(4, NonFiniteError("NaN")))
    first, second = started(backend, [[A], [B]])
    assert isinstance(first.last, NonFiniteError)
    first.check()
    second.check()
    assert isinstance(second.last, Result)


def test_settings_that_the_backend_refuses_fail_their_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(TARGET, num_slots=2)
    set_sampling = backend.set_sampling

    def refuse(slot: int, sampling: Sampling, prompt: Sequence[int] = (), mask: Mask | None = None) -> None:
        if prompt[0] == A:
            raise RequestError("not this one")
        set_sampling(slot, sampling, prompt, mask)

    monkeypatch.setattr(backend, "set_sampling", refuse)
    check_first_fails_alone(backend, "not this one")


def test_a_full_context_fails_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(TARGET, num_slots=2)
    prefill = backend.prefill

    def refuse(slot: int, tokens: Sequence[int]) -> int:
        if list(tokens) == [A, B]:
            raise ContextFullError("no room")
        return prefill(slot, tokens)

    monkeypatch.setattr(backend, "prefill", refuse)
    check_first_fails_alone(backend, "no room")


def test_a_slot_that_can_not_be_left_is_emptied_and_its_caller_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(TARGET, num_slots=2)
    rewind = backend.rewind

    def refuse(slot: int, length: int) -> None:
        if backend.rows[slot][0] == A:
            raise RewindError("moved away")
        rewind(slot, length)

    monkeypatch.setattr(backend, "rewind", refuse)
    second = plain_tokens(TARGET, [A, B], 2)[1]  # it ends within a round, whose rows go beyond
    check_first_fails_alone(backend, "moved away", replace(ENDLESS, stop_token_ids=(second,)))
    assert all(rows[0] != A for rows in backend.rows)


def check_first_fails_alone(backend: ScriptedBackend, message: str, request: Request = ENDLESS) -> None:
    """Of prompts that begin with A and with B; afterwards the slots serve others."""
    first, *others = started(backend, [[A, B], [B], [B, C], [B, A]], request)
    assert str(first.last) == message
    first.check()
    for other in others:
        other.check()
        assert isinstance(other.last, Result)


def test_a_failing_device_fails_all_with_the_reason_and_the_next_begin_anew() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2, fault=Fault(4, BackendError("the GPU has fallen off the bus")))
    listeners = started(backend, [[A], [B], [C]])
    assert [str(listener.last) for listener in listeners] == ["the GPU has fallen off the bus"] * 3
    for listener in listeners:
        listener.check()
    backend.fault = None
    for listener in started(backend, PROMPTS):
        listener.check()


def test_a_listener_that_fails_ends_its_generation_and_no_other() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2)
    scheduler = scheduler_of(backend)

    def gone(_: Event) -> None:
        raise RuntimeError("the event loop is closed")

    broken, other = Generation([A], ENDLESS, CODEC, 64, deliver=gone), Listener.of(backend, [B])
    scheduler.submit(broken)
    scheduler.submit(other.generation)
    run_all(scheduler)
    assert broken.result is not None
    assert broken.result.finish_reason == "cancelled"
    other.check()


def test_who_can_not_take_a_result_in_learns_why_and_no_other_ends() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2)
    scheduler = scheduler_of(backend)

    def refuse(_: Generation) -> None:
        raise RuntimeError("no room for it")

    broken, other = Listener.of(backend, [A], on_end=refuse), Listener.of(backend, [B])
    scheduler.submit(broken.generation)
    scheduler.submit(other.generation)
    run_all(scheduler)
    assert str(broken.last) == "no room for it"
    other.check()
    assert isinstance(other.last, Result)


def test_followers_share_the_prefill_of_the_first() -> None:
    backend = ScriptedBackend(TARGET, num_slots=3, prefill_chunk=4)
    scheduler = scheduler_of(backend)
    prompt = [A, B, C, D] * 4
    first, *others = (Listener.of(backend, prompt) for _ in range(4))
    first.generation.followers += [listener.generation for listener in others]
    scheduler.submit(first.generation)
    run_all(scheduler)
    for listener in (first, *others):
        listener.check()
    assert sum(size for _, size in backend.prefills) == len(prompt) + len(others)
    assert [listener.generation.num_reused for listener in others] == [15, 15, 15]


def test_followers_of_a_first_that_ends_early_are_told() -> None:
    backend = ScriptedBackend(TARGET)
    scheduler = scheduler_of(backend)
    first, other = Listener.of(backend, [A]), Listener.of(backend, [A])
    first.generation.followers.append(other.generation)
    scheduler.submit(first.generation)
    first.generation.cancel()
    run_all(scheduler)
    assert isinstance(other.last, RequestError)


def test_a_system_prompt_that_is_kept_is_fed_once() -> None:
    backend = ScriptedBackend(TARGET, num_slots=3, max_length=2000, prefill_chunk=64)
    scheduler, system = scheduler_of(backend), [VOCABULARY[i % 7] for i in range(1000)]
    kept = Listener.of(backend, system, is_kept=True)
    scheduler.submit(kept.generation)
    run_all(scheduler)
    assert kept.token_ids == []
    for number in range(6):
        backend.prefills.clear()
        listener = Listener.of(backend, [*system, VOCABULARY[number], A])
        scheduler.submit(listener.generation)
        run_all(scheduler)
        listener.check()
        assert sum(size for _, size in backend.prefills) == 2


def test_a_second_turn_feeds_only_what_is_new() -> None:
    backend = ScriptedBackend(TARGET, num_slots=2, max_length=2000, prefill_chunk=64)
    scheduler, text = scheduler_of(backend), [VOCABULARY[i % 5] for i in range(1000)]
    for _ in range(3):
        listener = Listener.of(backend, text)
        scheduler.submit(listener.generation)
        run_all(scheduler)
        text = [*listener.generation.tokens, B, C]
        assert sum(size for _, size in backend.prefills) <= len(text)
    assert sum(size for _, size in backend.prefills) == 1000 + 2 * 3  # the answer's last token and the new ones


def test_closed_it_takes_nothing_more_and_ends_what_runs() -> None:
    backend = ScriptedBackend(TARGET)
    scheduler = scheduler_of(backend)
    running, waiting = Listener.of(backend, [A]), Listener.of(backend, [B])
    scheduler.submit(running.generation)
    scheduler.submit(waiting.generation)
    scheduler.step()
    scheduler.close()
    scheduler.run()
    for listener in (running, waiting):
        listener.check()
        assert isinstance(listener.last, RequestError)
    with pytest.raises(RequestError, match="the pair is closed"):
        scheduler.submit(Listener.of(backend, [C]).generation)


def test_drained_it_ends_what_there_is_first() -> None:
    backend = ScriptedBackend(TARGET)
    scheduler = scheduler_of(backend)
    listeners = [Listener.of(backend, [token]) for token in (A, B, C)]
    for listener in listeners:
        scheduler.submit(listener.generation)
    scheduler.close(drain=True)
    scheduler.run()
    for listener in listeners:
        listener.check()
        assert isinstance(listener.last, Result)


# Any script of joins, cancels and failures


@dataclass(frozen=True)
class Join:
    prompt: list[int]
    request: Request


joins = st.builds(
    Join,
    st.lists(st.sampled_from(VOCABULARY[:3]), min_size=1, max_size=12),
    st.builds(
        Request,
        num_draft_tokens=st.one_of(st.none(), st.integers(0, 6)),
        max_new_tokens=st.integers(1, 12),
        stop_token_ids=st.just(()),
        stop_strings=st.just(()),
        rejects_drafts=st.booleans(),
    ),
)
moves = st.lists(st.one_of(joins, st.integers(0, 9), st.sampled_from(["step"] * 3)), min_size=3, max_size=40)


@settings(deadline=None, max_examples=300)
@given(moves, st.integers(1, 5), st.lists(st.integers(0, 6), max_size=60), st.integers(0, 40), st.integers(0, 9))
def test_nothing_is_lost_mixed_or_stuck(
    script: list[Join | int | str], num_slots: int, accepts: list[int], fault: int, refuses_below: int
) -> None:
    """A move joins a generation, cancels the n-th, or takes a turn; one call fails for one sequence."""
    backend = ScriptedBackend(
        TARGET,
        num_slots=num_slots,
        accepts=accepts,
        prefill_chunk=3,
        refuses_below=refuses_below,
        fault=Fault(fault, NonFiniteError("NaN")),
    )
    scheduler, listeners = scheduler_of(backend), list[Listener]()
    for move in script:
        if isinstance(move, Join):
            listeners.append(Listener.of(backend, move.prompt, move.request))
            scheduler.submit(listeners[-1].generation)
        elif isinstance(move, int):
            if move < len(listeners):
                listeners[move].generation.cancel()
        else:
            scheduler.step()
    run_all(scheduler)
    failed = [listener for listener in listeners if isinstance(listener.last, Exception)]
    assert len(failed) <= 1
    for listener in listeners:
        listener.check()


def test_many_threads_over_few_slots() -> None:
    """Random cancels; every thread gets the end of each of its generations."""
    backend = ScriptedBackend(TARGET, num_slots=4, prefill_chunk=4)
    scheduler = scheduler_of(backend)
    engine = threading.Thread(target=scheduler.run)
    engine.start()
    done: SimpleQueue[Listener | BaseException] = SimpleQueue()

    def client(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(8):
            ended = threading.Event()
            listener = Listener()
            listener.generation = Generation(
                [dice.choice(VOCABULARY) for _ in range(dice.randint(1, 20))],
                replace(ENDLESS, num_draft_tokens=dice.choice([None, 0, 4])),
                CODEC,
                64,
                deliver=listener.events.append,
            )
            listener.generation.on_end = lambda _, ended=ended: ended.set()  # type: ignore[misc]
            scheduler.submit(listener.generation)
            if dice.random() < 0.3:
                ended.wait(dice.random() / 100)
                listener.generation.cancel()
            assert ended.wait(20)
            done.put(listener)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    scheduler.close(drain=True)
    engine.join(20)
    assert not engine.is_alive()
    assert done.qsize() == 16 * 8
    while not done.empty():
        listener = done.get()
        assert isinstance(listener, Listener)
        listener.check()


@pytest.mark.parametrize(("num_slots", "bar"), [(1, 60e-6), (8, 250e-6)])
def test_python_per_round_is_little(num_slots: int, bar: float) -> None:
    """The quickest of many turns, without the backend; generous, as machines are shared."""
    backend = ScriptedBackend(TARGET, num_slots=num_slots, max_length=4000)
    inside = [0.0]

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(*values: object) -> object:
            start = perf_counter()
            try:
                return call(*values)
            finally:
                inside[0] += perf_counter() - start

        return run

    backend._target = lambda prefix: VOCABULARY[len(prefix) % 7]
    backend.round = timed(backend.round)  # type: ignore[assignment, method-assign]
    scheduler = scheduler_of(backend)
    for slot in range(num_slots):
        request = replace(ENDLESS, num_draft_tokens=0, max_new_tokens=400)
        scheduler.submit(Generation([A] * (slot + 1), request, CODEC, 4000))
    for _ in range(num_slots):
        scheduler.step()
    outside = []
    for _ in range(300):
        start, before = perf_counter(), inside[0]
        scheduler.step()
        outside.append(perf_counter() - start - (inside[0] - before))
    assert sorted(outside)[30] < bar
