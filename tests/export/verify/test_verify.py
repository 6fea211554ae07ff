"""Verification must miss what is wrong: damaged weights, a wrong window, a state wired to the wrong place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slipstream.export.verify.reference import Reference
from slipstream.export.verify.report import Report
from slipstream.export.verify.verify import context_lengths, sample_prompts, verify
from slipstream.runtime.backend.calls import RoundCall
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import BundleError, CheckpointError
from tests.support.bundles import rewrite_hash
from tests.support.pairs import BOS
from tests.support.progress import SilentProgress

PairFolder = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def reference(pair_folder: PairFolder) -> Reference:
    return Reference(*pair_folder("edge"), "float32")


@pytest.fixture
def bundle(bundle_folder: Callable[[str], Path], tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle_folder("edge"), tmp_path / "bundle"))


def check(bundle: Bundle, reference: Reference) -> Report:
    manifest = bundle.manifest
    prompts = sample_prompts(range(20, 280), BOS, 2, manifest.sliding_window, manifest.max_length, 8)
    return verify(bundle, reference, prompts, 8, [0, 3], SilentProgress())


def scale_weight(bundle: Bundle, graph: str, initializer: str, factor: float) -> Bundle:
    value = ir.load(bundle.path(graph)).graph.initializers[initializer].const_value
    assert isinstance(value, ir.ExternalTensor)
    file = bundle.path(str(value.location))
    content = np.memmap(file, np.float32, "r+", value.offset or 0, (value.nbytes // 4,))
    content *= factor
    content.flush()
    return rewrite_hash(bundle, file.name)


@pytest.mark.parametrize(
    ("graph", "initializer", "expected"),
    [
        ("target.onnx", "layers.1.mlp.gate_up.weight", "target logits"),
        ("target.onnx", "layers.4.attention.query_norm.weight", "target logits"),
        ("assistant.onnx", "layers.0.attention.query_norm.weight", "assistant"),
        ("assistant.onnx", "post_projection.weight", "hidden"),
    ],
)
def test_a_damaged_weight_is_a_miss(
    graph: str, initializer: str, expected: str, bundle: Bundle, reference: Reference
) -> None:
    report = check(scale_weight(bundle, graph, initializer, 1.01), reference)
    assert any(expected in failure for failure in report.failures), report.failures


@pytest.mark.parametrize("graph", ["target.onnx", "assistant.onnx"])
def test_a_window_off_by_one_is_a_miss(graph: str, bundle: Bundle, reference: Reference) -> None:
    model = onnx.load(bundle.path(graph), load_external_data=False)
    window = bundle.manifest.sliding_window
    changed = 0
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT64 and not tensor.external_data:
            value = onnx.numpy_helper.to_array(tensor)
            if value.size == 1 and value.item() == window:
                tensor.CopyFrom(onnx.numpy_helper.from_array(value + 1, tensor.name))
                changed += 1
    assert changed == 1, "the window must be one constant of the graph"
    onnx.save(model, bundle.path(graph))
    report = check(rewrite_hash(bundle, graph), reference)
    kind = graph.removesuffix(".onnx")
    beyond = [c for c in report.logits if c.context_length > window and c.graph.startswith(kind)]
    assert any(c.relative > report.tolerance for c in beyond)
    within = [c for c in report.logits if c.context_length < window - 1]
    assert all(c.relative <= report.tolerance for c in within)


@pytest.mark.parametrize("part", ["position", "hidden", "past_length"])
def test_state_that_reaches_the_assistant_wrong_is_a_miss(
    part: str, bundle: Bundle, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text stays right and only acceptance would fall: the drafts of whole rounds tell."""
    original = PairBackend._draft_tensors

    def tensors(self: PairBackend, call: RoundCall) -> dict[str, Any]:
        kept = original(self, call)
        stale = self.memory.allocate(kept[part].shape, kept[part].dtype)
        self.memory.write(stale, np.array(3))
        return {**kept, part: stale}

    monkeypatch.setattr(PairBackend, "_draft_tensors", tensors)
    report = check(bundle, reference)
    assert report.drafts.different
    assert report.failures
    assert all(not greedy.mismatches and not greedy.differs_from_plain for greedy in report.greedy)


def test_a_changed_file_is_refused_before_anything_runs(bundle: Bundle, reference: Reference) -> None:
    with bundle.path("target.bin").open("r+b") as file:
        file.write(b"\1\2\3\4")
    with pytest.raises(BundleError, match=r"target\.bin was changed since export"):
        check(bundle, reference)


def test_another_checkpoint_is_refused(bundle: Bundle, reference: Reference, pair_folder: PairFolder) -> None:
    other = Reference(*pair_folder("wrapped"), "float32")
    with pytest.raises(CheckpointError, match=r"made from another checkpoint than .*config\.json differs"):
        check(bundle, other)


def test_contexts_lie_below_at_and_beyond_the_window_even_for_short_contexts() -> None:
    assert {511, 512, 513, 1027} <= set(context_lengths(512, 8192))
    assert context_lengths(16, 12) == [7]
    assert context_lengths(16, 8) == [3]
