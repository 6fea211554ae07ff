"""The decoder layer of Gemma 4 with explicit KV buffers, shared by target and assistant.

Re-authored from transformers' ``models/gemma4/modeling_gemma4.py`` for export: modules hold
placeholders only, and each parameter carries a ``Recipe`` that says which checkpoint
tensors it is made of. Weights are written by ``export/weights.py``, one at a time.

Shapes: B batch, Q query rows, S KV capacity, H heads, D head size, N hidden size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from . import ops
from .config import Layer, LayerType, Rope, TextConfig

Layout = Literal["as_is", "transposed", "centroid_order"]


@dataclass(frozen=True)
class Recipe:
    """How an initializer is made from checkpoint tensors.

    sources: names in the checkpoint, without the text model's prefix.
    layout: "as_is"; "transposed" joins Linear weights [out, in] along out and stores
        [in, out]; "centroid_order" reorders the rows of sources[0] by sources[1] and
        groups them by centroid.
    shape: of the result.
    """

    sources: tuple[str, ...]
    layout: Layout
    shape: tuple[int, ...]


_placeholder_values = itertools.count(1)


def weight(recipe: Recipe, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A placeholder of the recipe's shape that takes no memory: one element, expanded.

    Its value is unique, since the ONNX exporter merges initializers that are equal.
    """
    dtype = dtype or torch.get_default_dtype()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.tensor(next(_placeholder_values) % 31_000, dtype=bits).view(dtype)  # below float16's infinity
    parameter = nn.Parameter(value.expand(recipe.shape), requires_grad=False)
    parameter.recipe = recipe  # type: ignore[attr-defined]
    return parameter


def recipes_of(module: nn.Module) -> dict[str, Recipe]:
    """The recipe of every parameter, by its name."""
    return {name: vars(parameter)["recipe"] for name, parameter in module.named_parameters()}


class Linear(nn.Module):
    """One or more bias-free Linear layers of the checkpoint, merged along their outputs."""

    def __init__(self, in_features: int, out_features: int, *sources: str) -> None:
        super().__init__()
        names = tuple(f"{source}.weight" for source in sources)
        self.weight = weight(Recipe(names, "transposed", (in_features, out_features)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float, source: str) -> None:
        super().__init__()
        self.weight = weight(Recipe((f"{source}.weight",), "as_is", (size,)))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.epsilon)


class Embedding(nn.Module):
    """Token embedding scaled by the square root of its width."""

    def __init__(self, num_rows: int, width: int, scale: float, source: str) -> None:
        super().__init__()
        self.weight = weight(Recipe((f"{source}.weight",), "as_is", (num_rows, width)))
        self.scale = scale

    def forward(self, token: Tensor) -> Tensor:
        return nn.functional.embedding(token, self.weight) * self.scale


class MLP(nn.Module):
    def __init__(self, config: TextConfig, layer: Layer, source: str) -> None:
        super().__init__()
        width = layer.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * width, f"{source}.gate_proj", f"{source}.up_proj")
        self.down = Linear(width, config.hidden_size, f"{source}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(gelu(gate, approximate="tanh") * up)
        return down


@dataclass(frozen=True)
class Context:
    """What every layer of one type shares within a call.

    cos, sin: [B, Q, D / 2] of the query rows.
    visible: bool [B, 1, Q, S], which buffer rows each query row sees.
    write_start: [B], buffer index of the first new row.
    """

    cos: Tensor
    sin: Tensor
    visible: Tensor
    write_start: Tensor


class Attention(nn.Module):
    """Grouped-query attention over a KV buffer; writes its own rows first when it owns one."""

    value_scale: Tensor

    def __init__(self, config: TextConfig, layer: Layer, source: str) -> None:
        super().__init__()
        self.layer = layer
        self.epsilon = config.rms_norm_eps
        projections = ["q_proj"]
        num_heads = layer.num_heads
        if layer.owns_kv:
            projections += ["k_proj"] if layer.value_is_key else ["k_proj", "v_proj"]
            num_heads += layer.num_kv_heads * (len(projections) - 1)
            self.key_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, f"{source}.k_norm")
            self.register_buffer("value_scale", torch.ones(layer.head_dim), persistent=False)
        self.num_projected_heads = num_heads
        self.project = Linear(
            config.hidden_size, num_heads * layer.head_dim, *(f"{source}.{name}" for name in projections)
        )
        self.query_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, f"{source}.q_norm")
        self.output = Linear(layer.num_heads * layer.head_dim, config.hidden_size, f"{source}.o_proj")

    def forward(self, x: Tensor, context: Context, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
            new_key = ops.rotate(self.key_norm(new_key), context.cos, context.sin)
            new_value = ops.rms_norm(new_value, self.value_scale, self.epsilon)
            key = ops.scatter_rows(key, new_key, context.write_start)
            value = ops.scatter_rows(value, new_value, context.write_start)
        query = ops.rotate(self.query_norm(query), context.cos, context.sin)
        attended = ops.attention(query, key, value, context.visible).transpose(1, 2)
        width = layer.num_heads * layer.head_dim
        return self.output(ops.reshape(attended, (0, 0, width), (batch, rows, width))), key, value


class PerLayerInput(nn.Module):
    """Adds the per-layer embedding (PLE) of the token to the residual stream."""

    def __init__(self, config: TextConfig, source: str) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.ple_dim, f"{source}.per_layer_input_gate")
        self.project = Linear(config.ple_dim, config.hidden_size, f"{source}.per_layer_projection")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, f"{source}.post_per_layer_input_norm")

    def forward(self, x: Tensor, per_layer_input: Tensor) -> Tensor:
        gated = gelu(self.gate(x), approximate="tanh") * per_layer_input
        added: Tensor = self.norm(self.project(gated))
        return x + added


class DecoderLayer(nn.Module):
    def __init__(self, config: TextConfig, layer: Layer) -> None:
        super().__init__()
        source = f"layers.{layer.index}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, f"{source}.{name}")

        self.input_norm = norm("input_layernorm")
        self.attention = Attention(config, layer, f"{source}.self_attn")
        self.post_attention_norm = norm("post_attention_layernorm")
        self.pre_mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = MLP(config, layer, f"{source}.mlp")
        self.post_mlp_norm = norm("post_feedforward_layernorm")
        self.per_layer_input = PerLayerInput(config, source) if config.ple_dim else None
        self.scalar = weight(Recipe((f"{source}.layer_scalar",), "as_is", (1,)))

    def forward(
        self, x: Tensor, context: Context, key: Tensor, value: Tensor, per_layer_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, key, value = self.attention(self.input_norm(x), context, key, value)
        x = x + self.post_attention_norm(attended)
        x = x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))
        if self.per_layer_input is not None and per_layer_input is not None:
            x = self.per_layer_input(x, per_layer_input)
        return x * self.scalar, key, value


class RotaryTable(nn.Module):
    """cos and sin of given positions, in float32, for one layer type."""

    frequencies: Tensor

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        num_rotated = int(rope.rotary_fraction * head_dim // 2)
        exponents = torch.arange(0, 2 * num_rotated, 2, dtype=torch.int64).float() / head_dim
        frequencies = torch.cat([1.0 / rope.theta**exponents, torch.zeros(head_dim // 2 - num_rotated)])
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.dtype = dtype

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q] -> cos, sin [B, Q, D / 2]."""
        angles = positions.float().unsqueeze(-1) * self.frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotary_tables(config: TextConfig, dtype: torch.dtype) -> nn.ModuleDict:
    head_dims: dict[LayerType, int] = {layer.type: layer.head_dim for layer in config.layers}
    return nn.ModuleDict(
        {
            layer_type: RotaryTable(config.rope[layer_type], head_dim, dtype)
            for layer_type, head_dim in head_dims.items()
        }
    )
