"""What every backend over the graphs shares: lengths, calls, and the state that goes from round to round.

A subclass binds and runs the graphs. State that a round reads and the next one needs is kept
twice and swapped: an output is never bound onto a live input, in-place KV aside. A prefill reads
no state: it runs for one slot, and what it hands on is copied to that slot's row of the state that
the next round reads.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import row_bucket
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.manifest import Manifest
from slipstream.runtime.errors import NonFiniteError, RequestError

from .calls import Call, Logits, PrefillCall, RoundCall, State
from .choosing import Choice, Choosing
from .contract import Mask, Sampling, Step, TokenLogprob
from .kv_cache import KVCache
from .per_layer_table import PerLayerTable
from .tensors import Memory, of_slot, of_slots


class PairBackend(ABC):
    """Implements ``runtime/backend/contract.py`` for a subclass that runs the graphs.

    draft_seconds stays 0 where a whole round is one launch; verify_seconds has it all then.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Memory,
        *,
        num_slots: int,
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
        self.num_slots = num_slots
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self.max_draft_tokens = max_draft_tokens
        self.draft_seconds = self.verify_seconds = 0.0
        self.cache = KVCache(
            manifest.kv,
            memory,
            num_slots=num_slots,
            window=manifest.sliding_window,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            max_draft_tokens=max_draft_tokens,
            capacity=capacity,
            base_step=base_step,
        )
        self._sizes = {**manifest.sizes, "batch": num_slots}
        self._states = tuple(State(memory, self._sizes, manifest.dtype) for _ in range(2))
        self._current = 0  # which state the next round reads
        base = graph_io.specs(graph_io.placed(graph_io.INPUTS, "base"), self._sizes, manifest.dtype)
        self._base = memory.mirror(base)
        self._choosing = Choosing(memory, manifest, num_slots)
        self._resumed = memory.mirror({"past_length": ((1,), "int64")})
        self._logits, self._row_bias = Logits(memory), Logits(memory)  # the bias stays 0 where no row is masked
        self._prefills: dict[int, PrefillCall] = {}
        self._rounds: dict[tuple[int, int], RoundCall] = {}  # by K and the number of slots
        self._last: Call | None = None
        self.is_closed = False
        self._running = threading.RLock()  # held during a call, so that nobody closes the backend under it
        self._is_ready = [False] * num_slots  # whether the device state is that of the length: a prefill makes it so
        self._is_stale = [False] * num_slots  # whether the device's past_length is not the length
        self._pending = np.zeros((num_slots, 1), np.int64)  # the state's token, as the host knows it

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def length(self) -> Sequence[int]:
        return self.cache.length

    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        if not 1 <= len(tokens) <= self.prefill_chunk:
            raise ValueError(f"prefill takes 1 to {self.prefill_chunk} tokens")
        with self._running:
            self._check_open()
            self._is_ready[slot] = False
            num_rows = self._rows_run(row_bucket(len(tokens), self.prefill_chunk), 1)
            self._prepare([slot], num_rows)
            call = self._last = self._prefill_call(num_rows)
            sampling = self._choosing.settings[slot]
            call.feed(tokens, self.cache.length[slot], self.cache.base[slot], sampling)
            self._run_prefill(call, slot, Choice.of([sampling]))
            for name, tensor in self._states[self._current].tensors.items():
                self.memory.copy_to_slot(call.state.tensors[name], tensor, slot)
            self.memory.synchronize()
            if not call.is_finite[0]:
                self._drop_call(slot)
                raise NonFiniteError(self.not_finite(slot))
            self.cache.length[slot] += len(tokens)
            self._is_ready[slot], self._is_stale[slot] = True, False
            token = self._pending[slot, 0] = int(call.own_token[0, 0])
            return token

    def round(self, num_draft_tokens: int, commit_limit: Sequence[int]) -> Step:
        with self._running:
            self._check_open()
            last = max((slot for slot, limit in enumerate(commit_limit) if limit), default=0)
            batch = min(1 << last.bit_length(), self.num_slots)
            limits = list(commit_limit[:batch])
            for slot, limit in enumerate(limits):
                if limit and not self._is_ready[slot]:
                    raise ValueError(f"slot {slot} is not ready: a prefill comes first")
            call = self._last = self._round_call(num_draft_tokens, batch)
            self._prepare(range(batch), call.num_rows)
            self._resume(batch)
            call.set_commit_limit(limits)
            self._run_round(call, self._choosing.choice(limits))
            self.memory.synchronize()
            self._current = 1 - self._current
            for slot in range(batch, self.num_slots):  # their rows are in the state that was read
                self._is_ready[slot], self._is_stale[slot] = False, True
            return self._commit(call, limits)

    def _resume(self, batch: int) -> None:
        """Tell the device the lengths of idle slots where it does not know them: rows that nobody reads go there."""
        for slot in range(batch):
            if self._is_stale[slot]:
                self._resumed.arrays["past_length"][0] = self.cache.length[slot]
                self._resumed.upload()
                tensors = self._resumed.tensors["past_length"], self._states[self._current].tensors["past_length"]
                self.memory.copy_to_slot(*tensors, slot)
                self.memory.synchronize()
                self._is_stale[slot] = False

    def _commit(self, call: RoundCall, limits: list[int]) -> Step:
        """Advance the lengths of slots that were not idle, or drop their rows where one is not finite."""
        own_token, num_accepted = call.own_token.tolist(), call.num_accepted.tolist()
        is_finite = call.is_finite.tolist()
        tokens: list[list[int]] = [[] for _ in range(self.num_slots)]
        failed = []
        for slot, limit in enumerate(limits):
            if not limit:
                self._is_ready[slot] = False
                continue
            if not is_finite[slot]:
                failed.append(slot)
                self._drop_call(slot)
                continue
            count = num_accepted[slot] + 1
            self.cache.length[slot] += count
            self._pending[slot, 0] = own_token[slot][count - 1]
            tokens[slot] = own_token[slot][:count]
        return Step(tokens, failed)

    def _drop_call(self, slot: int) -> None:
        """Keep nothing of a call that gave rows that are not finite."""
        self.cache.drop_garbage(slot)
        self._is_ready[slot], self._is_stale[slot] = False, True

    def not_finite(self, slot: int) -> str:
        """What a NonFiniteError of a slot says."""
        return (
            f"the target produced NaN or infinity at positions {self.cache.length[slot]} and later; nothing of this "
            f"call was kept. A {self.manifest.dtype} bundle may have overflowed: export with --dtype float32 or "
            "bfloat16"
        )

    def set_sampling(self, slot: int, sampling: Sampling, prompt: Sequence[int] = (), mask: Mask | None = None) -> None:
        with self._running:
            self._check_open()
            self._choosing.set(slot, sampling, prompt, mask)

    def logprobs(self, slot: int) -> list[TokenLogprob]:
        call, wanted = self._last, self._choosing.settings[slot].num_logprobs
        assert call is not None, "there was no call"
        assert wanted is not None, "the slot's sampling asks for none"
        row = 0 if isinstance(call, PrefillCall) else slot
        arrays = call.logprobs.arrays
        tops = zip(arrays["top_logprob_tokens"][row].tolist(), arrays["top_logprobs"][row].tolist(), strict=True)
        own = zip(call.own_token[row].tolist(), arrays["logprob"][row].tolist(), tops, strict=True)
        found = [
            TokenLogprob(token, logprob, tuple(zip(tokens[:wanted], values[:wanted], strict=True)))
            for token, logprob, (tokens, values) in own
        ]
        return found[: int(call.num_accepted[row]) + 1]

    def rewind(self, slot: int, length: int) -> None:
        self.cache.rewind(slot, length)
        self._is_ready[slot], self._is_stale[slot] = False, True

    def reset(self, slot: int) -> None:
        with self._running:
            self._check_open()
            self.cache.reset(slot)
            self.cache.shrink(release=self._release_bindings)
            self._is_ready[slot], self._is_stale[slot] = False, True

    def fork(self, source: int, slot: int, length: int) -> None:
        with self._running:
            self._check_open()
            self.cache.fork(source, slot, length)
            self._is_ready[slot], self._is_stale[slot] = False, True

    def last_draft(self, num_draft_tokens: int) -> list[list[int]]:
        """What the last round proposed, per slot that ran; for verification."""
        assert self._last is not None, "there was no call"
        draft: list[list[int]] = self.memory.read(self._last.draft).tolist()
        return [tokens[:num_draft_tokens] for tokens in draft]

    def last_logits(self) -> Array:
        """The target's logits [B, R, V] of the last call; for verification."""
        assert self._last is not None, "there was no call"
        return self.memory.read(self._last.scores["logits"])

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
        self._last = self._choosing.history = self.per_layer_table = None

    @abstractmethod
    def _close(self) -> None:
        """Forget what refers to the memory, and give it back, in order."""

    @abstractmethod
    def _run_prefill(self, call: PrefillCall, slot: int, choice: Choice) -> None:
        """Enqueue target and choice over the call's inputs, into its state, and the decision's download."""

    @abstractmethod
    def _run_round(self, call: RoundCall, choice: Choice) -> None:
        """Enqueue draft steps, target and choice from the current state into the other one, and the download."""

    def _check_open(self) -> None:
        if self.is_closed:
            raise RequestError("this session is closed, or its pair is: load the bundle or open a session again")
        self.memory.activate()

    def _look_up_round(self, call: RoundCall) -> None:
        """Wait for the download of the draft, if there is one, and upload the per-layer rows of a round's tokens."""
        if call.num_draft_tokens:
            self.memory.synchronize()
        call.look_up(self._pending[: call.batch], call.drafted.arrays["draft"])

    def _release_bindings(self) -> None:  # noqa: B027 (nothing to do where buffers do not grow)
        """Forget what refers to KV buffers: they are about to be replaced."""

    def _prefill_tensors(self, call: PrefillCall, slot: int) -> dict[str, Any]:
        """What target and choice read and write by name, over the KV of one slot."""
        cache = {name: of_slot(tensor, slot) for name, tensor in self.cache.tensors.items()}
        return {**call.inputs.tensors, **self._call_tensors(call, cache, call.state)}

    def _round_tensors(self, call: RoundCall) -> dict[str, Any]:
        """As _prefill_tensors, over the first slots, from the current state into the other one."""
        now, following = self._states[self._current], self._states[1 - self._current]
        cache, given = self.cache.tensors, {**now.tensors, **self._base.tensors, **self._choosing.per_slot}
        tensors = self._call_tensors(call, self._of_batch(call, cache), following)
        return {**self._of_batch(call, given), **call.inputs.tensors, **tensors}

    def _call_tensors(self, call: Call, cache: Mapping[str, Any], following: State) -> dict[str, Any]:
        state = {f"next_{name}": tensor for name, tensor in following.tensors.items()}
        return {
            **call.decision.tensors,
            **call.scores,
            **self._of_batch(call, state),
            **cache,
            **{f"next_{name}": tensor for name, tensor in cache.items()},
            "draft": call.draft,
            **self._choosing.constants,
            **({} if call.per_layer is None else call.per_layer.tensors),
        }

    def _whole_row_tensors(self, call: Call, slot: int | None, *, is_masked: bool) -> dict[str, Any]:
        """What choose_processed and choose_full read and write beside the others. slot: of a prefill."""
        assert self._choosing.history is not None, "its sampling was set"
        whole = self._choosing.history.tensors
        parts = self._of_batch(call, whole) if slot is None else {name: of_slot(whole[name], slot) for name in whole}
        return {
            **parts,
            "next_token_counts": parts["token_counts"],
            **(call.masks.tensors if is_masked else {"row_bias": self._row_bias.of(call.scores["logits"].shape)}),
            **call.logprobs.tensors,
        }

    def _draft_tensors(self, call: RoundCall) -> dict[str, Any]:
        """Inputs of the first draft step, but for the draft so far: the state and the target's donor buffers."""
        donors = graph_io.for_layers(graph_io.placed(graph_io.inputs("assistant"), "cache"), self.manifest.donors)
        cache = {binding.name: self.cache.tensors[binding.name] for binding in donors}
        state = self._states[self._current].tensors
        return self._of_batch(call, {**state, **self._base.tensors, **self._choosing.per_slot, **cache})

    @staticmethod
    def _of_batch(call: Call, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of the slots that a call runs over."""
        return {name: of_slots(tensor, call.batch) for name, tensor in tensors.items()}

    def _prepare(self, slots: Sequence[int], num_rows: int) -> None:
        try:
            may_have_moved = self.cache.make_room(slots, num_rows, self._release_bindings)
        except BaseException:
            for slot in slots:
                self._is_ready[slot] = False
            raise
        base = self._base.arrays["base"]
        if may_have_moved and base.tolist() != self.cache.base:
            base[:] = self.cache.base
            self._base.upload()

    def _prefill_call(self, num_rows: int) -> PrefillCall:
        if num_rows not in self._prefills:
            sizes = {**self._sizes, "num_rows": num_rows}
            self._prefills[num_rows] = PrefillCall(
                self.memory, sizes, self.manifest.dtype, self._logits, self.per_layer_table
            )
        return self._prefills[num_rows]

    def _rows_run(self, num_rows: int, batch: int) -> int:
        """Rows that a call of the target runs where num_rows are asked for; those beyond are padding."""
        return num_rows

    def _round_call(self, num_draft_tokens: int, batch: int) -> RoundCall:
        key = num_draft_tokens, batch
        if key not in self._rounds:
            sizes = {**self._sizes, "batch": batch, "num_rows": self._rows_run(num_draft_tokens + 1, batch)}
            self._rounds[key] = RoundCall(
                self.memory, sizes, self.manifest.dtype, self._logits, self.per_layer_table, num_draft_tokens
            )
        return self._rounds[key]
