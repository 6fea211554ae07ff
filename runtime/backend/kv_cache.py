"""The target's KV buffers: growth by buckets, compaction of sliding windows, rewind.

Full layers hold every row and grow through capacity buckets. Sliding layers hold rows from
an absolute ``base`` position on in a linear buffer of bounded size; when it is full, the
live window moves to the front and ``base`` advances. Rows at or above a sequence's length
are garbage by contract: masks hide them, the next call overwrites them. So going back only
shortens a length, and this class never touches a row to rewind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.capacity import capacity_bucket, kv_limits, round_up
from slipstream.runtime.bundle.manifest import KVBuffer
from slipstream.runtime.errors import ContextFullError, RewindError

from .tensors import Memory

_KEPT_CAPACITY = 1024  # buffers up to here stay: growing again costs more than attending to rows that are not held


class KVCache:
    """KV buffers of several slots, a sequence in each.

    length[slot]: rows that are valid. base[slot]: absolute position of row 0 of its sliding buffers.
    """

    def __init__(
        self,
        layout: Sequence[KVBuffer],
        memory: Memory,
        *,
        num_slots: int,
        window: int,
        max_length: int,
        prefill_chunk: int,
        max_draft_tokens: int,
        capacity: Mapping[str, int] | None = None,
        base_step: int = 1,
    ) -> None:
        """capacity: rows by layer type where they are fixed; None lets buffers grow.

        base_step: a compaction moves rows by multiples of it.
        """
        self._memory = memory
        self._num_slots = num_slots
        cached = graph_io.placed(graph_io.inputs("target"), "cache")
        self._bindings = {binding.name: binding for binding in graph_io.for_layers(cached, layout)}
        self._types = graph_io.layer_types(layout)
        self._kept_rows = window + max_draft_tokens + base_step  # at most, by a compaction
        self._window = window
        self._base_step = base_step
        self._limit = capacity or kv_limits(window, max_length, prefill_chunk, max_draft_tokens, base_step)
        self._smallest = capacity or {kind: capacity_bucket(1, limit) for kind, limit in self._limit.items()}
        self.capacity = dict(self._smallest)
        self.length = [0] * num_slots
        self.base = [0] * num_slots
        self._most_rows = max(prefill_chunk, max_draft_tokens + 1)  # of a call
        self._rewound_from = [0] * num_slots  # the largest length since the last reset that was shortened
        self._room_end = [0] * num_slots  # there is room for rows before this one; 0 when that has to be found out
        self._moved_to = [0] * num_slots  # sliding rows before this position may be overwritten: base, or the next one
        self.num_compactions = 0
        self.tensors: dict[str, Any] = {name: self._allocate(name) for name in self._bindings}

    def make_room(self, slots: Sequence[int], num_rows: int, release: Callable[[], None]) -> bool:
        """Make slots able to take num_rows more rows: grow, or compact what is full.

        Whether buffers or base may have changed since the last call. Mostly one number of each is compared.
        release: called before buffers are replaced, so that nothing holds the old ones then.
        Raises ContextFullError, and changes nothing, for more rows than the largest buffers hold.
        Where growing fails, every slot is empty afterwards, and can be filled anew.
        """
        length, room_end = self.length, self._room_end
        for slot in slots:
            if length[slot] + num_rows > room_end[slot]:
                self._grow_or_compact(slots, num_rows, release)
                full, sliding = self.capacity["full"], self.capacity["sliding"]
                room_end[:] = [min(full, base + sliding) for base in self.base]
                return True
        return False

    def _grow_or_compact(self, slots: Sequence[int], num_rows: int, release: Callable[[], None]) -> None:
        """As make_room, where buffers are missing or too small; nothing is done where they are not."""
        self._check_room(slots, num_rows)
        if not self.tensors:
            self.tensors = {name: self._allocate(name) for name in self._bindings}
        longest, held = max(self.length[slot] for slot in slots), max(map(self._held, slots))
        needed = {"full": longest + num_rows, "sliding": held + num_rows}
        grown = {kind: capacity_bucket(rows, self._limit[kind]) for kind, rows in needed.items()}
        if any(rows > self.capacity[kind] for kind, rows in grown.items()):
            release()
            try:
                for kind, rows in grown.items():
                    self._grow(kind, rows)
            except BaseException:  # some buffers have grown and some have not
                self._drop_buffers()
                self.length[:] = self.base[:] = self._rewound_from[:] = self._moved_to[:] = [0] * self._num_slots
                raise
        for slot in slots:
            if self._held(slot) + num_rows > self.capacity["sliding"]:
                self._compact(slot)

    def _held(self, slot: int) -> int:
        """Rows of its sliding buffers."""
        return self.length[slot] - self.base[slot]

    def _check_room(self, slots: Sequence[int], num_rows: int) -> None:
        kept = self._kept_rows  # after a compaction, which moves rows to before where they come from
        held = [kept if rows >= 2 * kept else rows for rows in map(self._held, slots)]
        needed = {"full": max(self.length[slot] for slot in slots) + num_rows, "sliding": max(held) + num_rows}
        for kind, rows in needed.items():
            if rows > self._limit[kind]:
                raise ContextFullError(
                    f"{num_rows} more rows make {rows}, and {kind} KV buffers hold {self._limit[kind]}: use a shorter "
                    "text, or export or build with a larger --max-length"
                )

    def rewind(self, slot: int, length: int) -> None:
        """Shorten a slot's sequence. Raises RewindError when its sliding window was partly moved away."""
        self._check_rewind(slot, length)
        self._rewound_from[slot] = max(self.length[slot], self._rewound_from[slot])
        self.length[slot] = length

    def _check_rewind(self, slot: int, length: int) -> None:
        held, first = self.length[slot], self._moved_to[slot]
        if not 0 <= length <= held:
            raise RewindError(f"a sequence of {held} rows can't be rewound to {length}")
        if first and length - self._window < first:
            raise RewindError(
                f"a rewind from {held} to {length} needs sliding rows from {length - self._window} on, but those "
                f"before {first} were moved away: prefill again from position 0"
            )

    def reset(self, slot: int) -> None:
        """Forget a slot's sequence: zero its rows, so that nothing of it can leak."""
        for tensor in self.tensors.values():
            self._memory.zero_rows(tensor, slot, 0, self._written_end(slot))
        self.length[slot] = self.base[slot] = self._rewound_from[slot] = self._moved_to[slot] = 0
        self._room_end[slot] = 0

    def fork(self, source: int, slot: int, length: int) -> None:
        """Replace a slot's sequence by the first length rows of another's. Raises RewindError as ``rewind`` does."""
        self._check_rewind(source, length)
        self.reset(slot)
        for name, tensor in self.tensors.items():
            first = self.base[source] if self._types[name] == "sliding" else 0
            self._memory.fork_rows(tensor, source, slot, length - first)
        self.length[slot], self.base[slot], self._moved_to[slot] = length, self.base[source], self._moved_to[source]

    def place(self, length: Sequence[int], base: Sequence[int]) -> None:
        """Say which rows of each slot are valid, as if they had been fed; for verification, which wrote them."""
        self.length[:], self.base[:], self._room_end[:] = length, base, [0] * self._num_slots

    def shrink(self, release: Callable[[], None]) -> None:
        """Start over with the smallest buffers when large ones hold no row: costs of a step follow the capacity.

        release: as for make_room.
        """
        is_small = max(self.capacity.values()) <= _KEPT_CAPACITY
        if any(self.length) or is_small or self.capacity == self._smallest:
            return
        release()
        self._drop_buffers()

    def close(self) -> None:
        self._drop_buffers()

    def drop_garbage(self, slot: int) -> None:
        """Zero every row at or above the length: after a call that wrote non-finite values."""
        for name, tensor in self.tensors.items():
            start = self._held(slot) if self._types[name] == "sliding" else self.length[slot]
            self._memory.zero_rows(tensor, slot, start, self._written_end(slot))

    def _written_end(self, slot: int) -> int:
        """No row from here on was written since the last reset."""
        return max(self.length[slot], self._rewound_from[slot]) + self._most_rows

    def _drop_buffers(self) -> None:
        """Give the buffers up; make_room allocates the smallest."""
        self.tensors.clear()
        self.capacity = dict(self._smallest)
        self._room_end[:] = [0] * self._num_slots

    def _grow(self, kind: str, capacity: int) -> None:
        held = self.capacity[kind]
        if capacity <= held:
            return
        self.capacity[kind] = capacity
        for name, buffer_type in self._types.items():  # one at a time: the peak is all old buffers plus one new
            if buffer_type == kind:
                grown = self._allocate(name)
                self._memory.copy_rows(self.tensors[name], grown, held)
                self.tensors[name] = grown

    def _compact(self, slot: int) -> None:
        """Move the live window of a slot's sliding buffers to their front; interrupted, it can be done again."""
        held = self._held(slot)
        start = round_up(held - self._kept_rows, self._base_step)
        self._moved_to[slot] = self.base[slot] + start
        for name, buffer_type in self._types.items():
            if buffer_type == "sliding":
                self._memory.move_rows(self.tensors[name], slot, start, held - start)
        self.base[slot] = self._moved_to[slot]
        self.num_compactions += 1

    def _allocate(self, name: str) -> Any:
        sizes = {"batch": self._num_slots, **{f"{kind}_capacity": rows for kind, rows in self.capacity.items()}}
        binding = self._bindings[name]
        return self._memory.allocate(binding.sized(sizes), binding.dtype)
