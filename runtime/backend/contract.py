"""The seam between the speculative loop and whatever runs the graphs.

A backend holds the device state of a batch of sequences: KV buffers, and for the next round
the pending token, its position and the hidden row before it. The loop holds token ids and
decides what is kept. ``tests/support/fakes.py`` has a scripted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAX_SEED = 2**62 - 1  # of the noise, whose products must fit into int64


@dataclass(frozen=True)
class Sampling:
    """How a sequence draws its tokens. See ``runtime/sampling`` for the law.

    temperature: 0 takes the most likely token, and the rest is without effect then. top_k: candidates kept, 1 to the
        engine's num_candidates. top_p: above 0 and at most 1. min_p: 0 to 1.
    seed: of the noise, 0 to MAX_SEED. The same seed draws the same token at a position of the same text, whatever K.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling(temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)


class Step(NamedTuple):
    """What one call of the target decided, per sequence.

    tokens[b]: the tokens it adds: accepted drafts, then the target's own token.
    """

    tokens: list[list[int]]


class Backend(Protocol):
    """Runs a pair of graphs for ``batch`` sequences.

    length[b] counts the rows of sequence b whose KV is valid. ``prefill`` and ``round`` move
    it; ``rewind`` shortens it. Every call either completes or leaves the lengths as they were;
    where memory for longer sequences can't be had, all of them are 0 afterwards.
    Sequences move together: each gets at least one token per round, so a batch ends when its
    first sequence has to (at max_length); leaving one out is not part of this contract yet.
    draft_seconds, verify_seconds add up the time inside the graphs of rounds; where a round is
    one launch, verify_seconds has all of it.
    notes: what a result must say about how its rounds ran.
    """

    batch: int
    max_length: int
    prefill_chunk: int
    max_draft_tokens: int
    draft_seconds: float
    verify_seconds: float

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def length(self) -> Sequence[int]:
        """Valid rows per sequence."""

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Step:
        """Feed 1 to prefill_chunk tokens per sequence, after which each gets its next token."""

    def round(self, num_draft_tokens: int, draft_length: Sequence[int]) -> Step:
        """Draft, verify and accept after a prefill or round.

        draft_length[b] <= num_draft_tokens bounds what sequence b may accept; 0 forces
        rejection with the row count unchanged. num_draft_tokens 0 is a plain step.
        Raises NonFiniteError and keeps nothing of the call when a row is not finite.
        """

    def set_sampling(self, sequence: int, sampling: Sampling) -> None:
        """How a sequence draws from the next prefill on; GREEDY until then. Raises RequestError where it can't."""

    def rewind(self, sequence: int, length: int) -> None:
        """Shorten a sequence. A prefill must follow. Raises RewindError."""

    def reset(self, sequence: int) -> None:
        """Forget a sequence."""

    def close(self) -> None:
        """Give the memory back. Nothing can be called afterwards."""


class Engine(Protocol):
    """What a bundle was loaded into; makes a backend for each batch of sequences.

    name: engine, version and device, as results state them. notes: what results must say.
    num_draft_tokens: K where a request names none. draft_counts: every K it may name.
    num_candidates: the largest top_k of a request that samples; 0 where every request is greedy.
    """

    name: str
    notes: tuple[str, ...]
    num_draft_tokens: int
    draft_counts: Sequence[int]
    num_candidates: int

    def new_backend(self, batch: int = 1) -> Backend: ...

    def close(self) -> None:
        """Give everything back; backends are closed first."""
