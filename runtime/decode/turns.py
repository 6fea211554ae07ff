"""Turns of threads: one at a time, with a time limit, cancellation and an end for those that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from slipstream.runtime.errors import BusyError, RequestError

_THREAD = threading.local()
_WAIT_SECONDS = 0.05  # between two looks at whether a wait was cancelled


class Turns:
    """Whose turn it is to generate with a pair.

    check_open: called before and while a thread waits; raises when there will be no more turns.
    """

    def __init__(self, check_open: Callable[[], None]) -> None:
        self._check_open = check_open
        self._changed = threading.Condition()
        self._holder: object | None = None

    def take(self, timeout: float | None, cancelled: threading.Event | None) -> None:
        """Wait until no thread has the turn, and take it.

        timeout: seconds to wait at most. cancelled: ends the wait when it is set.
        Raises BusyError where the turn did not come, or the calling thread has it, and RequestError for arguments
        that are none.
        """
        if timeout is not None and (type(timeout) not in (int, float) or not timeout >= 0):
            raise RequestError(f"timeout is {timeout!r}; seconds, 0 or more, are expected")
        if cancelled is not None and not isinstance(cancelled, threading.Event):
            raise RequestError(f"cancelled is {cancelled!r}; a threading.Event is expected")
        deadline = None if timeout is None else monotonic() + timeout
        with self._changed:
            self._check_open()
            while self._holder is not None:
                if self._holder is _this_thread():
                    raise BusyError("this thread has a stream of the pair open: close it, or use a session for each")
                if cancelled is not None and cancelled.is_set():
                    raise BusyError("the wait for other generations of the pair was cancelled")
                if deadline is not None and monotonic() >= deadline:
                    raise BusyError(f"other generations of the pair did not end within {timeout} s: use a session")
                self._changed.wait(_WAIT_SECONDS)
                self._check_open()
            self._holder = _this_thread()

    def leave(self) -> None:
        """Give the turn to the next; any thread may."""
        with self._changed:
            self._holder = None
            self._changed.notify()


def _this_thread() -> object:
    """The calling thread as an object of its own; the system gives the numbers of ended threads to new ones."""
    if not hasattr(_THREAD, "itself"):
        _THREAD.itself = object()
    return _THREAD.itself
