"""int8 KV: what is stored, by which scales both graphs read it, and that nothing but precision changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from slipstream.engines.onnxruntime.build import build_onnxruntime
from slipstream.engines.tensorrt.build import build_engines
from slipstream.export.calibrate.int8_kv import MARGIN, check_scales, int8_table, store_kv_as_int8
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.report import Report
from slipstream.export.verify.rounded_kv import rounded
from slipstream.export.verify.verify import sample_prompts, verify
from slipstream.runtime.bundle.engine_record import EngineSettings
from slipstream.runtime.bundle.manifest import Bundle, KVBuffer, open_bundle
from slipstream.runtime.errors import CheckpointError, RequestError
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.session import Pair
from tests.support.bundles import rewrite_hash
from tests.support.pairs import BOS
from tests.support.progress import SilentProgress

PairFolder = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folder(bundle_folder: Callable[..., Path]) -> Path:
    return bundle_folder("edge", kv="int8")


@pytest.fixture
def bundle(folder: Path, tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(folder, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def reference(pair_folder: PairFolder) -> Reference:
    return Reference(*pair_folder("edge"), "float32")


def check(bundle: Bundle, reference: Reference) -> Report:
    manifest = bundle.manifest
    prompts = sample_prompts(range(20, 280), BOS, 2, manifest.sliding_window, manifest.max_length, 8)
    return verify(bundle, reference, prompts, 8, [0, 3], SilentProgress())


def change_scale(bundle: Bundle, graph: str, name: str, factor: float) -> Bundle:
    """Let a graph read a buffer by another scale than the manifest's, and look like the bundle's own."""
    model = ir.load(bundle.path(graph))
    value = model.graph.initializers[f"{name}.scale"]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(factor), name=value.name)
    ir.save(model, bundle.path(graph))
    return rewrite_hash(bundle, graph)


def test_the_table_has_a_scale_for_what_was_seen_with_room_above() -> None:
    buffer = KVBuffer(
        layer=3,
        type="full",
        num_kv_heads=1,
        head_dim=8,
        dtype="float16",
        key_scale=1.0,
        value_scale=1.0,
        target_readers=[],
        assistant_readers=[0],
    )
    [stored] = int8_table([buffer], {3: (2.0, 0.0)})
    assert stored.dtype == "int8"
    assert stored.key_scale == float(np.float16(2.0 * MARGIN / 127)), "the graph holds it in float16"
    assert stored.value_scale == 1.0, "nothing was seen: zeros stay zeros"


def test_every_graph_reads_a_buffer_by_the_manifests_scales(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    assert all(buffer.dtype == "int8" for buffer in manifest.kv)
    assert len({buffer.key_scale for buffer in manifest.kv}) == len(manifest.kv), "each buffer has its own"
    table = [buffer.model_dump() for buffer in manifest.kv]
    for file in (manifest.target_graph, *(graph.file for graph in manifest.draft_graphs)):
        model = ir.load(folder / file)
        assert json.loads(model.metadata_props["slipstream.kv"]) == table
        check_scales(model, manifest.kv)
        for value in model.graph.inputs:
            is_kv = str(value.name).startswith("kv.")
            assert (value.dtype == ir.DataType.INT8) == is_kv
            for node in value.consumers() if is_kv else ():
                assert node.op_type in ("Shape", "TensorScatter", "DequantizeLinear")
        wrong = [b.model_copy(update={"value_scale": b.value_scale * 1.01}) for b in manifest.kv]
        with pytest.raises(AssertionError, match=r"kv\.\d+\.value is read with scales .*, the manifest says"):
            check_scales(model, wrong)


def test_a_buffer_is_dequantized_once_for_all_its_readers(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    operators = [node.op_type for node in ir.load(folder / manifest.target_graph).graph]
    assert operators.count("QuantizeLinear") == operators.count("DequantizeLinear") == 2 * len(manifest.kv)
    assert any(buffer.target_readers for buffer in manifest.kv)


def test_the_pass_leaves_a_graph_alone_that_is_int8_already(folder: Path) -> None:
    model = ir.load(folder / "target.onnx")
    assert not store_kv_as_int8(model, open_bundle(folder).manifest.kv)


def test_rounding_saturates_as_the_operators_do() -> None:
    values = torch.tensor([0.0, 0.24, 0.26, -0.26, 100.0, -100.0])
    assert rounded(values, 0.5).tolist() == [0.0, 0.0, 0.5, -0.5, 63.5, -64.0]


def test_the_graphs_compute_what_transformers_does_on_rounded_rows(bundle: Bundle, reference: Reference) -> None:
    report = check(bundle, reference)
    assert not report.failures
    assert report.rounding > 0
    assert report.is_quantized, "text that leaves transformers' is no failure of an int8 bundle"
    assistant = [item for item in report.logits if item.graph != "target"]
    assert max(item.relative for item in assistant) <= 1e-4, "donor rows are exact: nothing is rounded here"
    assert all(not greedy.differs_from_plain for greedy in report.greedy)


@pytest.mark.parametrize("graph", ["target.onnx", "assistant.onnx"])
def test_a_scale_that_is_not_the_manifests_is_a_miss(graph: str, bundle: Bundle, reference: Reference) -> None:
    donor = bundle.manifest.donors[1]  # its keys: a norm follows attention and takes out a factor of all values
    report = check(change_scale(bundle, graph, f"kv.{donor.layer}.key", 1.1), reference)
    kind = graph.removesuffix(".onnx")
    assert any(failure.startswith(kind) for failure in report.failures), report.failures


def test_a_float_bundle_is_compared_with_unrounded_rows_again(
    bundle_folder: Callable[..., Path], reference: Reference
) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    reference.round_kv(open_bundle(bundle_folder("edge", kv="int8")).manifest.kv)
    report = check(bundle, reference)
    assert not report.failures
    assert report.rounding == 0


def test_buffers_take_a_byte_per_value_and_survive_growth_compaction_and_rewind(bundle: Bundle) -> None:
    backend = OnnxRuntimeEngine(bundle, 1).new_backend()
    assert {tensor.dtype for tensor in backend.cache.tensors.values()} == {"int8"}
    assert all(tensor.array.nbytes == np.prod(tensor.shape) for tensor in backend.cache.tensors.values())
    backend.close()
    ids = [BOS, *range(20, 120)]
    with Pair(bundle) as pair:
        whole = pair.new_backend().prefill(0, ids)
        parts = pair.new_backend()
        for start in range(0, 80, 8):
            parts.prefill(0, ids[start : start + 8])
        parts.rewind(0, 76)
        assert parts.prefill(0, ids[76:]) == whole


def test_graphs_rewritten_for_onnxruntime_give_the_same_text(bundle: Bundle) -> None:
    with Pair(bundle) as pair:
        before = pair.generate("the the a the").token_ids
    build_onnxruntime(bundle, SilentProgress())
    with Pair(bundle) as pair:
        assert "rewritten" in pair.engine.name
        assert pair.generate("the the a the").token_ids == before


def test_tensorrt_refuses_int8_kv_before_it_is_loaded(bundle: Bundle) -> None:
    settings = EngineSettings(
        flavour="tensorrt", device="sm89", max_length=64, max_batch=1, num_draft_tokens=1, workspace_mib=64
    )
    with pytest.raises(RequestError, match=r"KV in int8, which TensorRT's .* export with --kv float"):
        build_engines(bundle, settings, SilentProgress())


def test_bfloat16_is_refused_before_anything_is_read(pair_folder: PairFolder, tmp_path: Path) -> None:
    settings = ExportSettings("bfloat16", kv="int8")
    with pytest.raises(CheckpointError, match=r"--kv int8 needs its scales measured on the CPU"):
        export_pair(open_pair(*pair_folder("edge")), tmp_path / "bundle", settings, SilentProgress())
    assert not (tmp_path / "bundle").exists()
