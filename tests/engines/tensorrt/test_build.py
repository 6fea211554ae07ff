"""``slipstream build`` with TensorRT-RTX, which needs no GPU: engines, record, refusals, nothing half-written."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from slipstream import cli
from slipstream.engines.tensorrt import build as build_module
from slipstream.engines.tensorrt import builder
from slipstream.engines.tensorrt import builder as tensorrt_builder
from slipstream.engines.tensorrt.build import _workspace_mib, build_engines
from slipstream.engines.tensorrt.builder import BuildOptions, engine_from_network, network_from_onnx
from slipstream.engines.tensorrt.passes.bucketing import attend_to_buckets
from slipstream.runtime.bundle.capacity import PREFILL_CHUNK, kv_limits
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.engine_record import EngineRecord, EngineSettings, engine_folder
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.graph_io import EMBEDDING_INPUT
from slipstream.runtime.bundle.manifest import Bundle, FileRecord, open_bundle
from slipstream.runtime.errors import BackendError, MissingExtraError, RequestError, SlipstreamError
from slipstream.runtime.machine.host import AvailableMemory
from slipstream.runtime.trt.flavour import load_flavour
from tests.support.engine_fixtures import build_simulated
from tests.support.progress import SilentProgress

pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")


def settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "flavour": "tensorrt-rtx",
        "device": "sm89",
        "max_length": 100,
        "max_batch": 2,
        "num_draft_tokens": 3,
        "workspace_mib": 256,
    }
    return EngineSettings(**(values | changes))


@pytest.fixture
def bundle(bundle_folder: Callable[[str], Path], tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle_folder("edge"), tmp_path / "bundle"))


def test_builds_for_other_gpus_have_room_for_an_embedding_that_outweighs_the_assistant(bundle: Bundle) -> None:
    """E4B's: 1280 MiB of embedding over an assistant of 152, which 1024 MiB were too little for."""
    sizes = {"embedding.bin": 1280 << 20, "target.bin": 2161 << 20, "assistant.bin": 152 << 20}
    files = {name: FileRecord(size_bytes=size, sha256="") for name, size in sizes.items()}
    manifest = bundle.manifest.model_copy(update={"files": {**bundle.manifest.files, **files}})
    for flavour, expected in (("tensorrt-rtx", [1024, 2152]), ("tensorrt", [1024, 1024])):
        asked = settings(flavour=flavour, workspace_mib=1024)
        assert [_workspace_mib(manifest, asked, name) for name in ("target.bin", "assistant.bin")] == expected


def test_engines_and_a_record_that_are_not_built_twice(bundle: Bundle) -> None:
    outcome = build_engines(bundle, settings(), SilentProgress())
    assert outcome.is_new
    names = ["assistant", "choose_greedy", "choose_sampled", "target"]
    assert sorted(p.stem for p in outcome.folder.glob("*.engine")) == names
    assert len(list(outcome.folder.iterdir())) == len(names) + 1
    assert outcome.folder == bundle.folder / "engines" / "tensorrt-rtx-sm89"
    record = EngineRecord.model_validate_json((outcome.folder / "record.json").read_text(), strict=False)
    assert record == outcome.record
    assert record.bundle_sha256 == file_sha256(bundle.folder / "manifest.json")
    assert set(record.target.profiles) == {"prefill", "verify"}
    assert record.target.profiles["verify"]["num_draft_tokens"] == (0, 3, 3)
    assert record.target.profiles["verify"]["batch"] == (1, 2, 2)
    assert record.target.profiles["prefill"]["batch"] == (1, 1, 1), "prompts are fed one by one"
    assert record.choosing["choose_greedy"].profiles["choose_greedy"]["num_scored_rows"] == (1, 4, 4)
    assert {(s.num_heads, s.num_kv_heads, s.head_dim, s.is_fused) for s in record.attention} == {
        (4, 1, 16, False),  # float32 has no fused kernels
        (4, 1, 32, False),
    }
    again = build_engines(bundle, settings(), SilentProgress())
    assert (again.is_new, again.record) == (False, record)
    written = (outcome.folder / "record.json").read_text()
    (outcome.folder / "record.json").write_text(written.replace(f'"{version("slipstream")}"', '"0.0.1"'))
    assert build_engines(bundle, settings(), SilentProgress()).is_new, "another slipstream may edit graphs otherwise"
    (outcome.folder / "target.engine").write_bytes(b"damaged")
    assert build_engines(bundle, settings(), SilentProgress()).is_new
    open_bundle(bundle.folder)  # engines beside the graphs do not disturb the bundle


@pytest.fixture
def half_bundle(bundle_folder: Callable[..., Path], tmp_path: Path) -> Callable[[str, DType], Bundle]:
    """A copy to build in."""

    def get(name: str, dtype: DType) -> Bundle:
        return open_bundle(shutil.copytree(bundle_folder(name, dtype=dtype, num_draft_tokens=1), tmp_path / "half"))

    return get


# query heads, KV heads, head size -> whether TensorRT-RTX has one kernel for it in half precision
ATTENTION = {
    "edge": {(4, 1, 16): True, (4, 1, 32): True},
    "dense": {(8, 4, 16): True, (8, 2, 32): True},
    "wide": {(8, 2, 256): True, (8, 1, 512): False},
    "experts": {(4, 2, 16): True, (4, 1, 32): True},
}


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        ("edge", "float16", "sm86"),
        ("dense", "bfloat16", "sm120"),
        ("wide", "float16", "sm120"),
        ("wide", "bfloat16", "sm86"),
        ("experts", "bfloat16", "sm89"),
    ],
)
def test_half_precision_pairs_build_for_every_device(
    name: str, dtype: DType, device: str, half_bundle: Callable[[str, DType], Bundle]
) -> None:
    """K=V, KV heads that differ by type, dense and centroid heads, small and large head sizes, mixtures of experts."""
    bundle = half_bundle(name, dtype)
    outcome = build_engines(bundle, settings(device=device, num_draft_tokens=1), SilentProgress())
    record, manifest = outcome.record, bundle.manifest
    assert (record.dtype, record.settings.device) == (dtype, device)
    for engine in (record.target, record.assistant):
        content = (outcome.folder / engine.file).read_bytes()
        assert (len(content), file_sha256(outcome.folder / engine.file)) == (engine.size_bytes, engine.sha256)
        assert EMBEDDING_INPUT.encode() in content
    assert (record.target.graph, record.assistant.graph) == ("target.onnx", "assistant.onnx")
    assert record.capacity == kv_limits(manifest.sliding_window, 100, PREFILL_CHUNK, 1)
    for profile in (*record.target.profiles.values(), *record.assistant.profiles.values()):
        assert [profile[f"{kind}_bucket"][2] for kind in record.capacity] == list(record.capacity.values())
    found = {(s.num_heads, s.num_kv_heads, s.head_dim): s.is_fused for s in record.attention}
    assert found == ATTENTION[name]
    assert {shape.dtype for shape in record.attention} == {dtype}


def test_a_build_puts_nothing_beside_the_bundles_own_files(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there when a build is killed stays: nobody looks for it."""
    before, found = sorted(bundle.folder.iterdir()), list[list[Path]]()

    def look(*_: object) -> None:
        found.append(sorted(bundle.folder.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "_parse", look)
    graph = bundle.path("target.onnx")
    with pytest.raises(KeyboardInterrupt):
        network_from_onnx(load_flavour("tensorrt-rtx"), ir.load(graph), graph)
    assert found == [before]


def test_an_engine_does_not_hold_the_embedding(bundle: Bundle, tmp_path: Path) -> None:
    """Its bytes are found in an engine of the graph as it is, and in none of those that are built."""
    manifest, trt = bundle.manifest, load_flavour("tensorrt-rtx")
    table = bundle.path(manifest.embedding_file).read_bytes()
    outcome = build_engines(bundle, settings(max_batch=1), SilentProgress())
    engines = [outcome.folder / engine.file for engine in (outcome.record.target, outcome.record.assistant)]
    piece = table[len(table) // 2 :][:1024]
    assert all(piece not in engine.read_bytes() for engine in engines)
    graph = bundle.path(outcome.record.assistant.graph)
    model = ir.load(graph)
    attend_to_buckets(model, manifest.kv, outcome.record.capacity)
    options = BuildOptions(trt.module.ComputeCapability.SM89, 256, None)
    profiles = list(outcome.record.assistant.profiles.values())
    parsed = network_from_onnx(trt, model, graph)
    with_table = engine_from_network(trt, parsed, profiles, options, lambda: True)
    assert table in bytes(with_table)
    assert len(with_table) > outcome.record.assistant.size_bytes + 0.9 * len(table)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": ""}, RequestError, "tensorrt-rtx needs --device, one of sm75, sm80, sm86, sm89, sm120"),
        ({"device": "sm90"}, RequestError, "sm90 is not a target of TensorRT-RTX .*; use --engine tensorrt"),
        ({"num_draft_tokens": 2}, RequestError, "assistant graphs of 1 and 3 steps; export with -k 2"),
        ({"max_length": 161}, RequestError, "--max-length 161 is outside 2..160, the bundle's"),
    ],
)
def test_what_can_not_be_is_refused(
    changes: dict[str, Any], error: type[SlipstreamError], message: str, bundle: Bundle
) -> None:
    with pytest.raises(error, match=message):
        build_engines(bundle, settings(**changes), SilentProgress())
    assert not (bundle.folder / "engines").exists()


def test_a_weight_beyond_31_bits_is_refused_by_name(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2B's per-layer embedding, with the limit brought down to this pair's."""
    monkeypatch.setattr(tensorrt_builder, "_MOST_ELEMENTS", 10_000)
    model = ir.load(bundle.path("target.onnx"))
    refusal = r"weight of .*target\.onnx has \d+ elements; TensorRT takes fewer than 10000.*--ple host"
    with pytest.raises(BackendError, match=refusal):
        network_from_onnx(load_flavour("tensorrt-rtx"), model, bundle.path("target.onnx"))


@pytest.mark.parametrize(("room", "chunk"), [(1_500_000, 256), (1_400_000, 64), (100, 16)])
def test_prefill_takes_as_many_rows_as_their_experts_have_room_for(
    room: int, chunk: int, bundle_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """12 experts of 3 x 20 x 48 weights and 108 values per row, in float32: 1.47 MB at 256 rows."""
    monkeypatch.setattr(build_module, "_EXPERTS_BYTES", room)
    bundle = build_simulated(bundle_folder("experts"), tmp_path / "bundle", max_batch=6)
    content = (engine_folder(bundle, "tensorrt-rtx", "sm89") / "record.json").read_text()
    record = EngineRecord.model_validate_json(content, strict=False)
    assert record.target.profiles["prefill"]["num_draft_tokens"] == (0, chunk - 1, chunk - 1)
    k, window = record.settings.num_draft_tokens, bundle.manifest.sliding_window
    assert record.capacity == kv_limits(window, 160, chunk, k)


def test_tensorrt_without_the_package_says_what_to_install(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'slipstream\[tensorrt\]'"):
        build_engines(bundle, settings(flavour="tensorrt", device=""), SilentProgress())


def test_a_tensorrt_without_cache_updates_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "10.3.0"
        LayerType = object()

    monkeypatch.setitem(sys.modules, "tensorrt", Old)
    with pytest.raises(BackendError, match=r"tensorrt 10\.3\.0 has no KV cache update .* JetPack 7"):
        build_engines(bundle, settings(flavour="tensorrt", device=""), SilentProgress())


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), BackendError("no")])
def test_a_build_that_fails_leaves_nothing_half_written(
    failure: BaseException, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(build_module, "_interruptible", fail)
    with pytest.raises(type(failure)):
        build_engines(bundle, settings(), SilentProgress())
    assert {p.name for p in bundle.folder.iterdir()} == {*bundle.manifest.files, "manifest.json"}


def test_too_little_memory_is_refused_first(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "read_state", lambda: AvailableMemory(1 << 20, 1 << 30, 0, None))
    with pytest.raises(RequestError, match=r"building needs about .* MiB of memory"):
        build_engines(bundle, settings(), SilentProgress())


def test_the_command_shows_what_was_built(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", str(bundle.folder), "--engine", "tensorrt-rtx", "--device", "sm89", "--max-length", "100"]
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    shown = capsys.readouterr()
    assert "target.engine" in shown.out
    assert "taken apart" in shown.out
    assert "built" in shown.err
    assert (bundle.folder / "engines" / "tensorrt-rtx-sm89" / "record.json").is_file()
