"""The seam between the decode core and whatever runs the graphs.

A backend holds the device state of several slots, a sequence in each: KV buffers, and for the next round
the pending token, its position and the hidden row before it. The core holds token ids and decides what is
kept. ``tests/support/fakes.py`` has a scripted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.sampling import NUM_CANDIDATES

MAX_SEED = 2**62 - 1  # of the noise, whose products must fit into int64


@dataclass(frozen=True)
class Sampling:
    """How a sequence draws its tokens. See ``runtime/sampling`` for the law.

    temperature: 0 takes the most likely token, and the next four are without effect then. top_k: tokens kept, 1 to the
        vocabulary's size. top_p: above 0 and at most 1. min_p: 0 to 1.
    seed: of the noise, 0 to MAX_SEED. The same seed draws the same token at a position of the same text, whatever K.
    repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 for none. logit_bias: what is added, by token.
    num_logprobs: log-probabilities of each token, and of so many of the likeliest ones; None for none.
    is_masked: whether a mask says which tokens may come.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    is_masked: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn: penalties and biases may change what is likeliest."""
        return self.temperature == 0

    @cached_property
    def needs_processing(self) -> bool:
        """Whether logits of the whole row are looked at or changed."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        is_processed = penalties != (1, 0, 0) or bool(self.logit_bias) or self.num_logprobs is not None
        return is_processed or self.is_masked or self.needs_more_candidates

    @property
    def needs_more_candidates(self) -> bool:
        """Whether tokens are drawn from more than the candidates of a row."""
        return not self.is_greedy and self.top_k > NUM_CANDIDATES


GREEDY = Sampling(temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)


# A draft of a sequence -> which tokens may come next, and next after each of its tokens: bool [len(draft) + 1, V].
Mask = Callable[[Sequence[int]], Array]


class TokenLogprob(NamedTuple):
    """A token with its log-probability, and the likeliest ones at its place: ids and log-probabilities, descending.

    Natural logarithms of the model's own probabilities, before temperature, penalties and biases.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Step(NamedTuple):
    """What a round decided.

    tokens: what it adds to each slot: accepted drafts, then the target's own token; nothing to idle and failed ones.
    failed: slots whose rows were not finite. Nothing of the round was kept for them; a prefill must follow.
    """

    tokens: list[list[int]]
    failed: list[int]


class Backend(Protocol):
    """Runs a pair of graphs for up to ``num_slots`` sequences.

    length[slot] counts the rows whose KV is valid. ``prefill`` and ``round`` move it; ``rewind`` shortens it. A slot is
    ready for rounds after a prefill or a round, and no longer after a rewind, a reset, a fork, or a round that it was
    idle in. Every call either completes or leaves the lengths as they were; where memory for longer sequences can't be
    had, all of them are 0 afterwards.
    Rounds run over the first slots, as many as a power of two, up to the last one that is not idle: low numbers cost
    less.
    draft_seconds, verify_seconds add up the time inside the graphs of rounds; where a round is
    one launch, verify_seconds has all of it.
    notes: what a result must say about how its rounds ran.
    """

    num_slots: int
    max_length: int
    prefill_chunk: int
    max_draft_tokens: int
    draft_seconds: float
    verify_seconds: float

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def length(self) -> Sequence[int]:
        """Valid rows per slot."""

    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        """Feed 1 to prefill_chunk tokens to one slot; the target's token after them.

        Raises NonFiniteError and keeps nothing of the call when a row is not finite.
        """

    def round(self, num_draft_tokens: int, commit_limit: Sequence[int]) -> Step:
        """Draft, verify and accept.

        num_draft_tokens: K of all slots; 0 is a plain step. commit_limit[slot]: tokens that it may add, at most K + 1;
        1 rejects every draft with the row count unchanged. 0 leaves the slot idle: its length stays.
        """

    def set_sampling(self, slot: int, sampling: Sampling, prompt: Sequence[int] = (), mask: Mask | None = None) -> None:
        """How a slot chooses from the next prefill on; GREEDY until then.

        prompt: what penalties see beside text. mask: where the sampling is masked, asked in every call.
        """

    def logprobs(self, slot: int) -> list[TokenLogprob]:
        """Of the tokens that the last call added to a slot whose sampling asks for them."""

    def rewind(self, slot: int, length: int) -> None:
        """Shorten a slot's sequence. Raises RewindError where rows before the new end are no longer there."""

    def reset(self, slot: int) -> None:
        """Forget a slot's sequence."""

    def fork(self, source: int, slot: int, length: int) -> None:
        """Replace a slot's sequence by the first length rows of another's. Raises RewindError as ``rewind`` does."""

    def not_finite(self, slot: int) -> str:
        """What to say of a slot whose rows were not finite."""

    def close(self) -> None:
        """Give the memory back. Nothing can be called afterwards."""


class Engine(Protocol):
    """What a bundle was loaded into; makes backends.

    name: engine, version and device, as results state them. notes: what results must say.
    max_length: tokens that a sequence holds.
    num_draft_tokens: the largest K where a request names none. draft_counts: every K it may name.
    has_whole_rows: whether penalties, biases, log-probabilities and any top_k can be had.
    """

    name: str
    notes: tuple[str, ...]
    max_length: int
    num_draft_tokens: int
    draft_counts: Sequence[int]
    has_whole_rows: bool

    def new_backend(self, num_slots: int = 1) -> Backend: ...

    def close(self) -> None:
        """Give everything back; backends are closed first."""
