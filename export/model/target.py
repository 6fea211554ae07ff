"""The target graph: embeds, updates the KV buffers in place, scores rows.

Inputs and outputs are listed in ``runtime/bundle/graph_io.py``; the same graph serves prefill
(one scored row) and verify (every row scored). What is made of the scores, the target's own
tokens and what they accept, is another graph's: see ``export/model/sampling.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream.export.checkpoint.config import LayerType, TextConfig

from . import ops
from .decoder import DecoderLayer, LayerInputs
from .layers import Embedding, Linear, Recipe, RMSNorm, rotary_tables, weight

PER_LAYER_SOURCE = "embed_tokens_per_layer"


class PerLayerEmbedding(nn.Module):
    """Per-layer inputs of every layer from the token ids and the embeddings (PLE).

    has_table: whether rows are looked up here; otherwise they come in.
    """

    def __init__(self, config: TextConfig, *, has_table: bool) -> None:
        super().__init__()
        self.num_layers, self.width = len(config.layers), config.ple_dim
        packed = self.num_layers * self.width
        self.scale = self.width**0.5
        self.table = Embedding(config.vocab_size, packed, self.scale, PER_LAYER_SOURCE) if has_table else None
        self.project = Linear(config.hidden_size, packed, "per_layer_model_projection")
        self.norm = RMSNorm(config, "per_layer_projection_norm", self.width)
        self.project_scale = config.hidden_size**-0.5

    def forward(self, token: Tensor, embedded: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        """token [B, Q], embedded [B, Q, N], rows [B, Q, L * P] of the table -> one [B, Q, P] per layer."""
        shape = (*token.shape, self.num_layers, self.width)
        context = ops.reshape(self.project(embedded) * self.project_scale, (0, 0, *shape[2:]), shape)
        if self.table is not None:
            rows = self.table(token)
        else:
            assert rows is not None
            rows = rows * self.scale
        identity = ops.reshape(rows, (0, 0, *shape[2:]), shape)
        combined = (self.norm(context) + identity) * 2.0**-0.5
        width = self.num_layers * self.width
        packed = ops.reshape(combined, (0, 0, width), (*token.shape, width))
        per_layer: tuple[Tensor, ...] = packed.split(self.width, dim=-1)
        return per_layer


class Target(nn.Module):
    """The target over its KV buffers, which it takes and returns.

    dtype: of weights, KV and hidden rows.
    suppress_tokens: ids that may never be picked (their logits are pushed below every other).
    has_per_layer_table: whether the graph looks per-layer embeddings up, or gets their rows.
    """

    suppress: Tensor | None

    def __init__(
        self,
        config: TextConfig,
        dtype: torch.dtype,
        *,
        suppress_tokens: Sequence[int] = (),
        has_per_layer_table: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = Embedding(config.vocab_size, config.hidden_size, config.hidden_size**0.5, "embed_tokens")
        self.per_layer_embed = PerLayerEmbedding(config, has_table=has_per_layer_table) if config.ple_dim else None
        self.takes_per_layer_rows = bool(config.ple_dim) and not has_per_layer_table
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config, "norm")
        shape = (config.vocab_size, config.hidden_size)
        self.head = None if config.has_tied_head else weight(Recipe(("lm_head.weight",), "as_is", shape))
        suppress = None
        if suppress_tokens:
            suppress = torch.zeros(config.vocab_size, dtype=torch.float32)
            suppress[list(suppress_tokens)] = torch.finfo(torch.float32).min
        self.register_buffer("suppress", suppress, persistent=False)
        self.rotary = rotary_tables(config, dtype)

    def forward(
        self,
        token: Tensor,
        draft: Tensor,
        past_length: Tensor,
        base: Tensor,
        scored_rows: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        per_layer_rows: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        rows = torch.cat([token, draft], dim=1)  # [B, Q]
        hidden, keys, values = self._decode(rows, per_layer_rows, past_length, base, keys, values)
        logits = self._score(pick_rows(hidden, scored_rows))  # [B, R, V]
        return logits, hidden, (hidden * 0).sum(dim=(1, 2)) == 0, *keys, *values

    def _decode(
        self,
        rows: Tensor,
        per_layer_rows: Tensor | None,
        past_length: Tensor,
        base: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        config = self.config
        slots = {layer.index: slot for slot, layer in enumerate(config.kv_layers)}
        keys, values = list(keys), list(values)
        positions = past_length.unsqueeze(1) + torch.arange(rows.shape[1])  # [B, Q]
        full, sliding = self._rows_of(keys, "full"), self._rows_of(keys, "sliding") + base.unsqueeze(1)
        contexts = {
            "full": self._context("full", positions, full, past_length),
            "sliding": self._context("sliding", positions, sliding, past_length - base),
        }
        x = self.embed(rows)
        ple = [None] * len(config.layers)
        if self.per_layer_embed is not None:
            ple = self.per_layer_embed(rows, x, per_layer_rows)
        for module, layer, per_layer_input in zip(self.layers, config.layers, ple, strict=True):
            assert layer.kv_owner is not None
            slot = slots[layer.kv_owner]
            x, keys[slot], values[slot] = module(x, contexts[layer.type], keys[slot], values[slot], per_layer_input)
        return self.norm(x), keys, values

    def _rows_of(self, keys: list[Tensor], layer_type: LayerType) -> Tensor:
        """Index of every row of the buffers [B, H, S, D] of one type: [1, S]."""
        first = [layer.type for layer in self.config.kv_layers].index(layer_type)
        return torch.arange(keys[first].shape[2]).unsqueeze(0)

    def _context(self, layer_type: LayerType, positions: Tensor, held: Tensor, write_start: Tensor) -> LayerInputs:
        """positions [B, Q] of the query rows, held [1 or B, S] of the buffer rows, both absolute."""
        query, row = positions.unsqueeze(-1), held.unsqueeze(1)
        visible = row <= query  # [B, Q, S]
        if layer_type == "sliding":
            visible = visible & (row > query - self.config.sliding_window)
        cos, sin = self.rotary[layer_type](positions)
        return LayerInputs(cos, sin, visible.unsqueeze(1), write_start)

    def _score(self, scored: Tensor) -> Tensor:
        """Logits [B, R, V] of rows [B, R, N], before the softcap: it keeps their order."""
        batch, rows = scored.shape[:2]
        width, vocab_size = self.config.hidden_size, self.config.vocab_size
        flat = ops.reshape(scored, (-1, width), (batch * rows, width))
        logits = ops.head(flat, self.embed.weight if self.head is None else self.head).float()
        if self.suppress is not None:
            logits = logits + self.suppress
        return logits.reshape(batch, rows, vocab_size)


def pick_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, Q, N] at rows index [B, R] -> [B, R, N]."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
