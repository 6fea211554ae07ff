"""Checks recipes against a checkpoint and writes them as ONNX external data, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

from slipstream.export.checkpoint.config import TextConfig
from slipstream.export.checkpoint.quantized import QuantizedCheckpoint, QuantizedHeader, StoredMatrix
from slipstream.export.checkpoint.tensors import FLOAT_DTYPES, Checkpoint
from slipstream.export.model.layers import Blocks, Recipe
from slipstream.runtime.errors import CheckpointError

from .quantize import column_scales_name, quantize, scales_name

ALIGNMENT_BYTES = 4096  # one page: external data is memory-mapped

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PACKED_DTYPES = {"int4": ir.DataType.INT4, "nvfp4": ir.DataType.FLOAT4E2M1}


def check_recipes(recipes: Iterable[Recipe], checkpoint: Checkpoint, *, before_tracing: bool = False) -> None:
    """Every source is there, a float (orderings aside) and of the size the recipe needs.

    before_tracing: which recipes take quantized sources is not known yet.
    Raises CheckpointError naming the first few that are not.
    """
    problems = []
    for recipe in recipes:
        missing = [name for name in recipe.sources if name not in checkpoint.headers]
        if missing:
            problems += [f"{name} is missing" for name in missing]
            continue
        shapes = [checkpoint.headers[name].shape for name in recipe.sources]
        if not _fits(recipe, shapes):
            found, expected = (" + ".join(map(str, each)) for each in (shapes, _stored_shapes(recipe)))
            problems.append(f"{' + '.join(recipe.sources)} has shape {found}, {expected} is expected")
        for name in recipe.sources:
            dtype = checkpoint.headers[name].dtype
            if isinstance(checkpoint.headers[name], QuantizedHeader) and (before_tracing or recipe.blocks is not None):
                continue
            if dtype not in FLOAT_DTYPES and not name.endswith("token_ordering"):
                problems.append(f"{name} has dtype {dtype}; float tensors are expected")
    checkpoint.refuse(problems)


def _fits(recipe: Recipe, shapes: list[tuple[int, ...]]) -> bool:
    if recipe.layout == "transposed":
        in_features, out_features = recipe.shape
        return all(len(s) == 2 and s[1] == in_features for s in shapes) and sum(s[0] for s in shapes) == out_features
    if recipe.layout == "as_is" and len(shapes[0]) <= 1:  # scalars and orderings are stored flat
        return prod(shapes[0]) == prod(recipe.shape)
    return shapes == _stored_shapes(recipe)


def _stored_shapes(recipe: Recipe) -> list[tuple[int, ...]]:
    """What _fits expects of the sources, in the checkpoint's layout; of several matrices, that of all stacked."""
    if recipe.layout == "centroid_order":
        num_centroids, width, tokens = recipe.shape
        return [(num_centroids * tokens, width), (num_centroids * tokens,)]
    return [recipe.shape[::-1] if recipe.layout == "transposed" else recipe.shape]


def make(recipe: Recipe, checkpoint: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a recipe, floats cast to dtype; values were checked before (``check.py``)."""
    tensors = [checkpoint.read(name) for name in recipe.sources]
    if recipe.layout == "transposed":
        result = torch.cat(tensors).t() if len(tensors) > 1 else tensors[0].t()
    elif recipe.layout == "centroid_order":
        ordering = tensors[1].long()
        num_centroids, width, _ = recipe.shape
        result = tensors[0][ordering].reshape(num_centroids, -1, width).transpose(1, 2)
    else:
        result = tensors[0].reshape(recipe.shape)
    if not result.is_floating_point():
        return result.long()
    return result.to(dtype).contiguous()


class ExternalData:
    """One external data file, filled in order. ``add`` returns the tensor that refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")

    def add(self, name: str, tensor: torch.Tensor, *, packed_as: ir.DataType | None = None) -> ir.ExternalTensor:
        """packed_as: a type of 4 bits; the tensor has a byte for each value, and is stored with two in a byte."""
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT_BYTES))
        offset = self._file.tell()
        stored = _packed(tensor) if packed_as else tensor
        content = stored.view(torch.uint8) if stored.dim() else stored.reshape(1).view(torch.uint8)
        self._file.write(content.numpy().data.cast("B"))
        dtype, shape, folder = packed_as or from_torch_dtype(tensor.dtype), ir.Shape(tensor.shape), self.path.parent
        return ir.ExternalTensor(self.path.name, offset, stored.nbytes, dtype, shape=shape, name=name, base_dir=folder)

    def close(self) -> None:
        self._file.close()


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """An even number of bytes -> half as many, the first of two values in the low bits."""
    pairs = codes.view(-1, 2)
    packed = pairs[:, 0] & 15
    packed |= pairs[:, 1] << 4
    return packed


def write_weights(
    model: ir.Model,
    recipes: Mapping[str, Recipe],
    checkpoint: Checkpoint,
    data: ExternalData,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> None:
    """Replace each recipe's initializers by external data. ``advance`` is told the bytes written."""
    for name, recipe in recipes.items():
        if recipe.blocks is None:
            tensors = [data.add(name, make(recipe, checkpoint, dtype))]
        else:
            matrix = _make_quantized(recipe, recipe.blocks, checkpoint, dtype)
            tensors = [data.add(name, matrix.codes, packed_as=_PACKED_DTYPES.get(recipe.blocks.format))]
            tensors.append(data.add(scales_name(name), matrix.scales))
            if matrix.column_scales is not None:
                tensors.append(data.add(column_scales_name(name), matrix.column_scales))
        for tensor in tensors:
            model.graph.initializers[tensor.name].const_value = tensor
            advance(tensor.nbytes)


def _make_quantized(recipe: Recipe, blocks: Blocks, checkpoint: Checkpoint, dtype: torch.dtype) -> StoredMatrix:
    """Codes and scales [..., N] of sources joined along N: those of a quantized checkpoint, or made here."""
    if isinstance(checkpoint, QuantizedCheckpoint):
        matrix = checkpoint.read_matrix(recipe.sources)
        if blocks.format == "int4":
            scales = _scales_in(dtype, matrix.scales, recipe, checkpoint)
            return StoredMatrix(matrix.codes.contiguous(), scales.contiguous())
        return StoredMatrix(matrix.codes.contiguous(), matrix.scales.contiguous(), matrix.column_scales)
    parts = [quantize(checkpoint.read(name), blocks, dtype) for name in recipe.sources]
    if len(parts) == 1:
        return StoredMatrix(*parts[0])
    return StoredMatrix(torch.cat([codes for codes, _ in parts], dim=1), torch.cat([s for _, s in parts], dim=1))


def _scales_in(dtype: torch.dtype, scales: torch.Tensor, recipe: Recipe, checkpoint: Checkpoint) -> torch.Tensor:
    result = scales.to(dtype)
    if not bool(((result == 0) == (scales == 0)).all()):
        raise CheckpointError(
            f"{checkpoint.folder}: scales of {' + '.join(recipe.sources)} are too small for {dtype}: "
            "export with --dtype bfloat16 or float32"
        )
    return result


_OTHER_TOWERS = re.compile(
    r"(^|\.)(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder|audio_embedder|rotary_emb)\."
)
_KV_SOURCE = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


def check_leftovers(recipes: Iterable[Recipe], checkpoint: Checkpoint, config: TextConfig) -> None:
    """Every tensor of the checkpoint is used or known to be idle. Raises CheckpointError.

    Idle are the towers of other modalities, the KV projections that published checkpoints
    keep for layers that read another layer's KV, and an output head that is tied.
    """
    used = {name for recipe in recipes for name in recipe.sources}
    unknown = [name for name in checkpoint.headers if name not in used and not _is_idle(name, config)]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder} has {len(unknown)} tensors that no part of the text model uses, first "
            f"{min(unknown)}: slipstream does not know this architecture"
        )


def _is_idle(name: str, config: TextConfig) -> bool:
    if _OTHER_TOWERS.search(name) or name in ("lm_head.weight", "masked_embedding.token_ordering"):
        return True
    match = _KV_SOURCE.fullmatch(name)
    if match is None or int(match[1]) >= len(config.layers):
        return False
    layer = config.layers[int(match[1])]
    return not layer.owns_kv or (layer.value_is_key and match[2] == "v_proj")
