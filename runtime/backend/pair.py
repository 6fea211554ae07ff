"""What every backend over the two graphs shares: lengths, calls, and the state that goes from round to round.

A subclass binds and runs the graphs. State that a round reads and the next one needs is kept
twice and swapped: an output is never bound onto a live input, in-place KV aside. A prefill
reads no state and always writes the first of the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.runtime.bundle.capacity import row_bucket
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, kv_name, kv_output_name
from slipstream.runtime.bundle.manifest import Manifest
from slipstream.runtime.errors import NonFiniteError, RequestError

from .contract import Step
from .kv_cache import KVCache
from .per_layer_table import PerLayerTable
from .tensors import Memory, Mirror


class State:
    """What a round hands to the next one."""

    def __init__(self, memory: Memory, batch: int, manifest: Manifest) -> None:
        self.token = memory.allocate((batch, 1), "int64")
        self.hidden = memory.allocate((batch, 1, manifest.hidden_size), manifest.dtype)
        self.past_length = memory.allocate((batch,), "int64")
        self.position = memory.allocate((batch,), "int64")

    @property
    def outputs(self) -> dict[str, Any]:
        """As the target's outputs name them."""
        return {
            "next_token": self.token,
            "next_hidden": self.hidden,
            "next_past_length": self.past_length,
            "next_position": self.position,
        }


class Call:
    """One shape of a target call: what the host gives it, and what it decides.

    inputs: uploaded by the host. decision: own_token [B, R], num_accepted [B], is_finite [B];
    all that ever comes back to the host.
    per_layer: the rows of a per-layer table that is looked up on the host, for every row of the call.
    """

    def __init__(self, memory: Memory, batch: int, num_rows: int, num_scored: int, table: PerLayerTable | None) -> None:
        self.num_rows = num_rows
        self._table = table
        self.per_layer: Mirror | None = None
        if table is not None:
            self.per_layer = memory.mirror({PER_LAYER_INPUT: ((batch, num_rows, table.width), table.dtype)})
        self.decision: Mirror = memory.mirror(
            {
                "own_token": ((batch, num_scored), "int64"),
                "num_accepted": ((batch,), "int64"),
                "is_finite": ((batch,), "bool"),
            }
        )
        self.inputs: Mirror
        self.draft: Any

    def look_up(self, tokens: Array) -> None:
        """Upload the per-layer rows of tokens [B, Q], where the table is on the host."""
        if self._table is not None and self.per_layer is not None:
            self._table.gather(tokens, self.per_layer.arrays[PER_LAYER_INPUT])
            self.per_layer.upload()


class PrefillCall(Call):
    """Token, draft and lengths come from the host; nothing is accepted."""

    def __init__(self, memory: Memory, batch: int, num_rows: int, table: PerLayerTable | None) -> None:
        super().__init__(memory, batch, num_rows, 1, table)
        self.inputs = memory.mirror(
            {
                "token": ((batch, 1), "int64"),
                "draft": ((batch, num_rows - 1), "int64"),
                "past_length": ((batch,), "int64"),
                "scored_rows": ((batch, 1), "int64"),
                "draft_length": ((batch,), "int64"),
            }
        )
        self.draft = self.inputs.tensors["draft"]


class RoundCall(Call):
    """The draft comes from the assistant and the rest from the state; the host bounds what may be accepted.

    num_rows: of the target; those after the K + 1 of a round hold token 0 and are never accepted.
    drafted: the draft, for the host to see where it looks per-layer rows up.
    """

    def __init__(
        self, memory: Memory, batch: int, num_draft_tokens: int, num_rows: int, table: PerLayerTable | None
    ) -> None:
        super().__init__(memory, batch, num_rows, num_rows, table)
        self.num_draft_tokens = num_draft_tokens
        self.drafted = memory.mirror({"draft": ((batch, num_rows - 1), "int64")})
        self.draft = self.drafted.tensors["draft"]
        self.inputs = memory.mirror({"scored_rows": ((batch, num_rows), "int64"), "draft_length": ((batch,), "int64")})
        self.inputs.arrays["scored_rows"][:] = np.arange(num_rows)
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
        per_layer_table: PerLayerTable | None = None,
    ) -> None:
        """capacity: fixed rows of the KV buffers by layer type; None lets them grow."""
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
        )
        self._states = (State(memory, batch, manifest), State(memory, batch, manifest))
        self._current = 0  # which state the next round reads
        self._base = memory.mirror({"base": ((batch,), "int64")})
        self._prefills: dict[int, PrefillCall] = {}
        self._rounds: dict[int, RoundCall] = {}
        self.is_closed = False
        self._is_ready = False  # whether the device state is that of the lengths: a prefill makes it so
        self._pending = np.zeros((batch, 1), np.int64)  # the state's token, as the host knows it

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def length(self) -> Sequence[int]:
        return self.cache.length

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Step:
        self._check_open()
        if not all(1 <= len(ids) <= self.prefill_chunk for ids in tokens):
            raise ValueError(f"prefill takes 1 to {self.prefill_chunk} tokens per sequence")
        self._is_ready = False
        num_rows = row_bucket(max(map(len, tokens)), self.prefill_chunk)
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
        call.look_up(np.concatenate([arrays["token"], arrays["draft"]], axis=1))
        self._run_prefill(call)
        self.memory.synchronize()
        step = self._finish(call, [len(ids) for ids in tokens])
        self._current = 0
        return step

    def round(self, num_draft_tokens: int, draft_length: Sequence[int]) -> Step:
        self._check_open()
        if not self._is_ready:
            raise ValueError("a round follows a prefill or a round; after a rewind or reset comes a prefill")
        self._prepare(self._round_rows(num_draft_tokens))
        call = self._round_call(num_draft_tokens)
        call.set_draft_length(draft_length)
        self._run_round(call)
        self.memory.synchronize()
        step = self._finish(call, [1] * self.batch)
        self._current = 1 - self._current
        return step

    def rewind(self, sequence: int, length: int) -> None:
        self.cache.rewind(sequence, length)
        self._is_ready = False

    def reset(self, sequence: int) -> None:
        self._check_open()
        self.cache.reset(sequence)
        self.cache.shrink(release=self._release_bindings)
        self._is_ready = False

    def last_draft(self, num_draft_tokens: int) -> list[list[int]]:
        """What the last round of this K proposed, per sequence; for verification."""
        draft: list[list[int]] = self.memory.read(self._round_call(num_draft_tokens).draft).tolist()
        return [tokens[:num_draft_tokens] for tokens in draft]

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.memory.activate()
            self._close()
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
        call.look_up(np.concatenate([self._pending, call.drafted.arrays["draft"]], axis=1))

    def _release_bindings(self) -> None:  # noqa: B027 (nothing to do where buffers do not grow)
        """Forget what refers to KV buffers: they are about to be replaced."""

    def _target_tensors(self, call: Call, following: State) -> dict[str, Any]:
        """The target's inputs and outputs by name, but for a round's token and past_length."""
        cache = self.cache.tensors
        tensors: dict[str, Any] = {
            **call.inputs.tensors,
            **call.decision.tensors,
            **following.outputs,
            **cache,
            "draft": call.draft,
            "base": self._base.tensors["base"],
        }
        if call.per_layer is not None:
            tensors.update(call.per_layer.tensors)
        for buffer in self.manifest.kv:
            for part in ("key", "value"):
                tensors[kv_output_name(buffer.layer, part)] = cache[kv_name(buffer.layer, part)]
        return tensors

    def _round_tensors(self, call: RoundCall) -> dict[str, Any]:
        """As _target_tensors, reading the current state."""
        now, following = self._states[self._current], self._states[1 - self._current]
        return {**self._target_tensors(call, following), "token": now.token, "past_length": now.past_length}

    def _draft_tensors(self) -> dict[str, Any]:
        """Inputs of the first draft step, but for the draft so far: the state and the target's donor buffers."""
        now = self._states[self._current]
        tensors: dict[str, Any] = {
            "token": now.token,
            "hidden": now.hidden,
            "position": now.position,
            "past_length": now.past_length,
            "base": self._base.tensors["base"],
        }
        for donor in self.manifest.donors:
            for part in ("key", "value"):
                tensors[kv_name(donor.layer, part)] = self.cache.tensors[kv_name(donor.layer, part)]
        return tensors

    def _prepare(self, num_rows: int) -> None:
        try:
            self.cache.make_room(num_rows, release=self._release_bindings)
        except BaseException:
            self._is_ready = False
            raise
        base = self._base.arrays["base"]
        if base.tolist() != self.cache.base:  # after a compaction or a reset
            base[:] = self.cache.base
            self._base.upload()

    def _finish(self, call: Call, num_fed: list[int]) -> Step:
        """Advance lengths, or drop the call when a row is not finite."""
        decision = call.decision.arrays
        if not decision["is_finite"].all():
            bad = [sequence for sequence in range(self.batch) if not decision["is_finite"][sequence]]
            for sequence in range(self.batch):
                self.cache.drop_garbage(sequence)
            raise NonFiniteError(
                f"the target produced NaN or infinity in sequence {bad[0]} at positions {self.cache.length[bad[0]]} "
                f"and later; nothing of this call was kept. A {self.manifest.dtype} bundle may have "
                "overflowed: export with --dtype float32 or bfloat16"
            )
        self._is_ready = True
        accepted = decision["num_accepted"].tolist()
        own = decision["own_token"].tolist()
        length = self.cache.length
        for sequence, count in enumerate(accepted):
            length[sequence] += num_fed[sequence] + count
            self._pending[sequence, 0] = own[sequence][count]
        return Step([tokens[: count + 1] for tokens, count in zip(own, accepted, strict=True)])

    def _prefill_call(self, num_rows: int) -> PrefillCall:
        if num_rows not in self._prefills:
            self._prefills[num_rows] = PrefillCall(self.memory, self.batch, num_rows, self.per_layer_table)
        return self._prefills[num_rows]

    def _round_rows(self, num_draft_tokens: int) -> int:
        """Rows of the target's call in a round: K + 1, or more where that is faster."""
        return num_draft_tokens + 1

    def _round_call(self, num_draft_tokens: int) -> RoundCall:
        if num_draft_tokens not in self._rounds:
            num_rows = self._round_rows(num_draft_tokens)
            call = RoundCall(self.memory, self.batch, num_draft_tokens, num_rows, self.per_layer_table)
            self._rounds[num_draft_tokens] = call
        return self._rounds[num_draft_tokens]
