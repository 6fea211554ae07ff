"""Checks recipes against a checkpoint and writes them as ONNX external data, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir
import torch

from slipstream.runtime.errors import CheckpointError

from .checkpoint import Checkpoint
from .config import TextConfig
from .layers import Recipe

ALIGNMENT_BYTES = 4096  # one page: external data is memory-mapped

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_IR_DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
}
_FLOAT_HEADERS = ("F64", "F32", "F16", "BF16")


def check_recipes(recipes: Iterable[Recipe], checkpoint: Checkpoint) -> None:
    """Every source is there, a float (orderings aside) and of the size the recipe needs.

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
            problems.append(f"{' + '.join(recipe.sources)} has shape {shapes}, which does not make {recipe.shape}")
        for name in recipe.sources:
            dtype = checkpoint.headers[name].dtype
            if dtype not in _FLOAT_HEADERS and not name.endswith("token_ordering"):
                problems.append(f"{name} has dtype {dtype}; float tensors are expected")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{checkpoint.folder}: {'; '.join(problems[:3])}{more}")


def _fits(recipe: Recipe, shapes: list[tuple[int, ...]]) -> bool:
    if recipe.layout == "transposed":
        in_features, out_features = recipe.shape
        return all(len(s) == 2 and s[1] == in_features for s in shapes) and sum(s[0] for s in shapes) == out_features
    if recipe.layout == "centroid_order":
        table, ordering = shapes
        num_rows = recipe.shape[0] * recipe.shape[1]
        return table == (num_rows, recipe.shape[2]) and ordering == (num_rows,)
    if len(shapes[0]) <= 1:  # scalars and orderings are stored flat
        return prod(shapes[0]) == prod(recipe.shape)
    return shapes[0] == recipe.shape


def make(recipe: Recipe, checkpoint: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a recipe, floats cast to dtype. Raises CheckpointError on NaN or infinity."""
    tensors = [checkpoint.read(name) for name in recipe.sources]
    if recipe.layout == "transposed":
        result = torch.cat(tensors).t() if len(tensors) > 1 else tensors[0].t()
    elif recipe.layout == "centroid_order":
        ordering = tensors[1].long()
        if not torch.equal(ordering.sort().values, torch.arange(len(ordering))):
            raise CheckpointError(f"{checkpoint.folder}: {recipe.sources[1]} does not name every token once")
        result = tensors[0][ordering].reshape(recipe.shape)
    else:
        result = tensors[0].reshape(recipe.shape)
    if not result.is_floating_point():
        return result.long()
    result = result.to(dtype)
    if not _is_finite(result):
        bad = [n for n, t in zip(recipe.sources, tensors, strict=True) if not _is_finite(t.to(dtype))]
        raise CheckpointError(f"{checkpoint.folder}: {', '.join(bad)} holds NaN or infinity as {dtype}")
    return result.contiguous()


def _is_finite(tensor: torch.Tensor) -> bool:
    """Row block by row block: isfinite of a whole table would take half as much memory again."""
    return all(bool(torch.isfinite(block).all()) for block in tensor.split(4096))


class ExternalData:
    """One external data file, filled in order. ``add`` returns the tensor that refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")

    def add(self, name: str, tensor: torch.Tensor) -> ir.ExternalTensor:
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT_BYTES))
        offset = self._file.tell()
        content = tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
        self._file.write(content.numpy().data.cast("B"))
        return ir.ExternalTensor(
            self.path.name,
            offset,
            tensor.numel() * tensor.element_size(),
            _IR_DTYPES[tensor.dtype],
            shape=ir.Shape(tensor.shape),
            name=name,
            base_dir=self.path.parent,
        )

    def close(self) -> None:
        self._file.close()


def write_weights(
    model: ir.Model,
    recipes: Mapping[str, Recipe],
    checkpoint: Checkpoint,
    data: ExternalData,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> None:
    """Replace each recipe's initializer by external data. ``advance`` is told the bytes written."""
    for name, recipe in recipes.items():
        tensor = data.add(name, make(recipe, checkpoint, dtype))
        model.graph.initializers[name].const_value = tensor
        advance(tensor.nbytes)


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
