"""Text of a pair on the calling thread, with nothing kept from before."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runtime.backend.contract import Backend
from slipstream.runtime.decode.draft_policy import DraftPolicy
from slipstream.runtime.decode.generation import Generation, Request
from slipstream.runtime.decode.results import Result
from slipstream.runtime.decode.scheduler import Scheduler
from slipstream.runtime.session import Pair


def new_scheduler(backend: Backend) -> Scheduler:
    """For requests that say their K."""
    return Scheduler(backend, DraftPolicy((0,), 0))


def generate(scheduler: Scheduler, pair: Pair, prompt: Sequence[int], request: Request) -> Result:
    """Raises what the generation fails with."""
    scheduler.forget()
    return scheduler.generate(Generation(prompt, request, pair.codec, pair.engine.max_length))
