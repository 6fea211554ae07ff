"""What every backend over the two graphs shares: lengths, calls, and the state that goes from round to round.

A subclass binds and runs the graphs. State that a round reads and the next one needs is kept
twice and swapped: an output is never bound onto a live input, in-place KV aside. A prefill
reads no state and always writes the first of the two.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import numpy as np

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import row_bucket
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.manifest import Manifest
from slipstream.runtime.errors import NonFiniteError, RequestError

from .contract import Sampling, Step
from .kv_cache import KVCache
from .per_layer_table import PerLayerTable
from .tensors import Memory, Mirror


class State:
    """What a round hands to the next one: tensors by the input's name."""

    def __init__(self, memory: Memory, sizes: Mapping[str, int], dtype: str) -> None:
        given = graph_io.specs(graph_io.placed(graph_io.INPUTS, "state"), sizes, dtype)
        self.tensors = memory.allocate_all(given)

    @property
    def outputs(self) -> dict[str, Any]:
        """The same tensors by the names of the target's outputs."""
        return {f"next_{name}": tensor for name, tensor in self.tensors.items()}


class Call:
    """One shape of a target call: what the host gives it, and what it decides.

    sizes: of every dimension by name. inputs: uploaded by the host.
    decision: own_token [B, R], num_accepted [B], is_finite [B]; all that ever comes back to the host.
    per_layer: the rows of a per-layer table that is looked up on the host, for every row of the call.
    """

    inputs: Mirror
    draft: Any

    def __init__(self, memory: Memory, sizes: Mapping[str, int], dtype: str, table: PerLayerTable | None) -> None:
        """sizes: of batch, num_rows and num_scored_rows, and the manifest's. dtype: the manifest's."""
        self.num_rows = sizes["num_rows"]
        self._memory, self._dtype = memory, dtype
        self.sizes = {**sizes, "num_draft_tokens": self.num_rows - 1}
        self.per_layer: Mirror | None = None
        if table is not None:
            self.per_layer = self._mirror(graph_io.INPUTS, "table")
            self._lookup = table.lookup(*self.per_layer.arrays.values())
            self._tokens = np.zeros((sizes["batch"], self.num_rows), np.int64)
            self._token, self._draft = self._tokens[:, :1], self._tokens[:, 1:]
        self.decision = self._mirror(graph_io.outputs("target"), "decision")
        decision = self.decision.arrays
        self.is_finite, self.num_accepted = decision["is_finite"], decision["num_accepted"]
        self.own_token = decision["own_token"]

    def _mirror(self, bindings: Iterable[graph_io.Binding], *places: graph_io.Place) -> Mirror:
        return self._memory.mirror(graph_io.specs(graph_io.placed(bindings, *places), self.sizes, self._dtype))

    def look_up(self, token: Array, draft: Array) -> None:
        """Upload the per-layer rows of token [B, 1] and draft [B, Q - 1], where the table is on the host."""
        if self.per_layer is not None:
            self._token[...], self._draft[...] = token, draft
            self._lookup(self._tokens)
            self.per_layer.upload()


class PrefillCall(Call):
    """Token, draft and lengths come from the host; nothing is accepted."""

    def __init__(self, memory: Memory, sizes: Mapping[str, int], dtype: str, table: PerLayerTable | None) -> None:
        super().__init__(memory, {**sizes, "num_scored_rows": 1}, dtype, table)
        self.inputs = self._mirror(graph_io.inputs("target"), "state", "draft", "host")
        self.draft = self.inputs.tensors["draft"]


class RoundCall(Call):
    """The draft comes from the assistant and the rest from the state; the host bounds what may be accepted.

    num_rows: of the target; those after the K + 1 of a round hold token 0 and are never accepted.
    drafted: the draft, for the host to see where it looks per-layer rows up.
    """

    def __init__(
        self, memory: Memory, sizes: Mapping[str, int], dtype: str, table: PerLayerTable | None, num_draft_tokens: int
    ) -> None:
        super().__init__(memory, {**sizes, "num_scored_rows": sizes["num_rows"]}, dtype, table)
        self.num_draft_tokens = num_draft_tokens
        self.drafted = self._mirror(graph_io.inputs("target"), "draft")
        self.draft = self.drafted.tensors["draft"]
        self.inputs = self._mirror(graph_io.inputs("target"), "host")
        self.inputs.arrays["scored_rows"][:] = np.arange(self.num_rows)
        self._draft_length: list[int] | None = None

    def set_draft_length(self, draft_length: Sequence[int]) -> None:
        """Upload the bound when it is not the one already there: a steady loop uploads nothing."""
        if draft_length != self._draft_length:
            self._draft_length = list(draft_length)
            self.inputs.arrays["draft_length"][:] = draft_length
            self.inputs.upload()


class PairBackend(ABC):
    """Implements ``runtime/backend/contract.py`` for a subclass that runs the graphs.

    draft_seconds stays 0 where a whole round is one launch; verify_seconds has it all then.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Memory,
        *,
        batch: int,
        max_length: int,
        prefill_chunk: int,
        max_draft_tokens: int,
        capacity: Mapping[str, int] | None = None,
        base_step: int = 1,
        per_layer_table: PerLayerTable | None = None,
    ) -> None:
        """capacity, base_step: of the KVCache."""
        self.manifest = manifest
        self.per_layer_table = per_layer_table
        self.memory = memory
        self.batch = batch
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self.max_draft_tokens = max_draft_tokens
        self.draft_seconds = self.verify_seconds = 0.0
        self.cache = KVCache(
            manifest.kv,
            memory,
            batch=batch,
            window=manifest.sliding_window,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            max_draft_tokens=max_draft_tokens,
            capacity=capacity,
            base_step=base_step,
        )
        self._sizes = {**manifest.sizes, "batch": batch}
        self._states = tuple(State(memory, self._sizes, manifest.dtype) for _ in range(2))
        self._current = 0  # which state the next round reads
        base = graph_io.specs(graph_io.placed(graph_io.INPUTS, "base"), self._sizes, manifest.dtype)
        self._base = memory.mirror(base)
        self._prefills: dict[int, PrefillCall] = {}
        self._rounds: dict[int, RoundCall] = {}
        self.is_closed = False
        self._running = threading.RLock()  # held during a call, so that nobody closes the backend under it
        self._is_ready = False  # whether the device state is that of the lengths: a prefill makes it so
        self._pending = np.zeros((batch, 1), np.int64)  # the state's token, as the host knows it

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def length(self) -> Sequence[int]:
        return self.cache.length

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Step:
        if not all(1 <= len(ids) <= self.prefill_chunk for ids in tokens):
            raise ValueError(f"prefill takes 1 to {self.prefill_chunk} tokens per sequence")
        with self._running:
            self._check_open()
            self._is_ready = False
            num_rows = self._rows_run(row_bucket(max(map(len, tokens)), self.prefill_chunk))
            self._prepare(num_rows)
            call = self._prefill_call(num_rows)
            arrays = call.inputs.arrays
            for sequence, ids in enumerate(tokens):
                arrays["token"][sequence, 0] = ids[0]
                arrays["draft"][sequence, : len(ids) - 1] = ids[1:]
                arrays["draft"][sequence, len(ids) - 1 :] = 0  # padding, above the new length
                arrays["scored_rows"][sequence, 0] = len(ids) - 1
                arrays["past_length"][sequence] = self.cache.length[sequence]
            call.inputs.upload()
            call.look_up(arrays["token"], arrays["draft"])
            self._run_prefill(call)
            self.memory.synchronize()
            step = self._finish(call, [len(ids) for ids in tokens])
            self._current = 0
            return step

    def round(self, num_draft_tokens: int, draft_length: Sequence[int]) -> Step:
        with self._running:
            self._check_open()
            if not self._is_ready:
                raise ValueError("a round follows a prefill or a round; after a rewind or reset comes a prefill")
            call = self._round_call(num_draft_tokens)
            self._prepare(call.num_rows)
            call.set_draft_length(draft_length)
            self._run_round(call)
            self.memory.synchronize()
            step = self._finish(call, [1] * self.batch)
            self._current = 1 - self._current
            return step

    def set_sampling(self, sequence: int, sampling: Sampling) -> None:
        if not sampling.is_greedy:
            raise RequestError(
                "these engines take the most likely token only: ask for temperature 0, or run the bundle "
                "with --engine onnxruntime"
            )

    def rewind(self, sequence: int, length: int) -> None:
        self.cache.rewind(sequence, length)
        self._is_ready = False

    def reset(self, sequence: int) -> None:
        with self._running:
            self._check_open()
            self.cache.reset(sequence)
            self.cache.shrink(release=self._release_bindings)
            self._is_ready = False

    def last_draft(self, num_draft_tokens: int) -> list[list[int]]:
        """What the last round of this K proposed, per sequence; for verification."""
        draft: list[list[int]] = self.memory.read(self._round_call(num_draft_tokens).draft).tolist()
        return [tokens[:num_draft_tokens] for tokens in draft]

    def close(self) -> None:
        """As the contract says; from another thread it waits for the end of a call that runs."""
        with self._running:
            if self.is_closed:
                return
            self.is_closed = True
            with ExitStack() as stack:  # from the last to the first, and to the end whatever fails
                stack.callback(self._forget)
                stack.callback(self._close)
                stack.callback(self.memory.activate)

    def _forget(self) -> None:
        self.cache.close()
        self._prefills.clear()
        self._rounds.clear()
        self.per_layer_table = None

    @abstractmethod
    def _close(self) -> None:
        """Forget what refers to the memory, and give it back, in order."""

    @abstractmethod
    def _run_prefill(self, call: PrefillCall) -> None:
        """Enqueue the target over the call's inputs, into the first state, and the decision's download."""

    @abstractmethod
    def _run_round(self, call: RoundCall) -> None:
        """Enqueue draft steps and target from the current state into the other one, and the decision's download."""

    def _check_open(self) -> None:
        if self.is_closed:
            raise RequestError("this session is closed, or its pair is: load the bundle or open a session again")
        self.memory.activate()

    def _look_up_round(self, call: RoundCall) -> None:
        """Wait for the download of the draft, if there is one, and upload the per-layer rows of a round's tokens."""
        if call.num_draft_tokens:
            self.memory.synchronize()
        call.look_up(self._pending, call.drafted.arrays["draft"])

    def _release_bindings(self) -> None:  # noqa: B027 (nothing to do where buffers do not grow)
        """Forget what refers to KV buffers: they are about to be replaced."""

    def _target_tensors(self, call: Call, following: State) -> dict[str, Any]:
        """The target's inputs and outputs by name, but for a round's token and past_length."""
        cache = self.cache.tensors
        return {
            **call.inputs.tensors,
            **call.decision.tensors,
            **following.outputs,
            **cache,
            **{f"next_{name}": tensor for name, tensor in cache.items()},
            "draft": call.draft,
            **self._base.tensors,
            **({} if call.per_layer is None else call.per_layer.tensors),
        }

    def _round_tensors(self, call: RoundCall) -> dict[str, Any]:
        """As _target_tensors, reading the current state."""
        now, following = self._states[self._current], self._states[1 - self._current]
        wanted = {binding.name for binding in graph_io.placed(graph_io.inputs("target"), "state")}
        state = {name: tensor for name, tensor in now.tensors.items() if name in wanted}
        return {**self._target_tensors(call, following), **state}

    def _draft_tensors(self) -> dict[str, Any]:
        """Inputs of the first draft step, but for the draft so far: the state and the target's donor buffers."""
        donors = graph_io.for_layers(graph_io.placed(graph_io.inputs("assistant"), "cache"), self.manifest.donors)
        cache = {binding.name: self.cache.tensors[binding.name] for binding in donors}
        return {**self._states[self._current].tensors, **self._base.tensors, **cache}

    def _prepare(self, num_rows: int) -> None:
        try:
            may_have_moved = self.cache.make_room(num_rows, self._release_bindings)
        except BaseException:
            self._is_ready = False
            raise
        base = self._base.arrays["base"]
        if may_have_moved and base.tolist() != self.cache.base:
            base[:] = self.cache.base
            self._base.upload()

    def _finish(self, call: Call, num_fed: list[int]) -> Step:
        """Advance lengths, or drop the call when a row is not finite."""
        is_finite = call.is_finite.tolist()
        if False in is_finite:
            self._drop_call(is_finite.index(False))
        self._is_ready = True
        length, tokens = self.cache.length, []
        for sequence, (own, count) in enumerate(zip(call.own_token.tolist(), call.num_accepted.tolist(), strict=True)):
            length[sequence] += num_fed[sequence] + count
            self._pending[sequence, 0] = own[count]
            tokens.append(own[: count + 1])
        return Step(tokens)

    def _drop_call(self, bad: int) -> NoReturn:
        """Keep nothing of a call that gave rows that are not finite, first in sequence bad."""
        for sequence in range(self.batch):
            self.cache.drop_garbage(sequence)
        raise NonFiniteError(
            f"the target produced NaN or infinity in sequence {bad} at positions {self.cache.length[bad]} "
            f"and later; nothing of this call was kept. A {self.manifest.dtype} bundle may have "
            "overflowed: export with --dtype float32 or bfloat16"
        )

    def _prefill_call(self, num_rows: int) -> PrefillCall:
        if num_rows not in self._prefills:
            sizes = {**self._sizes, "num_rows": num_rows}
            self._prefills[num_rows] = PrefillCall(self.memory, sizes, self.manifest.dtype, self.per_layer_table)
        return self._prefills[num_rows]

    def _rows_run(self, num_rows: int) -> int:
        """Rows that a call of the target runs where num_rows are asked for; those beyond are padding."""
        return num_rows

    def _round_call(self, num_draft_tokens: int) -> RoundCall:
        if num_draft_tokens not in self._rounds:
            num_rows = self._rows_run(num_draft_tokens + 1)
            sizes, dtype = {**self._sizes, "num_rows": num_rows}, self.manifest.dtype
            call = RoundCall(self.memory, sizes, dtype, self.per_layer_table, num_draft_tokens)
            self._rounds[num_draft_tokens] = call
        return self._rounds[num_draft_tokens]
