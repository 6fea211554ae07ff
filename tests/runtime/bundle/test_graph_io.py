"""The table of graph inputs and outputs: what it says is what is traced, bound, fed and written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from torch import Tensor

from slipstream.export import trace
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.model.target import Target
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.verify.target_run import TargetRun
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.graph_io import Binding
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.trt.backend import TensorRTEngine
from tests.simulator.machine import install
from tests.support.engine_fixtures import build_simulated
from tests.support.progress import SilentProgress

ROOT = Path(__file__).parents[3]
SHIFT = Binding("shift", ("target",), ("batch",), "int64", "host", "1 turns logits round")


class Shifted(Target):
    """The reader of a made-up input."""

    def forward(  # type: ignore[override]
        self,
        token: Tensor,
        draft: Tensor,
        past_length: Tensor,
        base: Tensor,
        scored_rows: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        shift: Tensor,
    ) -> tuple[Tensor, ...]:
        logits, *rest = super().forward(token, draft, past_length, base, scored_rows, keys, values)
        return logits * (1 - 2 * shift.unsqueeze(1).unsqueeze(2)), *rest


def prefilled(backend: PairBackend, shift: int) -> int:
    """The token after a prompt of five. The call's own array is where a producer puts its values."""
    backend.reset(0)
    call = backend._prefill_call(16)
    call.inputs.arrays["shift"][:] = shift
    return backend.prefill(0, [2, 5, 6, 7, 8])


def test_an_input_is_added_in_one_place_beside_its_producer_and_its_reader(
    pair_folder: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_io, "INPUTS", (*graph_io.INPUTS, SHIFT))
    monkeypatch.setattr(trace, "Target", Shifted)
    export_pair(open_pair(*pair_folder("dense")), tmp_path / "bundle", ExportSettings(), SilentProgress())
    bundle = open_bundle(tmp_path / "bundle")
    engine = OnnxRuntimeEngine(bundle, 1)
    backend: Any = engine.new_backend()
    plain = prefilled(backend, 0)
    turned = prefilled(backend, 1)
    logits = TargetRun(engine, 40).call([2, 5, 6, 7, 8], [4])["logits"]
    assert [plain, turned] == [int(logits.argmax()), int(logits.argmin())]
    build_simulated(bundle.folder, tmp_path / "built")
    with pytest.MonkeyPatch.context() as patch:
        install(patch, flavour="tensorrt-rtx", compute_capability="sm89")
        built = TensorRTEngine(open_bundle(tmp_path / "built"), "tensorrt-rtx")
        on_engines = built.new_backend()
        assert prefilled(on_engines, 1) == turned
        on_engines.close()
        built.close()


def test_feeds_fill_in_zeros_of_the_sizes_that_were_given() -> None:
    fed = graph_io.feeds("target", {"token": [[4]], "draft": [[5, 6]], "past_length": [3], "scored_rows": [[0, 1]]})
    assert fed["base"].tolist() == [0]
    assert {array.dtype for array in fed.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token": [[4]], "tokn": [1]}, "tokn is not an input of the target"),
        ({"token": [[4]], "past_length": [3, 3]}, r"past_length is \(2,\)"),
        ({"token": [4]}, r"token is \(1,\)"),
    ],
    ids=str,
)
def test_feeds_of_another_name_or_shape_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph_io.feeds("target", values)


def markdown() -> str:
    """The table as docs/bundle.md has it."""
    lines = ["| name | graphs | shape | type | given by, goes to | meaning |", "|---|---|---|---|---|---|"]
    for bindings in (graph_io.INPUTS, graph_io.OUTPUTS):
        for b in bindings:
            shape = ", ".join(map(str, b.shape))
            meaning = b.meaning + (f" ({b.condition})" if b.condition else "")
            lines.append(f"| `{b.name}` | {', '.join(b.graphs)} | [{shape}] | {b.dtype} | {b.place} | {meaning} |")
    return "\n".join(lines)


def test_the_documented_table_is_this_one() -> None:
    text = (ROOT / "docs" / "bundle.md").read_text(encoding="utf-8")
    begin, end = "<!-- graph_io -->\n", "\n<!-- end of graph_io -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == markdown()


def test_outputs_of_the_state_are_inputs_of_the_next_round() -> None:
    state = {binding.name: binding for binding in graph_io.placed(graph_io.INPUTS, "state")}
    outputs = graph_io.placed(graph_io.outputs("choose_greedy"), "state")
    assert {binding.name for binding in outputs} == {f"next_{name}" for name in state}
    for binding in outputs:
        read = state[binding.name.removeprefix("next_")]
        assert (binding.shape, binding.dtype) == (read.shape, read.dtype)


def test_the_table_is_what_onnxruntime_reads(bundle_folder: Callable[[str], Path]) -> None:
    bundle = open_bundle(bundle_folder("dense"))
    session = ort.InferenceSession(bundle.path(bundle.manifest.target_graph), providers=["CPUExecutionProvider"])
    table = graph_io.for_layers(graph_io.inputs("target"), bundle.manifest.kv)
    kinds = {"int64": "tensor(int64)", "float32": "tensor(float)"}
    found = {node.name: node.type for node in session.get_inputs()}
    assert found == {b.name: kinds[b.typed(bundle.manifest.dtype)] for b in table}
