"""What a pair has to give back, whatever thread asks for it and whatever fails on the way."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress

from slipstream.runtime.errors import RequestError

from .contract import Backend, Engine


class Resources:
    """An engine and the backends made of it, which are closed first. Apart from the pair, which may be gone by then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._backends: list[Backend] = []
        self._changing = threading.RLock()  # no backend is made while all are closed
        self._is_closed = False

    def check_open(self) -> None:
        """Raises RequestError once close was called."""
        if self._is_closed:
            raise RequestError("the pair is closed: load the bundle again")

    def new_backend(self, num_slots: int = 1) -> Backend:
        """A backend of several slots. Raises RequestError when closed, and what the engine raises."""
        with self._changing:
            self.check_open()
            backend = self._engine.new_backend(num_slots)
            self._backends.append(backend)
            return backend

    def close_backend(self, backend: Backend) -> None:
        """Close one backend, after the call that it is in.

        Takes no lock: a collection may run this on a thread that ``close`` waits for.
        """
        backend.close()
        with suppress(ValueError):  # closed before
            self._backends.remove(backend)

    def close(self) -> None:
        """Close every backend, the last one first, then the engine; all of them, whatever fails."""
        with self._changing, ExitStack() as stack:
            if not self._is_closed:
                self._is_closed = True
                stack.callback(self._engine.close)
                for backend in list(self._backends):
                    stack.callback(self.close_backend, backend)
