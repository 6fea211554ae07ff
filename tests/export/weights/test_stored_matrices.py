"""Bundles of already-quantized checkpoints: the codes of the file, transformers' logits, and clear refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engines.parity.reference_graphs import ReferenceGraph
from slipstream.export.checkpoint.folder import CheckpointFolder
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.checkpoint.quantization_config import Quantization
from slipstream.export.checkpoint.quantized import QuantizedCheckpoint, QuantizedHeader, fold_quantized
from slipstream.export.checkpoint.tensors import Checkpoint, TensorHeader, open_checkpoint
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.layers import Blocks, Layout, Recipe
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings, resolve
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.verify import verify
from slipstream.export.weights.recipes import ExternalData, write_weights
from slipstream.export.weights.stored_matrices import with_stored_matrices
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from tests.support.feeds import feeds_of
from tests.support.fixtures import MadeOnce
from tests.support.progress import SilentProgress
from tests.support.quantized_pairs import make_small_pair

StoredPair = Callable[[str], Path]


@pytest.fixture
def stored_pair(made_once: MadeOnce) -> StoredPair:
    """A pair whose target is in a format: target, its float twin, its codes, assistant, and the float32 bundle."""

    def get(kind: str) -> Path:
        def make(work: Path) -> None:
            packed = make_small_pair(work, kind)
            torch.save({name.removeprefix("model."): each.codes for name, each in packed.items()}, work / "codes.pt")
            pair = open_pair(work / "target", work / "assistant")
            export_pair(pair, work / "bundle", ExportSettings(), SilentProgress())

        return made_once(f"stored-{kind}", make)

    return get


_CODES = {
    "int4": (ir.DataType.INT4, np.int8),
    "fp8": (ir.DataType.FLOAT8E4M3FN, np.float32),
    "nvfp4": (ir.DataType.FLOAT4E2M1, np.float32),
}


@pytest.mark.parametrize("kind", sorted(_CODES))
def test_a_bundle_holds_the_codes_of_the_file(stored_pair: StoredPair, kind: str) -> None:
    folder = stored_pair(kind)
    codes = torch.load(folder / "codes.pt")
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    stored = ir.load(folder / "bundle" / "target.onnx").graph.initializers["layers.0.attention.project.weight"]
    dtype, comparable = _CODES[kind]
    assert stored.const_value is not None
    assert stored.dtype == dtype
    expected = torch.cat([codes[name] for name in names]).t()
    if kind == "nvfp4":
        patterns = stored.const_value.numpy().view(np.uint8) & 15
        assert np.array_equal(patterns, expected.numpy())
    else:
        found = stored.const_value.numpy().astype(comparable)
        assert np.array_equal(found, expected.to(torch.float32).numpy())


@pytest.mark.parametrize(("kind", "block_size"), [("int4", 32), ("fp8", None), ("nvfp4", 16)])
def test_the_manifest_says_how_weights_are_stored(stored_pair: StoredPair, kind: str, block_size: int | None) -> None:
    weights = open_bundle(stored_pair(kind) / "bundle").manifest.weights
    assert (weights.format, weights.block_size) == (kind, block_size)
    assert "assistant.onnx:pre_projection.weight" in weights.float_matrices
    assert "target.onnx:layers.0.mlp.down.weight" not in weights.float_matrices


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_onnxruntime_gives_transformers_logits(stored_pair: StoredPair, kind: str) -> None:
    folder = stored_pair(kind)
    reference = Reference(folder / "target", folder / "assistant", "float32")
    prompt = [2, *range(300, 308)]
    report = verify(open_bundle(folder / "bundle"), reference, [prompt], 8, [4], SilentProgress())
    assert max(check.relative for check in report.logits) < 1e-4
    assert report.drafts.different == ()


def test_fp8_on_the_cpu_says_what_it_costs(stored_pair: StoredPair) -> None:
    notes = {
        kind: OnnxRuntimeEngine(open_bundle(stored_pair(kind) / "bundle"), num_threads=1).notes
        for kind in ("int4", "fp8")
    }
    assert notes["int4"] == ()
    assert "dequantized in every call" in notes["fp8"][0]


def test_nvfp4_graphs_give_what_their_float_twins_give(stored_pair: StoredPair, tmp_path: Path) -> None:
    """On the reference that engines are compared with: ONNX Runtime runs no NVFP4 by itself."""
    folder = stored_pair("nvfp4")
    pair = open_pair(folder / "twin", folder / "assistant")
    export_pair(pair, tmp_path / "bundle", ExportSettings(), SilentProgress())
    found, expected = (ReferenceGraph(open_bundle(each / "bundle"), "target.onnx") for each in (folder, tmp_path))
    feeds = feeds_of(expected._session, junk=1e4)
    values, wanted = found.run(feeds), expected.run(feeds)
    assert np.abs(values["logits"] - wanted["logits"]).max() < 1e-4 * np.abs(wanted["logits"]).max()
    assert np.array_equal(values["logits"].argmax(axis=2), wanted["logits"].argmax(axis=2))


@pytest.mark.parametrize("kind", ["int4", "fp8", "nvfp4"])
def test_the_reference_has_the_values_of_the_float_twin(stored_pair: StoredPair, kind: str) -> None:
    """transformers itself would load FP8 codes without their scales, and say so only in a table of leftovers."""
    folder = stored_pair(kind)
    assistant = folder / "assistant"
    stored = Reference(folder / "target", assistant, "float32").target.state_dict()
    twin = Reference(folder / "twin", assistant, "float32").target.state_dict()
    assert set(stored) == set(twin)
    assert all(torch.equal(stored[name], twin[name]) for name in twin)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("int4", {"weights": "int4"}, r"is int4 already, and --weights int4 would quantize it again"),
        ("fp8", {"weights": "int8"}, r"is fp8 already, and --weights int8 would quantize it again"),
        ("nvfp4", {"dtype": "float16"}, r"need a run on the CPU.*--dtype bfloat16"),
        ("nvfp4", {"kv": "int8"}, r"need a run on the CPU.*--kv float"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    stored_pair: StoredPair, tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    pair = open_pair(stored_pair(kind) / "target", stored_pair(kind) / "assistant")
    with pytest.raises(CheckpointError, match=message):
        export_pair(pair, tmp_path / "bundle", ExportSettings(**settings), SilentProgress())
    assert not list(tmp_path.iterdir())


def test_two_formats_are_refused(stored_pair: StoredPair) -> None:
    pair, other = (open_pair(stored_pair(kind) / "target", stored_pair(kind) / "assistant") for kind in ("fp8", "int4"))
    with pytest.raises(CheckpointError, match="are quantized differently"):
        resolve(ExportSettings(), replace(pair, assistant=other.target))


_INT4 = Quantization("int4", 32)
_STORED = QuantizedHeader((64, 64), "INT4", Path("file"), "key", {})
_FLOAT = TensorHeader((64, 64), "BF16", Path("file"), "key")


def _empty() -> ir.Graph:
    return ir.Graph([], [], nodes=[])


def _checkpoint(headers: dict[str, TensorHeader], quantization: Quantization = _INT4) -> QuantizedCheckpoint:
    return QuantizedCheckpoint(Path("folder"), {}, headers, quantization)


@pytest.mark.parametrize(
    ("layout", "headers", "message"),
    [
        ("transposed", {"q": _STORED, "k": _FLOAT}, r"q are quantized, but not the rest of q \+ k"),
        ("as_is", {"q": _STORED, "k": _STORED}, "q is quantized, but it is read as a table"),
    ],
)
def test_matrices_that_can_not_be_read_are_refused(
    layout: Layout, headers: dict[str, TensorHeader], message: str
) -> None:
    graph = TracedGraph(ir.Model(_empty(), ir_version=11), {"m": Recipe(("q", "k"), layout, (64, 128))})
    with pytest.raises(CheckpointError, match=message):
        with_stored_matrices(graph, _checkpoint(headers))


def test_float_checkpoints_leave_the_graph_alone() -> None:
    graph = TracedGraph(ir.Model(_empty(), ir_version=11), {"m": Recipe(("q",), "transposed", (64, 64))})
    assert with_stored_matrices(graph, Checkpoint(Path("folder"), {}, {"q": _FLOAT})) is graph
    assert with_stored_matrices(graph, _checkpoint({"q": _FLOAT})).recipes == graph.recipes


def test_scales_that_float16_can_not_hold_are_refused(stored_pair: StoredPair, tmp_path: Path) -> None:
    shutil.copytree(stored_pair("int4") / "target", tmp_path / "target")
    file, source = tmp_path / "target" / "model.safetensors", "layers.1.self_attn.o_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {f"model.{source}_scale": tensors[f"model.{source}_scale"] * 1e-9}, file, {"format": "pt"})
    recipe = Recipe((source,), "transposed", (128, 64), Blocks("int4", 32))
    data = ExternalData(tmp_path / "weights.bin")
    checkpoint = fold_quantized(open_checkpoint(CheckpointFolder(tmp_path / "target")))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight are too small for torch\.float16"):
        write_weights(ir.Model(_empty(), ir_version=11), {"m": recipe}, checkpoint, data, torch.float16, lambda _: None)
    data.close()
