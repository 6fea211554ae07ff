"""A scripted backend of one sequence: the loop without a model, with the contract checked at every call."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from slipstream.runtime.backend.contract import GREEDY, Sampling, Step
from slipstream.runtime.errors import RewindError
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
    """Raises error at the call-th prefill or round (from 0), before or after the call has taken effect."""

    def __init__(self, call: int, error: BaseException, *, is_late: bool = False) -> None:
        self.call = call
        self.error = error
        self.is_late = is_late


class ScriptedBackend:
    """Backend (see runtime/backend/contract.py) over a function from token prefix to next token.

    accepts: drafts of each round that are right, in order; all are once they run out. A round
    with more right drafts than it offers accepts all it offers.
    refuses_below: rewinds to fewer rows raise RewindError, as those past a sliding window do.
    fed: tokens whose rows are valid. rounds: (num_draft_tokens, draft_length) of each round.
    sampling: what the last call set. prefills: sizes of the prefill calls. num_calls: prefills and rounds begun.
    """

    def __init__(
        self,
        target: Target,
        *,
        accepts: Iterable[int] = (),
        max_length: int = 64,
        prefill_chunk: int = 8,
        max_draft_tokens: int = 15,
        refuses_below: int = 0,
        fault: Fault | None = None,
    ) -> None:
        self.batch = 1
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self.max_draft_tokens = max_draft_tokens
        self.draft_seconds = self.verify_seconds = 0.0
        self.refuses_below = refuses_below
        self.fault = fault
        self.fed: list[int] = []
        self.rounds: list[tuple[int, int]] = []
        self.prefills: list[int] = []
        self.num_resets = 0
        self.num_calls = 0
        self.sampling = GREEDY
        self._target = target
        self._accepts = iter(accepts)
        self._pending: int | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None: ...

    @property
    def length(self) -> Sequence[int]:
        return [len(self.fed)]

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Step:
        (ids,) = tokens
        assert 1 <= len(ids) <= self.prefill_chunk, "a prefill takes 1 to prefill_chunk tokens"
        assert len(self.fed) + len(ids) < self.max_length, "a prefill must leave room for the token it predicts"
        self.prefills.append(len(ids))
        self._fail_early()
        self.fed = [*self.fed, *ids]
        self._pending = self._target(self.fed)
        self._fail_late()
        return Step([[self._pending]])

    def round(self, num_draft_tokens: int, draft_length: Sequence[int]) -> Step:
        (limit,) = draft_length
        assert self._pending is not None, "a round follows a prefill or a round; after a rewind, a prefill"
        assert 0 <= num_draft_tokens <= self.max_draft_tokens, "K out of bounds"
        assert 0 <= limit <= num_draft_tokens, "draft_length is at most K"
        assert len(self.fed) + limit + 2 <= self.max_length, "every token that may be added must fit into the context"
        self.rounds.append((num_draft_tokens, limit))
        self._fail_early()
        num_accepted = min(next(self._accepts, num_draft_tokens), limit)
        rows = [*self.fed, self._pending]
        for _ in range(num_accepted):
            rows.append(self._target(rows))
        tokens = [*rows[len(self.fed) + 1 :], self._target(rows)]
        self.fed, self._pending = rows, tokens[-1]
        self.draft_seconds += 2.0
        self.verify_seconds += 4.0
        self._fail_late()
        return Step([tokens])

    def set_sampling(self, sequence: int, sampling: Sampling) -> None:
        assert sequence == 0
        self.sampling = sampling

    def rewind(self, sequence: int, length: int) -> None:
        assert sequence == 0
        if not 0 <= length <= len(self.fed):
            raise RewindError(f"{len(self.fed)} rows can't be rewound to {length}")
        if length < self.refuses_below:
            raise RewindError(f"rows below {self.refuses_below} were moved away")
        self.fed = self.fed[:length]
        self._pending = None

    def reset(self, sequence: int) -> None:
        assert sequence == 0
        self.fed = []
        self._pending = None
        self.num_resets += 1

    def _fail_early(self) -> None:
        self.num_calls += 1
        if self._is_faulty() and self.fault is not None and not self.fault.is_late:
            raise self.fault.error

    def _fail_late(self) -> None:
        if self._is_faulty() and self.fault is not None and self.fault.is_late:
            raise self.fault.error

    def _is_faulty(self) -> bool:
        return self.fault is not None and self.num_calls - 1 == self.fault.call


def plain_tokens(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the target says one token at a time."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]
