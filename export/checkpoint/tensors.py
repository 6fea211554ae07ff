"""Reads a Hugging Face checkpoint folder: config.json, tensor headers, then tensors one by one.

Tensors are memory-mapped by safetensors; opening a checkpoint reads only the headers, so a
pair is checked before a weight is touched. Names are canonical: without the prefix that
the text model has in this class of checkpoint ("model.", "model.language_model.", ...).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.runtime.bundle.files import no_permission, plain_name
from slipstream.runtime.errors import CheckpointError

from .folder import CONFIG, CheckpointFolder, stand_in

_ANCHOR = "embed_tokens.weight"
_HEAD = "lm_head.weight"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_ROWS_AT_ONCE = 4096
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """dtype: as safetensors spells it ("BF16", "F8_E4M3", "I64"). key: the name in the file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    key: str

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return prod(self.shape) * int(bits[0] if bits else 8) // 8  # BOOL has no number

    def read(self) -> torch.Tensor:
        """The tensor as it is stored, backed by the mapped file."""
        with safe_open(self.file, framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(self.key)
            return tensor


@dataclass(frozen=True)
class Checkpoint:
    """folder, parsed config.json, and the header of every tensor by canonical name, as they lie on disk."""

    folder: Path
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, backed by the mapped file."""
        return self.headers[name].read()

    def refuse(self, problems: Sequence[str]) -> None:
        """Raises CheckpointError with the first few of the problems; nothing where there are none."""
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise CheckpointError(f"{self.folder}: {'; '.join(problems[:3])}{more}")


def open_checkpoint(folder: CheckpointFolder) -> Checkpoint:
    """Open a checkpoint, reading only config.json and tensor headers.

    Raises CheckpointError when files are missing, unreadable, or name a tensor twice.
    """
    config, weight_map = folder.object(CONFIG), _weight_map(folder)
    keys: dict[str, TensorHeader] = {}
    for name in sorted(set(weight_map.values())) or [_SINGLE]:
        file = folder.path / name
        for key, header in _headers(file).items():
            if key in keys:
                raise CheckpointError(f"tensor {key} is in {keys[key].file.name} and in {file.name}")
            keys[key] = header
    _check_index(folder.path, weight_map, keys)
    return Checkpoint(folder.path, config, _canonical(keys, folder.path))


def has_tied_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has no output head of its own, or one that equals its embedding in every value."""
    head, embedding = checkpoint.headers.get(_HEAD), checkpoint.headers[_ANCHOR]
    if head is None:
        return True
    if head.shape != embedding.shape or {head.dtype, embedding.dtype} - set(FLOAT_DTYPES):
        return False
    blocks = (checkpoint.read(name).split(_ROWS_AT_ONCE) for name in (_HEAD, _ANCHOR))
    return all(torch.equal(own.float(), embedded.float()) for own, embedded in zip(*blocks, strict=True))


def _weight_map(folder: CheckpointFolder) -> dict[str, str]:
    """File name by tensor, as the index has it; {} where one file holds them all, which transformers prefers."""
    path = folder.path
    if (path / _SINGLE).is_file():
        return {}
    if not (path / _INDEX).is_file():
        others = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
        held = f" (it holds {', '.join(others[:3])})" if others else ""
        raise CheckpointError(
            f"{path} has neither {_SINGLE} nor {_INDEX}{held}: save the model with transformers' save_pretrained, or "
            "download it again"
        )
    weight_map = folder.object(_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path / _INDEX} has no weight_map: the file is damaged, download it again")
    names = sorted(set(weight_map.values()))
    try:
        missing = [name for name in names if not (path / plain_name(name)).exists()]
    except ValueError as error:
        raise CheckpointError(f"{path / _INDEX}: {error}: shards lie beside their index") from error
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}. Download it again"
        )
    return weight_map


def _check_index(folder: Path, weight_map: Mapping[str, str], keys: Mapping[str, TensorHeader]) -> None:
    """Index and shards of one download agree to the last tensor; those of two revisions don't."""
    absent = sorted(set(weight_map) - set(keys))
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} tensors of the index are in no shard, first {absent[0]}: download it again"
        )
    moved = sorted(key for key, shard in weight_map.items() if keys[key].file.name != shard)
    if moved:
        raise CheckpointError(
            f"{folder}: the index has {moved[0]} in {weight_map[moved[0]]}, it is in {keys[moved[0]].file.name} "
            f"({len(moved)} such tensors): index and shards are of two downloads, download it again"
        )


def _headers(file: Path) -> dict[str, TensorHeader]:
    if file.exists() and not os.access(file, os.R_OK):  # safetensors would say that it is not there
        raise CheckpointError(no_permission(file))
    try:
        with safe_open(file, framework="pt") as shard:
            slices = {key: shard.get_slice(key) for key in shard.offset_keys()}
            return {
                key: TensorHeader(tuple(part.get_shape()), part.get_dtype(), file, key) for key, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        reason = stand_in(file) or f"{file} is not a readable safetensors file ({error}): download it again"
        raise CheckpointError(reason) from error


def _canonical(keys: Mapping[str, TensorHeader], folder: Path) -> dict[str, TensorHeader]:
    anchors = sorted(key for key in keys if key.endswith(_ANCHOR) and "tower" not in key)
    if len(anchors) != 1:
        raise CheckpointError(f"{folder} has {len(anchors)} tensors ending in {_ANCHOR}; a text model has one")
    prefix = anchors[0].removesuffix(_ANCHOR)
    # "language_model.model." is a text model inside a wrapper: its head stands beside "model."
    head = prefix.removesuffix("model.") + _HEAD if prefix.endswith(".model.") else _HEAD
    headers: dict[str, TensorHeader] = {}
    for key, header in keys.items():
        name = _HEAD if key == head else key.removeprefix(prefix)
        if name in headers:
            raise CheckpointError(f"{folder} has {headers[name].key} and {key}, which are one tensor of the text model")
        headers[name] = header
    return headers
