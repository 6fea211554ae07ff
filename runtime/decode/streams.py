"""Chunks of a generation for those who read them, on a thread or in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from queue import Empty, SimpleQueue

from slipstream.runtime.errors import RequestError

from .generation import Event, Generation
from .results import Chunk, Result

Start = Callable[[Callable[[Event], None]], Generation]  # submits a generation that delivers its events to a function


class Stream(Iterator[Chunk]):
    """Chunks of one running generation. Close it, or leave its ``with`` block, to stop early.

    The engine does not wait for its reader: chunks that were not read yet are kept, and ``result`` has everything that
    was committed. ``cancel`` may be called from any thread; ``result`` is there once the generation has ended.
    """

    def __init__(self, start: Start, *, has_chunks: bool = True) -> None:
        """has_chunks: False for who waits for the result alone: waking a thread costs the engine's 0.1 ms a round."""
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._generation = start(self._events.put if has_chunks else _last_only(self._events.put))
        self._has_ended = False  # whether the last event was read

    @property
    def generation(self) -> Generation:
        return self._generation

    def __next__(self) -> Chunk:
        if self._has_ended:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:  # an interrupt
            self.close()
            raise
        if isinstance(event, Chunk):
            return event
        self._has_ended = True
        if isinstance(event, Exception):
            raise event
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_generation"):
            self._generation.cancel()

    def finish(self) -> Result:
        """The result, once all chunks have come."""
        with self:
            for _ in self:
                pass
        return self.result

    def cancel(self) -> None:
        """Ask the generation to end after the call it is in."""
        self._generation.cancel()

    def close(self) -> None:
        """End, and wait until it has; what was committed so far is the result."""
        self._generation.cancel()
        while not self._has_ended:
            try:
                self._has_ended = not isinstance(self._events.get(timeout=0.05), Chunk)
            except Empty:
                self._has_ended = self._generation.result is not None

    @property
    def result(self) -> Result:
        """Raises RequestError while the generation runs."""
        return _result_of(self._generation)


class AsyncStream(AsyncIterator[Chunk]):
    """As Stream, in an event loop: the generation begins with the first chunk that is asked for.

    It is cancelled when the task that reads is, and by ``aclose``.
    """

    def __init__(
        self, start: Callable[[Callable[[Event], None]], Awaitable[Generation]], *, has_chunks: bool = True
    ) -> None:
        """has_chunks: as for Stream."""
        self._start, self._has_chunks = start, has_chunks
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._generation: Generation | None = None
        self._has_ended = False

    async def __anext__(self) -> Chunk:
        if self._has_ended:
            raise StopAsyncIteration
        try:
            if self._generation is None:
                loop, put = asyncio.get_running_loop(), self._events.put_nowait

                def deliver(event: Event) -> None:
                    loop.call_soon_threadsafe(put, event)

                self._generation = await self._start(deliver if self._has_chunks else _last_only(deliver))
            event = await self._events.get()
        except BaseException:
            self.cancel()
            raise
        if isinstance(event, Chunk):
            return event
        self._has_ended = True
        if isinstance(event, Exception):
            raise event
        raise StopAsyncIteration

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ask the generation to end after the call it is in; any thread may."""
        if self._generation is not None:
            self._generation.cancel()

    async def finish(self) -> Result:
        """The result, once all chunks have come."""
        async for _ in self:
            pass
        return self.result

    async def aclose(self) -> None:
        """End, and wait until it has."""
        self.cancel()
        while self._generation is not None and not self._has_ended:
            self._has_ended = not isinstance(await self._events.get(), Chunk)

    @property
    def result(self) -> Result:
        """Raises RequestError while the generation runs, or when it never began."""
        return _result_of(self._generation)


def _last_only(deliver: Callable[[Event], None]) -> Callable[[Event], None]:
    def deliver_last(event: Event) -> None:
        if not isinstance(event, Chunk):
            deliver(event)

    return deliver_last


def _result_of(generation: Generation | None) -> Result:
    if generation is None or generation.result is None:
        raise RequestError("the generation has no result: it has not ended, or it never began")
    return generation.result
