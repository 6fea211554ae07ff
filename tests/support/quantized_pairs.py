"""Targets written as already-quantized checkpoints, each with a float twin that holds the values it stands for.

The codes are made here with torch alone, by other code than the reader's: packing is done value by value.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from .pairs import PAIRS, make_pair

Tensors = dict[str, torch.Tensor]

_MATRIX = re.compile(r".*layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
INT4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
            },
        }
    },
}
FP8_CONFIG: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
NVFP4_CONFIG: dict[str, Any] = FP8_CONFIG | {"quant_algo": "NVFP4", "kv_cache_scheme": None}

# Two layers whose matrices all divide into blocks of 32; K=V on the full one. Its assistant stays float.
_LAYERS = ["sliding_attention", "full_attention"]
_SMALL: dict[str, Any] = {
    "target": {"num_hidden_layers": 2, "layer_types": _LAYERS, "hidden_size": 64, "attention_k_eq_v": True},
    "assistant": {"layer_types": _LAYERS},
}


@dataclass(frozen=True)
class Packed:
    """A matrix [N, K]: the tensors that store it, by suffix, its codes and its values."""

    tensors: Tensors
    codes: torch.Tensor
    values: torch.Tensor


def pack_int4(weight: torch.Tensor) -> Packed:
    """compressed-tensors' pack-quantized form, in groups of 32, scales in bfloat16."""
    blocks = weight.float().unflatten(1, (-1, 32))
    scale = (blocks.abs().amax(-1) / 7).to(torch.bfloat16)
    codes = (blocks / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    values = (codes * scale.float().unsqueeze(-1)).flatten(1)
    codes = codes.flatten(1).to(torch.int64)
    words = sum((codes[:, i::8] + 8) << (4 * i) for i in range(8))
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return Packed(stored, codes.to(torch.int8), values)


def pack_fp8(weight: torch.Tensor) -> Packed:
    """ModelOpt's FP8: one scale of the whole matrix."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return Packed(stored, codes, codes.float() * scale)


def pack_nvfp4(weight: torch.Tensor) -> Packed:
    """ModelOpt's NVFP4: a float8 scale for 16 values, and one scale of those scales."""
    blocks = weight.float().unflatten(1, (-1, 16))
    second = weight.float().abs().max() / (6 * 448)
    scale = (blocks.abs().amax(-1) / (6 * second)).to(torch.float8_e4m3fn)
    step = (scale.float() * second).unsqueeze(-1)
    codes = ((blocks / step).unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * step).flatten(1)
    codes = codes.flatten(1).to(torch.uint8)
    stored = {"weight": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": second}
    return Packed(stored | {"input_scale": torch.tensor(0.5)}, codes, values)


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Packed], int, dict[str, Any]]] = {
    "int4": (pack_int4, 32, INT4_CONFIG),
    "fp8": (pack_fp8, 1, FP8_CONFIG),
    "nvfp4": (pack_nvfp4, 16, NVFP4_CONFIG),
}


def quantize_target(source: Path, folder: Path, twin: Path, kind: str) -> dict[str, Packed]:
    """Write a float target of one file to ``folder`` in a format, and to ``twin`` as the float32 values of that.

    Matrices whose inputs the blocks do not divide stay as they are. Returns what was packed, by name in the file.
    """
    pack, block, config = FORMATS[kind]
    stored, floats, packed = Tensors(), Tensors(), dict[str, Packed]()
    for name, tensor in load_file(source / "model.safetensors").items():
        floats[name] = tensor.float()
        if not _MATRIX.fullmatch(name) or tensor.shape[1] % block:
            stored[name] = tensor
            continue
        packed[name] = pack(tensor)
        floats[name] = packed[name].values
        stored |= {f"{name.removesuffix('weight')}{suffix}": t for suffix, t in packed[name].tensors.items()}
    for out, tensors in ((folder, stored), (twin, floats)):
        shutil.copytree(source, out)
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return packed


def make_small_pair(folder: Path, kind: str) -> dict[str, Packed]:
    """A pair of two layers with its target in a format: folder/target, folder/twin and the float folder/assistant."""
    with patch.dict(PAIRS, small=_SMALL):
        make_pair(folder / "float", "small")
    (folder / "float" / "assistant").rename(folder / "assistant")
    return quantize_target(folder / "float" / "target", folder / "target", folder / "twin", kind)
