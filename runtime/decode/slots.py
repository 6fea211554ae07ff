"""What each slot of a backend holds, and which one a prompt goes to: rows that are there are not fed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.runtime.backend.contract import Backend
from slipstream.runtime.errors import RewindError

_COMPARED = 512  # tokens at a time
_FEWEST = 16  # shared tokens: a slot whose text shares less, its first tokens say, is emptied, and its buffers shrink


@dataclass
class _Slot:
    """tokens: those of its rows, and maybe some after them. is_kept: evicted last. last_used: a count, 0 for never."""

    tokens: list[int] = field(default_factory=list)
    is_busy: bool = False
    is_kept: bool = False
    last_used: int = 0


class Slots:
    """Every slot is free or in use; a free one keeps its tokens and rows until it is needed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._slots = [_Slot() for _ in range(backend.num_slots)]
        self._num_uses = 0

    @property
    def has_free(self) -> bool:
        return any(not slot.is_busy for slot in self._slots)

    def take(self, tokens: Sequence[int]) -> int:
        """A free slot, in use from now on, with the KV of as many leading tokens as could be had, but the last.

        The slot with the longest common prefix is taken over or forked from; the rest of its text is spared where
        another free slot holds nothing, and where it is kept. Of others the one goes whose use is longest ago, kept
        ones last.
        """
        shared = [self._shared(number, tokens) for number in range(len(self._slots))]
        free = [number for number, slot in enumerate(self._slots) if not slot.is_busy]
        sources = sorted(range(len(shared)), key=lambda number: (-shared[number], number not in free, number))
        source, number = sources[0], min(free, key=self._worth)
        if source in free and shared[source] and not self._is_better_forked(source, shared[source], number):
            number = source
        if not any(self._bring(source, number, shared[source]) for source in sources if shared[source]):
            self._backend.reset(number)
        self._num_uses += 1
        slot = self._slots[number]
        slot.tokens, slot.is_busy, slot.is_kept, slot.last_used = list(tokens), True, False, self._num_uses
        return number

    def leave(self, number: int, tokens: Sequence[int], *, is_kept: bool = False) -> None:
        """Free a slot whose rows are those of tokens, but for the last ones: what was fed beyond is dropped."""
        slot = self._slots[number]
        slot.tokens, slot.is_busy, slot.is_kept = list(tokens), False, is_kept

    def forget(self, number: int) -> None:
        """Free a slot and what it holds."""
        self._backend.reset(number)
        self._slots[number] = _Slot()

    def _shared(self, number: int, tokens: Sequence[int]) -> int:
        """Rows of a slot that are a prompt's too, but for its last token: that is fed in any case. 0 for too few."""
        most = min(self._backend.length[number], len(tokens) - 1)
        shared = common_prefix(self._slots[number].tokens[:most], tokens[:most])
        return shared if shared >= min(_FEWEST, most) else 0

    def _worth(self, number: int) -> tuple[bool, bool, int, int]:
        slot = self._slots[number]
        return slot.is_kept, self._backend.length[number] > 0, slot.last_used, number

    def _is_better_forked(self, source: int, shared: int, other: int) -> bool:
        if other == source:
            return False
        if self._slots[source].is_kept:
            return not self._slots[other].is_kept
        return self._backend.length[source] > shared and self._backend.length[other] == 0

    def _bring(self, source: int, number: int, shared: int) -> bool:
        """Leave the first shared rows of source in a slot, and no others; False where its sliding rows are gone."""
        try:
            if source == number:
                self._backend.rewind(number, shared)
            else:
                self._backend.fork(source, number, shared)
        except RewindError:
            return False
        return True


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    most = min(len(one), len(other))
    for start in range(0, most, _COMPARED):
        stop = min(start + _COMPARED, most)
        if one[start:stop] != other[start:stop]:
            return next(i for i in range(start, stop) if one[i] != other[i])
    return most
