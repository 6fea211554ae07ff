"""How chunks reach those who read them, and who waits for the result alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from slipstream.runtime.decode.generation import Event, Generation, Request
from slipstream.runtime.decode.results import Chunk
from slipstream.runtime.decode.streams import AsyncStream, Stream
from tests.support.fakes import make_codec

REQUEST = Request(num_draft_tokens=0, max_new_tokens=8, stop_token_ids=(), stop_strings=())


def begun(deliver: Callable[[Event], None]) -> Generation:
    """A generation that has delivered three chunks and its result."""
    generation = Generation([5], REQUEST, make_codec(), 64, deliver=deliver)
    for _ in range(3):
        deliver(Chunk("a", [5]))
    generation.end("length")
    deliver(generation.make_result("", ()))
    return generation


@pytest.mark.parametrize(("has_chunks", "expected"), [(True, 3), (False, 0)])
def test_chunks_come_to_those_who_want_them(has_chunks: bool, expected: int) -> None:
    """Waking a thread in each round costs the engine more than all else that it does in Python."""
    stream = Stream(begun, has_chunks=has_chunks)
    assert len(list(stream)) == expected
    assert stream.result.finish_reason == "length"


@pytest.mark.parametrize(("has_chunks", "expected"), [(True, 3), (False, 0)])
def test_chunks_come_to_an_event_loop_where_they_are_wanted(has_chunks: bool, expected: int) -> None:
    async def read() -> int:
        async def start(deliver: Callable[[Event], None]) -> Generation:
            return begun(deliver)

        return len([chunk async for chunk in AsyncStream(start, has_chunks=has_chunks)])

    assert asyncio.run(read()) == expected


def test_a_failure_reaches_who_waits_for_the_result_alone() -> None:
    def failing(deliver: Callable[[Event], None]) -> Generation:
        generation = begun(lambda _: None)
        deliver(RuntimeError("lost"))
        return generation

    with pytest.raises(RuntimeError, match="lost"):
        Stream(failing, has_chunks=False).finish()
