"""Many generations over the slots of one backend: admit, one prefill chunk, one round, commit, and again.

The backend drafts, verifies and accepts on its device; here tokens are committed, what may be added is bounded, and
lengths are kept right whatever ends. One thread does it all, ``run`` on a thread of its own or ``generate`` on the
caller's; other threads submit and cancel. Every round of a generation with a given K runs the same number of rows:
near its end fewer drafts may be accepted, not fewer drafted. A draft is accepted where it is the target's own token
after the row before it, which is the most likely one or drawn with noise of the seed and the position: so drafted text
is plain text by construction, whoever else is in the batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter

from slipstream.runtime.backend.contract import Backend, TokenLogprob
from slipstream.runtime.errors import BackendError, BusyError, ContextFullError, NonFiniteError, RequestError

from .draft_policy import DraftPolicy
from .generation import Event, Generation
from .results import FinishReason, Result
from .slots import Slots

MAX_WAITING = 64  # generations in the queue, where nothing else is asked for


class Scheduler:
    """Whose turn it is. policy: chooses K where a request names none. name, notes: of the engine, for results."""

    def __init__(
        self,
        backend: Backend,
        policy: DraftPolicy,
        *,
        name: str = "",
        notes: Callable[[], tuple[str, ...]] = tuple,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._backend, self._policy, self._name, self._notes = backend, policy, name, notes
        self._max_waiting = max_waiting
        self._slots = Slots(backend)
        self._waiting: deque[Generation] = deque()
        self._feeding: deque[Generation] = deque()
        self._decoding: list[Generation] = []
        self._changed = threading.Condition()
        self._is_closed = False  # to new generations
        self._is_stopped = False  # and to those that run

    # for any thread

    def submit(self, generation: Generation) -> None:
        """Put a generation into the queue. Raises BusyError where it is full, RequestError when closed."""
        with self._changed:
            self._check_open()
            if len(self._waiting) >= self._max_waiting:
                raise BusyError(
                    f"{len(self._waiting)} generations wait already, as many as may: try again later, or load the "
                    "bundle with more num_slots"
                )
            self._waiting.append(generation)
            self._changed.notify()

    def close(self, *, drain: bool = False) -> None:
        """Take no more generations, and cancel those there are, or let them end first with drain."""
        with self._changed:
            self._is_closed = True
            self._is_stopped = self._is_stopped or not drain
            self._changed.notify()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("the pair is closed: load the bundle again")

    # for the thread that runs it

    def run(self) -> None:
        """Take turns until closed."""
        try:
            while self._wait():
                self.step()
        finally:  # however it ends, nobody waits for it
            self.close()
            self._fail_all(RequestError("the pair is closed: load the bundle again"))

    def _wait(self) -> bool:
        """Until there is something to do; False when there will be nothing more."""
        with self._changed:
            while not (self._has_work or self._is_closed):
                self._changed.wait()
            return self._has_work and not self._is_stopped

    def generate(self, generation: Generation) -> Result:
        """Run a generation to its end on this thread, where no other does. Raises what it fails with."""
        failures: list[Exception] = []
        deliver = generation.deliver

        def watch(event: Event) -> None:
            if isinstance(event, Exception):
                failures.append(event)
            deliver(event)

        generation.deliver = watch
        self.submit(generation)
        while self.step():
            pass
        if failures:
            raise failures[0]
        assert generation.result is not None
        return generation.result

    def forget(self) -> None:
        """Drop the rows that free slots keep."""
        for slot in range(self._backend.num_slots):
            if all(generation.slot != slot for generation in (*self._feeding, *self._decoding)):
                self._slots.forget(slot)

    def step(self) -> bool:
        """One turn; whether there is more to do."""
        try:
            self._sweep()
            self._admit()
            self._turn_away()
            if self._feeding:
                self._feed()
            if self._decoding:
                self._round()
        except BaseException as error:  # whatever the backend failed with: nobody's rows can be trusted
            self._fail_all(error if isinstance(error, Exception) else BackendError(f"interrupted by {error!r}"))
            if not isinstance(error, Exception):
                raise
        return self._has_work

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._feeding or self._decoding)

    def _sweep(self) -> None:
        """End what was cancelled or is out of time."""
        for generation in (*self._waiting, *self._feeding, *self._decoding):
            if generation.is_cancelled:
                self._end(generation, "cancelled")
            elif generation.out_of_time:
                self._end(generation, "time")

    def _turn_away(self) -> None:
        """End what has waited as long as it may, and still has no slot."""
        for generation in tuple(self._waiting):
            if generation.is_late:
                self._fail(generation, BusyError(f"other generations did not end within {generation.waited}"))

    def _admit(self) -> None:
        while self._waiting and self._slots.has_free:
            generation = self._waiting.popleft()
            generation.times.admitted = monotonic()
            if generation.request.num_draft_tokens is None:
                generation.rates = self._policy.new_rates()
            self._feeding.append(generation)  # at once: whatever fails now is this one's failure too
            generation.slot = self._slots.take(generation.tokens)
            generation.num_reused = self._backend.length[generation.slot]
            mask = None if generation.matcher is None else generation.matcher.allowed
            try:
                self._backend.set_sampling(generation.slot, generation.request.sampling, generation.tokens, mask)
            except RequestError as error:
                self._fail(generation, error)

    def _feed(self) -> None:
        """One chunk of the prompt whose turn it is."""
        generation = self._feeding.popleft()
        slot, backend = generation.slot, self._backend
        assert slot is not None
        start = backend.length[slot]
        try:
            token = backend.prefill(slot, generation.tokens[start : start + backend.prefill_chunk])
        except (NonFiniteError, ContextFullError) as error:
            self._fail(generation, error)
            return
        except BaseException:
            self._feeding.append(generation)
            raise
        if backend.length[slot] < len(generation.tokens):
            self._feeding.append(generation)
            return
        generation.times.first_token = monotonic()
        self._waiting.extendleft(reversed(generation.followers))
        generation.followers.clear()
        if generation.is_kept:
            self._end(generation, "length")
            return
        self._decoding.append(generation)
        self._commit(generation, [token])

    def _round(self) -> None:
        backend = self._backend
        decoding = list(self._decoding)
        num_draft_tokens, batch = self._num_draft_tokens(decoding)
        limits = [0] * backend.num_slots
        for generation in decoding:
            assert generation.slot is not None
            request = generation.request
            most = num_draft_tokens if request.num_draft_tokens is None else request.num_draft_tokens
            generation.num_offered = min(most, generation.commit.room - 1)
            limits[generation.slot] = 1 if request.rejects_drafts else generation.num_offered + 1
        drafted, verified, start = backend.draft_seconds, backend.verify_seconds, perf_counter()
        tokens, failed = backend.round(num_draft_tokens, limits)
        self._policy.record(batch, num_draft_tokens, perf_counter() - start)
        drafted, verified = backend.draft_seconds - drafted, backend.verify_seconds - verified
        for generation in decoding:
            assert generation.slot is not None
            generation.times.draft += drafted
            generation.times.verify += verified
            if generation.slot in failed:
                self._fail(generation, NonFiniteError(backend.not_finite(generation.slot)))
            else:
                self._commit_round(generation, tokens[generation.slot])

    def _num_draft_tokens(self, decoding: Sequence[Generation]) -> tuple[int, int]:
        """K of a round, the largest of its generations', and the number of slots that it runs over."""
        last = max(generation.slot or 0 for generation in decoding)
        batch = min(1 << last.bit_length(), self._backend.num_slots)
        counts = [generation.request.num_draft_tokens for generation in decoding]
        if rates := [generation.rates for generation in decoding if generation.rates is not None]:
            counts.append(self._policy.choose(batch, rates))
        return max(count for count in counts if count is not None), batch

    def _commit_round(self, generation: Generation, tokens: list[int]) -> None:
        before = len(generation.tokens)
        num_offered = generation.num_offered
        self._commit(generation, tokens)
        num_accepted = min(len(tokens) - 1, len(generation.tokens) - before)
        generation.acceptance.record(num_offered, num_accepted)
        if generation.rates is not None and not generation.request.rejects_drafts:
            self._policy.record_acceptance(generation.rates, num_offered, num_accepted)

    def _commit(self, generation: Generation, tokens: list[int]) -> None:
        logprobs: Sequence[TokenLogprob] = ()
        if generation.request.sampling.num_logprobs is not None:
            assert generation.slot is not None
            logprobs = self._backend.logprobs(generation.slot)
        self._deliver(generation, generation.take(tokens, logprobs))
        if generation.commit.finish_reason is not None:
            self._finish(generation)

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        """End a generation for a reason outside its text."""
        chunk = generation.end(reason)
        if chunk.text or chunk.thought:
            self._deliver(generation, chunk)
        self._finish(generation)

    def _fail(self, generation: Generation, error: Exception) -> None:
        generation.end("error")
        self._finish(generation, error)

    def _finish(self, generation: Generation, error: Exception | None = None) -> None:
        """Free the slot, whose rows stay, and give the last event."""
        for queue in (self._waiting, self._feeding, self._decoding):
            if generation in queue:
                queue.remove(generation)
        slot, generation.slot = generation.slot, None
        if slot is not None:
            try:
                self._leave(slot, generation)
            except Exception as failure:  # noqa: BLE001 (its caller waits for the last event, whatever became of the slot)
                error = error or failure
                self._forget_failed(slot)
        for follower in generation.followers:
            self._fail(follower, error or RequestError("the first generation of this prompt ended before it was fed"))
        result = generation.make_result(self._name, self._notes())
        try:
            generation.on_end(generation)
        except Exception as failure:  # noqa: BLE001 (whoever asked can't take it in: no reason to end the others)
            error = error or failure
        self._deliver(generation, error or result)

    def _leave(self, slot: int, generation: Generation) -> None:
        """Rows are those of all tokens but the last at most: it is fed again when the text goes on."""
        held = len(generation.tokens) if generation.is_kept else max(len(generation.tokens) - 1, 0)
        if self._backend.length[slot] > held:
            self._backend.rewind(slot, held)
        self._slots.leave(slot, generation.tokens, is_kept=generation.is_kept)

    def _fail_all(self, error: Exception) -> None:
        """End everything that runs or waits; slots begin anew where the backend still can."""
        for generation in (*self._feeding, *self._decoding, *self._waiting):
            slot, generation.slot = generation.slot, None
            if slot is not None:
                self._forget_failed(slot)
            self._fail(generation, error)

    def _forget_failed(self, slot: int) -> None:
        try:
            self._slots.forget(slot)
        except Exception:  # noqa: BLE001 (the backend is closed, or its device gone: there is nothing to forget)
            self._slots.leave(slot, [])

    @staticmethod
    def _deliver(generation: Generation, event: Event) -> None:
        try:
            generation.deliver(event)
        except Exception:  # noqa: BLE001 (whoever listened is gone, and others go on)
            generation.cancel()
