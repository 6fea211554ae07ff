"""The assistant graph: one or several draft steps over the target's donor KV buffers.

Every step runs at the same position over the same KV: nothing is written but the draft.
Step input is the target's embedding of the last token joined with the hidden row; the
next step's hidden row is the assistant's own state projected back to the target's width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.export.checkpoint.config import AssistantConfig, CentroidHead, TextConfig

from . import ops
from .decoder import DecoderLayer, LayerInputs
from .layers import Embedding, Linear, Recipe, RMSNorm, rotary_tables, weight


def _head_source(text: TextConfig) -> str:
    return "embed_tokens.weight" if text.has_tied_head else "lm_head.weight"


class DenseHead(nn.Module):
    """Scores the whole vocabulary with the assistant's own table, tied to its embedding or not."""

    def __init__(self, text: TextConfig, num_top_logits: int) -> None:
        super().__init__()
        self.table = weight(Recipe((_head_source(text),), "as_is", (text.vocab_size, text.hidden_size)))
        self.num_top_logits = num_top_logits

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """state [B, 1, N] -> top logits and their tokens [B, T]."""
        flat = ops.reshape(state, (-1, state.shape[-1]), (state.shape[0], state.shape[-1]))
        return torch.topk(ops.head(flat, self.table).float(), self.num_top_logits, dim=-1)


class OrderedHead(nn.Module):
    """Scores only the tokens of the nearest centroids.

    The table is stored in centroid order, a contiguous block [N, tokens] for each, and gathered as it lies.
    """

    def __init__(self, text: TextConfig, head: CentroidHead, num_top_logits: int) -> None:
        super().__init__()
        per_centroid = text.vocab_size // head.num_centroids
        self.head = head
        self.num_scored = head.top_k * per_centroid
        self.num_top_logits = num_top_logits
        self.centroids = Linear(text.hidden_size, head.num_centroids, "masked_embedding.centroids")
        ordering = "masked_embedding.token_ordering"
        shape = (head.num_centroids, text.hidden_size, per_centroid)
        self.table = weight(Recipe((_head_source(text), ordering), "centroid_order", shape))
        self.tokens = weight(Recipe((ordering,), "as_is", (head.num_centroids, per_centroid)), torch.int64)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """state [B, 1, N] -> top logits and their tokens [B, T], of the scored ones."""
        batch = state.shape[0]
        _, nearest = torch.topk(self.centroids(state), self.head.top_k, dim=-1)
        nearest = ops.reshape(nearest, (0, -1), (batch, self.head.top_k))
        blocks = ops.pick(self.table, nearest)  # [B, top_k, N, tokens of a centroid]
        logits = ops.reshape(state.unsqueeze(1) @ blocks, (0, self.num_scored), (batch, self.num_scored)).float()
        top_logits, top_index = torch.topk(logits, self.num_top_logits, dim=-1)
        tokens = nn.functional.embedding(nearest, self.tokens)
        tokens = ops.reshape(tokens, (0, self.num_scored), (batch, self.num_scored))
        return top_logits, tokens.gather(1, top_index)


class Assistant(nn.Module):
    """num_steps draft steps of one assistant, unrolled."""

    def __init__(
        self, config: AssistantConfig, target: TextConfig, dtype: torch.dtype, *, num_steps: int, num_top_logits: int
    ) -> None:
        super().__init__()
        text = config.text
        self.config = text
        self.dtype = dtype
        self.num_steps = num_steps
        self.embed = Embedding(target.vocab_size, target.hidden_size, target.hidden_size**0.5, "embed_tokens")
        self.pre_projection = Linear(2 * config.backbone_hidden_size, text.hidden_size, "pre_projection")
        self.layers = nn.ModuleList(DecoderLayer(text, layer) for layer in text.layers)
        self.norm = RMSNorm(text, "norm")
        self.post_projection = Linear(text.hidden_size, config.backbone_hidden_size, "post_projection")
        self.rotary = rotary_tables(text, dtype)
        if config.centroid_head is None:
            self.head: nn.Module = DenseHead(text, num_top_logits)
        else:
            self.head = OrderedHead(text, config.centroid_head, num_top_logits)

    def forward(
        self,
        token: Tensor,
        draft: Tensor,
        hidden: Tensor,
        position: Tensor,
        past_length: Tensor,
        base: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        contexts = self._contexts(position, past_length, base, keys)
        donor = {"sliding": (keys[0], values[0]), "full": (keys[1], values[1])}
        tokens = torch.cat([token, draft], dim=1)
        last = tokens[:, -1:]
        drafted, top_logits, top_tokens = [draft], [], []
        for _ in range(self.num_steps):
            x = self.pre_projection(torch.cat([self.embed(last), hidden], dim=-1))
            for module, layer in zip(self.layers, self.config.layers, strict=True):
                x, _, _ = module(x, contexts[layer.type], *donor[layer.type])
            state = self.norm(x)
            hidden = self.post_projection(state)
            logits, step_tokens = self.head(state)
            last = step_tokens[:, :1]
            drafted.append(last)
            top_logits.append(logits)
            top_tokens.append(step_tokens)
        return torch.cat(drafted, dim=1), torch.stack(top_logits, dim=1), torch.stack(top_tokens, dim=1), hidden

    def _contexts(
        self, position: Tensor, past_length: Tensor, base: Tensor, keys: list[Tensor]
    ) -> dict[str, LayerInputs]:
        """By layer type: angles, and the mask of a draft step, [B, 1, 1, S].

        It shows the donor rows 0..N-1 of N = past_length, in sliding layers the last window of them: rows after them
        hold what was rejected, or nothing yet.
        """
        contexts = {}
        length = past_length.unsqueeze(1)  # [B, 1]
        for layer_type, key in zip(("sliding", "full"), keys, strict=True):
            if layer_type not in self.rotary:
                continue
            held = torch.arange(key.shape[2]).unsqueeze(0)
            if layer_type == "sliding":
                held = held + base.unsqueeze(1)
            visible = held < length
            if layer_type == "sliding":
                visible = visible & (held >= length - self.config.sliding_window)
            cos, sin = self.rotary[layer_type](position.unsqueeze(1))
            contexts[layer_type] = LayerInputs(cos, sin, visible.unsqueeze(1).unsqueeze(1), base)
        return contexts
