"""Growth, compaction and rewind of KV buffers, without a model: rows are stamped with their position."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.backend.kv_cache import KVCache
from slipstream.runtime.backend.tensors import ALIGNMENT_BYTES, HostTensor, Memory
from slipstream.runtime.bundle.capacity import capacity_bucket, kv_limits
from slipstream.runtime.bundle.manifest import KVBuffer
from slipstream.runtime.errors import BackendError, ContextFullError, RewindError

WINDOW, CHUNK, MAX_DRAFT = 8, 12, 3


def buffer(layer: int, kind: Literal["sliding", "full"]) -> KVBuffer:
    return KVBuffer(
        layer=layer,
        type=kind,
        num_kv_heads=2,
        head_dim=4,
        dtype="float32",
        key_scale=1.0,
        value_scale=1.0,
        target_readers=[],
        assistant_readers=[],
    )


def make_cache(
    num_slots: int = 1,
    max_length: int = 2000,
    memory: Memory | None = None,
    capacity: dict[str, int] | None = None,
    base_step: int = 1,
) -> KVCache:
    return KVCache(
        [buffer(0, "sliding"), buffer(1, "full")],
        memory or Memory(),
        num_slots=num_slots,
        window=WINDOW,
        max_length=max_length,
        prefill_chunk=CHUNK,
        max_draft_tokens=MAX_DRAFT,
        capacity=capacity,
        base_step=base_step,
    )


def write(cache: KVCache, num_rows: int, *, keep: list[int] | None = None) -> None:
    """What a call does: rows above each length get their position as value; keep[b] of them become valid."""
    cache.make_room(range(len(cache.length)), num_rows, release=lambda: None)
    for name, tensor in cache.tensors.items():
        for sequence, length in enumerate(cache.length):
            start = length - (cache.base[sequence] if ".0." in name else 0)
            rows = tensor.array[sequence, :, start : start + num_rows]
            assert rows.shape[1] == num_rows, "a call must fit into every buffer"
            rows[:] = (np.arange(num_rows) + length)[:, None] + 1000 * sequence
    for sequence in range(len(cache.length)):
        cache.length[sequence] += num_rows if keep is None else keep[sequence]


def check_visible_rows(cache: KVCache) -> None:
    """Every row that a mask may show holds its own position."""
    for sequence, length in enumerate(cache.length):
        base = cache.base[sequence]
        first = max(0, length - WINDOW)
        assert base <= first
        expected = np.arange(first, length) + 1000 * sequence
        sliding = cache.tensors["kv.0.key"].array[sequence, :, first - base : length - base]
        assert (sliding == expected[:, None]).all()
        full = cache.tensors["kv.1.value"].array[sequence, :, :length]
        assert (full == (np.arange(length) + 1000 * sequence)[:, None]).all()


def test_tensors_are_zero_filled_and_aligned() -> None:
    for dtype in ("float32", "float16", "bfloat16", "int64", "bool"):
        tensor = HostTensor((3, 5), dtype)
        assert tensor.address % ALIGNMENT_BYTES == 0
        assert not tensor.array.any()
        assert tensor.array.ctypes.data == tensor.address


def test_capacities_are_few_and_bounded() -> None:
    assert [capacity_bucket(n, 1000) for n in (1, 128, 129, 500, 513, 2000)] == [128, 128, 256, 512, 1000, 1000]
    assert kv_limits(512, 1024, 256, 15) == {"sliding": 1312, "full": 1280}
    assert kv_limits(512, 1024, 256, 15, base_step=128) == {"sliding": 1312 + 2 * 127 + 2, "full": 1280}


@pytest.mark.parametrize(
    ("kind", "held", "room"),
    [
        ("full", 20, 64 - 20),
        ("sliding", 20, 48 - 20),  # too few to move without overlap
        ("sliding", 24, 48 - (WINDOW + MAX_DRAFT + 1)),
    ],
)
def test_rows_beyond_the_largest_buffers_are_refused_and_change_nothing(kind: str, held: int, room: int) -> None:
    cache = make_cache(capacity={"full": 400, "sliding": 400} | {kind: 64 if kind == "full" else 48})
    write(cache, held)
    before = cache.length[:], cache.base[:], dict(cache.capacity)
    with pytest.raises(ContextFullError, match=f"{room + 1} more rows make .* {kind} KV buffers hold"):
        cache.make_room([0], room + 1, release=lambda: None)
    assert (cache.length, cache.base, cache.capacity) == before
    write(cache, room)


def test_sliding_memory_stays_bounded_while_full_memory_grows() -> None:
    cache = make_cache()
    for _ in range(150):
        write(cache, CHUNK)
    assert cache.capacity["sliding"] == kv_limits(WINDOW, 2000, CHUNK, MAX_DRAFT)["sliding"]
    assert cache.capacity["full"] == 2000 + 16
    assert cache.num_compactions > 10
    check_visible_rows(cache)


def test_growth_keeps_rows_and_frees_each_old_buffer_before_the_next_is_made() -> None:
    cache = make_cache()
    write(cache, 10)
    address = cache.tensors["kv.1.key"].address
    write(cache, CHUNK)
    assert cache.tensors["kv.1.key"].address == address
    for _ in range(8):
        write(cache, CHUNK)
    old = [weakref.ref(tensor) for tensor in cache.tensors.values() if tensor.shape[2] == 128]
    released: list[int] = []
    cache.make_room([0], CHUNK, release=lambda: released.append(1))
    assert released == [1]
    assert sum(reference() is None for reference in old) >= 2, "the replaced full buffers are gone"
    check_visible_rows(cache)


calls = st.lists(
    st.tuples(
        st.integers(1, CHUNK),
        st.lists(st.integers(0, CHUNK), min_size=2, max_size=2),
        st.lists(st.integers(0, MAX_DRAFT + 1), min_size=2, max_size=2),
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(calls, st.sampled_from([1, 4, 7, 32]))
def test_rows_in_sight_survive_any_accepts_rewinds_and_compactions(
    steps: list[tuple[int, list[int], list[int]]], base_step: int
) -> None:
    """Two sequences of different lengths; K + 1 rows back from the longest length is exact, in however many steps."""
    cache = make_cache(num_slots=2, base_step=base_step)
    longest = [0, 0]
    for num_rows, accepted, rewound in steps:
        write(cache, num_rows, keep=[min(count, num_rows) for count in accepted])
        for sequence, count in enumerate(rewound):
            held = cache.length[sequence]
            longest[sequence] = max(longest[sequence], held)
            cache.rewind(sequence, max(0, held - count, longest[sequence] - MAX_DRAFT - 1))
        check_visible_rows(cache)
        assert not any(base % base_step for base in cache.base)


@pytest.mark.parametrize("base_step", [1, 64])
def test_buffers_that_are_just_too_full_move_without_overlap(base_step: int) -> None:
    """The fewest rows that no longer fit, and the last step's: the most that a compaction keeps."""
    kept = WINDOW + MAX_DRAFT + base_step
    cache = make_cache(capacity={"sliding": 2 * kept + CHUNK, "full": 2000}, base_step=base_step)
    write(cache, 2 * kept)
    assert cache.num_compactions == 0
    write(cache, 1)
    for _ in range(40):
        write(cache, CHUNK)
        check_visible_rows(cache)
    assert cache.num_compactions > 2


@pytest.mark.parametrize("base_step", [1, 32])
def test_a_rewind_of_k_plus_one_rows_works_right_after_a_compaction(base_step: int) -> None:
    cache = make_cache(base_step=base_step)
    while cache.num_compactions == 0:
        write(cache, CHUNK)
    cache.rewind(0, cache.length[0] - CHUNK - MAX_DRAFT - 1)
    check_visible_rows(cache)


def test_a_deep_rewind_says_from_where_to_prefill_again() -> None:
    cache = make_cache()
    while cache.base[0] == 0:
        write(cache, CHUNK)
    held = cache.length[0]
    with pytest.raises(RewindError, match="prefill again from position 0"):
        cache.rewind(0, cache.base[0] + WINDOW - 1)
    assert cache.length[0] == held


@pytest.mark.parametrize("length", [-1, 11])
def test_a_rewind_goes_back_only(length: int) -> None:
    cache = make_cache()
    write(cache, 10)
    with pytest.raises(RewindError, match="10 rows can't be rewound"):
        cache.rewind(0, length)


def test_reset_zeroes_one_sequence_and_leaves_its_neighbour() -> None:
    cache = make_cache(num_slots=2)
    write(cache, 10)
    cache.reset(0)
    assert cache.length == [0, 10]
    assert not any(tensor.array[0].any() for tensor in cache.tensors.values())
    assert all(tensor.array[1, :, 1:10].all() for tensor in cache.tensors.values())


def test_garbage_above_the_length_can_be_dropped() -> None:
    cache = make_cache()
    write(cache, 10, keep=[4])
    cache.drop_garbage(0)
    for tensor in cache.tensors.values():
        assert not tensor.array[0, :, 4:].any()
        assert tensor.array[0, :, 1:4].all()


def test_a_cache_that_is_empty_again_shrinks_to_where_it_began() -> None:
    """So that a step after a long conversation costs what it did before."""
    cache = make_cache(num_slots=2)
    smallest, released = dict(cache.capacity), []
    for _ in range(100):
        write(cache, CHUNK)
    grown = dict(cache.capacity)
    assert grown["full"] > 1024 > smallest["full"]
    cache.reset(0)
    cache.shrink(release=lambda: released.append(True))
    assert (cache.capacity, released) == (grown, []), "the other sequence still holds rows"
    cache.reset(1)
    cache.shrink(release=lambda: released.append(True))
    assert (cache.capacity, released) == (smallest, [True])
    cache.shrink(release=lambda: released.append(True))
    assert released == [True], "there is nothing to do twice"
    write(cache, CHUNK)
    assert [tensor.shape[2] for kind, tensor in by_kind(cache)] == [smallest[kind] for kind, _ in by_kind(cache)]
    check_visible_rows(cache)


class Interrupted(Memory):
    """Raises in place of, or after, one of its calls."""

    def __init__(self) -> None:
        self.allocations_left = self.moves_left = 1 << 30

    def allocate(self, shape: Sequence[int], dtype: str) -> Any:
        self.allocations_left -= 1
        if self.allocations_left < 0:
            raise BackendError("there is no memory")
        return super().allocate(shape, dtype)

    def move_rows(self, tensor: HostTensor, sequence: int, start: int, num_rows: int) -> None:
        super().move_rows(tensor, sequence, start, num_rows)
        self.moves_left -= 1
        if self.moves_left == 0:
            raise KeyboardInterrupt


def write_often(cache: KVCache, count: int) -> None:
    for _ in range(count):
        write(cache, CHUNK)


@pytest.mark.parametrize("allocations", range(3))
def test_a_growth_that_fails_leaves_empty_sequences_that_can_be_filled(allocations: int) -> None:
    """Every further allocation fails, too, until the next attempt."""
    memory = Interrupted()
    cache = make_cache(num_slots=2, memory=memory)
    write(cache, CHUNK)
    memory.allocations_left = allocations
    with pytest.raises(BackendError, match="no memory"):
        write_often(cache, 40)
    assert (cache.length, cache.base) == ([0, 0], [0, 0])
    with pytest.raises(BackendError, match="no memory"):
        write(cache, CHUNK)
    memory.allocations_left = 1 << 30
    write_often(cache, 40)
    check_visible_rows(cache)


@pytest.mark.parametrize("moves", [1, 2])
def test_an_interrupted_compaction_is_done_again_and_forbids_what_a_whole_one_does(moves: int) -> None:
    memory = Interrupted()
    cache = make_cache(memory=memory)
    memory.moves_left = moves
    with pytest.raises(KeyboardInterrupt):
        write_often(cache, 40)
    held = cache.length[0]
    check_visible_rows(cache)
    with pytest.raises(RewindError, match="prefill again from position 0"):
        cache.rewind(0, held // 2)
    cache.rewind(0, held - MAX_DRAFT - 1)
    check_visible_rows(cache)
    for _ in range(20):
        write(cache, CHUNK)
        check_visible_rows(cache)
    cache.reset(0)
    write(cache, CHUNK)
    cache.rewind(0, 1)


def test_buffers_of_short_texts_are_kept_when_they_are_empty() -> None:
    """Growing them again for each prompt would cost more than it saves."""
    cache = make_cache()
    for _ in range(60):
        write(cache, CHUNK)
    grown = dict(cache.capacity)
    assert grown["full"] == 1024
    cache.reset(0)
    cache.shrink(release=lambda: pytest.fail("nothing is replaced"))
    assert cache.capacity == grown


def by_kind(cache: KVCache) -> list[tuple[str, HostTensor]]:
    return [("sliding" if ".0." in name else "full", tensor) for name, tensor in cache.tensors.items()]


def test_a_buffer_that_does_not_fit_is_a_clear_error() -> None:
    with pytest.raises(BackendError, match="no memory for a tensor of 4294967296 MiB: use shorter texts"):
        Memory().allocate((1 << 50,), "float32")
