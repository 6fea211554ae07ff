"""Reads a Hugging Face checkpoint folder: config.json, tensor headers, then tensors one by one.

Tensors are memory-mapped by safetensors; opening a checkpoint reads only the headers, so a
pair is checked before a weight is touched. Names are canonical: without the prefix that
the text model has in this class of checkpoint ("model.", "model.language_model.", ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.runtime.errors import CheckpointError

_ANCHOR = "embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    shape: tuple[int, ...]
    dtype: str
    file: Path
    key: str


@dataclass(frozen=True)
class Checkpoint:
    """folder, parsed config.json, and the header of every tensor by canonical name."""

    folder: Path
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, backed by the mapped file."""
        header = self.headers[name]
        with safe_open(header.file, framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(header.key)
            return tensor


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; {} when it is absent and not required."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise CheckpointError(
            f"{path} is missing: a checkpoint folder holds config.json, tokenizer.json and .safetensors files"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
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
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / _INDEX} has no weight_map: the file is damaged, download it again")
    return weight_map


def _check_index(folder: Path, keys: Mapping[str, TensorHeader]) -> None:
    if not (folder / _INDEX).exists():
        return
    absent = sorted(set(_weight_map(folder)) - set(keys))
    if absent:
        raise CheckpointError(f"{folder}: {len(absent)} tensors of the index are in no shard, first {absent[0]}")


def _headers(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(file, framework="pt") as shard:
            slices = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118 (not a dict)
            return {
                key: TensorHeader(tuple(part.get_shape()), part.get_dtype(), file, key) for key, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file ({error}): download it again") from error


def _canonical(keys: Mapping[str, TensorHeader], folder: Path) -> dict[str, TensorHeader]:
    anchors = sorted(key for key in keys if key.endswith(_ANCHOR) and "tower" not in key)
    if len(anchors) != 1:
        raise CheckpointError(f"{folder} has {len(anchors)} tensors ending in {_ANCHOR}; a text model has one")
    prefix = anchors[0].removesuffix(_ANCHOR)
    return {key.removeprefix(prefix): header for key, header in keys.items()}
