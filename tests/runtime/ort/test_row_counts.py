"""Rows that this CPU computes alike: the probe, what follows from its answers, and text that does not depend on K."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest

from slipstream.export.weights.quantize import BLOCK_SIZES
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.loop import Loop, Request
from slipstream.runtime.ort import row_counts
from slipstream.runtime.ort.backend import OnnxRuntimeBackend, OnnxRuntimeEngine
from slipstream.runtime.ort.row_counts import RowCounts, is_computed_alike, rounded_products
from slipstream.runtime.session import Pair

_WIDTH, _COLUMNS = 640, 23  # columns that kernels take four at a time, and a rest


def probe_text() -> str:
    """The probe: values that vary, made by operators that ONNX Runtime folds into constants."""
    names = [f"int{bits}_{block}" for bits in (4, 8) for block in BLOCK_SIZES]
    outputs = [f"float[rows,{_COLUMNS}] {name}" for name in names]
    lines = [
        "index = Range(zero, count, one)",
        "product = Mul(index, factor)",
        "bytes = Mod(product, prime)",
        "codes = Cast<to = 2>(bytes)",
        "floats = Cast<to = 1>(bytes)",
        "values = Div(floats, largest)",
        "keys = Reshape(values, keys_shape)",
        "queries = Unsqueeze(x, front)",
        "attended = Attention<scale = 0.01>(queries, keys, keys)",
        "attention = Squeeze(attended, front)",
    ]
    for name in names:
        bits, block = (int(part) for part in name.removeprefix("int").split("_"))
        blocks, size = _WIDTH // block, block * bits // 8
        lines += [
            f"{name}_end = Constant<value_ints = [{_COLUMNS * blocks * size}]>()",
            f"{name}_shape = Constant<value_ints = [{_COLUMNS}, {blocks}, {size}]>()",
            f"{name}_part = Slice(codes, start, {name}_end)",
            f"{name}_codes = Reshape({name}_part, {name}_shape)",
            f"{name}_blocks = Constant<value_ints = [{_COLUMNS * blocks}]>()",
            f"{name}_scales = Slice(values, start, {name}_blocks)",
            f"{name} = com.microsoft.MatMulNBits<K = {_WIDTH}, N = {_COLUMNS}, bits = {bits}, block_size = {block}, "
            f"accuracy_level = 4>(x, {name}_codes, {name}_scales)",
        ]
    constants = (
        f"int64 zero = {{0}}, int64 one = {{1}}, int64 count = {{{_COLUMNS * _WIDTH}}}, int64 factor = {{157}}, "
        "int64 prime = {251}, float largest = {251.0}, int64[1] start = {0}, int64[2] front = {0, 1}, "
        f"int64[4] keys_shape = {{1, 1, {_COLUMNS}, {_WIDTH}}}"
    )
    return (
        '<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>\n'
        f"row_counts (float[rows,{_WIDTH}] x) => (float[rows,{_WIDTH}] attention, {', '.join(outputs)})\n"
        f"    <{constants}>\n{{\n    " + "\n    ".join(lines) + "\n}"
    )


def probe_bytes() -> bytes:
    content: bytes = ir.serde.serialize_model(ir.from_onnx_text(probe_text())).SerializeToString()
    return content


def texts(folder: Path, draft_counts: tuple[int, ...], num_tokens: int = 60) -> list[list[list[int]]]:
    """For each prompt, the text of each K."""
    with Pair(open_bundle(folder)) as pair:
        loop, vocab_size = Loop(pair.new_backend(), pair.codec), pair.manifest.vocab_size
        found = []
        for seed in range(4):
            prompt = np.random.default_rng(seed).integers(8, vocab_size, 5 + 9 * seed).tolist()
            found.append([generate(loop, prompt, k, num_tokens) for k in draft_counts])
    return found


def generate(loop: Loop, prompt: list[int], num_draft_tokens: int, num_tokens: int) -> list[int]:
    loop.reset()
    loop.tokens += prompt
    for _ in loop.run(Request(num_draft_tokens, num_tokens, (), ()), lambda: False):
        pass
    assert loop.result is not None
    return loop.result.token_ids


def fake_alike(monkeypatch: pytest.MonkeyPatch, is_alike: Callable[[str, int], bool]) -> None:
    monkeypatch.setattr(row_counts, "is_computed_alike", is_alike)


def test_the_probe_is_what_its_text_says() -> None:
    path = Path(row_counts.__file__).with_name("row_counts.onnx")
    assert path.read_bytes() == probe_bytes(), "write probe_bytes() there"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_even_numbers_up_to_sixteen_are_alike_on_the_cpus_seen_so_far(weights: str, block_size: int) -> None:
    rows = [n for n in range(2, 17, 2) if not is_computed_alike(f"{weights}_{block_size}", n)]
    assert not rows


ROUNDED = [{"weights": "int4", "block_size": size} for size in BLOCK_SIZES] + [{"kv": "int8"}]


@pytest.mark.parametrize("settings", ROUNDED, ids=str)
def test_text_is_the_same_for_every_k_where_values_are_rounded(
    settings: dict[str, object], bundle_folder: Callable[..., Path]
) -> None:
    for plain, *drafted in texts(bundle_folder("blocks", **settings), (0, 1, 2, 4, 7)):
        assert all(text == plain for text in drafted)
