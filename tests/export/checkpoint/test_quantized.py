"""Already-quantized checkpoints: told, checked before a weight is read, and read bit for bit."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.export.checkpoint.folder import CheckpointFolder
from slipstream.export.checkpoint.quantization_config import Quantization, quantization_from_hf
from slipstream.export.checkpoint.quantized import QuantizedCheckpoint, dequantized, fold_quantized
from slipstream.export.checkpoint.tensors import open_checkpoint
from slipstream.export.model.layers import Recipe
from slipstream.export.weights.check import Part, check_values
from slipstream.runtime.errors import CheckpointError
from tests.support.fixtures import MadeOnce
from tests.support.progress import SilentProgress
from tests.support.quantized_pairs import (
    FORMATS,
    FP8_CONFIG,
    INT4_CONFIG,
    NVFP4_CONFIG,
    Packed,
    Tensors,
    quantize_target,
)

QuantizedTarget = Callable[[str], Path]
_Q, _K, _V = (f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")


@pytest.fixture
def quantized_target(made_once: MadeOnce, pair_folder: Callable[[str], tuple[Path, Path]]) -> QuantizedTarget:
    """The demo target in a format: target, its float twin and what was packed. Tests must not change it."""

    def get(kind: str) -> Path:
        def make(work: Path) -> None:
            work.mkdir()
            packed = quantize_target(pair_folder("demo")[0], work / "target", work / "twin", kind)
            torch.save({name: (p.tensors, p.codes, p.values) for name, p in packed.items()}, work / "packed.pt")

        return made_once(f"quantized-{kind}", make)

    return get


def opened(folder: Path) -> QuantizedCheckpoint:
    checkpoint = fold_quantized(open_checkpoint(CheckpointFolder(folder / "target")))
    assert isinstance(checkpoint, QuantizedCheckpoint)
    return checkpoint


def packed_in(folder: Path) -> dict[str, Packed]:
    content = torch.load(folder / "packed.pt")
    return {name.removeprefix("model."): Packed(*parts) for name, parts in content.items()}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("int4", Quantization("int4", 32)), ("fp8", Quantization("fp8", None)), ("nvfp4", Quantization("nvfp4", 16))],
)
def test_a_checkpoint_is_told_by_its_configuration(
    quantized_target: QuantizedTarget, kind: str, expected: Quantization
) -> None:
    assert opened(quantized_target(kind)).quantization == expected


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_codes_and_values_are_those_of_the_file(quantized_target: QuantizedTarget, kind: str) -> None:
    folder = quantized_target(kind)
    checkpoint, packed = opened(folder), packed_in(folder)
    assert len(packed) == 96
    for name, expected in packed.items():
        codes = checkpoint.read_matrix([name]).codes.t().contiguous()
        assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8)), name
        assert torch.equal(checkpoint.read(name), expected.values), name


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_matrices_with_scales_of_their_own_are_joined_exactly(quantized_target: QuantizedTarget, kind: str) -> None:
    folder = quantized_target(kind)
    checkpoint, packed = opened(folder), packed_in(folder)
    joined = checkpoint.read_matrix([_Q, _K, _V])
    expected = torch.cat([packed[name].values for name in (_Q, _K, _V)]).t()
    assert torch.equal(dequantized(joined, checkpoint.quantization), expected)
    num_scales = {"int4": (2, 96), "fp8": (96,), "nvfp4": (4, 96)}[kind]
    assert joined.scales.shape == num_scales


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_headers_are_those_of_the_float_form(quantized_target: QuantizedTarget, kind: str) -> None:
    folder = quantized_target(kind)
    checkpoint, plain = opened(folder), open_checkpoint(CheckpointFolder(folder / "twin"))
    assert set(checkpoint.headers) == set(plain.headers)
    assert {n: h.shape for n, h in checkpoint.headers.items()} == {n: h.shape for n, h in plain.headers.items()}
    assert checkpoint.is_quantized(_Q)
    assert not checkpoint.is_quantized("norm.weight")
    assert torch.equal(checkpoint.read("norm.weight").float(), plain.read("norm.weight"))


def test_a_float_checkpoint_is_left_alone(pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    checkpoint = open_checkpoint(CheckpointFolder(pair_folder("demo")[0]))
    assert fold_quantized(checkpoint) is checkpoint


def test_kv_and_activation_scales_are_left_out(quantized_target: QuantizedTarget, tmp_path: Path) -> None:
    names = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_scale")
    extra = {name: torch.tensor(0.5) for name in names}
    _rewrite(quantized_target("fp8"), tmp_path, lambda tensors: tensors.update(_named(extra)))
    assert not [name for name in opened(tmp_path).headers if name.endswith("_scale")]


def test_modelopt_is_told_by_its_own_file(quantized_target: QuantizedTarget, tmp_path: Path) -> None:
    _rewrite(quantized_target("nvfp4"), tmp_path, lambda tensors: None)
    _set_config(tmp_path, None)
    path = tmp_path / "target" / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}))
    assert opened(tmp_path).quantization == Quantization("nvfp4", 16)


def test_two_configurations_that_differ_are_refused(quantized_target: QuantizedTarget, tmp_path: Path) -> None:
    _rewrite(quantized_target("nvfp4"), tmp_path, lambda tensors: None)
    (tmp_path / "target" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(CheckpointError, match=r"nvfp4.*fp8.*download it again"):
        opened(tmp_path)


def _weights(**fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(INT4_CONFIG)
    config["config_groups"]["group_0"]["weights"] |= fields
    return config


def _two_groups() -> dict[str, Any]:
    config = copy.deepcopy(INT4_CONFIG)
    config["config_groups"]["group_1"] = _weights(group_size=64)["config_groups"]["group_0"]
    return config


_REFUSED_CONFIGS = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
    "awq of modelopt": (FP8_CONFIG | {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ'"),
    "mixed": (FP8_CONFIG | {"quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
    "blocks of nvfp4": (NVFP4_CONFIG | {"group_size": 32}, "group_size 32"),
    "asymmetric": (_weights(symmetric=False), "symmetric False"),
    "8 bits": (_weights(num_bits=8), "num_bits 8"),
    "one scale a row": (_weights(strategy="channel", group_size=None), "strategy 'channel'"),
    "group of 16": (_weights(group_size=16), "group_size 16"),
    "group of 256": (_weights(group_size=256), "group_size 256"),
    "inputs out of order": (_weights(actorder="group"), "actorder 'group'"),
    "two group sizes": (_two_groups(), r"mixes group sizes \[32, 64\]"),
    "other packing": (INT4_CONFIG | {"format": "marlin-24"}, "format 'marlin-24'"),
    "rotations": (INT4_CONFIG | {"transform_config": {"config_groups": {"u": {}}}}, "rotations"),
    "no groups": (INT4_CONFIG | {"config_groups": {}}, "no config_groups"),
    "unknown field": (INT4_CONFIG | {"bias_correction": True}, "bias_correction"),
    "not an object": ("int4", "quant_method None"),
}


@pytest.mark.parametrize(("entry", "message"), _REFUSED_CONFIGS.values(), ids=_REFUSED_CONFIGS)
def test_schemes_that_are_not_served_are_refused(entry: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        quantization_from_hf({"quantization_config": entry}, tmp_path)


def _named(tensors: Tensors) -> Tensors:
    return {f"model.layers.0.{name}": tensor for name, tensor in tensors.items()}


def _rewrite(source: Path, folder: Path, damage: Callable[[Tensors], object]) -> None:
    shutil.copytree(source / "target", folder / "target")
    file = folder / "target" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, {"format": "pt"})


def _set_config(folder: Path, entry: Any) -> None:
    path = folder / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": entry}))


_Q_FILE = "model." + _Q.removesuffix("weight")
_DAMAGES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no scale": ("int4", lambda t: t.pop(f"{_Q_FILE}weight_scale"), r"q_proj\.weight_scale is missing"),
    "no codes": ("int4", lambda t: t.pop(f"{_Q_FILE}weight_packed"), r"q_proj\.weight_packed is missing"),
    "no second scale": ("nvfp4", lambda t: t.pop(f"{_Q_FILE}weight_scale_2"), r"q_proj\.weight_scale_2 is missing"),
    "zero points": (
        "int4",
        lambda t: t.update({f"{_Q_FILE}weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)}),
        r"q_proj\.weight_zero_point is not served",
    ),
    "order of the inputs": (
        "int4",
        lambda t: t.update({f"{_Q_FILE}weight_g_idx": torch.zeros(64, dtype=torch.int32)}),
        r"q_proj\.weight_g_idx is not served",
    ),
    "scales of a smoothed model": (
        "fp8",
        lambda t: t.update({f"{_Q_FILE}pre_quant_scale": torch.ones(64)}),
        r"q_proj\.pre_quant_scale is not served",
    ),
    "float beside packed": (
        "int4",
        lambda t: t.update({f"{_Q_FILE}weight": torch.zeros(64, 64)}),
        "both a float weight and a packed one",
    ),
    "scales of another group size": (
        "int4",
        lambda t: t.update({f"{_Q_FILE}weight_scale": torch.ones(64, 1, dtype=torch.bfloat16)}),
        r"weight_scale is BF16 \(64, 1\); .* \(64, 2\) is expected",
    ),
    "whole scales": (
        "int4",
        lambda t: t.update({f"{_Q_FILE}weight_scale": torch.ones(64, 2, dtype=torch.int64)}),
        r"weight_scale is I64",
    ),
    "a scale for each row": (
        "fp8",
        lambda t: t.update({f"{_Q_FILE}weight_scale": torch.ones(64, 1)}),
        r"weight_scale is F32 \(64, 1\); one F32 is expected",
    ),
    "another format": (
        "nvfp4",
        lambda t: t.update({f"{_Q_FILE}weight": torch.zeros(64, 64).to(torch.float8_e4m3fn)}),
        r"q_proj\.weight is F8_E4M3 .* U8 is expected",
    ),
    "inputs that blocks do not divide": (
        "int4",
        lambda t: t.update({f"{_Q_FILE}weight_packed": torch.zeros(64, 6, dtype=torch.int32)}),
        "48 inputs, which blocks of 32 do not divide",
    ),
}


@pytest.mark.parametrize(("kind", "damage", "message"), _DAMAGES.values(), ids=_DAMAGES)
def test_damage_is_found_in_the_headers(
    quantized_target: QuantizedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    damage: Callable[[Tensors], object],
    message: str,
) -> None:
    _rewrite(quantized_target(kind), tmp_path, damage)
    checkpoint = open_checkpoint(CheckpointFolder(tmp_path / "target"))
    monkeypatch.setattr(type(checkpoint), "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=message):
        fold_quantized(checkpoint)


def test_a_configuration_without_quantized_matrices_is_refused(
    quantized_target: QuantizedTarget, tmp_path: Path
) -> None:
    shutil.copytree(quantized_target("int4") / "twin", tmp_path / "target")
    _set_config(tmp_path, INT4_CONFIG)
    with pytest.raises(CheckpointError, match="says int4, but no tensor is stored so"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"), [("int4", "weight_scale"), ("fp8", "weight"), ("nvfp4", "weight_scale"), ("fp8", "weight_scale")]
)
def test_nan_is_found_in_what_is_stored(
    quantized_target: QuantizedTarget, tmp_path: Path, kind: str, name: str
) -> None:
    def damage(tensors: Tensors) -> None:
        broken = tensors[f"{_Q_FILE}{name}"].float()
        broken.view(-1)[-1] = torch.nan
        tensors[f"{_Q_FILE}{name}"] = broken.to(tensors[f"{_Q_FILE}{name}"].dtype)

    _rewrite(quantized_target(kind), tmp_path, damage)
    part = Part(opened(tmp_path), [Recipe((_Q,), "transposed", (64, 64))])
    with pytest.raises(CheckpointError, match=rf"q_proj\.{name} holds NaN"):
        check_values([part], torch.bfloat16, SilentProgress())
