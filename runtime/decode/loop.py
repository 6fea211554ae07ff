"""The speculative loop of one sequence: draft, verify, accept, commit.

The backend drafts, verifies and accepts on its device; here tokens are committed, what may be
accepted is bounded, and lengths are kept right whatever interrupts. Every round of a generation
runs the same number of rows: near its end fewer drafts may be accepted, not fewer drafted. A draft
is accepted where it is the target's own token after the row before it, which is the most likely one
or drawn with noise of the seed and the position: so drafted text is plain text by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter

from slipstream.runtime.backend.contract import GREEDY, Backend, Sampling, Step
from slipstream.runtime.errors import ContextFullError, RewindError
from slipstream.runtime.text.codec import TextCodec, TextStream

from .commit import Commit
from .results import Acceptance, Chunk, Result, Timings


@dataclass(frozen=True)
class Request:
    """One generation, checked and resolved.

    num_draft_tokens: K, drafted in each round; 0 decodes plainly on the same path.
    stop_token_ids: of the bundle's generation settings and of stop texts that are a special token.
    rejects_drafts: decode plainly at the row count of drafted decoding: the reference that
        drafted text must equal without excuse.
    sampling: how tokens are drawn, from the next one on.
    """

    num_draft_tokens: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    rejects_drafts: bool = False
    sampling: Sampling = GREEDY


class _Stopwatch:
    """Adds up seconds between start and stop; a second stop adds nothing."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = perf_counter()

    def stop(self) -> float:
        if self._since is not None:
            self._seconds += perf_counter() - self._since
            self._since = None
        return self._seconds


class Loop:
    """tokens: the sequence so far; the backend holds valid KV for a prefix of it."""

    def __init__(self, backend: Backend, codec: TextCodec) -> None:
        self._backend = backend
        self._codec = codec
        self.tokens: list[int] = []
        self.result: Result | None = None

    def reset(self) -> None:
        self._backend.reset(0)
        self.tokens.clear()

    def replace(self, tokens: Sequence[int]) -> None:
        """Make the sequence these tokens, keeping the KV of the longest common prefix where it can be."""
        common = next(
            (i for i, (a, b) in enumerate(zip(self.tokens, tokens, strict=False)) if a != b),
            min(len(self.tokens), len(tokens)),
        )
        kept = max(min(common, len(tokens) - 1), 0)  # the last token is fed again, so it must have no row
        if kept < self._backend.length[0]:
            try:
                self._backend.rewind(0, kept)
            except RewindError:  # its sliding rows are gone: this costs a whole prefill, and nothing else
                self._backend.reset(0)
        self.tokens = list(tokens)

    def run(self, request: Request, is_cancelled: Callable[[], bool]) -> Generator[Chunk, None, None]:
        """Generate from ``tokens``; each yield is what one call added. ``result`` is set at the end.

        Raises ContextFullError when no new token fits.
        """
        self.result = None  # at once: a generator closed before it began runs none of its code
        return self._run(request, is_cancelled)

    def _run(self, request: Request, is_cancelled: Callable[[], bool]) -> Generator[Chunk, None, None]:
        backend, prefill, decode = self._backend, _Stopwatch(), _Stopwatch()
        before = backend.draft_seconds, backend.verify_seconds
        commit = self._commit(request)
        num_prompt_tokens, acceptance = len(self.tokens), Acceptance()
        acceptance.grow(request.num_draft_tokens)
        num_offered = None
        prefill.start()
        try:
            self._settle()
            backend.set_sampling(0, request.sampling)
            step = self._prefill(is_cancelled)
            prefill.stop()
            decode.start()
            while step is not None:
                chunk = commit.take(step.tokens[0])
                self.tokens += chunk.token_ids
                if num_offered is not None:
                    acceptance.record(num_offered, min(len(step.tokens[0]) - 1, len(chunk.token_ids)))
                decode.stop()
                yield chunk
                decode.start()
                if commit.finish_reason is not None or is_cancelled():
                    break
                num_offered = min(request.num_draft_tokens, commit.room - 1)
                step = backend.round(request.num_draft_tokens, [0 if request.rejects_drafts else num_offered])
            decode.stop()
            if commit.finish_reason is None:
                yield commit.end("cancelled")
        except Exception:
            commit.end("error")
            raise
        finally:  # an early close and Ctrl-C come here too: lengths are right and what was committed counts
            self._settle()
            if commit.finish_reason is None:
                commit.end("cancelled")
            timings = Timings(
                prefill=prefill.stop(),
                draft=backend.draft_seconds - before[0],
                verify=backend.verify_seconds - before[1],
                decode=decode.stop(),
            )
            k, sampling = request.num_draft_tokens, request.sampling
            self.result = commit.result(num_prompt_tokens, k, sampling, acceptance, timings)

    def check_room(self, num_tokens: int) -> int:
        """New tokens that fit after num_tokens. Raises ContextFullError when none does."""
        room = self._backend.max_length - num_tokens
        if room <= 0:
            raise ContextFullError(
                f"the sequence has {num_tokens} tokens and the context holds {self._backend.max_length}, one of "
                "them new: shorten the prompt, or export with a larger --max-length"
            )
        return room

    def _commit(self, request: Request) -> Commit:
        return Commit(
            TextStream(self._codec, request.stop_strings, self.tokens),
            stop_token_ids=request.stop_token_ids,
            max_new_tokens=request.max_new_tokens,
            context_room=self.check_room(len(self.tokens)),
        )

    def _prefill(self, is_cancelled: Callable[[], bool]) -> Step | None:
        """Feed every token without KV, in chunks; None when cancelled on the way."""
        step = None
        while self._backend.length[0] < len(self.tokens):
            if is_cancelled():
                return None
            start = self._backend.length[0]
            step = self._backend.prefill([self.tokens[start : start + self._backend.prefill_chunk]])
        return step

    def _settle(self) -> None:
        """Leave KV for all tokens but the last at most: the last is fed again when generation goes on."""
        held = max(len(self.tokens) - 1, 0)
        if self._backend.length[0] > held:
            self._backend.rewind(0, held)
