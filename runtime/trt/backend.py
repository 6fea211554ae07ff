"""The pair on TensorRT: a whole round is one captured CUDA graph.

For each bucket of rows held there are two graphs, one for each of the two states; each has execution contexts of its
own, whose shapes and addresses are set once. The draft engine's KV inputs are the target's donor buffers, its tokens
are written where the target reads them, and only what was decided is copied to the host. Compaction runs between
rounds, outside the graphs. Where per-layer embeddings are looked up on the host, draft and verify are a graph each, and
between them the drafted ids go to the host and K + 1 rows of the table to the device.

Never run on hardware here; ``tests/simulator/machine.py`` stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.runtime.backend.calls import PrefillCall, RoundCall
from slipstream.runtime.backend.choosing import Choice
from slipstream.runtime.backend.cuda import CapturedGraph, CudaMemory, Stream
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.backend.tensors import Mirror, front
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import capacity_bucket
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.graph_io import EMBEDDING_INPUT, ROWS_INPUT
from slipstream.runtime.errors import BackendError, RequestError

from .engine import CudaEngine, LoadedEngines, check_names


class ExecutionContext:
    """An execution context of one profile on one stream: shapes and addresses, then enqueue."""

    def __init__(self, engine: CudaEngine, profile: str, config: Any, stream: int, workspace: Any) -> None:
        self._engine = engine
        self._stream = stream
        self._context: Any = engine.context(profile, config)
        self._context.nvtx_verbosity = engine.trt.module.ProfilingVerbosity.NONE  # the engine's own would cost time
        self._check(self._context.set_optimization_profile_async(engine.profile_index(profile), stream), profile)
        self._context.set_device_memory(workspace.address, workspace.shape[0])
        self._tensors: Mapping[str, Any] = {}

    def bind(self, tensors: Mapping[str, Any]) -> None:
        """Shapes of all inputs, addresses of everything; what is set already is left alone."""
        check_names(self._engine, tensors)
        for name in (*self._engine.inputs, *self._engine.outputs):
            tensor, before = tensors[name], self._tensors.get(name)
            if name in self._engine.inputs and (before is None or before.shape != tensor.shape):
                self._check(self._context.set_input_shape(name, tensor.shape), name)
            if before is None or before.address != tensor.address:
                self._check(self._context.set_tensor_address(name, tensor.address), name)
        self._tensors = dict(tensors)
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise BackendError(f"{self._engine.path}: TensorRT can't infer its shapes: {error}") from error
        if missing:
            raise BackendError(f"{self._engine.path}: TensorRT misses the shapes of {', '.join(missing)}")

    def enqueue(self) -> None:
        self._check(self._context.execute_async_v3(self._stream), "execution")

    def can_be_captured(self) -> bool:
        """Whether CUDA graphs may hold this context's work; TensorRT proper has no such doubt."""
        return not hasattr(self._context, "is_stream_capturable") or self._context.is_stream_capturable(self._stream)

    def close(self) -> None:
        self._context = None
        self._tensors = {}

    def _check(self, is_good: bool, what: str) -> None:
        if not is_good:
            raise BackendError(f"{self._engine.path}: TensorRT refused {what}: {self._engine.trt.last_errors()}")


class _Captured:
    """Contexts in order and the download of a result, for one bucket and state; captured after the first run."""

    def __init__(self, contexts: Sequence[ExecutionContext], result: Mirror) -> None:
        self._contexts = contexts
        self._result = result
        self._graph: CapturedGraph | None = None
        self._has_run = False
        self.is_capturable = True

    def run(self, capture: Callable[[Callable[[], None]], CapturedGraph]) -> bool:
        """Whether the captured graph ran. capture: turns what a function enqueues into a graph.

        TensorRT settles its buffers in the first run, which therefore is not captured.
        """
        if self._graph is None and self._has_run and self.is_capturable:
            self._graph = capture(self._enqueue)
        if self._graph is not None:
            self._graph.launch()
            return True
        self._enqueue()
        self._has_run = True
        self.is_capturable = all(context.can_be_captured() for context in self._contexts)
        return False

    def _enqueue(self) -> None:
        for context in self._contexts:
            context.enqueue()
        self._result.download()

    def close(self) -> None:
        with ExitStack() as stack:  # from the last to the first, and to the end whatever fails
            for context in self._contexts:
                stack.callback(context.close)
            if self._graph is not None:
                stack.callback(self._graph.close)


class TensorRTEngine(LoadedEngines):
    """A bundle's engines, loaded; several backends may share them, each with a stream and memory of its own."""

    def new_backend(self, num_slots: int = 1) -> TensorRTBackend:
        self.cuda.activate()
        with ExitStack() as held:
            stream = Stream(self.cuda)
            held.callback(stream.close)
            memory = CudaMemory(stream)
            held.callback(memory.close)
            backend = TensorRTBackend(self, memory, num_slots=num_slots)
            held.pop_all()
        return backend


class TensorRTBackend(PairBackend):
    """Backend over a pair of TensorRT engines. See ``runtime/backend/contract.py`` for the contract."""

    memory: CudaMemory

    def __init__(self, engines: LoadedEngines, memory: CudaMemory, *, num_slots: int = 1) -> None:
        settings, record = engines.record.settings, engines.record
        if not 1 <= num_slots <= settings.max_batch:
            raise RequestError(
                f"{num_slots} slots do not fit: the engines were built with --max-batch {settings.max_batch}"
            )
        super().__init__(
            engines.manifest,
            memory,
            num_slots=num_slots,
            max_length=settings.max_length,
            prefill_chunk=record.target.profiles["prefill"]["num_draft_tokens"][2] + 1,
            max_draft_tokens=settings.num_draft_tokens,
            capacity=record.capacity,
            per_layer_table=engines.per_layer_table,
        )
        self._engines = engines
        self._num_steps = settings.num_draft_tokens
        workspace_bytes = max(engine.workspace_bytes for engine in engines.all)
        self._workspace = self.memory.allocate((workspace_bytes,), "uint8")
        largest = max(record.capacity.values())
        self._rows = self.memory.allocate((largest,), "int64")
        self.memory.write(self._rows, np.arange(largest))
        self._unread = self._allocate_unread()
        self._prefill_contexts: dict[str, ExecutionContext] = {}  # by profile
        # by K, slots, bucket, which state is read, and the graph that chooses
        self._captured: dict[tuple[int, int, int, int, str], list[_Captured]] = {}
        self.bucket = 0  # rows that the last call attended to at most
        self.last_is_captured = False  # whether the last round was a captured graph

    def _close(self) -> None:
        with ExitStack() as stack:  # from the last to the first, and to the end whatever fails
            stack.callback(self.memory.stream.close)
            stack.callback(self.memory.close)
            for context in self._prefill_contexts.values():
                stack.callback(context.close)
            for captured in chain(*self._captured.values()):
                stack.callback(captured.close)
            stack.callback(self.memory.synchronize)
        self._captured.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        if all(captured.is_capturable for captured in chain(*self._captured.values())):
            return ()
        return ("TensorRT does not let this round be captured: its graphs are launched one by one",)

    def round(self, num_draft_tokens: int, commit_limit: Sequence[int]) -> Any:
        """As the contract says; fewer drafts than the engine unrolls are drafted all the same and bounded."""
        return super().round(self._num_steps if num_draft_tokens else 0, commit_limit)

    @property
    def state(self) -> dict[str, Any]:
        """What the next round reads; for verification."""
        return self._states[self._current].tensors

    def set_state(self, values: Mapping[str, Array]) -> None:
        """Replace what the next round reads, as if a prefill had left it; for verification."""
        for name, tensor in self.state.items():
            self.memory.write(tensor, values[name])
        self._pending[:] = values["token"]
        self._is_ready, self._is_stale = [True] * self.num_slots, [False] * self.num_slots

    def last_decision(self) -> tuple[Array, Array]:
        """The target's own tokens [B, R] and the accepted drafts [B] of the last call; for verification."""
        assert self._last is not None, "there was no call"
        arrays = self._last.decision.arrays
        return arrays["own_token"].copy(), arrays["num_accepted"].copy()

    def _prepare(self, slots: Sequence[int], num_rows: int) -> None:
        super()._prepare(slots, num_rows)
        rows = max(self.cache.length[slot] for slot in slots) + num_rows
        self.bucket = capacity_bucket(rows, max(self.cache.capacity.values()))

    def _run_prefill(self, call: PrefillCall, slot: int, choice: Choice) -> None:
        tensors = {**self._prefill_tensors(call, slot), **self._fixed()}
        choosing = self._engines.choosing[choice.graph]
        for engine, profile in ((self._engines.target, "prefill"), (choosing, choice.graph)):
            if profile not in self._prefill_contexts:
                self._prefill_contexts[profile] = self._context(engine, profile)
            self._prefill_contexts[profile].bind(tensors)
            self._prefill_contexts[profile].enqueue()
        call.decision.download()

    def _run_round(self, call: RoundCall, choice: Choice) -> None:
        start = perf_counter()
        key = call.num_draft_tokens, call.batch, self.bucket, self._current, choice.graph
        if key not in self._captured:
            self._captured[key] = self._bind_round(call, choice.graph)
        *drafting, verifying = self._captured[key]
        for captured in drafting:
            captured.run(self.memory.stream.capture)
        if call.per_layer is not None:
            self._look_up_round(call)
        self.last_is_captured = verifying.run(self.memory.stream.capture)
        self.memory.synchronize()
        self.verify_seconds += perf_counter() - start

    def _bind_round(self, call: RoundCall, choose: graph_io.ChooseName) -> list[_Captured]:
        """One graph, or two where the host has something to do between draft and verify."""
        drafting = []
        if call.num_draft_tokens:
            draft = self._context(self._engines.assistant, "draft")
            draft.bind({**self._draft_tensors(call), **self._fixed(), **self._draft_rest(call)})
            drafting.append(draft)
        tensors = {**self._round_tensors(call), **self._fixed()}
        engines = {"verify": self._engines.target, choose: self._engines.choosing[choose]}
        contexts = [self._context(engine, profile) for profile, engine in engines.items()]
        for context in contexts:
            context.bind(tensors)
        if drafting and call.per_layer is not None:
            return [_Captured(drafting, call.drafted), _Captured(contexts, call.decision)]
        return [_Captured([*drafting, *contexts], call.decision)]

    def _context(self, engine: CudaEngine, profile: str) -> ExecutionContext:
        return ExecutionContext(
            engine, profile, self._engines.configs[profile], self.memory.stream.handle, self._workspace
        )

    def _fixed(self) -> dict[str, Any]:
        """What engines need beside the graphs' own inputs: the bucket and the embedding."""
        rows = {ROWS_INPUT[kind]: min(self.bucket, capacity) for kind, capacity in self.cache.capacity.items()}
        return {
            EMBEDDING_INPUT: self._engines.embedding,
            **{name: front(self._rows, (num_rows,)) for name, num_rows in rows.items()},
        }

    def _draft_rest(self, call: RoundCall) -> dict[str, Any]:
        """An empty draft to begin with, the draft where the target reads it, and what nobody reads."""
        sizes = {**call.sizes, "num_steps": self._num_steps, "num_drafted": 0}
        rest = {b.name: front(self._unread[b.name], b.sized(sizes)) for b in _DRAFT_REST}
        return {**rest, "next_draft": call.draft}

    def _allocate_unread(self) -> dict[str, Any]:
        """Inputs without content, and outputs that go nowhere but that TensorRT wants a place for."""
        sizes = {**self._sizes, "num_steps": self._num_steps, "num_drafted": 0}
        return self.memory.allocate_all(graph_io.specs(_DRAFT_REST, sizes, self.manifest.dtype))


# of the assistant: an empty draft, and what nobody reads
_DRAFT_REST = (
    *graph_io.placed(graph_io.inputs("assistant"), "draft"),
    *graph_io.placed(graph_io.outputs("assistant"), "graph", "step"),
)
