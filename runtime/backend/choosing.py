"""How each slot's tokens are chosen: its settings where the graphs read them, and what only some requests need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.manifest import Manifest

from .contract import GREEDY, Mask, Sampling
from .tensors import Memory

_SETTINGS = [binding.name for binding in graph_io.placed(graph_io.INPUTS, "sampling")]


class Choice(NamedTuple):
    """How a call chooses: the graph, whether any sequence draws its tokens, and whether any is masked."""

    graph: graph_io.ChooseName
    is_drawn: bool
    is_masked: bool

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> Choice:
        """samplings: of the sequences that are not idle."""
        is_drawn = is_processed = is_full = is_masked = False
        for sampling in samplings:
            is_drawn = is_drawn or not sampling.is_greedy
            if sampling.needs_processing:
                is_processed = True
                is_full = is_full or sampling.needs_more_candidates
                is_masked = is_masked or sampling.is_masked
        if is_processed:
            return cls("choose_full" if is_full else "choose_processed", is_drawn, is_masked)
        return cls("choose_sampled" if is_drawn else "choose_greedy", is_drawn, is_masked)

    @property
    def is_processed(self) -> bool:
        """Whether the graph reads the history, and gives log-probabilities."""
        return self.graph not in graph_io.ENGINE_CHOICES


class History:
    """What penalties and biases go by, per slot and token of the vocabulary; allocated where a sequence needs it.

    tensors: prompt_seen, token_counts and logit_bias [B, V]. The graph adds to the counts, in place.
    """

    def __init__(self, memory: Memory, sizes: Mapping[str, int]) -> None:
        self._memory, self._vocab_size = memory, sizes["vocab_size"]
        given = graph_io.placed(graph_io.inputs("choose_full"), "history")
        self.tensors = memory.allocate_all(graph_io.specs(given, sizes, ""))

    def begin(self, slot: int, sampling: Sampling, prompt: Sequence[int]) -> None:
        """A text of a slot begins after a prompt."""
        seen, bias = (np.zeros(self._vocab_size, np.float32) for _ in range(2))
        seen[list(prompt)] = 1
        for token, added in sampling.logit_bias:
            bias[token] = added
        rows = {"prompt_seen": seen, "token_counts": np.zeros_like(seen), "logit_bias": bias}
        for name, values in rows.items():
            self._memory.write_slot(self.tensors[name], slot, values)


def write_sampling(arrays: Mapping[str, Array], slot: int, sampling: Sampling) -> None:
    """Put a slot's settings where the graphs read them."""
    for name in _SETTINGS:
        arrays[name][slot] = getattr(sampling, name)


class Choosing:
    """settings, masks: per slot. tensors: settings of all slots [B] and constants, by the graphs' names.

    history: None where no sequence has needed it.
    """

    def __init__(self, memory: Memory, manifest: Manifest, num_slots: int) -> None:
        self._memory, self._sizes = memory, {**manifest.sizes, "batch": num_slots}
        self.settings = [GREEDY] * num_slots
        self.masks: list[Mask | None] = [None] * num_slots
        self.history: History | None = None
        self._sampling, self._constants = (
            memory.mirror(graph_io.specs(graph_io.placed(graph_io.INPUTS, place), self._sizes, manifest.dtype))
            for place in _PLACES
        )
        for slot in range(num_slots):
            write_sampling(self._sampling.arrays, slot, GREEDY)
        self._sampling.upload()
        self._constants.arrays["position_offset"][:] = manifest.draft_position_offset
        self._constants.arrays["logit_softcap"][:] = manifest.logit_softcap or 0
        self._constants.upload()

    @property
    def per_slot(self) -> dict[str, Any]:
        return self._sampling.tensors

    @property
    def constants(self) -> dict[str, Any]:
        return self._constants.tensors

    def set(self, slot: int, sampling: Sampling, prompt: Sequence[int], mask: Mask | None) -> None:
        """As ``Backend.set_sampling`` says."""
        self.settings[slot], self.masks[slot] = sampling, mask
        write_sampling(self._sampling.arrays, slot, sampling)
        self._sampling.upload()
        if sampling.needs_processing and self.history is None:
            self.history = History(self._memory, self._sizes)
        if self.history is not None:
            self.history.begin(slot, sampling, prompt)

    def choice(self, limits: Sequence[int]) -> Choice:
        """Of a round. limits: of the first slots; those that are idle count for nothing."""
        return Choice.of(sampling for sampling, limit in zip(self.settings, limits, strict=False) if limit)


_PLACES: tuple[graph_io.Place, ...] = ("sampling", "constant")
