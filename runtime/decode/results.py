"""What a generation returns, as typed values that convert to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from slipstream.runtime.backend.contract import GREEDY, Sampling, TokenLogprob

FinishReason = Literal["stop_token", "stop_string", "length", "context", "time", "cancelled", "error"]


class Chunk(NamedTuple):
    """What one round adds to a stream.

    text: new text of the answer; never taken back, possibly empty while it is held back.
    token_ids: newly committed tokens, the stop token included.
    thought: new text of the thought. logprobs: of token_ids, where they were asked for.
    """

    text: str
    token_ids: list[int]
    thought: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Acceptance:
    """How drafting went.

    rounds_offering[n], rounds_accepting[n]: rounds in which n drafts were offered, and accepted.
    """

    rounds_offering: list[int] = field(default_factory=lambda: [0])
    rounds_accepting: list[int] = field(default_factory=lambda: [0])

    def record(self, num_offered: int, num_accepted: int) -> None:
        """num_accepted of num_offered drafts were accepted in one round."""
        if num_offered >= len(self.rounds_offering):
            self.grow(num_offered)
        self.rounds_offering[num_offered] += 1
        self.rounds_accepting[num_accepted] += 1

    def grow(self, num_positions: int) -> None:
        missing = num_positions + 1 - len(self.rounds_offering)
        self.rounds_offering += [0] * missing
        self.rounds_accepting += [0] * missing

    def add(self, other: Acceptance) -> None:
        self.grow(len(other.offered))
        for count in range(len(other.rounds_offering)):
            self.rounds_offering[count] += other.rounds_offering[count]
            self.rounds_accepting[count] += other.rounds_accepting[count]

    @property
    def num_rounds(self) -> int:
        return sum(self.rounds_offering)

    @property
    def offered(self) -> list[int]:
        """Rounds in which each draft position was offered."""
        return _at_least(self.rounds_offering)

    @property
    def accepted(self) -> list[int]:
        """Rounds in which each draft position was accepted. A draft after a rejected one was offered, not accepted."""
        return _at_least(self.rounds_accepting)

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which each draft position was accepted."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Tokens a verify call adds: accepted drafts and its own one."""
        return 1 + sum(self.accepted) / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one generation.

    queued: until it was admitted. prefill: from there to the first token. decode: from there to the end, what others
        were given of the time included. draft, verify: inside the graphs of its rounds.
    """

    queued: float
    prefill: float
    draft: float
    verify: float
    decode: float

    def tokens_per_second(self, num_tokens: int) -> float:
        """Decode speed of num_tokens tokens, the first of which came from prefill."""
        return (num_tokens - 1) / self.decode if self.decode > 0 and num_tokens > 1 else 0.0


@dataclass(frozen=True)
class Result:
    """One finished generation.

    text: the answer, without special tokens and thoughts, cut before a stop string.
    thought: what stands between ``<|channel>`` and ``<channel|>``, without the channel's name; often empty.
    token_ids: committed tokens; the stop token, or the one completing a stop string, is last.
    finish_reason: "error" only where the call raised too: what was committed before is kept.
    num_draft_tokens: K asked for; 0 is plain decoding, None what measured costs and acceptance made of it.
    num_prompt_tokens: tokens before the first new one, BOS included. num_reused_tokens: of these, whose KV was there.
    sampling: how tokens were chosen, its seed included. logprobs: of token_ids, where they were asked for.
    engine: what ran it. notes: what its user has to know, such as engines without a parity stamp.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_draft_tokens: int | None
    acceptance: Acceptance
    timings: Timings
    engine: str = ""
    notes: tuple[str, ...] = ()
    thought: str = ""
    sampling: Sampling = GREEDY
    num_reused_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As ``slipstream generate --json`` prints it."""
        return {
            "text": self.text,
            "thought": self.thought,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_reused_tokens": self.num_reused_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "acceptance": [round(share, 4) for share in self.acceptance.by_position],
            "tokens_per_round": round(self.acceptance.tokens_per_round, 3),
            "timings": {
                **{name: round(seconds, 6) for name, seconds in asdict(self.timings).items()},
                "tokens_per_second": round(self.timings.tokens_per_second(len(self.token_ids)), 1),
            },
            "sampling": None if self.sampling == GREEDY else asdict(self.sampling),
            "logprobs": [logprob._asdict() for logprob in self.logprobs],
            "engine": self.engine,
            "notes": list(self.notes),
        }


def _at_least(rounds: Sequence[int]) -> list[int]:
    """For each n from 1 on, the rounds of at least n drafts; rounds[n]: those of just n."""
    return list(accumulate(reversed(rounds[1:])))[::-1]


def total_acceptance(results: Sequence[Result]) -> Acceptance:
    """Acceptance over several generations."""
    total = Acceptance()
    for result in results:
        total.add(result.acceptance)
    return total
