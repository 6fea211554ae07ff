"""One request on its way from the queue to its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from slipstream.runtime.backend.contract import GREEDY, Sampling, TokenLogprob
from slipstream.runtime.errors import RequestError
from slipstream.runtime.text.codec import TextCodec, TextStream
from slipstream.runtime.text.grammar import Matcher

from .commit import Commit
from .draft_policy import AcceptanceRates
from .results import Acceptance, Chunk, FinishReason, Result, Timings


@dataclass(frozen=True)
class Request:
    """One generation, checked and resolved.

    num_draft_tokens: K, drafted in each round; 0 decodes plainly on the same path; None lets the policy choose.
    stop_token_ids: of the bundle's generation settings and of stop texts that are a special token.
    max_seconds: from admission on; None sets no limit.
    rejects_drafts: decode plainly at the row count of drafted decoding: the reference that
        drafted text must equal without excuse.
    sampling: how tokens are chosen, from the next one on. json_schema: that the text follows.
    """

    num_draft_tokens: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    max_seconds: float | None = None
    rejects_drafts: bool = False
    sampling: Sampling = GREEDY
    json_schema: Mapping[str, Any] | None = None


Event = Chunk | Result | Exception  # of a generation: chunks, then a result or what it failed with


@dataclass
class _Times:
    """When things happened, by the monotonic clock; draft, verify: seconds inside the graphs of its rounds."""

    submitted: float = field(default_factory=monotonic)
    admitted: float | None = None
    first_token: float | None = None
    draft: float = 0.0
    verify: float = 0.0

    def seconds(self) -> Timings:
        """Up to now."""
        now = monotonic()
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return Timings(
            queued=admitted - self.submitted,
            prefill=first - admitted,
            draft=self.draft,
            verify=self.verify,
            decode=now - first,
        )


class Generation:
    """tokens: the prompt, and what was committed after it.

    deliver: gets each Event as it comes, on the engine's thread; on_end is called there before the last one.
    timeout: seconds to wait for admission. cancelled: as ``cancel``, when another thread sets it.
    slot: while it runs. num_reused: tokens of the prompt whose KV was there.
    matcher: of the grammar that the text follows.
    followers: generations of the same prompt, submitted when it has been fed.
    """

    def __init__(  # noqa: PLR0913 (what a generation is, said once)
        self,
        tokens: Sequence[int],
        request: Request,
        codec: TextCodec,
        max_length: int,
        *,
        deliver: Callable[[Event], None] = lambda _: None,
        on_end: Callable[[Generation], None] = lambda _: None,
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
        is_kept: bool = False,
        matcher: Matcher | None = None,
    ) -> None:
        """max_length: tokens that a sequence holds, more than it has now. is_kept: only feed the tokens.

        Raises RequestError for a timeout or an event that is none.
        """
        if timeout is not None and (type(timeout) not in (int, float) or not timeout >= 0):
            raise RequestError(f"timeout is {timeout!r}; seconds, 0 or more, are expected")
        if cancelled is not None and not isinstance(cancelled, threading.Event):
            raise RequestError(f"cancelled is {cancelled!r}; a threading.Event is expected")
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.request, self.deliver, self.on_end, self.is_kept = request, deliver, on_end, is_kept
        self.commit = Commit(
            TextStream(codec, request.stop_strings, self.tokens),
            stop_token_ids=request.stop_token_ids,
            max_new_tokens=request.max_new_tokens,
            context_room=max_length - len(self.tokens),
        )
        self.acceptance, self.times = Acceptance(), _Times()
        self.acceptance.grow(request.num_draft_tokens or 0)
        self.rates: AcceptanceRates | None = None
        self.slot: int | None = None
        self.num_reused = 0
        self.num_offered = 0  # drafts that the round under way may accept
        self.matcher = matcher
        self.followers: list[Generation] = []
        self.logprobs: list[TokenLogprob] = []
        self.result: Result | None = None
        self._timeout, self._cancelled, self._is_cancelled = timeout, cancelled, False

    def cancel(self) -> None:
        """End by the next turn; any thread may ask."""
        self._is_cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled or (self._cancelled is not None and self._cancelled.is_set())

    @property
    def is_late(self) -> bool:
        """Whether it has waited for admission as long as it may."""
        return self._timeout is not None and monotonic() - self.times.submitted >= self._timeout

    @property
    def waited(self) -> str:
        return f"{self._timeout} s"

    @property
    def out_of_time(self) -> bool:
        limit, start = self.request.max_seconds, self.times.admitted
        return limit is not None and start is not None and monotonic() - start >= limit

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Chunk:
        """Commit what a prefill or round added. logprobs: of the tokens, where they were asked for."""
        chunk = self.commit.take(tokens)
        self.tokens += chunk.token_ids
        if self.matcher is not None:
            self.matcher.commit(chunk.token_ids)
        if logprobs:
            chunk = chunk._replace(logprobs=tuple(logprobs[: len(chunk.token_ids)]))
            self.logprobs += chunk.logprobs
        return chunk

    def end(self, reason: FinishReason) -> Chunk:
        """End here, for a reason outside the text; gives the text that was held back."""
        return self.commit.end(reason)

    def make_result(self, engine: str, notes: tuple[str, ...]) -> Result:
        """Of a generation that has ended."""
        commit = self.commit
        assert commit.finish_reason is not None
        self.result = Result(
            text=commit.text,
            thought=commit.thought,
            token_ids=commit.token_ids,
            finish_reason=commit.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_reused_tokens=self.num_reused,
            num_draft_tokens=self.request.num_draft_tokens,
            sampling=self.request.sampling,
            acceptance=self.acceptance,
            timings=self.times.seconds(),
            engine=engine,
            notes=notes,
            logprobs=tuple(self.logprobs),
        )
        return self.result
