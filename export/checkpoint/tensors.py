"""Reads a Hugging Face checkpoint folder: config.json, tensor headers, then tensors one by one.

Tensors are memory-mapped by safetensors; opening a checkpoint reads only the headers, so a
pair is checked before a weight is touched. Names are canonical: without the prefix that
the text model has in this class of checkpoint ("model.", "model.language_model.", ...).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.runtime.bundle.files import no_permission
from slipstream.runtime.errors import CheckpointError

_ANCHOR = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"


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


def read_text(path: Path, *, required: bool = True) -> str | None:
    """A text file of a checkpoint folder; None when it is absent and not required."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if not required:
            return None
        raise CheckpointError(
            f"{path} is missing: a checkpoint folder holds config.json, generation_config.json, tokenizer.json and "
            ".safetensors files"
        ) from error
    except PermissionError as error:
        raise CheckpointError(no_permission(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(_stand_in(path) or f"{path} is not readable as text: {error}") from error


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; {} when it is absent and not required."""
    text = read_text(path, required=required)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(_stand_in(path) or f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a JSON object is expected")
    return content


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder, reading only config.json and tensor headers.

    Raises CheckpointError when files are missing, unreadable, or name a tensor twice.
    """
    config = read_json(folder / "config.json")
    keys: dict[str, TensorHeader] = {}
    for file in _shards(folder):
        for key, header in _headers(file).items():
            if key in keys:
                raise CheckpointError(f"tensor {key} is in {keys[key].file.name} and in {file.name}")
            keys[key] = header
    _check_index(folder, keys)
    return Checkpoint(folder, config, _canonical(keys, folder))


def _shards(folder: Path) -> list[Path]:
    index_path = folder / _INDEX
    if not index_path.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise CheckpointError(f"{folder} has neither model.safetensors nor {_INDEX}")
        return [single]
    names = sorted(set(_weight_map(folder).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}. Download it again"
        )
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / _INDEX} has no weight_map: the file is damaged, download it again")
    return weight_map


def _check_index(folder: Path, keys: Mapping[str, TensorHeader]) -> None:
    """Index and shards of one download agree to the last tensor; those of two revisions don't."""
    if not (folder / _INDEX).exists():
        return
    weight_map = _weight_map(folder)
    absent = sorted(set(weight_map) - set(keys))
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} tensors of the index are in no shard, first {absent[0]}: download it again"
        )
    moved = sorted(key for key, shard in weight_map.items() if keys[key].file.name != Path(shard).name)
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
        reason = _stand_in(file) or f"{file} is not a readable safetensors file ({error}): download it again"
        raise CheckpointError(reason) from error


def _stand_in(file: Path) -> str | None:
    """What to do about a file that only stands for the wanted one, as failed downloads leave it."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError:
        return None
    if start.startswith(b"version https://git-lfs"):
        return f"{file} is a Git LFS pointer, not the file: run git lfs pull in {file.parent}, or download it again"
    if start.startswith(b"<"):
        return (
            f"{file} is a web page, not the file: the download got an error or a login page. Log in where the "
            "checkpoint is kept, accept its terms, and download it again"
        )
    return None


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
