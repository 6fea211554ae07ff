"""The thread that drives a pair's scheduler: begun by the first generation, ended by close."""

from __future__ import annotations

import threading

from slipstream.runtime.backend.contract import Engine
from slipstream.runtime.backend.resources import Resources

from .draft_policy import DraftPolicy
from .generation import Generation
from .scheduler import Scheduler


class EngineThread:
    """Apart from the pair, which may be gone by then: the thread must not keep it alive."""

    def __init__(self, resources: Resources, engine: Engine, num_slots: int) -> None:
        self._resources, self._engine, self._num_slots = resources, engine, num_slots
        self._starting = threading.RLock()
        self._scheduler: Scheduler | None = None
        self._thread: threading.Thread | None = None
        self.max_length = engine.max_length

    def submit(self, generation: Generation) -> None:
        """Raises BusyError, RequestError, and BackendError where there is no memory for the slots."""
        with self._starting:
            if self._scheduler is None:
                self._scheduler = self._start()
        self._scheduler.submit(generation)

    def _start(self) -> Scheduler:
        backend, engine = self._resources.new_backend(self._num_slots), self._engine
        policy = DraftPolicy(engine.draft_counts, engine.num_draft_tokens)
        scheduler = Scheduler(backend, policy, name=engine.name, notes=lambda: (*engine.notes, *backend.notes))
        # a daemon: the interpreter waits for other threads before it calls what would end this one
        self._thread = threading.Thread(target=scheduler.run, name="slipstream", daemon=True)
        self._thread.start()
        return scheduler

    def close(self, *, drain: bool = False) -> None:
        """End the thread, then give everything back; whoever is second waits for the first."""
        if self._scheduler is not None:
            self._scheduler.close(drain=drain)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._resources.close()
