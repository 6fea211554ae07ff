"""The pair of graphs on ONNX Runtime, bound once and fed without copies.

Every input and output is bound by address, in host memory for the CPU provider and in device
memory for CUDA's. The donor KV buffers of the target are the very inputs of the assistant;
drafts and accepted state go from graph to graph through buffers that both name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import onnxruntime as ort

from slipstream.runtime.backend.calls import Call, PrefillCall, RoundCall
from slipstream.runtime.backend.choosing import Choice
from slipstream.runtime.backend.cuda import Cuda, CudaMemory, Stream
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.backend.per_layer_table import open_per_layer_table
from slipstream.runtime.backend.tensors import Memory, front, of_slots
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import MAX_DRAFT_TOKENS, PREFILL_CHUNK, cpu_base_step
from slipstream.runtime.bundle.dtypes import NUMPY
from slipstream.runtime.bundle.engine_record import check_runs
from slipstream.runtime.bundle.manifest import Bundle, check_links
from slipstream.runtime.bundle.onnxruntime_record import INT8_ACTIVATIONS, optimized_folder
from slipstream.runtime.errors import BackendError
from slipstream.runtime.sampling import files

from .probes import CUDA_PROVIDER_ADVICE, LIBRARY_ADVICE, cpu_notes, missing_library, open_graphs
from .row_counts import RowCounts, rounded_products
from .session import CUDA_PROVIDER, open_session, run_bound, session_options

Provider = Literal["cpu", "cuda"]
_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16, which bindings take where numpy has no type


class OnnxRuntimeEngine:
    """The bundle's graphs as ONNX Runtime sessions; several backends may share them.

    On the CPU these are the graphs that ``slipstream build --engine onnxruntime`` wrote, where it did.
    """

    def __init__(
        self, bundle: Bundle, num_threads: int, provider: Provider = "cpu", *, accuracy_level: str = INT8_ACTIVATIONS
    ) -> None:
        """num_threads: within an operator on the CPU; 0 takes every usable core.
        accuracy_level: what quantized matrices are multiplied with on the CPU; INT8_ACTIVATIONS is the fast way.

        Raises BackendError.
        """
        self.manifest = bundle.manifest
        check_runs(self.manifest, "onnxruntime" if provider == "cpu" else "onnxruntime-cuda")
        self._accuracy_level = accuracy_level
        self.stream: Stream | None = None
        self.notes: tuple[str, ...] = ()
        if provider == "cpu" and self.manifest.weights.format == "fp8":
            self.notes = ("FP8 weights are dequantized in every call on the CPU, which is slow: build engines",)
        check_links(bundle)
        record = open_graphs(bundle) if provider == "cpu" else None
        is_rounded = provider == "cpu" and accuracy_level == INT8_ACTIVATIONS
        products = rounded_products(self.manifest, int8_activations=is_rounded) if provider == "cpu" else ()
        self.row_counts = RowCounts({} if record is None else record.rows_run, products)
        rewritten = {} if record is None else {g.graph: optimized_folder(bundle) / g.file for g in record.graphs}
        self._sessions: dict[str, ort.InferenceSession] = {}
        try:
            if provider == "cuda":
                self.stream = _cuda_stream()
            for file in (self.manifest.target_graph, *(graph.file for graph in self.manifest.draft_graphs)):
                path = rewritten.get(file, bundle.path(file))
                self._sessions[file] = self._session(path, num_threads, bundle.folder)
            self.per_layer_table = open_per_layer_table(bundle)
        except BaseException:
            self.close()
            raise
        self.name = f"onnxruntime {ort.__version__} {provider}, {'rewritten' if record else 'portable'} graphs"
        self.max_length = self.manifest.max_length
        self.num_draft_tokens = self.manifest.generation.num_draft_tokens
        self.draft_counts: Sequence[int] = range(MAX_DRAFT_TOKENS + 1)
        self.has_whole_rows = True

    @property
    def target(self) -> ort.InferenceSession:
        return self._sessions[self.manifest.target_graph]

    def choose(self, graph: graph_io.ChooseName) -> ort.InferenceSession:
        """Chooses the target's tokens from its logits, and accepts drafts that equal them."""
        return self._sampling_session(files.choose_path(graph, self.manifest.dtype))

    @property
    def draw(self) -> ort.InferenceSession:
        """Draws a draft from the candidates of an assistant's step."""
        return self._sampling_session(files.DRAW)

    @property
    def drafts(self) -> dict[int, ort.InferenceSession]:
        """By number of steps."""
        return {graph.num_steps: self._sessions[graph.file] for graph in self.manifest.draft_graphs}

    def new_backend(self, num_slots: int = 1) -> OnnxRuntimeBackend:
        memory = self.memory()
        memory.activate()
        try:
            return OnnxRuntimeBackend(self, memory, num_slots=num_slots)
        except BaseException:
            memory.close()
            raise

    def close(self) -> None:
        """Close backends first."""
        self._sessions.clear()
        self.per_layer_table = None
        if self.stream is not None:
            self.stream.cuda.activate()
            self.stream.close()
            self.stream = None

    def memory(self) -> Memory:
        return Memory() if self.stream is None else CudaMemory(self.stream)

    def _sampling_session(self, path: Path) -> ort.InferenceSession:
        """Opened at its first use: most bundles are run greedily, on machines where half a MiB counts."""
        if path.name not in self._sessions:
            self._sessions[path.name] = self._session(path, 1)
        return self._sessions[path.name]

    def _session(self, path: Path, num_threads: int, weights: Path | None = None) -> ort.InferenceSession:
        """weights: the folder where they are."""
        # CUDA's kernels have no accuracy levels
        level = self._accuracy_level if self.stream is None else None
        options = session_options(weights, num_threads=num_threads, accuracy_level=level)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        # the target's threads would go on spinning on the cores that the assistant's need next, and the other way round
        options.add_session_config_entry("session.force_spinning_stop", "1")
        model = path if weights in (None, path.parent) else path.read_bytes()
        if self.stream is None:
            return open_session(model, options, path)
        device, stream = str(self.stream.cuda.device), str(self.stream.handle)
        # TF32 keeps ten bits of a float32's mantissa
        settings = {"device_id": device, "user_compute_stream": stream, "use_tf32": "0"}
        session = open_session(model, options, path, provider=CUDA_PROVIDER, provider_options=settings)
        if session.get_providers()[0] != CUDA_PROVIDER:
            library = missing_library()
            found = f"ONNX Runtime's CUDA provider did not load: {library or 'its libraries are there'}"
            raise BackendError(found, LIBRARY_ADVICE if library else "slipstream doctor shows GPU and driver")
        self.notes += cpu_notes(session, path.name)
        return session


def _cuda_stream() -> Stream:
    if CUDA_PROVIDER not in ort.get_available_providers():
        raise BackendError(
            f"onnxruntime {ort.__version__} has no CUDA provider",
            f"{CUDA_PROVIDER_ADVICE}; or run on the CPU with --engine onnxruntime",
        )
    return Stream(Cuda())


class _Call:
    """A graph with its bindings for one set of shapes and addresses."""

    def __init__(self, session: ort.InferenceSession, tensors: Mapping[str, Any], device: str, index: int) -> None:
        """tensors: of every input, and of the outputs that are wanted. device, index: where they all are."""
        self._session = session
        self._binding = session.io_binding()
        self._tensors = tensors  # keeps the bound memory alive
        self._options: ort.RunOptions | None = None  # asking it for an entry that it lacks costs 40 microseconds a run
        if device == "cuda":
            self._options = ort.RunOptions()
            self._options.add_run_config_entry("gpu_graph_id", "-1")  # no graph is captured
            # graphs of a round follow each other on one stream without the host
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        inputs = [(node.name, self._binding.bind_input) for node in session.get_inputs()]
        outputs = [(node.name, self._binding.bind_output) for node in session.get_outputs() if node.name in tensors]
        for name, bind in inputs + outputs:
            tensor = tensors[name]
            kind = _BFLOAT16 if tensor.dtype == "bfloat16" else NUMPY[tensor.dtype]
            bind(name, device, index, kind, tensor.shape, tensor.address)

    def run(self) -> None:
        run_bound(self._session, self._binding, self._options)


class OnnxRuntimeBackend(PairBackend):
    """Backend over ONNX Runtime. See ``runtime/backend/contract.py`` for the contract."""

    def __init__(
        self,
        graphs: OnnxRuntimeEngine,
        memory: Memory | None = None,
        *,
        num_slots: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
    ) -> None:
        manifest = graphs.manifest
        super().__init__(
            manifest,
            memory or graphs.memory(),
            num_slots=num_slots,
            max_length=manifest.max_length,
            prefill_chunk=prefill_chunk,
            max_draft_tokens=max_draft_tokens,
            base_step=cpu_base_step(manifest) if graphs.stream is None else 1,
            per_layer_table=graphs.per_layer_table,
        )
        self._graphs = graphs
        # of draft steps after the first graph's: what one of them gives, the next one reads
        step = graph_io.specs(graph_io.placed(graph_io.outputs("assistant"), "step"), self._sizes, manifest.dtype)
        self._step_hidden = [tensor for _ in range(2) for tensor in self.memory.allocate_all(step).values()]
        self._partial_drafts: dict[tuple[int, int], Any] = {}  # by slots and tokens
        # by number of rows and slot
        self._bound_prefills: dict[tuple[int, int, Choice], list[_Call]] = {}
        # by K, number of slots, and which state is read
        self._bound_rounds: dict[tuple[int, int, int, Choice], tuple[list[_Call], list[_Call]]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        calls = *self._rounds.values(), *self._prefills.values()
        if all(self._graphs.row_counts.are_alike(call.num_rows, call.batch) for call in calls):
            return ()
        return ("this CPU rounds differently with the number of rows: drafted text may leave plain text",)

    def _rows_run(self, num_rows: int, batch: int) -> int:
        return self._graphs.row_counts.run(num_rows, batch, max(self.prefill_chunk, self.max_draft_tokens + 1))

    def _close(self) -> None:
        self._release_bindings()
        self.memory.close()

    def _run_prefill(self, call: PrefillCall, slot: int, choice: Choice) -> None:
        key = call.num_rows, slot, choice
        if key not in self._bound_prefills:
            tensors = self._prefill_tensors(call, slot)
            self._bound_prefills[key] = self._bind_target(call, tensors, choice, slot)
        if choice.is_masked:
            call.fill_masks([self._choosing.masks[slot]], [[]])
        for graph in self._bound_prefills[key]:
            graph.run()
        self._download(call, choice)

    def _run_round(self, call: RoundCall, choice: Choice) -> None:
        drafts, targets = self._bound_round(call, choice)
        start = perf_counter()
        for draft in drafts:
            draft.run()
        if drafts and not self._drafts_in_place(call):
            drafted = self._partial_drafts[call.batch, call.num_draft_tokens]
            call.drafted.arrays["draft"][:, : call.num_draft_tokens] = drafted.array
        is_host = self.memory.device == "cpu"  # elsewhere only the whole is known
        drafted_at = perf_counter() if is_host else start
        if drafts and (call.per_layer is not None or choice.is_masked):
            call.drafted.download()
        if call.per_layer is not None:
            self._look_up_round(call)
        if choice.is_masked:
            self.memory.synchronize()
            drafted_ids = call.drafted.arrays["draft"][:, : call.num_draft_tokens].tolist()
            call.fill_masks(self._choosing.masks[: call.batch], drafted_ids)
        looked_up = perf_counter() if is_host else start
        for target in targets:
            target.run()
        self._download(call, choice)
        self.memory.synchronize()
        self.draft_seconds += drafted_at - start
        self.verify_seconds += perf_counter() - looked_up

    @staticmethod
    def _download(call: Call, choice: Choice) -> None:
        call.decision.download()
        if choice.is_processed:
            call.logprobs.download()

    def _release_bindings(self) -> None:
        self._bound_prefills.clear()
        self._bound_rounds.clear()

    def _bind(self, session: ort.InferenceSession, tensors: Mapping[str, Any]) -> _Call:
        stream = self._graphs.stream
        return _Call(session, tensors, self.memory.device, stream.cuda.device if stream else 0)

    def _bound_round(self, call: RoundCall, choice: Choice) -> tuple[list[_Call], list[_Call]]:
        key = call.num_draft_tokens, call.batch, self._current, choice
        bound = self._bound_rounds.get(key)
        if bound is None:
            drafts = self._bind_drawn_drafts(call) if choice.is_drawn else self._bind_drafts(call)
            bound = self._bound_rounds[key] = drafts, self._bind_target(call, self._round_tensors(call), choice)
        return bound

    def _bind_target(
        self, call: Call, tensors: Mapping[str, Any], choice: Choice, slot: int | None = None
    ) -> list[_Call]:
        """The target, and the graph that chooses from its logits. slot: of a prefill."""
        more = {}
        if choice.is_processed:
            more = self._whole_row_tensors(call, slot, is_masked=choice.is_masked)
        choose = self._graphs.choose(choice.graph)
        return [self._bind(self._graphs.target, tensors), self._bind(choose, {**tensors, **more})]

    def _bind_drawn_drafts(self, call: RoundCall) -> list[_Call]:
        """Single steps, and after each the graph that draws from its candidates."""
        given = graph_io.placed(graph_io.inputs("draw"), "graph")
        candidates = self.memory.allocate_all(graph_io.specs(given, call.sizes, self.manifest.dtype))
        tensors = {**self._draft_tensors(call), **candidates}
        calls: list[_Call] = []
        for step in range(call.num_draft_tokens):
            tensors["draft"] = self._partial_draft(step, call)
            next_hidden = of_slots(self._step_hidden[step % 2], call.batch)
            calls.append(self._bind(self._graphs.drafts[1], {**tensors, "next_hidden": next_hidden}))
            next_draft = self._partial_draft(step + 1, call)
            calls.append(self._bind(self._graphs.draw, {**tensors, "next_draft": next_draft}))
            tensors["hidden"] = next_hidden
        return calls

    def _bind_drafts(self, call: RoundCall) -> list[_Call]:
        """The fewest graphs that draft K tokens, each appending to what those before it drafted."""
        tensors = self._draft_tensors(call)
        calls: list[_Call] = []
        num_drafted = 0
        while num_drafted < call.num_draft_tokens:
            num_steps = max(n for n in self._graphs.drafts if n <= call.num_draft_tokens - num_drafted)
            tensors["draft"] = self._partial_draft(num_drafted, call)
            num_drafted += num_steps
            tensors["next_draft"] = self._partial_draft(num_drafted, call)
            tensors["next_hidden"] = of_slots(self._step_hidden[len(calls) % 2], call.batch)
            calls.append(self._bind(self._graphs.drafts[num_steps], dict(tensors)))
            tensors["hidden"] = tensors["next_hidden"]
        return calls

    def _drafts_in_place(self, call: RoundCall) -> bool:
        """Whether the tokens of all slots lie together where the target reads them: padding would part them."""
        return call.batch == 1 or call.num_rows == call.num_draft_tokens + 1

    def _partial_draft(self, num_drafted: int, call: RoundCall) -> Any:
        """Where the first num_drafted tokens of a draft lie; the whole one is in the target's own input if it can."""
        if num_drafted == call.num_draft_tokens and self._drafts_in_place(call):
            return front(call.draft, (call.batch, num_drafted))
        key = call.batch, num_drafted
        if key not in self._partial_drafts:
            self._partial_drafts[key] = self.memory.allocate(key, "int64")
        return self._partial_drafts[key]
