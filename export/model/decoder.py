"""The decoder layer of Gemma 4 with explicit KV buffers, shared by target and assistant.

Shapes: B batch, Q query rows, S KV capacity, H heads, D head size, N hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import gelu

from slipstream.export.checkpoint.config import Layer, TextConfig

from . import ops
from .layers import MLP, Linear, Recipe, RMSNorm, UnitNorm, weight
from .moe import MixtureOfExperts


@dataclass(frozen=True)
class LayerInputs:
    """What every layer of one type shares within a call.

    cos, sin: [B, Q, D / 2] of the query rows.
    visible: bool [B, 1, Q, S], which buffer rows each query row sees.
    write_start: [B], buffer index of the first new row.
    """

    cos: Tensor
    sin: Tensor
    visible: Tensor
    write_start: Tensor


class RotaryEmbedding(nn.Module):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RotaryEmbedding (half-split). x [B, H, Q, D]; cos, sin [B, Q, D / 2]."""
        return ops.node("RotaryEmbedding", (x, cos, sin), {"interleaved": 0})


class Cache(nn.Module):
    def forward(self, buffer: Tensor, rows: Tensor, start: Tensor) -> Tensor:
        """TensorScatter: buffer [B, H, S, D] with rows [B, H, Q, D] written from index start [B] on."""
        return ops.node("TensorScatter", (buffer, rows, start), {"axis": 2, "mode": "linear"})


class Attention(nn.Module):
    """Grouped-query attention over a KV buffer; writes its own rows first when it owns one."""

    def __init__(self, config: TextConfig, layer: Layer, source: str) -> None:
        super().__init__()
        self.layer = layer
        projections = ["q_proj"]
        num_heads = layer.num_heads
        if layer.owns_kv:
            projections += ["k_proj"] if layer.value_is_key else ["k_proj", "v_proj"]
            num_heads += layer.num_kv_heads * (len(projections) - 1)
            self.key_norm = RMSNorm(config, f"{source}.k_norm", layer.head_dim)
            self.key_rotary, self.key_cache = RotaryEmbedding(), Cache()
            self.value_norm, self.value_cache = UnitNorm(layer.head_dim, config.rms_norm_eps), Cache()
        self.num_projected_heads = num_heads
        self.project = Linear(
            config.hidden_size, num_heads * layer.head_dim, *(f"{source}.{name}" for name in projections)
        )
        self.query_norm = RMSNorm(config, f"{source}.q_norm", layer.head_dim)
        self.query_rotary = RotaryEmbedding()
        self.output = Linear(layer.num_heads * layer.head_dim, config.hidden_size, f"{source}.o_proj")

    def forward(self, x: Tensor, context: LayerInputs, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, Q, N]; key, value [B, Hkv, S, D], returned with the new rows when this layer owns them."""
        batch, rows, _ = x.shape
        layer = self.layer
        shape = (batch, rows, self.num_projected_heads, layer.head_dim)
        heads = ops.reshape(self.project(x), (0, 0, *shape[2:]), shape).transpose(1, 2)  # [B, H, Q, D]
        query = heads
        if layer.owns_kv:
            sizes = [layer.num_heads] + [layer.num_kv_heads] * (1 if layer.value_is_key else 2)
            query, new_key, *rest = heads.split(sizes, dim=1)
            new_value = rest[0] if rest else new_key
            new_key = self.key_rotary(self.key_norm(new_key), context.cos, context.sin)
            new_value = self.value_norm(new_value)
            key = self.key_cache(key, new_key, context.write_start)
            value = self.value_cache(value, new_value, context.write_start)
        query = self.query_rotary(self.query_norm(query), context.cos, context.sin)
        attended = ops.attention(query, key, value, context.visible).transpose(1, 2)
        width = layer.num_heads * layer.head_dim
        return self.output(ops.reshape(attended, (0, 0, width), (batch, rows, width))), key, value


class PerLayerInput(nn.Module):
    """Adds the per-layer embedding (PLE) of the token to the residual stream."""

    def __init__(self, config: TextConfig, source: str) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.ple_dim, f"{source}.per_layer_input_gate")
        self.project = Linear(config.ple_dim, config.hidden_size, f"{source}.per_layer_projection")
        self.norm = RMSNorm(config, f"{source}.post_per_layer_input_norm")

    def forward(self, x: Tensor, per_layer_input: Tensor) -> Tensor:
        gated = gelu(self.gate(x), approximate="tanh") * per_layer_input
        added: Tensor = self.norm(self.project(gated))
        return x + added


class DecoderLayer(nn.Module):
    def __init__(self, config: TextConfig, layer: Layer) -> None:
        super().__init__()
        source = f"layers.{layer.index}"
        self.input_norm = RMSNorm(config, f"{source}.input_layernorm")
        self.attention = Attention(config, layer, f"{source}.self_attn")
        self.post_attention_norm = RMSNorm(config, f"{source}.post_attention_layernorm")
        self.pre_mlp_norm = RMSNorm(config, f"{source}.pre_feedforward_layernorm")
        self.mlp = MLP(config, layer, f"{source}.mlp")
        self.experts = MixtureOfExperts(config, config.experts, source) if config.experts else None
        self.post_mlp_norm = RMSNorm(config, f"{source}.post_feedforward_layernorm")
        self.per_layer_input = PerLayerInput(config, source) if config.ple_dim else None
        self.scalar = weight(Recipe((f"{source}.layer_scalar",), "as_is", (1,)))

    def forward(
        self, x: Tensor, context: LayerInputs, key: Tensor, value: Tensor, per_layer_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, key, value = self.attention(self.input_norm(x), context, key, value)
        x = x + self.post_attention_norm(attended)
        mixed = self.mlp(self.pre_mlp_norm(x))
        if self.experts is not None:
            mixed = self.experts(x, mixed)
        x = x + self.post_mlp_norm(mixed)
        if self.per_layer_input is not None and per_layer_input is not None:
            x = self.per_layer_input(x, per_layer_input)
        return x * self.scalar, key, value
