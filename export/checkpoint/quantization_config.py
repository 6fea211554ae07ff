"""What a checkpoint's configuration says of quantization: one of the formats that are served, nothing, or an error.

Served are, as their makers publish them:

- int4: "pack-quantized" of compressed-tensors (``compressors/pack_quantized/base.py`` there), symmetric, in groups of
  32, 64 or 128 along the input. Google's w4a16 QAT checkpoints of Gemma 4 are of this kind (group 32).
- fp8 and nvfp4: quant_algo FP8, NVFP4 and W4A16_NVFP4 of NVIDIA ModelOpt (``modelopt/torch/export/quant_utils.py`` and
  ``convert_hf_config.py`` there), told by config.json's quantization_config, by hf_quant_config.json, or both.

Which matrices are quantized is told by their tensors (``export/checkpoint/quantized.py``), not by the lists of
exceptions here. What the configuration asks for beyond weights is not taken over: activations and KV stay in the
bundle's dtype, which is more precise than the checkpoint's own scheme. QAT checkpoints whose tensors are ordinary
bfloat16 ("q4_0-unquantized") have no such configuration: they are quantized like any other, with block size 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.runtime.errors import CheckpointError

from .folder import read_json

INT4_BLOCKS = (32, 64, 128)
NVFP4_BLOCK = 16
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_METHODS = ("modelopt", "modelopt_fp4")
_ADVICE = "Export the checkpoint that it was quantized from, with --weights int4 or int8"
_PACKED_FIELDS = frozenset(
    """config_groups format global_compression_ratio ignore kv_cache_scheme quant_method quantization_status
    sparsity_config transform_config version""".split()
)


@dataclass(frozen=True)
class Quantization:
    """The one format of a checkpoint's quantized matrices.

    block_size: values along the input that share a scale; None where a whole matrix does (fp8).
    """

    format: Literal["int4", "fp8", "nvfp4"]
    block_size: int | None


def quantization_from_hf(config: Mapping[str, Any], folder: Path) -> Quantization | None:
    """How a checkpoint says that it is quantized; None when it does not.

    config: the parsed config.json of folder. Raises CheckpointError for any scheme that is not served.
    """
    entries = [part.get("quantization_config") for part in (config, config.get("text_config") or {})]
    where = f"{folder / 'config.json'}: quantization_config"
    found = [_from_entry(entry, where) for entry in entries if entry is not None]
    path = folder / _MODELOPT_FILE
    if path.exists():
        fields = read_json(path).get("quantization")
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path} has no object named quantization: ModelOpt writes one")
        found.append(_from_modelopt(fields, str(path)))
    if len(set(found)) > 1:
        formats = " and ".join(str(each) for each in found)
        raise CheckpointError(f"{folder}: config.json and {_MODELOPT_FILE} say {formats}: download it again")
    return found[0] if found else None


def _from_entry(entry: Any, where: str) -> Quantization:
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if method == "compressed-tensors":
        return _from_compressed_tensors(entry, where)
    if method in _MODELOPT_METHODS:
        return _from_modelopt(entry, where)
    raise CheckpointError(
        f"{where} has quant_method {method!r}; compressed-tensors (pack-quantized int4) and modelopt (FP8, NVFP4) "
        f"are served. {_ADVICE}"
    )


def _from_modelopt(fields: Mapping[str, Any], where: str) -> Quantization:
    algorithm = fields.get("quant_algo")
    if algorithm == "FP8":
        return Quantization("fp8", None)
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise CheckpointError(f"{where} has quant_algo {algorithm!r}; FP8, NVFP4 and W4A16_NVFP4 are served. {_ADVICE}")
    block_size = fields.get("group_size", NVFP4_BLOCK)
    if block_size != NVFP4_BLOCK:
        raise CheckpointError(f"{where} has group_size {block_size!r}; NVFP4 has one scale for {NVFP4_BLOCK} values")
    return Quantization("nvfp4", NVFP4_BLOCK)


def _from_compressed_tensors(entry: Mapping[str, Any], where: str) -> Quantization:
    unknown = sorted(name for name, value in entry.items() if name not in _PACKED_FIELDS and value)
    if unknown:
        raise CheckpointError(f"{where} has fields that slipstream does not know: {', '.join(unknown)}. {_ADVICE}")
    if entry.get("transform_config") or (entry.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise CheckpointError(f"{where} has rotations or sparsity, which are not served. {_ADVICE}")
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where} has no config_groups: they say how the weights are stored")
    sizes = {_group_block_size(entry, name, group, where) for name, group in groups.items()}
    if len(sizes) > 1:
        raise CheckpointError(f"{where} mixes group sizes {sorted(sizes)}; one bundle has one. {_ADVICE}")
    return Quantization("int4", sizes.pop())


def _group_block_size(entry: Mapping[str, Any], name: str, group: Any, where: str) -> int:
    where = f"{where}.config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where} says nothing of weights. {_ADVICE}")
    expected = {
        "format": (group.get("format") or entry.get("format"), ("pack-quantized",)),
        "input_activations": (group.get("input_activations"), (None,)),
        "output_activations": (group.get("output_activations"), (None,)),
        "num_bits": (weights.get("num_bits"), (4,)),
        "type": (weights.get("type"), ("int",)),
        "symmetric": (weights.get("symmetric"), (True,)),
        "strategy": (weights.get("strategy"), ("group",)),
        "group_size": (weights.get("group_size"), INT4_BLOCKS),
        "actorder": (weights.get("actorder") or None, (None, "weight", "static")),  # those leave the inputs in order
        "dynamic": (weights.get("dynamic") or False, (False,)),
    }
    for field, (found, served) in expected.items():
        if found not in served:
            raise CheckpointError(
                f"{where} has {field} {found!r}; {' or '.join(map(repr, served))} is served. {_ADVICE}"
            )
    return int(weights["group_size"])
