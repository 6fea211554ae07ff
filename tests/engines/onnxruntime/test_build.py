"""``slipstream build --engine onnxruntime``: graphs beside the portable ones, weights shared, nothing half-written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines.onnxruntime import build as onnxruntime_build
from slipstream.engines.onnxruntime.build import build_onnxruntime
from slipstream.export.verify.verify import verify
from slipstream.runtime.bundle import onnxruntime_record
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.bundle.onnxruntime_record import FILTERS, WEIGHTS_FOLDER, open_optimized, optimized_folder
from slipstream.runtime.decode.settings import GenerationSettings
from slipstream.runtime.doctor.diagnosis import examine
from slipstream.runtime.errors import BackendError, BundleError, RequestError
from slipstream.runtime.machine.host import usual_num_threads
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.ort.probes import channels_of_a_block
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress


@pytest.fixture
def bundle(bundle_folder: Callable[[str], Path], tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle_folder("edge"), tmp_path / "bundle"))


def test_every_graph_and_a_record_that_is_not_built_twice(bundle: Bundle) -> None:
    assert open_optimized(bundle, ort.__version__) is None
    outcome = build_onnxruntime(bundle, SilentProgress())
    graphs = ["target.onnx", "assistant.onnx", "assistant_3_steps.onnx"]
    assert outcome.is_new
    assert outcome.folder == bundle.folder / "engines" / "onnxruntime-cpu"
    assert sorted(path.name for path in outcome.folder.iterdir()) == sorted([*graphs, "record.json"])
    assert open_optimized(bundle, ort.__version__) == outcome.record
    assert [graph.graph for graph in outcome.record.graphs] == graphs
    assert outcome.record.bundle_sha256 == file_sha256(bundle.folder / "manifest.json")
    assert outcome.record.num_threads == 1
    passes = ["add_masks", "join_head_rows", "fold_layer_scalars"]
    assert [graph.passes for graph in outcome.record.graphs] == [["fuse_cached_attention", *passes], passes, passes]
    again = build_onnxruntime(bundle, SilentProgress())
    assert (again.is_new, again.record) == (False, outcome.record)
    open_bundle(bundle.folder)  # graphs beside the portable ones do not disturb the bundle


def test_a_moved_bundle_loads_with_the_weights_it_has(bundle: Bundle, tmp_path: Path) -> None:
    outcome = build_onnxruntime(bundle, SilentProgress())
    moved = open_bundle(bundle.folder.rename(tmp_path / "moved"))
    for graph in outcome.record.graphs:
        content = (optimized_folder(moved) / graph.file).read_bytes()
        options = ort.SessionOptions()
        options.add_session_config_entry(WEIGHTS_FOLDER, str(moved.folder))
        portable = ort.InferenceSession(moved.path(graph.graph), providers=["CPUExecutionProvider"])
        optimized = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        assert [node.name for node in optimized.get_inputs()] == [node.name for node in portable.get_inputs()]
        assert [node.name for node in optimized.get_outputs()] == [node.name for node in portable.get_outputs()]


def test_weights_are_named_and_not_copied(bundle: Bundle) -> None:
    outcome = build_onnxruntime(bundle, SilentProgress())
    inline = 0
    for graph in outcome.record.graphs:
        for value in ir.load(outcome.folder / graph.file).graph.initializers.values():
            assert value.const_value is not None
            if isinstance(value.const_value, ir.ExternalTensor):
                assert str(value.const_value.location) in bundle.manifest.files
            else:
                inline = max(inline, value.const_value.nbytes)
    assert inline <= 4 * 6 * 32  # the norm weights of 4 query heads, a key's and a value's, of 32 each


def test_graphs_of_another_export_are_refused_and_built_again(bundle: Bundle) -> None:
    build_onnxruntime(bundle, SilentProgress())
    path = bundle.folder / "manifest.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(BackendError, match=r"another export.*--engine onnxruntime again, or delete .*onnxruntime-cpu"):
        open_optimized(bundle, ort.__version__)
    assert build_onnxruntime(bundle, SilentProgress()).is_new
    assert open_optimized(bundle, ort.__version__) is not None


@pytest.mark.parametrize("file", ["target.onnx", "record.json"])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_damaged_files_are_refused_and_built_again(bundle: Bundle, file: str, is_deleted: bool) -> None:
    path = build_onnxruntime(bundle, SilentProgress()).folder / file
    if is_deleted:
        path.unlink()
    else:
        path.write_bytes(b"damaged")
    with pytest.raises(BackendError, match="or delete"):
        open_optimized(bundle, ort.__version__)
    assert build_onnxruntime(bundle, SilentProgress()).is_new
    assert open_optimized(bundle, ort.__version__) is not None


def test_another_version_or_number_of_threads_builds_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    build_onnxruntime(bundle, SilentProgress())
    monkeypatch.setattr(onnxruntime_build, "usual_num_threads", lambda manifest: 2)
    outcome = build_onnxruntime(bundle, SilentProgress())
    assert (outcome.is_new, outcome.record.num_threads) == (True, 2)
    monkeypatch.setattr(onnxruntime_build, "version", lambda name: "0.0.1")
    assert build_onnxruntime(bundle, SilentProgress()).is_new


def test_another_onnxruntime_is_refused_and_built_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, passes = ort.__version__, build_onnxruntime(bundle, SilentProgress()).record.graphs[0].passes
    assert "fuse_cached_attention" in passes
    monkeypatch.setattr(ort, "__version__", "1.31.1")
    with pytest.raises(
        BackendError, match=rf"built with ONNX Runtime {installed}, 1.31.1 is installed\. Run slipstream"
    ):
        OnnxRuntimeEngine(bundle, 1)
    record = build_onnxruntime(bundle, SilentProgress()).record
    assert record.onnxruntime_version == "1.31.1"
    assert "fuse_cached_attention" not in record.graphs[0].passes


def test_a_failure_leaves_what_was_there(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    record = build_onnxruntime(bundle, SilentProgress()).record

    class Interrupted(SilentProgress):
        def start(self, stage: str, total_bytes: int) -> None:
            if "assistant" in stage:
                raise KeyboardInterrupt

    monkeypatch.setattr(onnxruntime_build, "usual_num_threads", lambda manifest: 2)
    with pytest.raises(KeyboardInterrupt):
        build_onnxruntime(bundle, Interrupted())
    assert open_optimized(bundle, ort.__version__) == record
    assert [path.name for path in (bundle.folder / "engines").iterdir()] == ["onnxruntime-cpu"]


def test_a_graph_that_does_not_load_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ort, "InferenceSession", refuse)
    with pytest.raises(RequestError, match=r"can't load target.onnx of this float32 bundle.*no kernel"):
        build_onnxruntime(bundle, SilentProgress())
    assert not (bundle.folder / "engines").exists()


def test_bfloat16_is_refused(bundle: Bundle) -> None:
    manifest = bundle.manifest.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(BackendError, match="--dtype float32"):
        build_onnxruntime(Bundle(bundle.folder, manifest), SilentProgress())


def test_float16_builds(bundle_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bundle_folder("edge", dtype="float16"), tmp_path / "half")
    record = build_onnxruntime(open_bundle(folder), SilentProgress()).record
    assert all("fuse_cached_attention" not in graph.passes for graph in record.graphs)  # its kernel takes float32


def test_large_models_share_out_their_work(bundle: Bundle) -> None:
    assert usual_num_threads(bundle.manifest) == 1
    files = dict(bundle.manifest.files)
    files["target.bin"] = files["target.bin"].model_copy(update={"size_bytes": 1 << 30})
    assert usual_num_threads(bundle.manifest.model_copy(update={"files": files})) >= 1


def test_hard_links_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "linked").hardlink_to(bundle.path("target.bin"))
    with pytest.raises(RequestError, match=r"target.bin has 2 hard links.*cp -r"):
        build_onnxruntime(bundle, SilentProgress())
    assert not (bundle.folder / "engines").exists()


@pytest.fixture
def large(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle whose matrices count as large."""
    monkeypatch.setattr(onnxruntime_build, "LEAST_FILTER_BYTES", 1)
    return bundle


def test_matrices_become_filters_that_graphs_share(large: Bundle) -> None:
    outcome = build_onnxruntime(large, SilentProgress())
    assert all("block_matrices" in graph.passes for graph in outcome.record.graphs)
    named = [
        {
            value.const_value.offset
            for value in ir.load(outcome.folder / graph.file).graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
            and str(value.const_value.location) == f"engines/onnxruntime-cpu/{FILTERS}"
        }
        for graph in outcome.record.graphs
    ]
    assert named[1] < named[2]  # the last product of a single step is an output of its graph
    assert not named[0] & named[2]
    assert outcome.record.filters is not None
    assert (outcome.folder / FILTERS).stat().st_size == outcome.record.filters.size_bytes
    assert not build_onnxruntime(large, SilentProgress()).is_new
    OnnxRuntimeEngine(large, 1).close()


@pytest.mark.parametrize("num_draft_tokens", range(8))
def test_rounds_over_filters_give_the_same_tokens(large: Bundle, num_draft_tokens: int) -> None:
    """Rounds of four and five rows take six, but for batches."""
    settings = GenerationSettings(num_draft_tokens=num_draft_tokens, max_new_tokens=40)
    with Pair(large) as portable:
        expected = portable.generate("three blue parrots", settings)
    build_onnxruntime(large, SilentProgress())
    with Pair(large) as pair:
        assert pair.generate("three blue parrots", settings).token_ids == expected.token_ids
        backend: Any = pair.new_backend(2)
        rows = [backend._rows_run(num_draft_tokens + 1, batch) for batch in (1, 2)]
    usual = num_draft_tokens + 1
    assert rows == [6 if usual in (4, 5) else usual, usual]


def test_the_record_says_how_many_rows_run(large: Bundle) -> None:
    outcome = build_onnxruntime(large, SilentProgress())
    assert outcome.record.rows_run == {4: 6, 5: 6}
    record = outcome.record.model_copy(update={"rows_run": {2: 3, 9: 300}})
    (outcome.folder / "record.json").write_text(record.model_dump_json())
    with Pair(large) as pair:
        backend: Any = pair.new_backend(1)
        assert [backend._rows_run(rows, 1) for rows in (2, 5, 9)] == [3, 5, 9]  # never more than buffers have room for


def test_small_quantized_and_half_graphs_keep_their_matrices(
    bundle: Bundle, bundle_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = build_onnxruntime(bundle, SilentProgress()).record
    assert (record.filters, record.rows_run) == (None, {})
    monkeypatch.setattr(onnxruntime_build, "LEAST_FILTER_BYTES", 1)
    for name, settings in (("edge", {"dtype": "float16"}), ("wide", {"weights": "int8"})):
        folder = shutil.copytree(bundle_folder(name, **settings), tmp_path / name)
        outcome = build_onnxruntime(open_bundle(folder), SilentProgress())
        assert outcome.record.filters is None
        assert not (outcome.folder / FILTERS).exists()


def test_a_cpu_without_such_a_layout_keeps_its_matrices(large: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_build, "channels_of_a_block", lambda layout: 1)
    outcome = build_onnxruntime(large, SilentProgress())
    assert outcome.record.filters is None
    assert not any("block_matrices" in graph.passes for graph in outcome.record.graphs)


def test_what_can_not_be_run_has_no_layout(tmp_path: Path) -> None:
    (tmp_path / "layout.onnx").write_bytes(b"no graph")
    assert channels_of_a_block(tmp_path / "layout.onnx") == 1


def test_another_cpus_layout_is_refused(large: Bundle) -> None:
    outcome = build_onnxruntime(large, SilentProgress())
    assert outcome.record.filters is not None
    block = outcome.record.filters.block
    filters = outcome.record.filters.model_copy(update={"block": 2 * block})
    record = outcome.record.model_copy(update={"filters": filters})
    (outcome.folder / "record.json").write_text(record.model_dump_json())
    with pytest.raises(BackendError, match=rf"that read {2 * block} channels at once, this one reads {block}\. Run"):
        OnnxRuntimeEngine(large, 1)
    found = [finding for finding in examine(large.folder).findings if finding.name == "engines/onnxruntime-cpu"]
    assert [(finding.state, f"this one reads {block}" in finding.detail) for finding in found] == [("problem", True)]
    assert build_onnxruntime(large, SilentProgress()).record.filters == outcome.record.filters
    OnnxRuntimeEngine(large, 1).close()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_damaged_filters_are_refused(large: Bundle, is_deleted: bool) -> None:
    path = build_onnxruntime(large, SilentProgress()).folder / FILTERS
    if is_deleted:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BackendError, match=r"filters.bin is missing or has another size.*Run slipstream build"):
        OnnxRuntimeEngine(large, 1)


@pytest.mark.parametrize("file", [FILTERS, "layout.onnx"])
def test_changed_filters_are_refused_and_built_again(large: Bundle, file: str) -> None:
    path = build_onnxruntime(large, SilentProgress()).folder / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BackendError, match=rf"{file} .*was changed since it was built\. Run slipstream build"):
        OnnxRuntimeEngine(large, 1)
    assert build_onnxruntime(large, SilentProgress()).is_new
    assert path.read_bytes() == content


def test_large_filters_are_hashed_by_build_and_verify(large: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_record, "SMALL_FILE_BYTES", 0)
    path = build_onnxruntime(large, SilentProgress()).folder / FILTERS
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    OnnxRuntimeEngine(large, 1).close()
    reference: Any = SimpleNamespace()
    with pytest.raises(BackendError, match=rf"{FILTERS} was changed since it was built"):
        verify(large, reference, [], 1, [], SilentProgress())
    assert build_onnxruntime(large, SilentProgress()).is_new


def test_links_that_lead_out_of_the_bundle_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = bundle.path("target.bin")
    path.rename(tmp_path / "target.bin")
    path.symlink_to(tmp_path / "target.bin")
    message = r"target.bin is a link that leads to .*cp -rL"
    with pytest.raises(BundleError, match=message):
        build_onnxruntime(bundle, SilentProgress())
    with pytest.raises(BundleError, match=message):
        OnnxRuntimeEngine(bundle, 1)
    [way] = [way for way in examine(bundle.folder).ways if way.engine == "onnxruntime"]
    assert not way.can_run
    assert "target.bin is a link" in way.detail
    assert not (bundle.folder / "engines").exists()


def test_filters_are_not_written_behind_a_link(large: Bundle, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (large.folder / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"engines/onnxruntime-cpu is a link that leads to"):
        build_onnxruntime(large, SilentProgress())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_bundle_behind_a_link_runs(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bundle.folder)
    build_onnxruntime(open_bundle(tmp_path / "link"), SilentProgress())
    with Pair(open_bundle(tmp_path / "link")) as pair:
        assert "rewritten" in pair.engine.name


def test_what_the_disk_refuses_is_an_error_without_leftovers(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(RequestError, match=r"onnxruntime-cpu can't be written: .*No space left on device.*Nothing was"):
        build_onnxruntime(bundle, SilentProgress())
    assert not (bundle.folder / "engines").exists()


def test_a_full_disk_is_refused_before_anything_is_written(large: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1024))
    with pytest.raises(RequestError, match=r"the matrices once more: .* has 1\.0 KiB free: make room"):
        build_onnxruntime(large, SilentProgress())
    assert not (large.folder / "engines").exists()
