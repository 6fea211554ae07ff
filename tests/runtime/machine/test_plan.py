"""The memory plan against what is really allocated and held, and what is refused with it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import GenerationSettings, Pair, load
from slipstream.export.weights.memory import ExportPlan, check_export, export_plan
from slipstream.runtime import session
from slipstream.runtime.bundle.capacity import MAX_DRAFT_TOKENS
from slipstream.runtime.bundle.engine_record import EngineFile, EngineRecord, EngineSettings
from slipstream.runtime.bundle.manifest import Bundle, Manifest, PerLayerTableFile, Weights, open_bundle
from slipstream.runtime.errors import BackendError, RequestError
from slipstream.runtime.machine import host
from slipstream.runtime.machine.host import AvailableMemory, usual_num_threads
from slipstream.runtime.machine.plan import (
    build_peak,
    check_build,
    check_start,
    engine_plans,
    memory_plan,
    run_plan,
    what_to_change,
)

BundleFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def bundle(bundle_folder: BundleFolder) -> Bundle:
    return open_bundle(bundle_folder("edge"))


def changed(manifest: Manifest, **fields: Any) -> Manifest:
    return manifest.model_copy(update=fields)


def with_sizes(manifest: Manifest, **sizes: int) -> Manifest:
    """Files of other sizes, by name without .bin."""
    files = dict(manifest.files)
    for name, size in sizes.items():
        files[f"{name}.bin"] = files["target.bin"].model_copy(update={"size_bytes": size})
    return changed(manifest, files=files)


def kv_bytes(backend: Any) -> int:
    return sum(tensor.array.nbytes for tensor in backend.cache.tensors.values())


# against what is allocated and held


@pytest.mark.parametrize(
    ("name", "settings"), [("edge", {}), ("dense", {}), ("edge", {"kv": "int8"})], ids=["edge", "dense", "int8"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_kv_is_what_a_cache_allocates(
    name: str, settings: dict[str, Any], batch: int, bundle_folder: BundleFolder
) -> None:
    pair = load(bundle_folder(name, **settings))
    backend: Any = pair.new_backend(batch)
    length = 100
    plan = memory_plan(pair.manifest, length, batch)
    assert kv_bytes(backend) == plan.kv_start
    before = kv_bytes(backend)
    backend.cache.length = [length] * batch
    backend.cache.make_room(range(batch), 256, release=lambda: None)  # the worst prefill call
    assert kv_bytes(backend) == plan.kv_sliding + plan.kv_full > before
    assert max(tensor.array.nbytes for tensor in backend.cache.tensors.values()) == plan.growth


def test_kv_of_a_drafted_generation_is_as_planned(bundle_folder: BundleFolder) -> None:
    pair = load(bundle_folder("demo"))
    one = pair.session()
    one.append("the fox " * 100)
    one.generate(GenerationSettings(max_new_tokens=8))
    length, [backend] = len(one.token_ids), pair._resources._backends
    assert kv_bytes(backend) <= memory_plan(pair.manifest, length, 1).kv
    assert kv_bytes(backend) > memory_plan(pair.manifest, length // 4, 1).kv_full


_HELD = """
import re, sys
from pathlib import Path
import slipstream
def anonymous():
    return int(re.search(r"^Anonymous: +(\\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[1]) << 10
first = slipstream.load(sys.argv[1])  # what libraries take once is not the plan's
before = anonymous()
second = slipstream.load(sys.argv[1])
print(anonymous() - before, second.plan.packed)
"""
_FIXED_BYTES = 6 << 20  # tokenizer and sessions of the demo bundle, about 5 MB beside 7 MB of packed weights


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells what is private")
def test_packed_weights_are_what_loading_adds(bundle_folder: BundleFolder) -> None:
    """An estimate twice as high or half as high would fail."""
    done = subprocess.run(
        [sys.executable, "-c", _HELD, str(bundle_folder("demo"))], capture_output=True, text=True, check=True
    )
    held, packed = map(int, done.stdout.split())
    assert packed > 6 << 20
    assert 0.9 * packed < held < 1.1 * packed + _FIXED_BYTES


_CHOOSES = """
import re, sys
from pathlib import Path
import numpy as np
import onnxruntime as ort
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.sampling import files
def memory(kind):
    return int(re.search(rf"^{kind}:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.M)[1]) << 10
rows, vocab_size = map(int, sys.argv[1:])
sizes = dict(batch=1, num_scored_rows=rows, num_rows=rows, num_draft_tokens=rows - 1, hidden_size=4)
session = ort.InferenceSession(files.choose_path("choose_full", "float32"), providers=["CPUExecutionProvider"])
before = memory("VmRSS")
given = graph_io.specs(graph_io.inputs("choose_full"), {**sizes, "vocab_size": vocab_size}, "float32")
fed = {name: np.ones(shape, dtype) for name, (shape, dtype) in given.items()}
fed["logits"] = np.random.default_rng(0).standard_normal(fed["logits"].shape, np.float32)
logits = fed["logits"].nbytes  # planned with the workspace
session.run(None, fed)
print(memory("VmHWM") - before - logits)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak")
def test_whole_rows_take_at_most_what_is_planned(bundle: Bundle) -> None:
    """An estimate a third too high would fail."""
    vocab_size = 1 << 17
    arguments = [sys.executable, "-c", _CHOOSES, str(MAX_DRAFT_TOKENS + 1), str(vocab_size)]
    taken = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    plan = memory_plan(changed(bundle.manifest, vocab_size=vocab_size), 100, 1)
    assert 0.75 * plan.whole_rows < taken < plan.whole_rows


def test_a_pair_tells_its_plan(bundle: Bundle) -> None:
    assert Pair(bundle).plan == memory_plan(bundle.manifest, 160, 1)


# parts


def test_a_table_on_the_host_is_no_part_of_what_must_fit(bundle: Bundle) -> None:
    manifest = bundle.manifest
    table = PerLayerTableFile(file="per_layer_embedding.bin", dtype="bfloat16", width=48)
    with_table = changed(with_sizes(manifest, per_layer_embedding=5 << 30), per_layer_table=table)
    without = changed(manifest, per_layer_table=None)
    plan, other = memory_plan(with_table, 100, 1), memory_plan(without, 100, 1)
    assert plan.per_layer_table == 5 << 30
    assert (plan.total, plan.start, plan.weights) == (other.total, other.start, other.weights)
    assert build_peak(with_table, "tensorrt") == build_peak(without, "tensorrt")
    assert usual_num_threads(with_table) == 1


def test_int8_kv_takes_a_quarter_and_is_widened_in_the_workspace(bundle: Bundle) -> None:
    small = changed(bundle.manifest, kv=[buffer.model_copy(update={"dtype": "int8"}) for buffer in bundle.manifest.kv])
    plan, whole = memory_plan(small, 100, 2), memory_plan(bundle.manifest, 100, 2)
    assert 4 * plan.kv_full == whole.kv_full
    assert 4 * plan.kv_sliding * 320 == whole.kv_sliding * 512  # the CPU moves them by whole blocks, and so later
    assert 4 * memory_plan(small, 100, 2, place="gpu").kv_sliding == whole.kv_sliding
    assert plan.workspace - whole.workspace == 2 * whole.growth  # key and value of a layer


@pytest.mark.parametrize(
    ("stored", "block_size", "packed"), [("int4", 32, 1.55), ("int4", 128, 1.175), ("int8", 32, 1.3)]
)
def test_quantized_matrices_are_packed_without_the_embedding(
    stored: Any, block_size: int, packed: float, bundle: Bundle
) -> None:
    manifest = with_sizes(bundle.manifest, embedding=1 << 30, target=10_000, assistant=1000)
    weights = Weights(format=stored, block_size=block_size, float_matrices=[])
    plan = memory_plan(changed(manifest, weights=weights), 100, 1)
    assert plan.packed == round(packed * 10_000) + 2 * round(packed * 1000)
    assert plan.packed + plan.loading == 20_000 + 2 * round(packed * 1000)
    assert plan.held_weights == plan.packed + (1 << 30)


def test_float16_is_float32_on_the_cpu_and_widens_the_embedding(bundle: Bundle) -> None:
    half = changed(bundle.manifest, dtype="float16")
    plan, whole = memory_plan(half, 100, 1), memory_plan(bundle.manifest, 100, 1)
    assert plan.packed == 2 * whole.packed
    assert plan.workspace - whole.workspace == 3 * 2 * plan.embedding  # in the target, and in two assistant graphs


def test_a_gpu_holds_all_weights_and_packs_none(bundle: Bundle) -> None:
    plan = memory_plan(bundle.manifest, 100, 1, place="gpu")
    sizes = {name: bundle.manifest.files[f"{name}.bin"].size_bytes for name in ("embedding", "target", "assistant")}
    # two assistant graphs are sessions of their own beside the target's
    assert plan.held_weights == 3 * sizes["embedding"] + sizes["target"] + 2 * sizes["assistant"]


def record_of(**settings: Any) -> EngineRecord:
    usual: dict[str, Any] = {
        "flavour": "tensorrt-rtx",
        "device": "sm89",
        "max_length": 100,
        "max_batch": 1,
        "num_draft_tokens": 3,
    }
    file = EngineFile(
        file="target.engine", graph="target.onnx", size_bytes=5000, sha256="", build_seconds=1.0, profiles={}
    )
    return EngineRecord(
        bundle_sha256="",
        slipstream_version="",
        engine_version="",
        settings=EngineSettings(**(usual | {"workspace_mib": 1} | settings)),
        device_name="",
        dtype="float32",
        capacity={"sliding": 320, "full": 368},
        attention=[],
        target=file,
        assistant=file.model_copy(update={"file": "assistant.engine", "size_bytes": 500}),
        choosing={},
        peak_memory_mib=1,
    )


def write_record(folder: Path, record: EngineRecord) -> None:
    place = folder / "engines" / f"{record.settings.flavour}-{record.settings.device}"
    place.mkdir(parents=True)
    (place / "record.json").write_text(json.dumps(record.model_dump()))


def test_engines_are_planned_from_their_record(bundle: Bundle, tmp_path: Path) -> None:
    copy = Bundle(tmp_path, bundle.manifest)
    assert run_plan(copy, "tensorrt-rtx") is None
    write_record(tmp_path, record_of())
    write_record(tmp_path, record_of(flavour="tensorrt", workspace_mib=2))
    plans = engine_plans(copy)
    assert list(plans) == ["tensorrt-rtx-sm89", "tensorrt-sm89"]
    plan = run_plan(copy, "tensorrt-rtx")
    assert plan == plans["tensorrt-rtx-sm89"]
    assert plan is not None
    kv = 2 * 368 * 32 * 4 + 2 * 2 * 320 * 16 * 4
    assert (plan.place, plan.kv, plan.kv_start, plan.growth) == ("gpu", kv, kv, 0)
    assert plan.total == 5500 + 384 * 48 * 4 + kv + (1 << 20)


def test_a_record_that_is_not_readable_has_no_plan(bundle: Bundle, tmp_path: Path) -> None:
    write_record(tmp_path, record_of())
    (tmp_path / "engines" / "tensorrt-rtx-sm89" / "record.json").write_text("{")
    assert engine_plans(Bundle(tmp_path, bundle.manifest)) == {}


# refusals


def memory_of(available: int) -> AvailableMemory:
    return AvailableMemory(available, 1 << 40, 0, None)


def test_loading_is_refused_one_byte_below_its_peak(bundle: Bundle) -> None:
    plan = memory_plan(bundle.manifest, 100, 1)
    check_start(plan, bundle.manifest, memory_of(plan.start))
    with pytest.raises(BackendError, match=r"^loading needs about .*: close other programs, or export with --weights"):
        check_start(plan, bundle.manifest, memory_of(plan.start - 1))


def test_a_refused_pair_has_loaded_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(session, "_open_engine", lambda *arguments: opened.append(arguments))
    monkeypatch.setattr(session, "read_state", lambda: memory_of(1))
    with pytest.raises(BackendError, match=r"1 B are available"):
        Pair(bundle)
    assert opened == []


def test_nothing_is_refused_where_memory_is_unknown_or_the_gpus(bundle: Bundle) -> None:
    check_start(memory_plan(bundle.manifest, 100, 1), bundle.manifest, None)
    check_start(memory_plan(bundle.manifest, 100, 1, place="gpu"), bundle.manifest, memory_of(1))
    check_build(bundle.manifest, "tensorrt", None)


def test_a_build_is_refused_one_byte_below_its_peak(bundle: Bundle) -> None:
    needed = build_peak(bundle.manifest, "tensorrt")
    check_build(bundle.manifest, "tensorrt", memory_of(needed))
    with pytest.raises(RequestError, match=r"or build on a larger machine with the same GPU, or export with"):
        check_build(bundle.manifest, "tensorrt", memory_of(needed - 1))


def test_advice_names_what_takes_most_first_and_nothing_that_is_done(bundle: Bundle) -> None:
    manifest = bundle.manifest
    large = with_sizes(manifest, target=1 << 30)
    advice = what_to_change(memory_plan(large, 100, 2), large)
    assert advice.index("--weights int4") < advice.index("fewer slots") < advice.index("--kv int8")
    done = changed(
        manifest,
        weights=Weights(format="int4", block_size=32, float_matrices=[]),
        kv=[buffer.model_copy(update={"dtype": "int8"}) for buffer in manifest.kv],
    )
    assert "export" not in what_to_change(memory_plan(done, 100, 1), done)


# export


def test_an_export_is_planned_by_its_largest_tensor() -> None:
    layers = pytest.importorskip("slipstream.export.model.layers")
    small, large = layers.Recipe(("a",), "as_is", (10, 20)), layers.Recipe(("b",), "as_is", (300, 20))
    table = PerLayerTableFile(file="t.bin", dtype="bfloat16", width=7), layers.Recipe(("t",), "as_is", (10**6, 7))
    plan = export_plan([small, large], table, 4)
    assert (plan.bundle, plan.largest) == (4 * 200 + 4 * 6000 + 2 * 7 * 10**6, 4 * 6000)
    assert plan.peak < 3 * plan.largest + (2 << 30)  # what every export keeps to


def test_an_export_without_memory_says_which_part_is_large(tmp_path: Path) -> None:
    plan = ExportPlan(bundle=1, largest=1 << 30, peak=2 << 30)
    check_export(plan, tmp_path / "new", memory_of(2 << 30))
    with pytest.raises(RequestError, match=r"its largest tensor takes 1\.0 GiB as float32; 1\.0 GiB are available"):
        check_export(plan, tmp_path / "new", memory_of(1 << 30))


# the host


def test_freed_blocks_can_be_given_back() -> None:
    blocks = [np.ones(1 << 12) for _ in range(1000)]  # small enough to come from the heap
    del blocks
    gc.collect()
    host.give_back_freed_memory()
