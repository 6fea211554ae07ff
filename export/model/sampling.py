"""The graphs that draw tokens, as ``export/sampling_graphs.py`` traces them. ``runtime/sampling`` has the law.

Spelled for TensorRT-RTX 1.7.1, whose parser takes neither bit operations nor unsigned types, and which never ends
building the hash together with a second Softmax and its ReduceMax (either alone builds). Over candidates there is one
Softmax, one CumSum and the ArgMax.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.sampling import NUM_CANDIDATES

from . import ops
from .target import pick_rows

_PRIME = (1 << 31) - 1  # x -> x^5 permutes 0 to _PRIME - 1, as 5 and _PRIME - 1 have no common divisor
_ADDED = (0x1B873593, 0x2545F491, 0x6A09E667, 0x3C6EF372, 0x510E527F)  # before each round of the hash
_LEAST = -3.0e38  # as a logit: below all others, and finite
_SUPPRESSED = -1.0e37  # no logit of a model is below
_NEVER = 1 << 30  # above any row index
_COLDEST = 1e-6  # temperature that stands for 0 where the filters divide by it


class ChooseGreedy(nn.Module):
    """The likeliest token of each row, how many drafts they accept, and the next round's state.

    Inputs and outputs: "choose_greedy" in ``runtime/bundle/graph_io.py``.
    """

    name: graph_io.ChooseName = "choose_greedy"
    dtype = torch.float32  # of hidden rows, which are picked only

    def forward(
        self,
        draft: Tensor,
        past_length: Tensor,
        scored_rows: Tensor,
        commit_limit: Tensor,
        logits: Tensor,
        hidden: Tensor,
        position_offset: Tensor,
    ) -> tuple[Tensor, ...]:
        own_token = logits.argmax(dim=2)
        return accepted(own_token, draft, past_length, scored_rows, commit_limit, hidden, position_offset)


class ChooseSampled(nn.Module):
    """As ChooseGreedy, with tokens drawn from the candidates of each row.

    Inputs and outputs: "choose_sampled" in ``runtime/bundle/graph_io.py``.
    """

    name: graph_io.ChooseName = "choose_sampled"
    dtype = torch.float32

    def forward(  # noqa: PLR0913, PLR0917 (one argument per input)
        self,
        draft: Tensor,
        past_length: Tensor,
        scored_rows: Tensor,
        commit_limit: Tensor,
        logits: Tensor,
        hidden: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        position_offset: Tensor,
        logit_softcap: Tensor,
    ) -> tuple[Tensor, ...]:
        key = row_keys(seed, past_length.unsqueeze(1) + scored_rows + 1)
        top_logits, top_tokens = logits.topk(NUM_CANDIDATES, dim=2)
        own_token = pick(softcapped(top_logits, logit_softcap), top_tokens, key, temperature, top_k, top_p, min_p)
        return accepted(own_token, draft, past_length, scored_rows, commit_limit, hidden, position_offset)


class Draw(nn.Module):
    """One more token of a draft, with the noise that the target will draw it with.

    Inputs and outputs: "draw" in ``runtime/bundle/graph_io.py``.
    """

    name: graph_io.GraphName = "draw"
    dtype = torch.float32

    def forward(
        self,
        draft: Tensor,
        past_length: Tensor,
        draft_top_logits: Tensor,
        draft_top_tokens: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
    ) -> Tensor:
        key = row_keys(seed, past_length.unsqueeze(1) + (draft.shape[1] + 1))
        drawn = pick(draft_top_logits, draft_top_tokens, key, temperature, top_k, top_p, min_p)
        return torch.cat([draft, drawn], dim=1)


def accepted(
    own_token: Tensor,
    draft: Tensor,
    past_length: Tensor,
    scored_rows: Tensor,
    commit_limit: Tensor,
    hidden: Tensor,
    position_offset: Tensor,
) -> tuple[Tensor, ...]:
    """What a choose graph gives: own_token [B, R], how many drafts they accept, and the next round's state."""
    num_accepted = count_accepted(draft, own_token, scored_rows, commit_limit)
    last = num_accepted.unsqueeze(1)  # [B, 1]
    row = scored_rows.gather(1, last)
    num_fed = torch.where(commit_limit > 0, (row + 1).squeeze(1), 0)
    next_past_length = past_length + num_fed
    return (
        own_token,
        num_accepted,
        own_token.gather(1, last),
        pick_rows(hidden, row),
        next_past_length,
        next_past_length + position_offset,
    )


def count_accepted(draft: Tensor, own_token: Tensor, scored_rows: Tensor, commit_limit: Tensor) -> Tensor:
    """How many drafts equal the own token of the row before them, from the first scored row on. [B]

    draft [B, K]; own_token, scored_rows [B, R]. commit_limit [B] is above the answer and at most R, so the last
    scored row never accepts and what it is compared with (a number appended to keep the index in range) is moot.
    """
    following = torch.cat([draft, commit_limit.unsqueeze(1)], dim=1).gather(1, scored_rows)
    steps = torch.arange(scored_rows.shape[1]).unsqueeze(0)  # [1, R]
    is_accepted = (following == own_token) & (steps + 1 < commit_limit.unsqueeze(1))
    return torch.where(is_accepted, _NEVER, steps).amin(dim=1)


def softcapped(logits: Tensor, cap: Tensor) -> Tensor:
    """cap [1] as Gemma applies it, 0 for none; what is suppressed stays the least there is."""
    is_capped = (cap > 0) & (logits > _SUPPRESSED)
    return torch.where(is_capped, torch.tanh(logits / cap.clamp(min=_COLDEST)) * cap, logits)


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """seed [B], position [B, R] of the token to be drawn, both 0 or more -> keys [B, R] of its noise."""
    low, high = seed % _PRIME, _quotient(seed, _PRIME) % _PRIME
    key = _scramble(_scramble(low + _ADDED[0]) + high + _ADDED[1])
    return _scramble(_scramble(key.unsqueeze(1) + position + _ADDED[2]) + _ADDED[3])


def pick(
    logits: Tensor, tokens: Tensor, key: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The token drawn in each row, [B, R]: of what the filters keep, the largest logit + temperature * noise.

    logits float32, tokens [B, R, T], descending; key [B, R]; settings [B].
    """
    per_row = [setting.unsqueeze(1).unsqueeze(2) for setting in (temperature, top_k, top_p, min_p)]
    is_kept = kept(logits, *per_row)
    noise = -torch.log(-torch.log(uniform(key, tokens)))
    score = torch.where(is_kept, logits + per_row[0] * noise, _LEAST)
    return tokens.gather(2, score.argmax(dim=2, keepdim=True)).squeeze(2)


def kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which candidates [B, R, T] may be drawn, the first always; settings [B, 1, 1].

    The filters of transformers in its order: top_k, top_p of what that leaves, min_p, which needs no new sum as it
    compares with the first candidate only.
    """
    is_among_k = torch.arange(logits.shape[2]) < top_k
    probs = torch.softmax(torch.where(is_among_k, logits / temperature.clamp(min=_COLDEST), _LEAST), dim=2)
    before = probs.cumsum(dim=2) - probs
    # 1 is no filter: sums of float32 reach it before the last candidate
    return is_among_k & ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[:, :, :1])


def uniform(key: Tensor, tokens: Tensor) -> Tensor:
    """key [B, R], tokens [B, R, T] -> float32 (n + 0.5) / 2^23, n of 23 bits: exact, never 0 or 1."""
    hashed = _scramble(key.unsqueeze(2) + tokens + _ADDED[4])
    return (_quotient(hashed, 256).float() + 0.5) * 2.0**-23  # the upper bits: 31 are more than float32 holds


def _scramble(x: Tensor) -> Tensor:
    """x^5 modulo _PRIME of int64 x >= 0; no product reaches 2^62."""
    x = x % _PRIME
    square = x * x % _PRIME
    return square * square % _PRIME * x % _PRIME


def _quotient(x: Tensor, divisor: int) -> Tensor:
    """The integer Div of int64 x >= 0: torch exports // as four nodes, and truncating division through float32."""
    return ops.node("Div", (x, torch.tensor(divisor)), {})
