"""What layers are made of: placeholders for weights, and the modules that hold them.

Re-authored from transformers' ``models/gemma4/modeling_gemma4.py`` for export: modules hold
placeholders only, and each parameter carries a ``Recipe`` that says which checkpoint
tensors it is made of. Weights are written by ``export/weights/recipes.py``, one at a time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from slipstream.export.checkpoint.config import Layer, LayerType, Rope, TextConfig

from . import ops

Layout = Literal["as_is", "transposed", "centroid_order"]


@dataclass(frozen=True)
class Blocks:
    """How a matrix [in, out] is quantized. size: values along its input that share a scale."""

    format: Literal["int8", "int4", "fp8", "nvfp4"]
    size: int

    @property
    def num_bits(self) -> int:
        return 4 if self.format in ("int4", "nvfp4") else 8

    def scale_bytes(self, item_bytes: int) -> int:
        """Bytes of one scale. item_bytes: of a float of the bundle."""
        return {"fp8": 4, "nvfp4": 1}.get(self.format, item_bytes)

    @property
    def code_range(self) -> tuple[int, int]:
        half = 1 << (self.num_bits - 1)
        return -half, half - 1


@dataclass(frozen=True)
class Recipe:
    """How an initializer is made from checkpoint tensors.

    sources: names in the checkpoint, without the text model's prefix.
    layout: "as_is"; "transposed" joins Linear weights [out, in] along out and stores
        [in, out]; "centroid_order" reorders the rows of sources[0] by sources[1] and
        stores each centroid's as the columns of a block [N, tokens].
    shape: of the result.
    blocks: of a "transposed" result that is stored as codes, with a second initializer for its scales.
    """

    sources: tuple[str, ...]
    layout: Layout
    shape: tuple[int, ...]
    blocks: Blocks | None = None

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    def num_bytes(self, item_bytes: int) -> int:
        """Bytes of the result in its file. item_bytes: of a float of the bundle."""
        if self.blocks is None:
            return self.num_values * item_bytes
        scales = self.num_values // self.blocks.size * self.blocks.scale_bytes(item_bytes)
        columns = 4 * self.shape[-1] if self.blocks.format == "nvfp4" else 0
        return self.num_values * self.blocks.num_bits // 8 + scales + columns


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
    """Over the last axis. size: of that, the width of the model where it is not given."""

    def __init__(self, config: TextConfig, source: str, size: int | None = None) -> None:
        super().__init__()
        self.weight = weight(Recipe((f"{source}.weight",), "as_is", (size or config.hidden_size,)))
        self.epsilon = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.epsilon)


class UnitNorm(nn.Module):
    """RMSNorm without a weight of its own."""

    unit: Tensor

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("unit", torch.ones(size), persistent=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.unit, self.epsilon)


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
    tables = nn.ModuleDict()
    for layer_type, head_dim in head_dims.items():
        tables[layer_type] = RotaryTable(config.rope[layer_type], head_dim, dtype)
    return tables
