"""Drawn text: drafted equals plain, and how often first drafts are accepted beside the most that there could be."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from slipstream.runtime.backend.contract import Sampling
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle.manifest import CHAT_TEMPLATE
from slipstream.runtime.decode.generation import Request
from slipstream.runtime.decode.scheduler import Scheduler
from slipstream.runtime.session import Pair

from .generating import generate, new_scheduler
from .reference import Array, Reference
from .report import FirstDraftCheck, SampledCheck

TEMPERATURE = 1.0  # Gemma 4's own, with its top_k
_TOP_K = 64
_PROMPTS, _DRAFTS_EACH, _WORDS = 5, 16, 8


def check_sampled(pair: Pair, prompts: Sequence[Sequence[int]], num_tokens: int, num_draft_tokens: int) -> SampledCheck:
    """Text of each prompt with a seed of its own, drafted and with every draft rejected."""
    differs = []
    with closing(pair.new_backend()) as backend:
        scheduler = new_scheduler(backend)
        for number, prompt in enumerate(prompts):
            sampling = _sampling(seed=number)
            texts = [
                _text(scheduler, pair, prompt, num_tokens, num_draft_tokens, sampling, rejects_drafts=rejects_drafts)
                for rejects_drafts in (False, True)
            ]
            if texts[0] != texts[1]:
                differs.append(number)
    return SampledCheck(num_draft_tokens, TEMPERATURE, len(prompts), len(prompts) * num_tokens, tuple(differs))


def check_first_drafts(pair: Pair, reference: Reference, prompts: Sequence[Sequence[int]]) -> FirstDraftCheck:
    """How often the draft after each token is the one that the target draws, and how often it could be at most.

    That is 1 - TV, TV being the total variation between what target and assistant draw from: no rule that keeps the
    target's law accepts more (Leviathan, Kalman, Matias, 2023, theorem 3.5).
    Prompts open a chat where the bundle has a template: elsewhere assistants are not at home.
    """
    accepted, possible = 0, []
    for number, prompt in enumerate(prompts[:_PROMPTS]):
        with closing(pair.new_backend()) as backend:
            assert isinstance(backend, PairBackend)
            backend.set_sampling(0, _sampling(seed=number))
            ids, token = _opening(pair, prompt), 0
            for start in range(0, len(ids), backend.prefill_chunk):
                token = backend.prefill(0, ids[start : start + backend.prefill_chunk])
            for _ in range(min(_DRAFTS_EACH, backend.max_length - len(ids) - 2)):
                ids.append(token)
                [token] = backend.round(1, [1]).tokens[0]
                accepted += backend.last_draft(1)[0][0] == token
                draft = reference.draft(ids, 1, backend.manifest.draft_position_offset)[0]
                possible.append(float(np.minimum(_drawn(reference.logits(ids)[-1]), _drawn(draft)).sum()))
    count = len(possible)
    return FirstDraftCheck(TEMPERATURE, count, accepted / max(count, 1), float(np.mean(possible or [0.0])))


def _opening(pair: Pair, prompt: Sequence[int]) -> list[int]:
    """A prompt's first words as what a user says, where there is a chat template."""
    if CHAT_TEMPLATE not in pair.manifest.files:
        return list(prompt)
    return pair.chat_ids([{"role": "user", "content": pair.codec.decode(prompt[1 : 1 + _WORDS])}])


def _sampling(seed: int) -> Sampling:
    return Sampling(TEMPERATURE, _TOP_K, top_p=1.0, min_p=0.0, seed=seed)


def _drawn(logits: Array) -> Array:
    """Logits [V] -> the probability of each token to be drawn."""
    kept = np.full(logits.shape, -np.inf)
    top = np.argsort(-logits, kind="stable")[:_TOP_K]
    kept[top] = logits[top] / TEMPERATURE
    weights = np.exp(kept - kept.max())
    shares: Array = weights / weights.sum()
    return shares


def _text(
    scheduler: Scheduler,
    pair: Pair,
    prompt: Sequence[int],
    num_tokens: int,
    num_draft_tokens: int,
    sampling: Sampling,
    *,
    rejects_drafts: bool,
) -> list[int]:
    request = Request(num_draft_tokens, num_tokens, (), (), rejects_drafts=rejects_drafts, sampling=sampling)
    return generate(scheduler, pair, prompt, request).token_ids
