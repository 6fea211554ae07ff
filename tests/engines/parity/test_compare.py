"""Engines against ONNX Runtime through the simulator: what passes is stamped, each kind of miss is not."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from slipstream import GenerationSettings, cli, load
from slipstream.engines.parity import compare as parity
from slipstream.engines.parity.call_check import CallCheck
from slipstream.engines.parity.compare import ParityReport, compare_engines, context_lengths
from slipstream.engines.tensorrt import build as build_module
from slipstream.engines.tensorrt.build import build_engines
from slipstream.engines.tensorrt.builder import edited_model
from slipstream.runtime.backend import cuda
from slipstream.runtime.bundle.engine_record import RECORD, STAMP, EngineRecord, EngineSettings, ParityStamp, read_stamp
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import BundleError
from tests.simulator.machine import Simulator, install, simulate_builds
from tests.support.pairs import VOCAB_SIZE
from tests.support.progress import SilentProgress

Outputs = dict[str, npt.NDArray[Any]]
NUM_DRAFT_TOKENS = 3


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    installed = install(monkeypatch)
    simulate_builds(monkeypatch)
    return installed


def build(bundle: Bundle, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "flavour": "tensorrt-rtx",
        "device": "sm89",
        "max_length": 60,
        "max_batch": 1,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "workspace_mib": 64,
    }
    return build_engines(bundle, EngineSettings(**(values | changes)), SilentProgress()).folder


def compare(bundle: Bundle) -> ParityReport:
    return compare_engines(bundle, "tensorrt-rtx", SilentProgress())


@pytest.fixture
def new_bundle(bundle_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Bundle]:
    return lambda name: open_bundle(shutil.copytree(bundle_folder(name), tmp_path / name))


@pytest.fixture
def bundle(simulator: Simulator, new_bundle: Callable[[str], Bundle]) -> Bundle:
    """The "edge" bundle with engines that carry a stamp of other engines."""
    made = new_bundle("edge")
    (build(made) / STAMP).write_text("{}", encoding="utf-8")
    return made


def stamp_file(bundle: Bundle) -> Path:
    return bundle.folder / "engines" / "tensorrt-rtx-sm89" / STAMP


@pytest.mark.parametrize("name", ["edge", "dense"])
def test_engines_that_agree_are_stamped_at_every_bucket_and_batch(
    name: str, simulator: Simulator, new_bundle: Callable[[str], Bundle]
) -> None:
    bundle = new_bundle(name)
    folder = build(bundle, max_length=150, max_batch=2)
    report = compare(bundle)
    assert report.failures == []
    assert {check.batch for check in report.calls} == {1, 2}
    assert {check.rows for check in report.calls if check.call == "prefill"} == {1, 11, 16, 59, 64}
    assert {check.rows for check in report.calls if check.call != "prefill"} == {1, NUM_DRAFT_TOKENS + 1}
    contexts = {check.context for check in report.calls if check.call != "prefill"}
    assert contexts == set(context_lengths(bundle.manifest.sliding_window, 150, 416, NUM_DRAFT_TOKENS + 1))
    assert {124, 125, 145} <= contexts, "both sides of the bucket of 128 rows, and the longest"
    stamp = ParityStamp.model_validate_json((folder / STAMP).read_text())
    assert (stamp.device, stamp.num_calls) == ("NVIDIA Simulator", len(report.calls))
    assert stamp.largest_difference <= 1e-5 < stamp.tolerance
    assert stamp.num_tokens >= len(report.calls)
    simulator.check_closed()


def test_each_round_is_compared_launched_and_captured(
    simulator: Simulator, new_bundle: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every bucket and K; in the second bucket K = 0 has one context only."""
    bundle = new_bundle("edge")
    build(bundle, max_length=150)
    seen: list[tuple[str, int, int, bool]] = []
    original = parity._Comparison._check_round

    def check(self: Any, backend: Any, scene: Any, num_draft_tokens: int, limit: int) -> Any:
        before = simulator.launches
        result = original(self, backend, scene, num_draft_tokens, limit)
        seen.append((result.call, num_draft_tokens, backend.bucket, simulator.launches > before))
        return result

    monkeypatch.setattr(parity._Comparison, "_check_round", check)
    assert compare(bundle).failures == []
    combinations = {(k, bucket) for _, k, bucket, _ in seen}
    assert combinations == {(0, 128), (3, 128), (0, 256), (3, 256)}
    for is_captured in (False, True):
        assert {(k, bucket) for _, k, bucket, was_captured in seen if was_captured == is_captured} == combinations
    assert {(call, was_captured) for call, _, _, was_captured in seen} == {
        ("round launched", False),
        ("round captured", True),
    }


def test_a_stamp_ends_the_note_of_results(bundle: Bundle) -> None:
    def notes() -> tuple[str, ...]:
        with load(bundle.folder, engine="tensorrt-rtx") as pair:
            return pair.generate("the fox", GenerationSettings(max_new_tokens=4)).notes

    assert any("no parity stamp" in note for note in notes())
    assert compare(bundle).failures == []
    assert notes() == ()


def test_a_stamp_is_worth_nothing_for_other_engines(bundle: Bundle) -> None:
    compare(bundle)
    content = stamp_file(bundle).read_bytes()
    folder = build(bundle, max_batch=2)
    assert not stamp_file(bundle).exists(), "a build leaves no stamp of the engines before it"
    stamp_file(bundle).write_bytes(content)
    record = EngineRecord.model_validate_json((folder / RECORD).read_text(), strict=False)
    assert read_stamp(folder, record, "NVIDIA Simulator", 13000) is None
    compare(bundle)
    assert read_stamp(folder, record, "NVIDIA Simulator", 13000) is not None
    stamp_file(bundle).write_bytes(b'{"target_sha256": 1}')
    assert read_stamp(folder, record, "NVIDIA Simulator", 13000) is None


# misses


def shift(name: str, amount: float, where: Any = ...) -> Callable[[Outputs], None]:
    def tamper(outputs: Outputs) -> None:
        if name in outputs:
            outputs[name][where] += amount

    return tamper


def replace_tokens(name: str, where: Any = ...) -> Callable[[Outputs], None]:
    def tamper(outputs: Outputs) -> None:
        if name in outputs:
            outputs[name][where] = (outputs[name][where] + 1) % VOCAB_SIZE

    return tamper


def not_finite(outputs: Outputs) -> None:
    if "is_finite" in outputs:
        outputs["logits"][:] = np.nan
        outputs["is_finite"][:] = False


MISSES = {
    "own token": (replace_tokens("own_token"), "row 0 of sequence 0 is"),
    "own token of a later row": (replace_tokens("own_token", np.s_[:, 1:]), "row 1 of sequence 0"),
    "best token": (shift("logits", 50, np.s_[..., 7]), "row 0 of sequence 0 is 7"),
    "logits": (shift("logits", 0.2), "a logit differs by"),
    "logits that are NaN": (shift("logits", np.nan, np.s_[..., 9:]), "row 0 of sequence 0 is|a logit differs by nan"),
    "first draft": (replace_tokens("next_draft", np.s_[:, :1]), "draft 0 of sequence 0 is"),
    "new KV row": (shift("next_kv.0.key", 0.2, np.s_[:, :, 1]), r"kv\.0\.key differs by"),
    "KV of the full layer": (shift("next_kv.2.value", 0.2, np.s_[:, :, 0]), r"kv\.2\.value before is"),
    "KV that is NaN": (shift("next_kv.1.value", np.nan, np.s_[:, :, 0]), r"kv\.1\.value before is"),
    "next hidden row": (shift("next_hidden", 0.2), "next hidden row differs by"),
    "next position": (shift("next_position", 1), "position"),
    "next past length": (shift("next_past_length", 1), "past"),
    "next token": (replace_tokens("next_token"), "token"),
    "accepted": (shift("num_accepted", 1), "accept"),
    "not finite": (not_finite, "NaN|finite"),
}


@pytest.fixture
def few_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and beyond the window, in one bucket."""
    monkeypatch.setattr(parity, "context_lengths", lambda *_: [1, 20, 35])


@pytest.mark.usefixtures("few_contexts")
@pytest.mark.parametrize("what", MISSES)
def test_a_miss_is_a_failure_and_leaves_no_stamp(what: str, bundle: Bundle, simulator: Simulator) -> None:
    change, message = MISSES[what]

    def tamper(graph: str, outputs: Outputs) -> None:
        is_target = not graph.startswith("assistant")
        is_round = is_target and outputs["logits" if graph == "target" else "own_token"].shape[1] > 1
        if is_round or (what != "accepted" and (is_target or what == "first draft")):
            change(outputs)

    simulator.tamper = tamper
    report = compare(bundle)
    assert report.failures
    assert report.to_dict()["passed"] is False
    assert re.search(message, report.failures[0])
    assert not stamp_file(bundle).exists()
    simulator.check_closed()


@pytest.mark.usefixtures("few_contexts")
def test_a_graph_whose_replay_differs_is_a_miss(
    bundle: Bundle, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_replayed, launch = [False], cuda.CapturedGraph.launch

    def replay(graph: cuda.CapturedGraph) -> None:
        graph._cuda.call("cudaStreamSynchronize", graph._stream)
        is_replayed[0] = True
        launch(graph)
        graph._cuda.call("cudaStreamSynchronize", graph._stream)
        is_replayed[0] = False

    monkeypatch.setattr(cuda.CapturedGraph, "launch", replay)
    simulator.tamper = lambda graph, outputs: shift("logits", 0.2 * is_replayed[0])(outputs)
    report = compare(bundle)
    assert {check.call for check in report.calls if check.problem} <= {"round launched", "round captured"}
    assert any("a logit differs" in failure for failure in report.failures)
    assert not stamp_file(bundle).exists()


def window_off_by_one(model: ir.Model, window: int) -> int:
    changed = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size == 1 and tensor.dtype == ir.DataType.INT64 and tensor.numpy() == window:
            value.const_value = ir.tensor(np.array(window + 1), name=value.name)
            changed += 1
    return changed


def rows_from_the_future(model: ir.Model, _: int) -> int:
    """Each mask shows one row more than it should."""
    by_position = [node for node in model.graph if node.op_type == "LessOrEqual"]  # the target's masks
    masks = by_position or [node for node in model.graph if node.op_type == "Less"]
    for number, node in enumerate(masks):
        one = ir.Value(name=f"one.{number}", const_value=ir.tensor(np.array(1)), type=ir.TensorType(ir.DataType.INT64))
        model.graph.register_initializer(one)
        later = ir.Node("", "Add", [node.inputs[1], one], name=f"later.{number}")
        later.outputs[0].name = f"later.{number}"
        model.graph.insert_before(node, later)
        node.replace_input_with(1, later.outputs[0])
    return len(masks)


@pytest.mark.parametrize("graph", ["target.onnx", "assistant_3_steps.onnx"])
@pytest.mark.parametrize("damage", [window_off_by_one, rows_from_the_future])
def test_an_engine_with_another_mask_is_a_miss(
    damage: Callable[[ir.Model, int], int], graph: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edited(path: Path, *arguments: Any) -> ir.Model:
        model = edited_model(path, *arguments)
        if path.name == graph:
            assert damage(model, bundle.manifest.sliding_window) >= 1
        return model

    monkeypatch.setattr(build_module, "edited_model", edited)
    build(bundle, max_length=64)
    report = compare(bundle)
    assert report.failures
    if damage is window_off_by_one:
        reached = [check.context + check.rows for check in report.calls if check.problem]
        assert min(reached) > bundle.manifest.sliding_window
    assert not stamp_file(bundle).exists()


def test_a_token_that_differs_within_the_margin_is_a_near_tie(
    bundle: Bundle, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parity.TOLERANCE, "float32", 0.01)

    def tamper(graph: str, outputs: Outputs) -> None:
        if graph == "target" and outputs["logits"].shape[1] == 1:
            for logits in outputs["logits"][:, 0]:
                second, first = np.argsort(logits)[-2:]
                if logits[first] - logits[second] < 0.005 * abs(logits).max():
                    logits[second] = logits[first] + 1e-4

    simulator.tamper = tamper
    report = compare(bundle)
    assert report.failures == []
    stamp = ParityStamp.model_validate_json(stamp_file(bundle).read_text())
    assert stamp.near_ties == sum(check.near_ties for check in report.calls) >= 1
    assert 0 < stamp.largest_difference <= 0.01


def test_a_changed_file_is_refused_before_anything_runs(bundle: Bundle, simulator: Simulator) -> None:
    with bundle.path("target.bin").open("r+b") as file:
        file.write(b"\1\2\3\4")
    with pytest.raises(BundleError, match=r"target\.bin was changed since export"):
        compare(bundle)
    assert simulator.executions.total() == 0


# which contexts


@pytest.mark.parametrize(("window", "max_length", "capacity", "rows"), [(512, 8192, 8448, 5), (16, 160, 416, 4)])
def test_contexts_lie_round_the_window_and_every_bucket_edge(
    window: int, max_length: int, capacity: int, rows: int
) -> None:
    lengths = context_lengths(window, max_length, capacity, rows)
    longest = max_length - rows - 1
    assert {1, window - 1, window, window + 1, longest} <= set(lengths)
    for edge in (2**power for power in range(7, 14)):
        both = {edge - rows, edge - rows + 1}
        assert both <= set(lengths) if max(both) <= longest else not both & set(range(longest + 1, edge)) & set(lengths)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == longest


def test_a_context_shorter_than_the_window_has_fewer() -> None:
    assert context_lengths(512, 40, 296, 4) == [1, 35]


# the command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["slipstream", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.usefixtures("few_contexts")
def test_the_command_shows_a_table_and_stamps(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, bundle.folder, "--engine", "tensorrt-rtx") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("prefill", "captured", "near-ties", "verified", "stamped"):
        assert part in shown
    assert "MISS" not in shown
    assert stamp_file(bundle).is_file()
    assert run(monkeypatch, bundle.folder, "--engine", "tensorrt-rtx", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["failures"]) == (True, [])
    assert set(report["calls"][0]) == set(CallCheck.__dataclass_fields__)


@pytest.mark.usefixtures("few_contexts")
def test_the_command_ends_with_1_on_a_miss(
    bundle: Bundle, simulator: Simulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulator.tamper = lambda graph, outputs: shift("logits", 0.2)(outputs)
    assert run(monkeypatch, bundle.folder, "--engine", "tensorrt-rtx") == 1
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("MISS", "a logit differs", "not verified"))
    assert "stamped" not in shown
    assert run(monkeypatch, bundle.folder, "--engine", "tensorrt-rtx", "--json") == 1
    assert json.loads(capsys.readouterr().out)["failures"]
    assert not stamp_file(bundle).exists()


def test_a_checkpoint_is_refused_with_an_engine(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, bundle.folder, "--engine", "tensorrt-rtx", "--target", tmp_path) == 2
    assert "--target: engines are compared with the bundle's graphs, so leave it out" in capsys.readouterr().err
