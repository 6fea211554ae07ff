"""``slipstream build --engine onnxruntime``: graphs beside the portable ones, weights shared, nothing half-written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines import onnxruntime_build
from slipstream.engines.onnxruntime_build import build_onnxruntime
from slipstream.runtime.bundle import Bundle, file_sha256, open_bundle
from slipstream.runtime.errors import BackendError, RequestError
from slipstream.runtime.onnxruntime_backend import Graphs
from slipstream.runtime.onnxruntime_record import (
    WEIGHTS_FOLDER,
    open_optimized,
    optimized_folder,
    usual_num_threads,
)

from .conftest import SilentProgress


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
    assert all("add_masks" in graph.passes for graph in outcome.record.graphs)
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
        BackendError, match=rf"built with ONNX Runtime {installed}, 1.31.1 is installed: run slipstream"
    ):
        Graphs(bundle, 1)
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
    assert not list((bundle.folder / "engines").iterdir())


def test_bfloat16_is_refused(bundle: Bundle) -> None:
    manifest = bundle.manifest.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(RequestError, match="--dtype float32"):
        build_onnxruntime(Bundle(bundle.folder, manifest), SilentProgress())


def test_float16_builds(bundle_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bundle_folder("edge", dtype="float16"), tmp_path / "half")
    record = build_onnxruntime(open_bundle(folder), SilentProgress()).record
    assert all("fold_layer_scalars" not in graph.passes for graph in record.graphs)  # float16 could overflow


def test_large_models_share_out_their_work(bundle: Bundle) -> None:
    assert usual_num_threads(bundle.manifest) == 1
    files = dict(bundle.manifest.files)
    files["target.bin"] = files["target.bin"].model_copy(update={"size_bytes": 1 << 30})
    assert usual_num_threads(bundle.manifest.model_copy(update={"files": files})) >= 1
