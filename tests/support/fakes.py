"""A scripted backend of some slots: the decode core without a model, with the contract checked at every call."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from slipstream.runtime.backend.contract import GREEDY, Mask, Sampling, Step, TokenLogprob
from slipstream.runtime.errors import NonFiniteError, RewindError
from slipstream.runtime.text.codec import TextCodec

from .pairs import BOS, make_tokenizer

Target = Callable[[Sequence[int]], int]


@cache
def make_codec() -> TextCodec:
    """The codec of tests/support/pairs.py's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        make_tokenizer().save(str(path))
        return TextCodec(path, BOS)


def hash_target(seed: int, vocabulary: Sequence[int]) -> Target:
    """The next token depends on every token before it, so that one wrong row changes the rest."""

    def next_token(prefix: Sequence[int]) -> int:
        digest = hashlib.blake2b(repr((seed, list(prefix))).encode(), digest_size=4).digest()
        return vocabulary[int.from_bytes(digest) % len(vocabulary)]

    return next_token


def scripted_target(num_prompt_tokens: int, script: Sequence[int]) -> Target:
    """After a prompt of num_prompt_tokens the tokens of script, one after the other, whatever came before."""

    def next_token(prefix: Sequence[int]) -> int:
        return script[len(prefix) - num_prompt_tokens] if len(prefix) >= num_prompt_tokens else script[0]

    return next_token


class Fault:
    """Raises error at the call-th prefill or round (from 0), before or after the call has taken effect.

    A round says of a NonFiniteError which slot failed: the first that is not idle.
    """

    def __init__(self, call: int, error: Exception, *, is_late: bool = False) -> None:
        self.call = call
        self.error = error
        self.is_late = is_late


class ScriptedBackend:
    """Backend (see runtime/backend/contract.py) over a function from token prefix to next token.

    accepts: drafts of each round that are right, in order and slot by slot; all are once they run out. A round
    with more right drafts than it offers accepts all it offers.
    refuses_below: rewinds to fewer rows, and forks of fewer, raise RewindError, as those past a sliding window do.
    rows: tokens whose rows are valid, by slot. rounds: K and commit_limit of each round. prefills: slot and size of
    each. sampling: what was set, by slot. num_calls: prefills and rounds begun.
    """

    def __init__(
        self,
        target: Target,
        *,
        num_slots: int = 1,
        accepts: Iterable[int] = (),
        max_length: int = 64,
        prefill_chunk: int = 8,
        max_draft_tokens: int = 15,
        refuses_below: int = 0,
        fault: Fault | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self.max_draft_tokens = max_draft_tokens
        self.draft_seconds = self.verify_seconds = 0.0
        self.refuses_below = refuses_below
        self.fault = fault
        self.rows: list[list[int]] = [[] for _ in range(num_slots)]
        self.rounds: list[tuple[int, tuple[int, ...]]] = []
        self.prefills: list[tuple[int, int]] = []
        self.num_resets = self.num_forks = self.num_calls = 0
        self.sampling = [GREEDY] * num_slots
        self._target = target
        self._accepts = iter(accepts)
        self._pending: list[int | None] = [None] * num_slots

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None: ...

    @property
    def length(self) -> Sequence[int]:
        return [len(rows) for rows in self.rows]

    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        assert 1 <= len(tokens) <= self.prefill_chunk, "a prefill takes 1 to prefill_chunk tokens"
        assert len(self.rows[slot]) + len(tokens) < self.max_length, "there must be room for the token it predicts"
        self.prefills.append((slot, len(tokens)))
        self._pending[slot] = None
        self._fail(is_late=False)
        self.rows[slot] = [*self.rows[slot], *tokens]
        token = self._pending[slot] = self._target(self.rows[slot])
        self._fail(is_late=True)
        return token

    def round(self, num_draft_tokens: int, commit_limit: Sequence[int]) -> Step:
        assert len(commit_limit) == self.num_slots, "every slot has its limit"
        assert any(commit_limit), "a round has something to do"
        assert 0 <= num_draft_tokens <= self.max_draft_tokens, "K out of bounds"
        for slot, limit in enumerate(commit_limit):
            assert 0 <= limit <= num_draft_tokens + 1, "at most K + 1 tokens are added"
            assert not limit or self._pending[slot] is not None, "a slot that is not idle is ready"
            assert len(self.rows[slot]) + limit + 1 <= self.max_length or not limit, "what is added must fit"
        self.rounds.append((num_draft_tokens, tuple(commit_limit)))
        failed = self._failed_slot(commit_limit)
        if failed is None:
            self._fail(is_late=False)
        limits = [0 if slot == failed else limit for slot, limit in enumerate(commit_limit)]
        tokens = [self._added(slot, num_draft_tokens, limit) for slot, limit in enumerate(limits)]
        self.draft_seconds += 2.0
        self.verify_seconds += 4.0
        if failed is None:
            self._fail(is_late=True)
        return Step(tokens, [] if failed is None else [failed])

    def _added(self, slot: int, num_draft_tokens: int, limit: int) -> list[int]:
        """What a round adds to a slot."""
        pending = self._pending[slot]
        if not limit or pending is None:
            self._pending[slot] = None  # idle ones need a prefill
            return []
        num_accepted = min(next(self._accepts, num_draft_tokens), limit - 1)
        rows = [*self.rows[slot], pending]
        for _ in range(num_accepted):
            rows.append(self._target(rows))
        tokens = [*rows[len(self.rows[slot]) + 1 :], self._target(rows)]
        self.rows[slot], self._pending[slot] = rows, tokens[-1]
        return tokens

    def set_sampling(self, slot: int, sampling: Sampling, prompt: Sequence[int] = (), mask: Mask | None = None) -> None:
        assert list(prompt[: len(self.rows[slot])]) == self.rows[slot], "a slot holds the beginning of its prompt"
        self.sampling[slot] = sampling

    def logprobs(self, slot: int) -> list[TokenLogprob]:
        raise NotImplementedError

    def rewind(self, slot: int, length: int) -> None:
        self.check_rewind(slot, length)
        self.rows[slot] = self.rows[slot][:length]
        self._pending[slot] = None

    def reset(self, slot: int) -> None:
        self.rows[slot] = []
        self._pending[slot] = None
        self.num_resets += 1

    def fork(self, source: int, slot: int, length: int) -> None:
        assert source != slot, "a fork goes to another slot"
        self.check_rewind(source, length)
        self.rows[slot] = self.rows[source][:length]
        self._pending[slot] = None
        self.num_forks += 1

    def not_finite(self, slot: int) -> str:
        return f"NaN at position {len(self.rows[slot])}"

    def check_rewind(self, slot: int, length: int) -> None:
        if not 0 <= length <= len(self.rows[slot]):
            raise RewindError(f"{len(self.rows[slot])} rows can't be rewound to {length}")
        if length < self.refuses_below:
            raise RewindError(f"rows below {self.refuses_below} were moved away")

    def _failed_slot(self, commit_limit: Sequence[int]) -> int | None:
        """The slot whose rows are not finite in this round."""
        if self.fault is None or self.fault.call != self.num_calls or not isinstance(self.fault.error, NonFiniteError):
            return None
        self.num_calls += 1
        return next(slot for slot, limit in enumerate(commit_limit) if limit)

    def _fail(self, *, is_late: bool) -> None:
        """Raise what the fault asks for at this call, which counts once."""
        self.num_calls += not is_late
        if self.fault is not None and self.num_calls - 1 == self.fault.call and self.fault.is_late == is_late:
            raise self.fault.error


class ScriptedEngine:
    """Engine (see runtime/backend/contract.py) that makes one scripted backend."""

    name = "scripted"
    notes: tuple[str, ...] = ()
    num_draft_tokens = 3
    draft_counts: Sequence[int] = range(16)
    has_whole_rows = True

    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend, self.max_length = backend, backend.max_length

    def new_backend(self, num_slots: int = 1) -> ScriptedBackend:
        assert num_slots == self.backend.num_slots
        return self.backend

    def close(self) -> None: ...


def plain_tokens(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the target says one token at a time."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]
