"""Graphs that choose from processed logits: penalties, biases, masks, log-probabilities, and in one any top_k.

As ``export/model/sampling.py`` has it, over processed logits. Sequences whose top_k is within the candidates are chosen
for by the very nodes of ``choose_sampled``, so that who else is in a batch changes nothing for them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.graph_io import NUM_LOGPROBS
from slipstream.runtime.sampling import NUM_CANDIDATES

from .sampling import accepted, pick, row_keys, softcapped


class ChooseProcessed(nn.Module):
    """Inputs and outputs: "choose_processed" in ``runtime/bundle/graph_io.py``."""

    name: graph_io.ChooseName = "choose_processed"
    dtype = torch.float32  # of hidden rows, which are picked only

    def forward(  # noqa: PLR0913, PLR0917 (one argument per input)
        self,
        token: Tensor,
        draft: Tensor,
        past_length: Tensor,
        scored_rows: Tensor,
        commit_limit: Tensor,
        is_generated: Tensor,
        logits: Tensor,
        hidden: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        repetition_penalty: Tensor,
        presence_penalty: Tensor,
        frequency_penalty: Tensor,
        prompt_seen: Tensor,
        token_counts: Tensor,
        logit_bias: Tensor,
        row_bias: Tensor,
        position_offset: Tensor,
        logit_softcap: Tensor,
    ) -> tuple[Tensor, ...]:
        own_logits = softcapped(logits, logit_softcap)  # [B, R, V]
        counts = token_counts.unsqueeze(1) + self._new_counts(token, draft, scored_rows, is_generated, logits)
        penalties = (repetition_penalty, presence_penalty, frequency_penalty)
        processed = _penalized(own_logits, prompt_seen.unsqueeze(1), counts, penalties)
        processed = processed + logit_bias.unsqueeze(1) + row_bias
        key = row_keys(seed, past_length.unsqueeze(1) + scored_rows + 1)
        own_token = self._own_token(processed, key, (temperature, top_k, top_p, min_p))
        decided = accepted(own_token, draft, past_length, scored_rows, commit_limit, hidden, position_offset)
        last = decided[1].reshape(-1, 1, 1).expand(-1, 1, counts.shape[2])
        is_counted = (commit_limit > 0).unsqueeze(1)
        next_counts = torch.where(is_counted, counts.gather(1, last).squeeze(1), token_counts)
        total = own_logits.logsumexp(dim=2, keepdim=True)
        top_logits, top_tokens = own_logits.topk(NUM_LOGPROBS, dim=2)
        logprob = own_logits.gather(2, own_token.unsqueeze(2)) - total
        return (*decided, next_counts, logprob.squeeze(2), top_logits - total, top_tokens)

    def _own_token(self, processed: Tensor, key: Tensor, settings: tuple[Tensor, ...]) -> Tensor:
        """[B, R]. settings: temperature, top_k, top_p, min_p, each [B]."""
        return pick(*processed.topk(NUM_CANDIDATES, dim=2), key, *settings)

    @staticmethod
    def _new_counts(token: Tensor, draft: Tensor, scored_rows: Tensor, is_generated: Tensor, logits: Tensor) -> Tensor:
        """How often each token stands in the call's rows up to each scored one, [B, R, V]; 0 where they are prompt."""
        rows = torch.cat([token, draft], dim=1)  # [B, Q]
        is_before = torch.arange(rows.shape[1]) <= scored_rows.unsqueeze(2)  # [B, R, Q]
        added = is_before.float() * is_generated.float().reshape(-1, 1, 1)
        index = rows.unsqueeze(1).expand(-1, scored_rows.shape[1], -1)
        return torch.zeros_like(logits).scatter_add(2, index, added)


class ChooseFull(ChooseProcessed):
    """The same, where any sequence may draw from more than the candidates: ordering whole rows is most of the time.

    TensorRT takes no TopK of a whole vocabulary (3840 elements at most), so this graph is ONNX Runtime's.
    """

    name: graph_io.ChooseName = "choose_full"

    def _own_token(self, processed: Tensor, key: Tensor, settings: tuple[Tensor, ...]) -> Tensor:
        ordered, tokens = processed.sort(dim=2, descending=True)  # as TopK: of equal ones the lower id first
        few = pick(ordered[:, :, :NUM_CANDIDATES], tokens[:, :, :NUM_CANDIDATES], key, *settings)
        needs_more = (settings[1] > NUM_CANDIDATES).unsqueeze(1)
        return torch.where(needs_more, pick(ordered, tokens, key, *settings), few)


def _penalized(logits: Tensor, prompt_seen: Tensor, counts: Tensor, penalties: tuple[Tensor, ...]) -> Tensor:
    """logits, counts [B, R, V], prompt_seen [B, 1, V]; penalties [B].

    Repetition as in CTRL (Keskar and others, 2019) and transformers, over prompt and text; presence and frequency as
    OpenAI's API has them, over the text alone.
    """
    repetition, presence, frequency = (penalty.reshape(-1, 1, 1) for penalty in penalties)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized = torch.where(prompt_seen + counts > 0, repeated, logits)
    return penalized - frequency * counts - presence * (counts > 0).float()
