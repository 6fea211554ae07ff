"""Checkpoints whose matrices are quantized already: checked by their headers, read as they are, never quantized again.

The tensors that store one matrix are folded into one header under the name its float form would have, so that what
looks for a Linear's weight finds it. A matrix [N, K] = [out, in] is stored as

- int4 (compressed-tensors, ``pack_to_int32`` in ``compressors/pack_quantized/helpers.py``): weight_packed int32
  [N, K / 8], eight values + 8 in each, lowest bits first; weight_scale float [N, K / block]; weight_shape [2];
- fp8 (ModelOpt, ``modelopt/torch/export/quant_utils.py``): weight float8_e4m3fn [N, K]; weight_scale, one float32;
- nvfp4 (ModelOpt, ``NVFP4QTensor`` in ``modelopt/torch/quantization/qtensor/nvfp4_tensor.py``): weight uint8
  [N, K / 2], two E2M1 values in each, the first in the low bits; weight_scale float8_e4m3fn [N, K / 16];
  weight_scale_2, one float32: a value is code * weight_scale * weight_scale_2.

input_scale, k_scale and v_scale belong to quantized activations and KV, which bundles don't have: they are left out.
What is not here: which schemes are served (``quantization_config.py``), and the operators that undo them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from .quantization_config import Quantization, quantization_from_hf
from .tensors import Checkpoint, TensorHeader

# Names of the tensors of one matrix, the codes first, and those that only concern activations.
_PARTS = {
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8": ("weight", "weight_scale"),
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
}
_CODE_DTYPES = {"int4": "I32", "fp8": "F8_E4M3", "nvfp4": "U8"}
_PER_CODE = {"int4": 8, "fp8": 1, "nvfp4": 2}
_FOLDED_DTYPES = {"int4": "INT4", "fp8": "F8_E4M3", "nvfp4": "NVFP4"}
_IGNORED = re.compile(r"\.input_scale$|\.self_attn\.(k_proj\.)?k_scale$|\.self_attn\.(v_proj\.)?v_scale$")
_REFUSED = ("weight_zero_point", "weight_g_idx", "pre_quant_scale", "bias")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class QuantizedHeader(TensorHeader):
    """A quantized matrix under the name, key and shape [N, K] of its float form, which is in no file.

    parts: what it is stored as, by suffix.
    """

    parts: Mapping[str, TensorHeader]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [K, N] as DequantizeLinear takes it, from one or several sources joined along N.

    codes: [K, N]: int8 of -8..7 (int4), float8_e4m3fn (fp8), or uint8 bit patterns 0..15 of E2M1 (nvfp4).
    scales: [K / block, N] float as stored (int4), [N] float32 (fp8), or [K / 16, N] float8_e4m3fn (nvfp4).
    column_scales: [N] float32, the scale of nvfp4's scales; None otherwise.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    column_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class QuantizedCheckpoint(Checkpoint):
    """A checkpoint some of whose headers are QuantizedHeader, all of one format."""

    quantization: Quantization

    def read(self, name: str) -> torch.Tensor:
        """The tensor; of a quantized matrix the values [N, K] that it stands for, float32."""
        if not self.is_quantized(name):
            return super().read(name)
        return dequantized(self.read_matrix([name]), self.quantization).t()

    def is_quantized(self, name: str) -> bool:
        return isinstance(self.headers[name], QuantizedHeader)

    def read_matrix(self, names: Sequence[str]) -> StoredMatrix:
        """Quantized matrices of one input size joined along their outputs, codes and scales as they are stored."""
        suffixes = _PARTS[self.quantization.format]
        codes = _unpacked(self._joined(names, suffixes[0]), self.quantization).t()
        if self.quantization.format == "fp8":
            return StoredMatrix(codes, self._per_column(names, suffixes[1]))
        scales = self._joined(names, suffixes[1]).t()
        if self.quantization.format == "nvfp4":
            return StoredMatrix(codes, scales, self._per_column(names, suffixes[2]))
        return StoredMatrix(codes, scales)

    def _joined(self, names: Sequence[str], suffix: str) -> torch.Tensor:
        tensors = [self._part(name, suffix) for name in names]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def _per_column(self, names: Sequence[str], suffix: str) -> torch.Tensor:
        """A scale of each whole matrix, repeated for its outputs: [N]."""
        return torch.cat([self._part(name, suffix).reshape(1).expand(self.headers[name].shape[0]) for name in names])

    def _part(self, name: str, suffix: str) -> torch.Tensor:
        header = self.headers[name]
        assert isinstance(header, QuantizedHeader)
        return header.parts[suffix].read()


def fold_quantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its quantized matrices folded, or itself when its configuration has no quantization.

    Raises CheckpointError, before any weight is read, for a scheme that is not served and for matrices that are
    stored otherwise than their configuration says.
    """
    quantization = quantization_from_hf(checkpoint.config, checkpoint.folder)
    if quantization is None:
        return checkpoint
    prefixes = _quantized_prefixes(checkpoint, quantization)
    problems = [problem for prefix in prefixes for problem in _problems(checkpoint, prefix, quantization)]
    if not prefixes:
        problems = [f"its configuration says {quantization.format}, but no tensor is stored so"]
    checkpoint.refuse(problems)
    headers = {name: header for name, header in checkpoint.headers.items() if not _IGNORED.search(name)}
    for prefix in prefixes:
        parts = {suffix: headers.pop(f"{prefix}.{suffix}") for suffix in _PARTS[quantization.format]}
        codes = next(iter(parts.values()))
        shape = (codes.shape[0], codes.shape[1] * _PER_CODE[quantization.format])
        key, dtype = f"{codes.key.rpartition('.')[0]}.weight", _FOLDED_DTYPES[quantization.format]
        headers[f"{prefix}.weight"] = QuantizedHeader(shape, dtype, codes.file, key, parts)
    return QuantizedCheckpoint(checkpoint.folder, checkpoint.config, headers, quantization)


def dequantized(matrix: StoredMatrix, quantization: Quantization) -> torch.Tensor:
    """The values [K, N] that a stored matrix stands for, float32."""
    codes, scales = matrix.codes.float(), matrix.scales.float()
    if quantization.format == "nvfp4":
        assert matrix.column_scales is not None
        positive = torch.tensor(_E2M1)
        codes = torch.cat([positive, -positive])[matrix.codes.long()]
        scales = scales * matrix.column_scales
    if quantization.block_size is not None:
        scales = scales.repeat_interleave(quantization.block_size, dim=0)
    return codes * scales


def _unpacked(codes: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """[N, words] as stored -> [N, K], a value each."""
    if quantization.format == "fp8":
        return codes
    octets = codes.contiguous().view(torch.uint8)  # int32 lie lowest byte first in a safetensors file
    values = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    return values.to(torch.int8) - 8 if quantization.format == "int4" else values


def _quantized_prefixes(checkpoint: Checkpoint, quantization: Quantization) -> list[str]:
    """Modules of which any tensor says that they are quantized, so that one that lacks the others is found."""
    suffix, *others = _PARTS[quantization.format]
    dtype = _CODE_DTYPES[quantization.format]
    prefixes = dict[str, None]()
    for name, header in checkpoint.headers.items():
        prefix, _, last = name.rpartition(".")
        if last in others or (last == suffix and header.dtype == dtype):
            prefixes[prefix] = None
    return list(prefixes)


def _problems(checkpoint: Checkpoint, prefix: str, quantization: Quantization) -> Iterator[str]:
    suffixes = _PARTS[quantization.format]
    headers = {suffix: checkpoint.headers.get(f"{prefix}.{suffix}") for suffix in suffixes}
    missing = [f"{prefix}.{suffix}" for suffix, header in headers.items() if header is None]
    if missing:
        yield f"{', '.join(missing)} is missing beside the other tensors of {prefix}"
        return
    if quantization.format == "int4" and f"{prefix}.weight" in checkpoint.headers:
        yield f"{prefix} has both a float weight and a packed one"
    yield from (f"{prefix}.{suffix} is not served" for suffix in _REFUSED if f"{prefix}.{suffix}" in checkpoint.headers)
    codes, scales = (headers[suffix] for suffix in suffixes[:2])
    assert codes is not None
    assert scales is not None
    wanted = _CODE_DTYPES[quantization.format]
    if codes.dtype != wanted or len(codes.shape) != 2:
        yield f"{prefix}.{suffixes[0]} is {codes.dtype} {codes.shape}; a matrix of {wanted} is expected"
        return
    num_outputs, num_inputs = codes.shape[0], codes.shape[1] * _PER_CODE[quantization.format]
    if quantization.block_size is not None and num_inputs % quantization.block_size:
        yield f"{prefix} has {num_inputs} inputs, which blocks of {quantization.block_size} do not divide"
        return
    if quantization.block_size is None:
        yield from _scalar_problems(f"{prefix}.weight_scale", scales)
        return
    shape = (num_outputs, num_inputs // quantization.block_size)
    dtypes = ("F8_E4M3",) if quantization.format == "nvfp4" else ("BF16", "F16", "F32")
    if scales.shape != shape or scales.dtype not in dtypes:
        yield (
            f"{prefix}.weight_scale is {scales.dtype} {scales.shape}; {' or '.join(dtypes)} {shape} is expected "
            f"for {num_outputs} x {num_inputs} values in blocks of {quantization.block_size}"
        )
    second = headers.get("weight_scale_2")
    if second is not None:
        yield from _scalar_problems(f"{prefix}.weight_scale_2", second)


def _scalar_problems(name: str, header: TensorHeader) -> Iterator[str]:
    if prod(header.shape) != 1 or header.dtype != "F32":
        yield f"{name} is {header.dtype} {header.shape}; one F32 is expected"
