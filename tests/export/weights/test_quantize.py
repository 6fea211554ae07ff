"""Weight-only int4 and int8: the values, the graphs, and what ONNX Runtime and TensorRT-RTX make of them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from slipstream import GenerationSettings, load
from slipstream.engines.onnxruntime.build import build_onnxruntime
from slipstream.engines.tensorrt.build import build_engines
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.model.layers import Blocks
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.verify import sample_prompts, verify
from slipstream.export.weights.quantize import dequantize, quantize
from slipstream.runtime.bundle.engine_record import EngineSettings
from slipstream.runtime.bundle.graph_roles import HEAD, ROLE
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.bundle.onnxruntime_record import WEIGHTS_FOLDER, optimized_folder
from slipstream.runtime.errors import CheckpointError
from tests.support import pairs
from tests.support.bundles import rewrite_hash
from tests.support.fixtures import MadeOnce
from tests.support.progress import RecordedProgress, SilentProgress

Format = Literal["int8", "int4"]
FORMATS: tuple[Format, ...] = ("int8", "int4")
WIDTH = 64  # of the pairs here; that of tests/support/pairs.py does not divide into blocks
HEAVY = "heavy"  # "wide" with matrices that outweigh the code of an engine
GetPair = Callable[[str], tuple[Path, Path]]
GetBundle = Callable[..., Bundle]


@pytest.fixture(scope="module")
def pair(made_once: MadeOnce) -> GetPair:
    def get(name: str) -> tuple[Path, Path]:
        def make(work: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(pairs._TEXT, "hidden_size", WIDTH)
                if name == HEAVY:
                    patch.setitem(pairs._TEXT, "intermediate_size", 8192)
                pairs.make_pair(work, "wide" if name == HEAVY else name)

        folder = made_once(f"pair-{name}-{WIDTH}", make)
        return folder / "target", folder / "assistant"

    return get


@pytest.fixture(scope="module")
def bundle(pair: GetPair, made_once: MadeOnce) -> GetBundle:
    """int4 in blocks of 32 with a graph of one draft step, unless settings say otherwise."""

    def get(name: str, **changes: Any) -> Bundle:
        settings: dict[str, Any] = {"weights": "int4", "block_size": 32, "dtype": "float32", "num_draft_tokens": 1}
        settings |= changes

        def export(work: Path) -> None:
            export_pair(open_pair(*pair(name)), work, ExportSettings(**settings), SilentProgress())

        return open_bundle(made_once("-".join(["bundle", name, str(WIDTH), *map(str, settings.values())]), export))

    return get


def relative_error(weight: torch.Tensor, blocks: Blocks) -> float:
    values = dequantize(*quantize(weight, blocks, torch.float32))
    return float((values - weight).square().sum() / weight.square().sum())


@pytest.mark.parametrize("size", [32, 64, 128])
def test_searched_scales_leave_less_error_than_the_largest_value_gives(size: int) -> None:
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(size))
    grouped = weight.view(48, -1, size)
    scales = grouped.abs().amax(-1, keepdim=True) / 7
    plain = (grouped / scales).round().clamp(-8, 7) * scales
    plain_error = float((plain - grouped).square().sum() / weight.square().sum())
    assert relative_error(weight, Blocks("int4", size)) < 0.8 * plain_error
    assert relative_error(weight, Blocks("int8", size)) < 0.01 * plain_error


def on_a_grid(sign: int, lowest: int, highest: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of codes in lowest..highest, both used in every block of 32, times a scale for each."""
    random = torch.Generator().manual_seed(highest)
    codes = torch.randint(lowest, highest + 1, (70, 12, 32), generator=random)
    codes[..., 3], codes[..., 17] = lowest, highest
    scales = sign * (0.001 + torch.rand(70, 12, 1, generator=random)).half().float()
    return (codes * scales).to(dtype).view(70, 384)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("highest", range(8))
@pytest.mark.parametrize("lowest", [-8, -7, -4, -3, -1])
def test_what_lies_on_an_int4_grid_comes_out_as_it_is(lowest: int, highest: int, sign: int) -> None:
    weight = on_a_grid(sign, lowest, highest, torch.float32)
    assert torch.equal(dequantize(*quantize(weight, Blocks("int4", 32), torch.float32)), weight)
    values = dequantize(*quantize(weight, Blocks("int8", 32), torch.float32))
    torch.testing.assert_close(values, weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lowest", [-8, -5])
def test_a_half_precision_grid_keeps_its_codes(lowest: int, dtype: torch.dtype) -> None:
    """As a QAT checkpoint stores it: the products are rounded, and so are our scales."""
    weight = on_a_grid(-1, lowest, 4, dtype)
    exact, _ = quantize(on_a_grid(-1, lowest, 4, torch.float32), Blocks("int4", 32), torch.float32)
    codes, scales = quantize(weight, Blocks("int4", 32), dtype)
    assert torch.equal(codes, exact)
    torch.testing.assert_close(dequantize(codes, scales), weight, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_blocks_of_zeros_and_of_values_too_small_for_a_scale_are_zeros() -> None:
    weight = torch.ones(2, 96)
    weight[0, :32], weight[1, 64:] = 0.0, 1e-10
    codes, scales = quantize(weight, Blocks("int4", 32), torch.float16)
    expected = weight.clone()
    expected[1, 64:] = 0.0
    assert torch.equal(dequantize(codes, scales).float(), expected)
    assert bool(torch.isfinite(scales).all())


def test_only_int4_has_negative_scales() -> None:
    """TensorRT's parser takes them for int4, and refuses them for int8."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    signs = {form: (quantize(weight, Blocks(form, 32), torch.float32)[1] < 0).float().mean() for form in FORMATS}
    assert 0.4 < signs["int4"] < 0.6
    assert signs["int8"] == 0


def test_no_block_depends_on_its_neighbours() -> None:
    weight = torch.randn(130, 2176, generator=torch.Generator().manual_seed(0))  # more than one tile each way
    codes, scales = quantize(weight, Blocks("int4", 128), torch.float32)
    alone = [quantize(weight[n : n + 1, 2048:], Blocks("int4", 128), torch.float32) for n in range(130)]
    assert torch.equal(codes[2048:], torch.cat([c for c, _ in alone], dim=1))
    torch.testing.assert_close(scales[16:], torch.cat([s for _, s in alone], dim=1), rtol=1e-6, atol=0)


def dequantized(model: ir.Model) -> dict[str, ir.Node]:
    return {
        str(node.inputs[0].name): node for node in model.graph if node.op_type == "DequantizeLinear" if node.inputs[0]
    }


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_matrices_are_blocks_along_their_input(weights: Format, bundle: GetBundle, pair: GetPair) -> None:
    """The values the graph holds are those of ``quantize``, for joined matrices in the order of their parts."""
    opened, checkpoint = bundle("edge", weights=weights), open_pair(*pair("edge")).target
    nodes = dequantized(ir.load(opened.path("target.onnx")))
    node = nodes["layers.0.mlp.gate_up.weight"]
    codes, scales = (value.const_value.numpy() for value in node.inputs if value and value.const_value)
    assert (codes.dtype.name, codes.shape, scales.shape) == (weights, (WIDTH, 128), (WIDTH // 32, 128))
    assert (node.attributes["axis"].as_int(), node.attributes["block_size"].as_int()) == (0, 32)
    parts = [checkpoint.read(f"layers.0.mlp.{name}_proj.weight") for name in ("gate", "up")]
    expected = torch.cat([dequantize(*quantize(part, Blocks(weights, 32), torch.float32)) for part in parts])
    found = codes.astype(np.float32) * scales.repeat(32, axis=0)
    np.testing.assert_array_equal(found.T, expected.numpy())


def test_what_is_gathered_or_chooses_stays_float(bundle: GetBundle) -> None:
    edge = bundle("edge").manifest.weights
    assert (edge.format, edge.block_size) == ("int4", 32)
    # per-layer embeddings of 8 have no block of 32
    narrow = [f"target.onnx:layers.{n}.per_layer_input.project.weight" for n in range(6)]
    assert sorted(edge.float_matrices) == sorted(["assistant.onnx:head.centroids.weight", *narrow])
    # an assistant of 32 has no block of 64, nor has its head, which is a table then
    dense = bundle("dense", block_size=64).manifest.weights
    assert "assistant.onnx:head.table" in dense.float_matrices
    assert not any(name.startswith("target") for name in dense.float_matrices)
    experts = bundle("experts", weights="int8")
    routers = [f"target.onnx:layers.{n}.experts.router.project.weight" for n in range(3)]
    assert experts.manifest.weights.float_matrices == routers
    names = set(dequantized(ir.load(experts.path("target.onnx"))))
    assert "head.weight" in names
    assert not any("experts" in name or "embed" in name for name in names)


def test_a_head_is_a_matrix_of_its_own_and_the_table_stays_shared(bundle: GetBundle) -> None:
    for name in ("dense", "wide"):  # untied and tied
        opened = bundle(name)
        for file in ("target.onnx", "assistant.onnx"):
            graph = ir.load(opened.path(file)).graph
            heads = [node.op_type for node in graph if node.metadata_props.get(ROLE) == HEAD]
            assert "MatMul" in heads
            assert not any(node.op_type == "Gemm" for node in graph)
            assert not {"head", "head.table"} & set(graph.initializers)
            table = graph.initializers["embed.weight"].const_value
            assert isinstance(table, ir.ExternalTensor)
            assert (table.location, table.dtype) == ("embedding.bin", ir.DataType.FLOAT)


def test_every_draft_step_reads_the_same_bytes_through_nodes_of_its_own(bundle: GetBundle) -> None:
    opened = bundle("wide", num_draft_tokens=3)
    one = dequantized(ir.load(opened.path("assistant.onnx")))
    several = dequantized(ir.load(opened.path("assistant_3_steps.onnx")))
    assert len(several) == 3 * len(one)
    assert all(len(node.outputs[0].uses()) == 1 for node in several.values())

    def places(nodes: dict[str, ir.Node]) -> Counter[tuple[object, ...]]:
        tensors = [value.const_value for node in nodes.values() for value in node.inputs if value]
        return Counter((t.location, t.offset, t.length) for t in tensors if isinstance(t, ir.ExternalTensor))

    assert set(places(several)) == set(places(one))
    assert set(places(several).values()) == {3}


def operators(bundle: Bundle, content: bytes, file: Path) -> Counter[str]:
    """Of a graph as ONNX Runtime runs it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(file)
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.folder))
    ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(file, load_external_data=False).graph.node)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("edge", {}),
        ("dense", {"block_size": 64}),
        ("wide", {"weights": "int8", "num_draft_tokens": 3}),
        ("wide", {"dtype": "float16"}),
    ],
)
def test_onnxruntime_fuses_every_quantized_matrix(
    name: str, settings: dict[str, Any], bundle: GetBundle, tmp_path: Path
) -> None:
    """In all graphs, as exported and as rewritten."""
    opened = open_bundle(shutil.copytree(bundle(name, **settings).folder, tmp_path / "bundle"))
    files = [opened.manifest.target_graph, *(graph.file for graph in opened.manifest.draft_graphs)]
    graphs = [opened.path(file) for file in files]
    if settings.get("dtype") != "float16":
        build_onnxruntime(opened, SilentProgress())
        graphs += [optimized_folder(opened) / file for file in files]
    for path in graphs:
        model = ir.load(path)
        num_quantized = len(dequantized(model))
        counts = operators(opened, path.read_bytes(), tmp_path / "fused.onnx")
        assert counts["MatMulNBits"] == num_quantized > 0
        assert counts["DequantizeLinear"] == 0


def test_a_rewritten_quantized_bundle_generates(bundle: GetBundle, tmp_path: Path) -> None:
    opened = open_bundle(shutil.copytree(bundle("edge").folder, tmp_path / "bundle"))
    build_onnxruntime(opened, SilentProgress())
    with load(opened.folder) as loaded:
        result = loaded.generate("the", GenerationSettings(max_new_tokens=24))
    assert "rewritten" in result.engine
    assert 0 < len(result.token_ids) <= 24


def test_progress_counts_the_bytes_of_codes_and_scales(pair: GetPair, tmp_path: Path) -> None:
    progress = RecordedProgress()
    settings = ExportSettings(weights="int4", num_draft_tokens=1)
    export_pair(open_pair(*pair("dense")), tmp_path / "bundle", settings, progress)
    for stage in ("writing the target", "writing the assistant"):
        assert progress.written[stage] == progress.announced[stage] > 0
    model = ir.load(tmp_path / "bundle" / "target.onnx")
    node = dequantized(model)["head.weight"]
    sizes = [value.const_value.nbytes for value in node.inputs if value and value.const_value]
    num_values = pairs.VOCAB_SIZE * WIDTH
    assert sizes == [num_values // 2, num_values // 32 * 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "int4", "block_size": 48}, "--block-size is 48; served are 32, 64, 128"),
        ({"weights": "int8", "block_size": 128}, "--weights int8 --block-size 128 would leave most matrices float: "),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str, pair: GetPair, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        export_pair(open_pair(*pair("edge")), tmp_path / "bundle", ExportSettings(**settings), SilentProgress())
    assert list(tmp_path.iterdir()) == []


def test_float_weights_have_no_block_size(bundle: GetBundle) -> None:
    weights = bundle("wide", weights="float").manifest.weights
    assert (weights.format, weights.block_size, weights.float_matrices) == ("float", None, [])


def check(bundle: Bundle, reference: Reference):  # type: ignore[no-untyped-def]
    manifest = bundle.manifest
    prompts = sample_prompts(range(20, 280), pairs.BOS, 2, manifest.sliding_window, manifest.max_length, 8)
    return verify(bundle, reference, prompts, 8, [0, 3], SilentProgress())


@pytest.mark.parametrize(
    ("name", "changes"), [("edge", {}), ("dense", {"block_size": 64}), ("experts", {"weights": "int8"})]
)
def test_a_quantized_bundle_equals_transformers_on_the_same_weights(
    name: str, changes: dict[str, Any], bundle: GetBundle, pair: GetPair
) -> None:
    opened = bundle(name, **changes)
    report = check(opened, Reference(*pair(name), "float32"))
    assert report.failures == []
    assert report.is_quantized
    assert max(found.relative for found in report.logits) < 1e-4
    assert all(0.0 <= greedy.agreement <= 1.0 for greedy in report.greedy)


def test_a_wrong_scale_is_a_miss(bundle: GetBundle, pair: GetPair, tmp_path: Path) -> None:
    opened = open_bundle(shutil.copytree(bundle("edge").folder, tmp_path / "bundle"))
    scales = ir.load(opened.path("target.onnx")).graph.initializers["layers.1.mlp.gate_up.weight.scales"].const_value
    assert isinstance(scales, ir.ExternalTensor)
    content = np.memmap(opened.path("target.bin"), np.float32, "r+", scales.offset or 0, (prod(scales.shape.numpy()),))
    content *= 1.01
    content.flush()
    report = check(rewrite_hash(opened, "target.bin"), Reference(*pair("edge"), "float32"))
    assert any("target logits" in failure for failure in report.failures)


def test_a_rounded_reference_is_not_used_for_other_weights(bundle: GetBundle, pair: GetPair) -> None:
    reference = Reference(*pair("edge"), "float32")
    reference.round_weights(bundle("edge").manifest.weights)
    with pytest.raises(CheckpointError, match=r"this reference was rounded to .*int4.* open the pair again"):
        reference.round_weights(bundle("edge", weights="int8").manifest.weights)


def target_engine(opened: Bundle, device: str, folder: Path) -> bytes:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    copied = open_bundle(shutil.copytree(opened.folder, folder / opened.folder.name))
    settings = EngineSettings(
        flavour="tensorrt-rtx", device=device, max_length=100, max_batch=1, num_draft_tokens=1, workspace_mib=256
    )
    outcome = build_engines(copied, settings, SilentProgress())
    return (outcome.folder / outcome.record.target.file).read_bytes()


def test_tensorrt_keeps_int4(bundle: GetBundle, tmp_path: Path) -> None:
    """It stores them in an order of its own, but the engine is smaller by most of what four bits of sixteen save."""
    quantized, whole = (bundle(HEAVY, weights=weights, dtype="float16") for weights in ("int4", "float"))
    matrices = [node.outputs[0].shape for node in dequantized(ir.load(quantized.path("target.onnx"))).values()]
    bytes_saved = 1.5 * sum(prod(shape.numpy()) for shape in matrices if shape)
    sizes = [len(target_engine(opened, "sm89", tmp_path)) for opened in (whole, quantized)]
    assert sizes[0] - sizes[1] > 0.7 * bytes_saved


def test_tensorrt_keeps_int8(bundle: GetBundle, tmp_path: Path) -> None:
    """Every matrix lies in the engine as it does in the bundle."""
    opened = bundle("wide", weights="int8", dtype="bfloat16")
    engine = target_engine(opened, "sm120", tmp_path)
    nodes = dequantized(ir.load(opened.path("target.onnx")))
    codes = {name: node.inputs[0].const_value for name, node in nodes.items() if node.inputs[0]}
    assert len(codes) == 9
    assert [name for name, tensor in codes.items() if tensor is None or tensor.tobytes() not in engine] == []
