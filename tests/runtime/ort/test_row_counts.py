"""Rows that this CPU computes alike: the probe, what follows from its answers, and text that does not depend on K."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slipstream.export.weights.quantize import BLOCK_SIZES
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.bundle.graph_io import layer_types
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.settings import GenerationSettings
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
        attributes = f"K = {_WIDTH}, N = {_COLUMNS}, bits = {bits}, block_size = {block}, accuracy_level = 4"
        lines += [
            f"{name}_end = Constant<value_ints = [{_COLUMNS * blocks * size}]>()",
            f"{name}_shape = Constant<value_ints = [{_COLUMNS}, {blocks}, {size}]>()",
            f"{name}_part = Slice(codes, start, {name}_end)",
            f"{name}_codes = Reshape({name}_part, {name}_shape)",
            f"{name}_blocks = Constant<value_ints = [{_COLUMNS * blocks}]>()",
            f"{name}_scales = Slice(values, start, {name}_blocks)",
            f"{name} = com.microsoft.MatMulNBits<{attributes}>(x, {name}_codes, {name}_scales)",
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


def kept(pair: Pair, num_draft_tokens: int, batch: int = 1) -> dict[str, Array]:
    """KV of every sequence after the same few tokens, which come from a prompt of one call and rounds."""
    backend: Any = pair.new_backend(batch)
    prompts = np.random.default_rng(0).integers(8, pair.manifest.vocab_size, (batch, 9)).tolist()
    for slot, ids in enumerate(prompts):
        backend.prefill(slot, ids)
    while min(backend.length) < 24:
        backend.round(num_draft_tokens, [num_draft_tokens + 1] * batch)
    return {name: tensor.array[:, :, :24].copy() for name, tensor in backend.cache.tensors.items()}


def valid_rows(backend: OnnxRuntimeBackend, length: int) -> dict[str, Array]:
    """KV of the tokens before length: all rows of full layers, the last window's of sliding ones."""
    types, first = layer_types(backend.manifest.kv), length - backend.manifest.sliding_window
    spans = {"sliding": slice(first - backend.cache.base[0], length - backend.cache.base[0]), "full": slice(length)}
    return {name: tensor.array[:, :, spans[types[name]]] for name, tensor in backend.cache.tensors.items()}


def differing(found: dict[str, Array], expected: dict[str, Array]) -> list[str]:
    return [name for name, rows in found.items() if not np.array_equal(rows, expected[name])]


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


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def int4(request: pytest.FixtureRequest, bundle_folder: Callable[..., Path]) -> Iterator[Pair]:
    with Pair(open_bundle(bundle_folder("blocks", weights="int4", block_size=request.param))) as pair:
        yield pair


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 7])
def test_drafted_rows_have_the_bits_of_plain_ones_over_int4_weights(int4: Pair, num_draft_tokens: int) -> None:
    assert not differing(kept(int4, num_draft_tokens), kept(int4, 0))


def test_batches_have_the_bits_of_single_sequences(int4: Pair) -> None:
    together, alone = kept(int4, 4, batch=3), kept(int4, 0)
    assert not differing({name: rows[:1] for name, rows in together.items()}, alone)


def test_single_rows_have_the_bits_of_many_over_int8_kv(bundle_folder: Callable[..., Path]) -> None:
    """A last bit seldom decides a step of int8: half a million values show some thirty."""
    with Pair(open_bundle(bundle_folder("edge", kv="int8"))) as pair:
        tokens = np.random.default_rng(0).integers(8, pair.manifest.vocab_size, (32, 128))
        found: list[dict[str, Array]] = []
        for num_rows in (1, 16):
            backend: Any = pair.new_backend(32)
            for start in range(0, 128, num_rows):
                for slot, ids in enumerate(tokens.tolist()):
                    backend.prefill(slot, ids[start : start + num_rows])
            found.append({name: tensor.array[:, :, :128] for name, tensor in backend.cache.tensors.items()})
    assert not differing(*found)


def test_text_and_rows_have_the_same_bits_for_every_k_across_compactions(bundle_folder: Callable[..., Path]) -> None:
    """Heads of 32 values: buffers of 1072 rows, moved by multiples of 512."""
    prompt, length = 1000, 2200
    bundle = open_bundle(bundle_folder("blocks", weights="int4", block_size=32))
    bundle.manifest = bundle.manifest.model_copy(update={"max_length": length + 8})
    graphs = OnnxRuntimeEngine(bundle, num_threads=1)
    tokens = np.random.default_rng(0).integers(8, bundle.manifest.vocab_size, prompt).tolist()
    texts: list[list[int]] = []
    caches: list[dict[str, Array]] = []
    for k in (0, 4):
        backend = OnnxRuntimeBackend(graphs, prefill_chunk=8, max_draft_tokens=4)
        text = [backend.prefill(0, tokens[start : start + 8]) for start in range(0, prompt, 8)][-1:]
        while backend.length[0] < length:
            text += backend.round(k, [k + 1]).tokens[0]
        assert backend.cache.num_compactions == 2
        texts.append(text[: length - prompt])
        caches.append(valid_rows(backend, length))
    assert texts[0] == texts[1]
    assert not differing(*caches)


def test_a_prompt_of_one_token_is_fed_like_any_other(int4: Pair) -> None:
    backends: list[Any] = [int4.new_backend(), int4.new_backend()]
    backends[0].prefill(0, [20, 30, 40, 50])
    for token in (20, 30, 40, 50):
        backends[1].prefill(0, [token])
    whole, single = ({n: t.array[:, :, :4] for n, t in b.cache.tensors.items()} for b in backends)
    assert not differing(single, whole)


def test_floats_run_as_many_rows_as_are_asked_for(bundle_folder: Callable[..., Path]) -> None:
    manifest = open_bundle(bundle_folder("edge")).manifest
    assert rounded_products(manifest, int8_activations=True) == ()
    assert [RowCounts({}, ()).run(rows, 1, 16) for rows in (1, 3, 5)] == [1, 3, 5]


def test_rows_grow_until_every_product_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = RowCounts({}, ("attention", "int4_32"))
    fake_alike(monkeypatch, lambda name, rows: rows > 1 if name == "attention" else rows % 2 == 0)
    assert [counts.run(rows, 1, 16) for rows in (1, 2, 3, 5, 16)] == [2, 2, 4, 6, 16]
    assert [counts.run(rows, 3, 16) for rows in (1, 4, 5)] == [2, 4, 6]  # attention sees the rows of one sequence


def test_rows_that_are_faster_must_be_alike_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_alike(monkeypatch, lambda _, rows: rows % 4 == 0)
    assert RowCounts({5: 6}, ("int4_32",)).run(5, 1, 16) == 8


def test_a_cpu_without_such_numbers_is_said_in_results(int4: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_alike(monkeypatch, lambda _, rows: rows > 1000)
    result = int4.generate("abc", GenerationSettings(max_new_tokens=4))
    assert any("rounds differently" in note for note in result.notes)


def test_plain_steps_are_padded_up_to_the_end_of_the_context(int4: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_alike(monkeypatch, lambda _, rows: rows % 4 == 0)
    length = int4.manifest.max_length
    backend: Any = OnnxRuntimeBackend(int4.engine, prefill_chunk=8, max_draft_tokens=3)  # type: ignore[arg-type]
    for start in range(0, length - 5, 8):
        backend.prefill(0, list(range(20, 20 + min(8, length - 5 - start))))
    rounds = [backend.round(0, [1]).tokens for _ in range(5)]
    assert backend.length == [length]
    assert all(len(tokens) == 1 for [tokens] in rounds)
