"""Slots that come and go over ONNX Runtime: whatever the others do, each sequence is its solo run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.backend.contract import GREEDY, Sampling
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.errors import RewindError
from slipstream.runtime.ort.backend import OnnxRuntimeBackend, OnnxRuntimeEngine
from tests.support.pairs import random_prompt

NUM_SLOTS, NUM_TOKENS, CHUNK, K = 4, 40, 8, 3
WARM = Sampling(temperature=1.0, top_k=64, top_p=0.95, min_p=0.0, seed=3)
_SOLO: dict[tuple[int, Sampling], list[int]] = {}


@pytest.fixture(scope="module")
def engine(bundle_folder: Callable[[str], Path]) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(open_bundle(bundle_folder("edge")), num_threads=1)


def feed(backend: OnnxRuntimeBackend, slot: int, ids: list[int]) -> int:
    """Prefill what a slot does not hold; the token after it."""
    held = backend.length[slot]
    return [backend.prefill(slot, ids[start : start + CHUNK]) for start in range(held, len(ids), CHUNK)][-1]


def solo(engine: OnnxRuntimeEngine, number: int, sampling: Sampling) -> list[int]:
    """Prompt and plain text, alone in a backend."""
    if (number, sampling) not in _SOLO:
        backend = OnnxRuntimeBackend(engine, prefill_chunk=CHUNK, max_draft_tokens=K)
        backend.set_sampling(0, sampling)
        text = random_prompt(3 + 4 * number, number)
        text.append(feed(backend, 0, text))
        while len(text) < 3 + 4 * number + NUM_TOKENS:
            text += backend.round(0, [1]).tokens[0]
        _SOLO[number, sampling] = text
    return _SOLO[number, sampling]


@dataclass
class Player:
    """Plays a script on a backend and compares every token. playing: number and sampling of the text in a slot."""

    engine: OnnxRuntimeEngine
    backend: OnnxRuntimeBackend
    playing: dict[int, tuple[int, Sampling]] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)

    def text(self, slot: int) -> list[int]:
        return solo(self.engine, *self.playing[slot])

    def check(self, slot: int, first: int, tokens: list[int]) -> None:
        assert tokens == self.text(slot)[first : first + len(tokens)]

    def join(self, slot: int, number: int, *, is_warm: bool) -> None:
        """Another text, from its prompt on."""
        self.backend.reset(slot)
        self.playing[slot] = number, WARM if is_warm else GREEDY
        self.backend.set_sampling(slot, self.playing[slot][1])
        self.go_on(slot, 3 + 4 * number)

    def go_on(self, slot: int, length: int) -> None:
        """Prefill up to a length of the text, and at least the prompt."""
        length = max(length, 3 + 4 * self.playing[slot][0])
        token = feed(self.backend, slot, self.text(slot)[:length])
        self.check(slot, length, [token])
        self.ready.add(slot)

    def leave(self, slot: int) -> None:
        self.playing.pop(slot, None)
        self.ready.discard(slot)

    def rewind(self, slot: int, count: int) -> None:
        if slot in self.playing and self.backend.length[slot] > 3 + 4 * self.playing[slot][0] + count:
            self.backend.rewind(slot, self.backend.length[slot] - count)
            self.go_on(slot, self.backend.length[slot] + 1)

    def fork(self, source: int, slot: int, back: int) -> None:
        if source not in self.playing or source == slot:
            return
        length = max(self.backend.length[source] - back, 1)
        try:
            self.backend.fork(source, slot, length)
        except RewindError:
            return
        self.playing[slot] = self.playing[source]
        self.backend.set_sampling(slot, self.playing[slot][1])
        self.go_on(slot, length + 1)

    def round(self, num_draft_tokens: int, limits: list[int]) -> None:
        """Slots without a text, at its end or with limit 0 are idle."""
        held = list(self.backend.length)
        for slot in range(NUM_SLOTS):
            has_room = slot in self.ready and held[slot] + num_draft_tokens + 2 < len(self.text(slot))
            limits[slot] = min(limits[slot], num_draft_tokens + 1) if has_room else 0
        if not any(limits):
            return
        step = self.backend.round(num_draft_tokens, limits)
        assert not step.failed
        for slot, tokens in enumerate(step.tokens):
            assert len(tokens) <= limits[slot]
            assert self.backend.length[slot] == held[slot] + len(tokens)
            if tokens:
                self.check(slot, held[slot] + 1, tokens)
            else:
                self.ready.discard(slot)
        for slot in self.playing.keys() - self.ready:  # idle ones go on with a prefill
            if held[slot] + 2 < len(self.text(slot)):
                self.go_on(slot, held[slot] + 1)


slots, few = st.integers(0, NUM_SLOTS - 1), st.integers(0, K + 1)
actions = st.one_of(
    st.tuples(st.just("join"), slots, st.integers(0, 5), st.booleans()),
    st.tuples(st.just("leave"), slots),
    st.tuples(st.just("rewind"), slots, few),
    st.tuples(st.just("fork"), slots, slots, st.integers(0, 6)),
    st.tuples(st.just("round"), st.integers(0, K), st.lists(few, min_size=NUM_SLOTS, max_size=NUM_SLOTS)),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(actions, min_size=5, max_size=40))
def test_every_sequence_is_its_solo_run(engine: OnnxRuntimeEngine, script: list[tuple[object, ...]]) -> None:
    """Joins, leaves, rewinds, forks and idle rounds, greedy and drawn text side by side, across compactions."""
    player = Player(engine, OnnxRuntimeBackend(engine, num_slots=NUM_SLOTS, prefill_chunk=CHUNK, max_draft_tokens=K))
    for name, *values in script:
        if name == "join":
            slot, number, is_warm = values
            player.join(slot, number, is_warm=is_warm)  # type: ignore[arg-type]
        else:
            getattr(player, str(name))(*values)
    for _ in range(12):
        player.round(K, [K + 1] * NUM_SLOTS)


def test_a_slot_that_is_not_finite_fails_alone(engine: OnnxRuntimeEngine) -> None:
    player = Player(engine, OnnxRuntimeBackend(engine, num_slots=2, prefill_chunk=CHUNK, max_draft_tokens=K))
    for slot in range(2):
        player.join(slot, slot, is_warm=False)
    backend, name = player.backend, f"kv.{engine.manifest.kv[0].layer}.value"
    backend.cache.tensors[name].array[0, 0, 1] = np.nan
    held = list(backend.length)
    step = backend.round(K, [K + 1] * 2)
    assert step.failed == [0]
    assert (step.tokens[0], backend.length[0]) == ([], held[0])
    player.check(1, held[1] + 1, step.tokens[1])
    player.join(0, 2, is_warm=False)  # and the slot can be used again
    for _ in range(5):
        held = list(backend.length)
        for slot, tokens in enumerate(backend.round(K, [K + 1] * 2).tokens):
            player.check(slot, held[slot] + 1, tokens)


def test_rounds_run_over_as_few_slots_as_a_power_of_two(engine: OnnxRuntimeEngine) -> None:
    player = Player(engine, OnnxRuntimeBackend(engine, num_slots=NUM_SLOTS, prefill_chunk=CHUNK, max_draft_tokens=K))
    for last, batch in ((0, 1), (1, 2), (2, 4), (3, 4)):
        player.join(last, last, is_warm=False)
        player.backend.round(K, [int(slot == last) for slot in range(NUM_SLOTS)])
        assert player.backend._last is not None
        assert player.backend._last.batch == batch


def test_an_idle_slot_keeps_its_rows_and_needs_a_prefill(engine: OnnxRuntimeEngine) -> None:
    player = Player(engine, OnnxRuntimeBackend(engine, num_slots=2, prefill_chunk=CHUNK, max_draft_tokens=K))
    for slot in range(2):
        player.join(slot, slot + 1, is_warm=False)
    held = player.backend.length[1]
    for _ in range(6):
        player.backend.round(K, [K + 1, 0])
    assert player.backend.length[1] == held
    with pytest.raises(ValueError, match="slot 1 is not ready"):
        player.backend.round(K, [0, 1])
    player.go_on(1, held + 1)
    step = player.backend.round(K, [0, K + 1])
    player.check(1, held + 2, step.tokens[1])


def test_a_prefill_leaves_other_slots_alone(engine: OnnxRuntimeEngine) -> None:
    player = Player(engine, OnnxRuntimeBackend(engine, num_slots=3, prefill_chunk=CHUNK, max_draft_tokens=K))
    for slot in (0, 2):
        player.join(slot, slot, is_warm=False)
    before = {name: tensor.array[[0, 2]].copy() for name, tensor in player.backend.cache.tensors.items()}
    player.join(1, 4, is_warm=True)
    for name, tensor in player.backend.cache.tensors.items():
        assert (tensor.array[[0, 2]] == before[name]).all(), name
