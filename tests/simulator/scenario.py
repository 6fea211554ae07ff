"""What engines are held against: a script of rounds over the simulator, compared with ONNX Runtime at every call.

Drafts are replaced by right and wrong ones as the script wants, so that any number of them is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, kv_name
from slipstream.runtime.bundle.manifest import Bundle
from slipstream.runtime.errors import RewindError
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.trt.backend import TensorRTEngine
from tests.support.engine_fixtures import build_simulated, feed_slot, onnxruntime_backend
from tests.support.pairs import BOS, VOCAB_SIZE

from .machine import Simulator

K = 3
PROMPT_LENGTHS = (70, 41, 9, 37)
TEXT_LENGTH = 172


@dataclass(frozen=True)
class Reference:
    """The text of a prompt, the target's logits at each position, and drafts by the number of rows held."""

    num_prompt_tokens: int
    text: list[int]
    logits: npt.NDArray[np.float32]
    drafts: dict[int, list[int]]


@dataclass(frozen=True)
class Setting:
    bundle: Bundle
    references: list[Reference]


def setting_of(source: Path, folder: Path) -> Setting:
    bundle = build_simulated(source, folder, prefill_chunk=16)
    random = np.random.default_rng(7)
    prompts = [[BOS, *random.integers(8, VOCAB_SIZE, length - 1).tolist()] for length in PROMPT_LENGTHS]
    return Setting(bundle, [reference(bundle, ids) for ids in prompts])


def reference(bundle: Bundle, prompt: list[int]) -> Reference:
    backend = onnxruntime_backend(bundle)
    text, drafts = [*prompt, feed_slot(backend, 0, prompt)], dict[int, list[int]]()
    while len(text) < TEXT_LENGTH:
        held = backend.length[0]
        text += backend.round(K, [1]).tokens[0]
        drafts[held] = backend.last_draft(K)[0]
    return Reference(len(prompt), text, reference_logits(bundle, text), drafts)


def reference_logits(bundle: Bundle, text: list[int]) -> npt.NDArray[np.float32]:
    """All rows in one call of the portable graph, without a cache to speak of."""
    ids = np.array([text])
    inputs = {
        "token": ids[:, :1],
        "draft": ids[:, 1:],
        "past_length": np.zeros(1, np.int64),
        "base": np.zeros(1, np.int64),
        "scored_rows": np.arange(len(text))[None],
    }
    for buffer in bundle.manifest.kv:
        for part in ("key", "value"):
            shape = (1, buffer.num_kv_heads, len(text), buffer.head_dim)
            inputs[kv_name(buffer.layer, part)] = np.zeros(shape, np.float32)
    graphs = OnnxRuntimeEngine(bundle, num_threads=1)
    if graphs.per_layer_table is not None:
        inputs[PER_LAYER_INPUT] = graphs.per_layer_table.rows(ids)
    logits: npt.NDArray[np.float32] = graphs.target.run(["logits"], inputs)[0][0]
    return logits


class Player:
    """Drives one backend and holds every call against the references."""

    def __init__(self, simulator: Simulator, backend: Any, references: Sequence[Reference]) -> None:
        self.simulator = simulator
        self.backend = backend
        self.references = list(references)
        self._right: Sequence[int] = ()
        self._own_drafts: list[list[int]] = []
        self._logits: npt.NDArray[np.float32] = np.zeros(0, np.float32)

    def start(self) -> None:
        """Prefill every prompt in chunks."""
        self.simulator.tamper = self._see
        for slot, ref in enumerate(self.references):
            token = feed_slot(self.backend, slot, ref.text[: ref.num_prompt_tokens])
            assert token == ref.text[ref.num_prompt_tokens]
            self._check_logits([(ref, ref.num_prompt_tokens - 1, 0)])

    def prefill(self, counts: Sequence[int]) -> None:
        """Feed that many tokens of each text, where there are any."""
        for slot, (ref, count) in enumerate(zip(self.references, counts, strict=True)):
            if count:
                end = self.backend.length[slot] + count
                token = feed_slot(self.backend, slot, ref.text[end - count : end])
                assert (token, self.backend.length[slot]) == (ref.text[end], end)
                self._check_logits([(ref, end - 1, 0)])

    def round(self, right: Sequence[int], limits: Sequence[int] | None = None, k: int = K) -> None:
        """right: how many drafts are made right. limits: the bound of each sequence."""
        held, limits = list(self.backend.length), limits or [k] * len(right)
        self._right, self._own_drafts = right, []
        self.simulator.tamper = self._see
        step = self.backend.round(k, [limit + 1 for limit in limits])
        assert not step.failed
        accepted = [min(r, limit) if k else 0 for r, limit in zip(right, limits, strict=True)]
        pairs = list(zip(self.references, held, accepted, strict=True))
        assert step.tokens == [ref.text[start + 1 : start + 2 + count] for ref, start, count in pairs]
        assert list(self.backend.length) == [start + 1 + count for _, start, count in pairs]
        assert self._own_drafts == ([ref.drafts[start] for ref, start, _ in pairs] if k else [])
        self._check_logits(pairs)

    def _see(self, graph: str, outputs: dict[str, Any]) -> None:
        """Keep what the engines gave, and put drafts in place of the assistant's."""
        if graph == "target":
            self._logits = outputs["logits"].copy()
        if not graph.startswith("assistant"):
            return
        self._own_drafts = outputs["next_draft"].tolist()
        sequences = zip(self.references, self._right, self.backend.length, outputs["next_draft"], strict=False)
        for ref, right, start, next_draft in sequences:
            draft = np.array(ref.text[start + 1 : start + 1 + K])
            draft[right:] = (draft[right:] + 1) % VOCAB_SIZE
            next_draft[:] = draft

    def _check_logits(self, rows_of: Sequence[tuple[Reference, int, int]]) -> None:
        """Of every row that counts: the first one's position, and the drafts accepted after it, per sequence."""
        for sequence, (ref, start, count) in enumerate(rows_of):
            rows = self._logits[sequence, : count + 1]
            np.testing.assert_allclose(rows, ref.logits[start : start + count + 1], atol=1e-3)

    def rewind(self, counts: Sequence[int]) -> None:
        """Go back that many rows and one more, and feed these again."""
        for sequence, count in enumerate(counts):
            self.backend.rewind(sequence, self.backend.length[sequence] - count - 1)
        self.prefill([count + 1 for count in counts])

    def reset(self, sequence: int, ref: Reference) -> None:
        self.backend.reset(sequence)
        self.references[sequence] = ref
        for rows in self.kv():
            assert not rows[sequence].any()
            assert len(rows) == 1 or rows[sequence - 1].any(), "its neighbour keeps its rows"

    def kv(self) -> Iterator[Any]:
        for tensor in self.backend.cache.tensors.values():
            yield self.backend.memory.read(tensor)

    def rewind_one(self, slots: Sequence[int]) -> None:
        """Feed the last row again, where it says 1."""
        for slot, is_fed in enumerate(slots):
            if is_fed:
                self.backend.rewind(slot, self.backend.length[slot] - 1)
        self.prefill(slots)

    def leave_idle(self) -> None:
        """Rounds of one slot, two and three, whose others keep their rows and go on with a prefill."""
        for limits, fed in (
            ([4, 0, 0], [0, 0, 0]),  # once, so that the others' rows are in the state that was read
            ([3, 0, 0], [0, 0, 0]),
            ([2, 0, 0], [0, 0, 1]),
            ([2, 0, 3], [0, 1, 0]),  # the second one's rows stay, though the round runs over it
            ([0, 2, 0], [1, 0, 1]),
        ):
            held = list(self.backend.length)
            self._right = [3, 3, 3]
            step = self.backend.round(K, limits)
            assert [len(tokens) for tokens in step.tokens] == limits
            assert list(self.backend.length) == [rows + limit for rows, limit in zip(held, limits, strict=True)]
            for ref, rows, tokens in zip(self.references, held, step.tokens, strict=True):
                assert tokens == ref.text[rows + 1 : rows + 1 + len(tokens)]
            self.rewind_one(fed)

    def fork(self) -> None:
        """The first sequence's rows in the last slot."""
        length = self.backend.length[0] - 2
        self.backend.fork(0, 2, length)
        self.references[2] = self.references[0]
        self.prefill([0, 0, 1])
        for _ in range(2):
            self.round([1, 2, 3])

    def survive_a_row_that_is_not_finite(self) -> None:
        tensor, held = self.backend.cache.tensors["kv.0.value"], self.backend.length[0]
        saved = self.backend.memory.read(tensor)
        broken = saved.copy()
        broken[0, :, held - self.backend.cache.base[0] - 5] = np.nan
        self.backend.memory.write(tensor, broken)
        assert self.backend.round(K, [K + 1]).failed == [0]
        rows = self.backend.memory.read(tensor)
        self.backend.memory.write(tensor, np.where(np.isnan(rows), saved, rows))
        assert all(np.isfinite(rows).all() for rows in self.kv())
        assert self.backend.length[0] == held
        self.rewind([0])


def play_alone(player: Player, others: Sequence[Reference]) -> None:
    """Accepts of every count, clamps, plain rounds, a rewind, a row that is not finite, other prompts."""
    player.start()
    for right in (3, 0, 2, 1):
        player.round([right])
    for _ in range(3):
        player.round([3], k=0)
    player.round([3], [1])
    player.round([3], [1])
    player.rewind([2])
    player.round([2])
    player.survive_a_row_that_is_not_finite()
    player.round([1])
    for ref in others:  # each after an odd number of rounds
        player.reset(0, ref)
        player.start()
        for right in (0, 3, 1):
            player.round([right])


def play_together(player: Player, other: Reference) -> None:
    """Three lengths beyond the window: full buffers, the end of the first bucket, and one sequence made anew."""
    player.start()
    for i in range(10):
        player.round([i % 4, (i + 1) % 4, 3], [3, 2, i % 4])
    player.round([3, 3, 3], [2, 1, 2], k=2)
    player.rewind([4, 1, 0])
    while player.backend.length[0] < 132 or min(player.backend.cache.base[:2]) == 0:
        player.round([3, 2, 0] if player.backend.length[0] < 132 else [0, 3, 0])
    player.round([3, 3, 3], k=0)
    assert min(player.backend.cache.base[:2]) > 0
    with pytest.raises(RewindError):
        player.backend.rewind(0, player.backend.cache.base[0] + 3)
    player.reset(1, other)
    player.prefill([0, other.num_prompt_tokens, 0])
    for i in range(6):
        player.round([1, 3, (i + 2) % 4])
    player.leave_idle()
    player.fork()


def play(simulator: Simulator, setting: Setting) -> None:
    """The whole script: alone, together, closed in order."""
    long, middle, short, other = setting.references
    engines = TensorRTEngine(setting.bundle, "tensorrt-rtx")
    backends = [engines.new_backend(), engines.new_backend(3)]
    try:
        play_alone(Player(simulator, backends[0], [other]), [short, middle])
        play_together(Player(simulator, backends[1], [long, middle, short]), short)
        for backend in backends:
            backend.close()
        engines.close()
        simulator.check_closed()
    finally:
        for backend in backends:  # what broke can't be closed any more
            backend.is_closed = True
