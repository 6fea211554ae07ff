"""The pair of graphs on ONNX Runtime, bound once and fed without copies.

Every input and output is bound by address. The donor KV buffers of the target are the very
inputs of the assistant; drafts and accepted state go from graph to graph through buffers
that both name. State that a call reads and the next one needs is kept twice and swapped: an
output is never bound onto a live input, in-place KV aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort

from .backend import MAX_DRAFT_TOKENS, Step
from .bundle import Bundle, Manifest
from .errors import BackendError, NonFiniteError
from .graph_io import kv_name, kv_output_name
from .kv_cache import KVCache
from .memory import HostMemory, HostTensor

_ELEMENT_TYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": 16,  # onnx.TensorProto.BFLOAT16: numpy has no such type
    "int64": np.int64,
    "bool": np.bool_,
}
_PREFILL_BUCKETS = (16, 64, 256)
DEFAULT_PREFILL_CHUNK = 256


class Graphs:
    """The bundle's graphs as ONNX Runtime sessions; several backends may share them."""

    def __init__(self, bundle: Bundle, num_threads: int) -> None:
        """num_threads: within an operator; 0 lets ONNX Runtime take every core. Raises BackendError."""
        self.manifest = bundle.manifest
        if self.manifest.dtype == "bfloat16":
            raise BackendError(
                "this bundle is bfloat16, which ONNX Runtime's CPU provider can't multiply: "
                "export with --dtype float32 for the CPU"
            )
        self.target = _session(bundle.path(self.manifest.target_graph), num_threads)
        self.drafts = {
            graph.num_steps: _session(bundle.path(graph.file), num_threads) for graph in self.manifest.draft_graphs
        }


def _session(path: Path, num_threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has one class per status code and no common base
        raise BackendError(f"ONNX Runtime {ort.__version__} can't load {path}: {error}") from error


class _State:
    """What a round hands to the next one."""

    def __init__(self, batch: int, manifest: Manifest) -> None:
        self.token = HostTensor((batch, 1), "int64")
        self.hidden = HostTensor((batch, 1, manifest.hidden_size), manifest.dtype)
        self.past_length = HostTensor((batch,), "int64")
        self.position = HostTensor((batch,), "int64")


class _Call:
    """A graph with its bindings for one set of shapes and addresses."""

    def __init__(self, session: ort.InferenceSession, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._tensors = (inputs, outputs)  # keeps the bound memory alive
        for name, tensor in inputs.items():
            self._binding.bind_input(name, "cpu", 0, _ELEMENT_TYPES[tensor.dtype], tensor.shape, tensor.address)
        for name, tensor in outputs.items():
            self._binding.bind_output(name, "cpu", 0, _ELEMENT_TYPES[tensor.dtype], tensor.shape, tensor.address)

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # see _session
            raise BackendError(f"ONNX Runtime failed while running a graph: {error}") from error


class _TargetCall:
    """The target at one number of rows: its own inputs and outputs beside the shared state."""

    def __init__(self, batch: int, num_rows: int, num_scored: int) -> None:
        self.draft = HostTensor((batch, num_rows - 1), "int64")
        self.scored_rows = HostTensor((batch, num_scored), "int64")
        self.scored_rows.array[:] = np.arange(num_scored)
        self.draft_length = HostTensor((batch,), "int64")
        self.own_token = HostTensor((batch, num_scored), "int64")
        self.num_accepted = HostTensor((batch,), "int64")
        self.is_finite = HostTensor((batch,), "bool")


class OnnxRuntimeBackend:
    """Backend over ONNX Runtime's CPU provider. See ``runtime/backend.py`` for the contract."""

    def __init__(
        self,
        graphs: Graphs,
        *,
        batch: int = 1,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self._graphs = graphs
        manifest = graphs.manifest
        self.batch = batch
        self.max_length = manifest.max_length
        self.prefill_chunk = prefill_chunk
        self.max_draft_tokens = max_draft_tokens
        self.cache = KVCache(
            manifest.kv,
            HostMemory(),
            batch=batch,
            window=manifest.sliding_window,
            max_length=manifest.max_length,
            prefill_chunk=prefill_chunk,
            max_draft_tokens=max_draft_tokens,
        )
        self.draft_seconds = self.verify_seconds = 0.0
        self._states = [_State(batch, manifest), _State(batch, manifest)]
        self._base = HostTensor((batch,), "int64")
        self._targets: dict[tuple[int, int], _TargetCall] = {}
        self._draft_tensors: dict[int, HostTensor] = {}
        self._step_hidden = [HostTensor((batch, 1, manifest.hidden_size), manifest.dtype) for _ in range(2)]
        self._target_calls: dict[tuple[int, int, int], _Call] = {}
        self._draft_calls: dict[tuple[int, int], list[_Call]] = {}
        self._is_ready = False  # whether the device state is that of the lengths: a prefill makes it so

    @property
    def length(self) -> Sequence[int]:
        return self.cache.length

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Step:
        if not all(1 <= len(ids) <= self.prefill_chunk for ids in tokens):
            raise ValueError(f"prefill takes 1 to {self.prefill_chunk} tokens per sequence")
        num_rows = self._bucket(max(map(len, tokens)))
        self._prepare(num_rows)
        target = self._target(num_rows, 1)
        state = self._states[0]
        for sequence, ids in enumerate(tokens):
            state.token.array[sequence, 0] = ids[0]
            target.draft.array[sequence, : len(ids) - 1] = ids[1:]
            target.draft.array[sequence, len(ids) - 1 :] = 0  # padding, above the new length
            target.scored_rows.array[sequence, 0] = len(ids) - 1
            state.past_length.array[sequence] = self.cache.length[sequence]
        target.draft_length.array[:] = 0
        self._target_call(num_rows, 1).run()
        return self._finish(target, [len(ids) for ids in tokens])

    def round(self, num_draft_tokens: int, draft_length: Sequence[int]) -> Step:
        if not self._is_ready:
            raise ValueError("a round follows a prefill or a round; after a rewind or reset comes a prefill")
        num_rows = num_draft_tokens + 1
        self._prepare(num_rows)
        target = self._target(num_rows, num_rows)
        target.draft_length.array[:] = draft_length
        start = perf_counter()
        if num_draft_tokens:
            for call in self._bound_draft(num_draft_tokens):
                call.run()
        drafted = perf_counter()
        self._target_call(num_rows, num_rows).run()
        done = perf_counter()
        self.draft_seconds += drafted - start
        self.verify_seconds += done - drafted
        return self._finish(target, [1] * self.batch)

    def rewind(self, sequence: int, length: int) -> None:
        self.cache.rewind(sequence, length)
        self._is_ready = False

    def reset(self, sequence: int) -> None:
        self.cache.reset(sequence)
        self._is_ready = False

    def last_draft(self, num_draft_tokens: int) -> list[list[int]]:
        """What the last round of this K proposed, per sequence; for verification."""
        draft: list[list[int]] = self._draft(num_draft_tokens, num_draft_tokens).array.tolist()
        return draft

    def _prepare(self, num_rows: int) -> None:
        self.cache.make_room(num_rows, release=self._release_bindings)
        self._base.array[:] = self.cache.base

    def _release_bindings(self) -> None:
        self._target_calls.clear()
        self._draft_calls.clear()

    def _finish(self, target: _TargetCall, num_fed: list[int]) -> Step:
        """Advance lengths and swap the state, or drop the call when a row is not finite."""
        if not target.is_finite.array.all():
            bad = [sequence for sequence in range(self.batch) if not target.is_finite.array[sequence]]
            for sequence in range(self.batch):
                self.cache.drop_garbage(sequence)
            raise NonFiniteError(
                f"the target produced NaN or infinity in sequence {bad[0]} at positions {self.cache.length[bad[0]]} "
                f"and later; nothing of this call was kept. A {self._graphs.manifest.dtype} bundle may have "
                "overflowed: export with --dtype float32 or bfloat16"
            )
        self._states.reverse()
        self._is_ready = True
        accepted = target.num_accepted.array.tolist()
        own = target.own_token.array.tolist()
        length = self.cache.length
        for sequence, count in enumerate(accepted):
            length[sequence] += num_fed[sequence] + count
        return Step([tokens[: count + 1] for tokens, count in zip(own, accepted, strict=True)])

    def _bucket(self, num_rows: int) -> int:
        """Row counts of prefill calls are few, so that neither bindings nor the arena grow with prompts."""
        if num_rows == 1:
            return 1
        return next((b for b in _PREFILL_BUCKETS if num_rows <= b <= self.prefill_chunk), self.prefill_chunk)

    def _target(self, num_rows: int, num_scored: int) -> _TargetCall:
        key = (num_rows, num_scored)
        if key not in self._targets:
            self._targets[key] = _TargetCall(self.batch, num_rows, num_scored)
        return self._targets[key]

    def _draft(self, num_drafted: int, num_draft_tokens: int) -> HostTensor:
        """Where the first num_drafted tokens of a draft lie; the whole one is the target's own input."""
        if num_drafted == num_draft_tokens:
            return self._target(num_draft_tokens + 1, num_draft_tokens + 1).draft
        if num_drafted not in self._draft_tensors:
            self._draft_tensors[num_drafted] = HostTensor((self.batch, num_drafted), "int64")
        return self._draft_tensors[num_drafted]

    def _target_call(self, num_rows: int, num_scored: int) -> _Call:
        key = (num_rows, num_scored, id(self._states[0]))
        if key not in self._target_calls:
            target, now, following = self._target(num_rows, num_scored), *self._states
            inputs: dict[str, HostTensor] = {
                "token": now.token,
                "draft": target.draft,
                "past_length": now.past_length,
                "base": self._base,
                "scored_rows": target.scored_rows,
                "draft_length": target.draft_length,
                **self.cache.tensors,
            }
            outputs = {
                "own_token": target.own_token,
                "num_accepted": target.num_accepted,
                "is_finite": target.is_finite,
                "next_token": following.token,
                "next_hidden": following.hidden,
                "next_past_length": following.past_length,
                "next_position": following.position,
            }
            for buffer in self._graphs.manifest.kv:
                for part in ("key", "value"):
                    outputs[kv_output_name(buffer.layer, part)] = self.cache.tensors[kv_name(buffer.layer, part)]
            self._target_calls[key] = _Call(self._graphs.target, inputs, outputs)
        return self._target_calls[key]

    def _bound_draft(self, num_draft_tokens: int) -> list[_Call]:
        key = (num_draft_tokens, id(self._states[0]))
        if key not in self._draft_calls:
            self._draft_calls[key] = self._bind_draft(num_draft_tokens)
        return self._draft_calls[key]

    def _bind_draft(self, num_draft_tokens: int) -> list[_Call]:
        state, hidden, num_drafted = self._states[0], self._states[0].hidden, 0
        calls: list[_Call] = []
        while num_drafted < num_draft_tokens:
            num_steps = max(n for n in self._graphs.drafts if n <= num_draft_tokens - num_drafted)
            inputs: dict[str, HostTensor] = {
                "token": state.token,
                "draft": self._draft(num_drafted, num_draft_tokens),
                "hidden": hidden,
                "position": state.position,
                "past_length": state.past_length,
                "base": self._base,
            }
            for donor in self._graphs.manifest.donors:
                for part in ("key", "value"):
                    inputs[kv_name(donor.layer, part)] = self.cache.tensors[kv_name(donor.layer, part)]
            num_drafted += num_steps
            hidden = self._step_hidden[len(calls) % 2]
            outputs = {"next_draft": self._draft(num_drafted, num_draft_tokens), "next_hidden": hidden}
            calls.append(_Call(self._graphs.drafts[num_steps], inputs, outputs))
        return calls
