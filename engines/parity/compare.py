"""Engines against ONNX Runtime, call by call, on the GPU they run on; and the stamp that says they agreed.

Both sides get the same random KV, tokens and hidden rows: at every bucket, round the sliding window and near the
capacity, with one sequence and with the largest batch, for every row count of prefill, one plain row and a whole round,
and large values in every row that must not be seen. So no long prompt has to be computed, and every buffer holds other
data. A round runs twice, launched and as the captured graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import PREFILL_BUCKETS, capacity_bucket
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.engine_record import STAMP, Flavour, ParityStamp
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, check_hashes
from slipstream.runtime.bundle.staging import write_whole
from slipstream.runtime.errors import BackendError, NonFiniteError
from slipstream.runtime.machine.progress import Progress
from slipstream.runtime.trt.backend import TensorRTBackend, TensorRTEngine

from .call_check import CallCheck, CallChecker
from .reference_graphs import ReferenceGraph

TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}  # of the scale of what is compared
# Large and finite; in float16 a product of head size 512 must not overflow before the mask hides it.
_POISON = {"float32": 1e4, "float16": 1e2, "bfloat16": 1e4}
_ROWS_BEFORE = 64  # of the rows that a call must leave alone, so many are compared
_STATES = 2  # a round reads one and writes the other
_TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class ParityReport:
    """Every call that was compared; ``failures`` has a line for each that missed the tolerance."""

    engine: str
    tolerance: float
    calls: tuple[CallCheck, ...]

    @property
    def failures(self) -> list[str]:
        return [
            f"{check.call}, {check.rows} rows at context {check.context}, batch {check.batch}: {check.problem}"
            for check in self.calls
            if check.problem
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"passed": not self.failures, "failures": self.failures, **asdict(self)}


def compare_engines(bundle: Bundle, flavour: Flavour, progress: Progress) -> ParityReport:
    """Compare a bundle's engines for this GPU with ONNX Runtime, and stamp them when nothing missed.

    Raises BackendError or MissingExtraError when they can't run.
    """
    check_hashes(bundle)
    pair = TensorRTEngine(bundle, flavour)
    try:
        for engine in pair.record.engines:  # of which loading hashes small ones only
            if file_sha256(pair.folder / engine.file) != engine.sha256:
                raise BackendError(f"{pair.folder / engine.file} was changed since it was built. Build again")
        _write_stamp(pair.folder, None)
        checks = tuple(_Comparison(bundle, pair, progress).checks())
        report = ParityReport(pair.name, TOLERANCE[bundle.manifest.dtype], checks)
        if not report.failures:
            _write_stamp(pair.folder, _stamp(pair, report))
    finally:
        pair.close()
    return report


def _write_stamp(folder: Path, stamp: ParityStamp | None) -> None:
    """Replace the stamp, or remove it. Raises BackendError where the bundle can't be written."""
    try:
        (folder / STAMP).unlink(missing_ok=True)
        if stamp is not None:
            write_whole(folder / STAMP, stamp.to_json())
    except OSError as error:
        raise BackendError(f"the stamp can't be kept in {folder}: {error}. Make the bundle writable") from error


def _stamp(pair: TensorRTEngine, report: ParityReport) -> ParityStamp:
    return ParityStamp(
        target_sha256=pair.record.target.sha256,
        assistant_sha256=pair.record.assistant.sha256,
        engine_version=pair.trt.version,
        device=pair.cuda.name,
        driver_version=pair.cuda.driver_version,
        slipstream_version=version("slipstream"),
        reference=f"onnxruntime {ort.__version__} cpu, float32",
        largest_difference=max(check.difference for check in report.calls),
        tolerance=report.tolerance,
        num_calls=len(report.calls),
        num_tokens=sum(check.num_tokens for check in report.calls),
        near_ties=sum(check.near_ties for check in report.calls),
    )


def context_lengths(window: int, max_length: int, capacity: int, num_rows: int) -> list[int]:
    """Lengths to compare at: round the window, on both sides of every bucket's edge for num_rows, and the longest."""
    longest = max_length - num_rows - 1
    lengths = {1, window // 2, window - 1, window, window + 1, 2 * window + 3, longest}
    edge = capacity_bucket(1, capacity)
    while edge < capacity:
        lengths |= {edge - num_rows, edge - num_rows + 1}
        edge = capacity_bucket(edge + 1, capacity)
    return sorted(length for length in lengths if 1 <= length <= longest)


@dataclass(frozen=True)
class _Scene:
    """The state that engine and reference start a call from.

    lengths, bases: per sequence. kv: float32 values, rounded to the bundle's type.
    """

    lengths: list[int]
    bases: list[int]
    kv: dict[str, Array]
    token: Array
    hidden: Array


@dataclass(frozen=True)
class _Fed:
    """What a target call was fed.

    slots: it ran over. rows: that were scored, in each of them. lengths: per slot, if nothing were accepted.
    limit: of accepted drafts.
    """

    slots: Sequence[int]
    num_rows: int
    rows: Array
    draft: Array
    limit: int
    lengths: Array


class _Comparison:
    def __init__(self, bundle: Bundle, pair: TensorRTEngine, progress: Progress) -> None:
        manifest = bundle.manifest
        self._pair, self._manifest, self._progress = pair, manifest, progress
        self._k = pair.num_draft_tokens
        self._kinds = graph_io.layer_types(manifest.kv)
        self._dtype = _TYPES[manifest.dtype]
        self._tolerance, self._poison = TOLERANCE[manifest.dtype], _POISON[manifest.dtype]
        progress.start("loading the reference", 0)
        self._target = ReferenceGraph(bundle, manifest.target_graph)
        draft = next(graph.file for graph in manifest.draft_graphs if graph.num_steps == self._k)
        self._assistant = ReferenceGraph(bundle, draft)

    def checks(self) -> Iterator[CallCheck]:
        settings = self._pair.record.settings
        for batch in sorted({1, settings.max_batch}):
            backend = self._pair.new_backend(batch)
            try:
                capacity = max(backend.cache.capacity.values())
                window = self._manifest.sliding_window
                sizes = [rows for rows in PREFILL_BUCKETS if rows <= backend.prefill_chunk]
                prefills = [1, *(rows for size in sizes for rows in (size - 5, size))]  # with padding, and full
                for length in context_lengths(window, settings.max_length, capacity, self._k + 1):
                    self._progress.start(f"batch {batch}, context {length}", 0)
                    scene = self._scene(backend, length)
                    for num_rows in prefills:
                        if length + num_rows < settings.max_length:
                            yield self._check_prefill(backend, scene, num_rows)
                    for num_draft_tokens in (0, self._k):
                        for turn in range(2 * _STATES):  # each state's first round is launched, its second captured
                            limit = max(num_draft_tokens - turn, 0)
                            yield self._check_round(backend, scene, num_draft_tokens, limit)
            finally:
                backend.close()

    def _scene(self, backend: TensorRTBackend, length: int) -> _Scene:
        """Sequences of a batch have different lengths; sliding buffers begin where a compaction would leave them."""
        random = np.random.default_rng((length, backend.num_slots))
        lengths = [max(1, length - 3 * sequence) for sequence in range(backend.num_slots)]
        kept = self._manifest.sliding_window + self._k + 1
        room = backend.cache.capacity["sliding"] - backend.prefill_chunk
        bases = [0 if n <= room else n - kept for n in lengths]
        kv = {}
        for name, tensor in backend.cache.tensors.items():
            values = random.standard_normal(tensor.shape, np.float32)
            for sequence, (held, base) in enumerate(zip(lengths, bases, strict=True)):
                values[sequence, :, held - (base if self._kinds[name] == "sliding" else 0) :] = self._poison
            kv[name] = values.astype(self._dtype).astype(np.float32)
        token = random.integers(0, self._manifest.vocab_size, (backend.num_slots, 1))
        hidden = random.standard_normal((backend.num_slots, 1, self._manifest.hidden_size), np.float32)
        return _Scene(lengths, bases, kv, token, hidden.astype(self._dtype).astype(np.float32))

    def _bits(self, values: Array) -> Array:
        """Float values in the bundle's element type (bfloat16 as its bits)."""
        typed = values.astype(self._dtype)
        return typed.view(np.uint16) if self._manifest.dtype == "bfloat16" else typed

    def _floats(self, values: Array) -> Array:
        """What _bits made, as float32."""
        typed = values.view(self._dtype) if self._manifest.dtype == "bfloat16" else values
        return typed.astype(np.float32)

    def _place(self, backend: TensorRTBackend, scene: _Scene) -> None:
        for name, values in scene.kv.items():
            backend.memory.write(backend.cache.tensors[name], self._bits(values))
        backend.cache.place(scene.lengths, scene.bases)

    def _feeds(self, backend: TensorRTBackend, scene: _Scene, slots: Sequence[int]) -> dict[str, Any]:
        """The reference's inputs, whose buffers need no more rows than the engine's bucket."""
        rows = {kind: min(backend.bucket, rows) for kind, rows in backend.cache.capacity.items()}
        kv = {name: values[list(slots), :, : rows[self._kinds[name]]] for name, values in scene.kv.items()}
        lengths, bases = ([each[slot] for slot in slots] for each in (scene.lengths, scene.bases))
        return {**kv, "past_length": lengths, "base": bases}

    def _per_layer_rows(self, backend: TensorRTBackend, tokens: Array) -> dict[str, Array]:
        table = backend.per_layer_table
        return {} if table is None else {graph_io.PER_LAYER_INPUT: self._floats(table.rows(tokens))}

    def _check_prefill(self, backend: TensorRTBackend, scene: _Scene, num_rows: int) -> CallCheck:
        """Of the last slot: its buffers begin somewhere in those of all."""
        self._place(backend, scene)
        slot = backend.num_slots - 1
        random = np.random.default_rng((num_rows, *scene.lengths))
        ids = random.integers(0, self._manifest.vocab_size, (1, num_rows))
        check = CallChecker("prefill", backend.num_slots, num_rows, scene.lengths[slot], self._tolerance)
        try:
            backend.prefill(slot, ids[0].tolist())
        except NonFiniteError:
            return check.not_finite()
        scored = np.full((1, 1), num_rows - 1)
        tokens = {"token": ids[:, :1], "draft": ids[:, 1:], "scored_rows": scored}
        feeds = self._feeds(backend, scene, [slot])
        expected = self._target.run(feeds | self._per_layer_rows(backend, ids) | tokens)
        none, lengths = np.zeros((1, 0), np.int64), np.array(scene.lengths[slot:]) + num_rows
        self._check_target(backend, check, scene, expected, _Fed([slot], num_rows, scored, none, 0, lengths))
        return check.result()

    def _check_round(self, backend: TensorRTBackend, scene: _Scene, num_draft_tokens: int, limit: int) -> CallCheck:
        self._place(backend, scene)
        num_slots, lengths = backend.num_slots, np.array(scene.lengths)
        values = {
            "token": scene.token,
            "past_length": lengths,
            "position": lengths + self._manifest.draft_position_offset,
        }
        backend.set_state({**values, "hidden": self._bits(scene.hidden)})
        step = backend.round(num_draft_tokens, [limit + 1] * num_slots)
        call = "round captured" if backend.last_is_captured else "round launched"
        check = CallChecker(call, num_slots, num_draft_tokens + 1, scene.lengths[0], self._tolerance)
        if step.failed:
            return check.not_finite()
        draft = np.array(backend.last_draft(num_draft_tokens), np.int64).reshape(num_slots, num_draft_tokens)
        feeds = self._feeds(backend, scene, range(num_slots)) | {**values, "hidden": scene.hidden}
        if num_draft_tokens:
            none = np.zeros((num_slots, 0), np.int64)
            check.draft(draft, self._assistant.run(feeds | {"draft": none}))
        rows = np.tile(np.arange(num_draft_tokens + 1), (num_slots, 1))
        fed = self._per_layer_rows(backend, np.concatenate([scene.token, draft], axis=1))
        expected = self._target.run(feeds | fed | {"draft": draft, "scored_rows": rows})
        call_fed = _Fed(range(num_slots), num_draft_tokens + 1, rows, draft, limit, lengths + 1)
        self._check_target(backend, check, scene, expected, call_fed)
        return check.result()

    def _check_target(
        self, backend: TensorRTBackend, check: CallChecker, scene: _Scene, expected: dict[str, Array], fed: _Fed
    ) -> None:
        own, accepted = backend.last_decision()
        check.tokens(own, expected["logits"])
        check.logits(backend.last_logits(), expected["logits"])
        state = {name: backend.memory.read(tensor)[list(fed.slots)] for name, tensor in backend.state.items()}
        # by the engine's own tokens: the reference may accept another draft where it nearly ties
        agree = np.cumprod(own[:, :-1] == fed.draft, axis=1).sum(axis=1)
        check.exactly("accepted drafts", accepted, np.minimum(agree, fed.limit))
        check.exactly("next token", state["token"], np.take_along_axis(own, accepted[:, None], axis=1))
        check.exactly("next past_length", state["past_length"], fed.lengths + accepted)
        offset = self._manifest.draft_position_offset
        check.exactly("next position", state["position"], fed.lengths + accepted + offset)
        row = np.take_along_axis(fed.rows, accepted[:, None], axis=1)[:, :, None]
        wanted = np.take_along_axis(expected["hidden"], row, axis=1)
        check.close_to("next hidden row", self._floats(state["hidden"]), wanted)
        self._check_kv(backend, check, scene, expected, fed)

    def _check_kv(
        self, backend: TensorRTBackend, check: CallChecker, scene: _Scene, expected: dict[str, Array], fed: _Fed
    ) -> None:
        """New rows against the reference's; the last rows before them untouched."""
        for name, tensor in backend.cache.tensors.items():
            for index, slot in enumerate(fed.slots):
                start = scene.lengths[slot] - (scene.bases[slot] if self._kinds[name] == "sliding" else 0)
                first = max(start - _ROWS_BEFORE, 0)
                rows = self._floats(backend.memory.read_rows(tensor, first, start + fed.num_rows))[slot]
                new = expected[f"next_{name}"][index, :, start : start + fed.num_rows]
                check.close_to(name, rows[:, start - first :], new)
                check.exactly(f"{name} before", rows[:, : start - first], scene.kv[name][slot, :, first:start])
