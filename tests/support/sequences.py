"""One sequence over a scheduler that the calling thread drives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from slipstream.runtime.backend.contract import Backend
from slipstream.runtime.decode.draft_policy import DraftPolicy
from slipstream.runtime.decode.generation import Event, Generation, Request
from slipstream.runtime.decode.results import Chunk, Result
from slipstream.runtime.decode.scheduler import Scheduler
from slipstream.runtime.text.codec import TextCodec


class Asked(threading.Event):
    """Set from the check-th question (from 0) on."""

    def __init__(self, check: int) -> None:
        super().__init__()
        self.num_asked = 0
        self._check = check

    def is_set(self) -> bool:
        self.num_asked += 1
        return self.num_asked > self._check


class OneSequence:
    """tokens: so far. chunks: of the last generation, and result: what became of it."""

    def __init__(self, backend: Backend, codec: TextCodec, tokens: Sequence[int] = ()) -> None:
        self.scheduler = Scheduler(backend, DraftPolicy(range(16), 4))
        self.tokens = list(tokens)
        self.chunks: list[Chunk] = []
        self.result: Result | None = None
        self._codec, self._backend = codec, backend

    def generation(
        self, request: Request, cancelled: threading.Event | None = None, deliver: Callable[[Event], None] | None = None
    ) -> Generation:
        return Generation(
            self.tokens,
            request,
            self._codec,
            self._backend.max_length,
            deliver=deliver or self._deliver,
            on_end=self._take_in,
            cancelled=cancelled,
        )

    def run(self, request: Request, cancelled: threading.Event | None = None) -> Result:
        """Generate from the tokens. Raises what the generation fails with; result is there all the same."""
        self.chunks, self.result = [], None
        return self.scheduler.generate(self.generation(request, cancelled))

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Chunk):
            self.chunks.append(event)

    def _take_in(self, generation: Generation) -> None:
        self.tokens, self.result = list(generation.tokens), generation.result
