"""TensorRT engines through the simulator: ONNX Runtime's tokens, what is copied and launched, refusals, closing."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.demo import PROMPTS
from slipstream.engines.tensorrt.builder import edited_model
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.verify import sample_prompts, verify
from slipstream.runtime.backend.contract import GREEDY, Sampling
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.backend.tensors import aligned
from slipstream.runtime.bundle.capacity import capacity_bucket
from slipstream.runtime.bundle.engine_record import EngineName, ParityStamp
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.decode.settings import GenerationSettings
from slipstream.runtime.errors import BackendError, MissingExtraError, NonFiniteError, RequestError, RewindError
from slipstream.runtime.session import Pair
from slipstream.runtime.trt.backend import TensorRTBackend
from tests.demo_pair import corpus
from tests.simulator import tensorrt as simulated_tensorrt
from tests.simulator.machine import Simulator, install
from tests.support.engine_fixtures import LAST, build_simulated, decode, feed, feed_slot, onnxruntime_backend
from tests.support.pairs import BOS, PAIRS, VOCAB_SIZE, random_prompt
from tests.support.progress import SilentProgress

Built = Callable[..., Path]
PairFolder = Callable[[str], tuple[Path, Path]]
ENGINE: EngineName = "tensorrt-rtx"
FOLDER = Path("engines") / "tensorrt-rtx-sm89"
SHORT = GenerationSettings(max_new_tokens=20)


@pytest.fixture(scope="module")
def built(bundle_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Bundles with engines for sm89. Tests must not change them."""

    @cache
    def get(name: str, **settings: str) -> Path:
        source = bundle_folder("dense", draft_position="last") if name == LAST else bundle_folder(name, **settings)
        return build_simulated(source, tmp_path_factory.mktemp("built")).folder

    return get


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    return install(monkeypatch)


@pytest.fixture
def copied(built: Built, tmp_path: Path) -> Path:
    """A built bundle of "edge" that may be changed."""
    return shutil.copytree(built("edge"), tmp_path / "bundle", ignore=shutil.ignore_patterns("runtime.cache"))


@pytest.fixture
def edge(sim: Simulator, built: Built) -> Iterator[Pair]:
    """Closed and checked after the test."""
    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        yield pair
    sim.check_closed()


@pytest.fixture
def demo(sim: Simulator, built: Built) -> Iterator[Pair]:
    """With its per-layer table in the graph: a round is one launch. Closed and checked after the test."""
    with Pair(open_bundle(built("demo", ple="device")), engine=ENGINE) as pair:
        yield pair
    sim.check_closed()


SAMPLINGS = [{"temperature": 1.0}, {"temperature": 0.5, "top_k": 20, "min_p": 0.05}, {"temperature": 1.3, "top_p": 0.8}]


def backend_of(pair: Pair, batch: int = 1) -> TensorRTBackend:
    backend = pair.new_backend(batch)
    assert isinstance(backend, TensorRTBackend)
    return backend


def conversation(pair: Pair, length: int, seed: int) -> list[int]:
    """Real text of the demo pair, which it drafts well."""
    random, ids = Random(seed), list[int]()
    while len(ids) < length:
        text = pair.chat_text(corpus.conversation(random))
        ids += pair.codec.encode_more(text.removeprefix("<bos>")) if ids else pair.codec.encode_prompt(text)
    return ids[:length]


@pytest.mark.parametrize("name", [*sorted(PAIRS), LAST])
def test_every_pair_equals_transformers_through_its_engines(
    name: str, built: Built, pair_folder: PairFolder, sim: Simulator
) -> None:
    bundle = open_bundle(built(name))
    manifest, k = bundle.manifest, bundle.manifest.generation.num_draft_tokens
    prompts = sample_prompts(range(20, 380), BOS, 5, manifest.sliding_window, manifest.max_length, 24)
    reference = Reference(*pair_folder("dense" if name == LAST else name), "float32")
    report = verify(bundle, reference, prompts, 24, [0, k], SilentProgress(), engine=ENGINE)
    assert report.failures == []
    assert report.drafts.num_drafts >= 10
    assert max(map(len, prompts)) + 24 == manifest.max_length > 2 * manifest.sliding_window
    assert manifest.draft_position_offset == (-1 if name == LAST else 0)
    assert sim.launches > 100
    sim.check_closed()


@pytest.mark.parametrize("num_draft_tokens", [4, 0])
def test_long_text_and_its_drafts_equal_onnxruntimes_over_every_bucket(num_draft_tokens: int, demo: Pair) -> None:
    ids = conversation(demo, 30, seed=1)
    backend, bundle = backend_of(demo), open_bundle(Path(demo.engine.folder.parents[1]))  # type: ignore[attr-defined]
    found = decode(backend, [ids], 960, num_draft_tokens)
    expected = decode(onnxruntime_backend(bundle), [ids], 960, num_draft_tokens)
    assert found == expected
    assert backend.cache.num_compactions >= 2
    assert {bucket for _, _, bucket, *_ in backend._captured} == {128, 256, 512, 1024}
    assert len(set(found.tokens[0])) > 30, "the text must not be one token over and over"
    if num_draft_tokens:
        assert len(found.drafts[0]) < 960 / 2, "drafts must have been accepted"


def test_generated_text_equals_onnxruntimes_drafted_and_plain(demo: Pair, built: Built, sim: Simulator) -> None:
    lengths = []
    with Pair(open_bundle(built("demo"))) as cpu:
        for text in PROMPTS:
            messages = [{"role": "user", "content": text}]
            expected = cpu.generate(messages)
            lengths.append(len(expected.token_ids))
            for k in (4, 0):
                result = demo.generate(messages, GenerationSettings(num_draft_tokens=k))
                assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
                assert result.finish_reason == "stop_token"
    assert min(lengths) > 50
    assert sim.launches > 0


@pytest.mark.parametrize("num_draft_tokens", [4, 0])
def test_a_batch_of_three_lengths_equals_solo_runs_and_onnxruntime(
    num_draft_tokens: int, demo: Pair, built: Built
) -> None:
    """Long enough that each sequence compacts in a round of its own."""
    prompts = [conversation(demo, length, seed=length) for length in (240, 150, 31)]
    backend = backend_of(demo, 3)
    together = decode(backend, prompts, 310, num_draft_tokens)
    assert backend.cache.num_compactions >= 3
    bundle = open_bundle(built("demo"))
    for sequence, ids in enumerate(prompts):
        alone = decode(backend_of(demo), [ids], 310, num_draft_tokens)
        assert together.tokens[sequence][:310] == alone.tokens[0][:310]
        assert alone == decode(onnxruntime_backend(bundle), [ids], 310, num_draft_tokens)
        drafts = together.drafts[sequence]
        assert all(drafts[held] == draft for held, draft in alone.drafts[0].items() if held in drafts)


def test_batches_of_a_pair_with_many_heads_equal_solo_runs(built: Built, sim: Simulator) -> None:
    prompts = [random_prompt(length, length) for length in (90, 40, 7)]
    with Pair(open_bundle(built("dense")), engine=ENGINE) as pair:
        for k in (3, 0):
            together = decode(backend_of(pair, 3), prompts, 50, k)
            for sequence, ids in enumerate(prompts):
                alone = decode(backend_of(pair), [ids], 50, k)
                assert together.tokens[sequence][:50] == alone.tokens[0][:50]
    sim.check_closed()


def test_a_rewind_and_a_prefill_go_on_as_if_nothing_had_been(edge: Pair) -> None:
    ids = random_prompt(40, 1)
    backend = backend_of(edge)
    text = ids + decode(backend, [ids], 30, 3).tokens[0]
    for back in (3, 5, 9):
        backend.rewind(0, backend.length[0] - back)
        held = backend.length[0]
        assert backend.prefill(0, text[held : held + 1]) == text[held + 1]
        assert backend.round(3, [1]).tokens[0] == [text[held + 2]]
    with pytest.raises(RewindError, match="can't be rewound"):
        backend.rewind(0, 1000)


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_second_prompt_sees_nothing_of_the_first(num_rounds: int, edge: Pair, built: Built) -> None:
    """After an odd and an even number of rounds, which leave either of the two states."""
    backend, bundle = backend_of(edge), open_bundle(built("edge"))
    for seed in range(3):
        backend.reset(0)
        assert all(not backend.memory.read(tensor).any() for tensor in backend.cache.tensors.values())
        found = decode(backend, [random_prompt(12 + 40 * seed, seed)], 20, 3)
        assert found == decode(onnxruntime_backend(bundle), [random_prompt(12 + 40 * seed, seed)], 20, 3)
        for _ in range(num_rounds):
            backend.round(0, [1])


def poison(backend: TensorRTBackend) -> None:
    """Large finite values wherever no valid row is."""
    for buffer in backend.manifest.kv:
        for part in ("key", "value"):
            tensor = backend.cache.tensors[f"kv.{buffer.layer}.{part}"]
            values = backend.memory.read(tensor)
            for sequence in range(backend.num_slots):
                base = backend.cache.base[sequence] if buffer.type == "sliding" else 0
                values[sequence, :, backend.length[sequence] - base :] = 1e4
            backend.memory.write(tensor, values)


@pytest.mark.parametrize("name", ["edge", "dense"])
def test_poison_in_unused_rows_changes_nothing(name: str, built: Built, sim: Simulator) -> None:
    prompts = [random_prompt(50, 5), random_prompt(13, 6)]
    with Pair(open_bundle(built(name)), engine=ENGINE) as pair:
        clean, poisoned = backend_of(pair, 2), backend_of(pair, 2)
        poison(poisoned)
        assert feed(poisoned, prompts) == feed(clean, prompts)
        for k in (3, 3, 0, 3):
            poison(poisoned)
            assert poisoned.round(k, [k + 1] * 2) == clean.round(k, [k + 1] * 2)
            assert not k or poisoned.last_draft(k) == clean.last_draft(k)
    sim.check_closed()


def copies_of(sim: Simulator, call: Callable[..., Any], *arguments: Any) -> Counter[tuple[str, int]]:
    """What a call copies between host and device."""
    before = len(sim.copies)
    call(*arguments)
    return Counter(copy for copy in sim.copies[before:] if copy[0] != "DeviceToDevice")


def test_a_steady_round_copies_its_decision_and_nothing_else(sim: Simulator, demo: Pair, built: Built) -> None:
    """For any context and vocabulary. A changed bound is one small upload more."""
    decision = Counter({("DeviceToHost", 768): 1})
    bound = ("HostToDevice", 768)
    with Pair(open_bundle(built("edge", ple="device")), engine=ENGINE) as edge:
        for pair, lengths in ((demo, (20, 200, 700)), (edge, (20, 90))):
            assert pair.manifest.vocab_size in (2048, VOCAB_SIZE)
            backend, k = backend_of(pair), pair.engine.num_draft_tokens
            for length in lengths:
                backend.reset(0)
                feed(backend, [random_prompt(length, length)])
                backend.round(k, [k + 1])
                backend.round(k, [k + 1])
                addresses = set(sim.allocations)
                for _ in range(5):
                    assert copies_of(sim, backend.round, k, [k + 1]) == decision
                assert copies_of(sim, backend.round, 1, [2]) == decision + Counter({bound: 1})
                assert copies_of(sim, backend.round, 1, [2]) == decision
                assert copies_of(sim, backend.round, k, [k + 1]) == decision + Counter({bound: 1})
                assert set(sim.allocations) == addresses, "a round allocates nothing"


def test_with_a_per_layer_table_on_the_host_a_round_also_copies_the_draft_and_its_rows(
    sim: Simulator, built: Built
) -> None:
    """Whatever the context. Draft and verify are a launch each, plain decoding is one."""
    with Pair(open_bundle(built("demo")), engine=ENGINE) as pair:
        table, k = pair.manifest.per_layer_table, pair.engine.num_draft_tokens
        assert table is not None
        for length in (20, 700):
            backend = backend_of(pair)
            feed(backend, [random_prompt(length, length)])
            for num_drafts in (k, 0):
                rows = ("HostToDevice", aligned((num_drafts + 1) * table.width * 4))
                expected = [("DeviceToHost", 768), rows] + [("DeviceToHost", 256)] * bool(num_drafts)
                for _ in range(5):
                    backend.round(num_drafts, [num_drafts + 1])
                launches, addresses = sim.launches, set(sim.allocations)
                assert copies_of(sim, backend.round, num_drafts, [num_drafts + 1]) == Counter(expected)
                assert sim.launches - launches == 1 + bool(num_drafts)
                assert set(sim.allocations) == addresses, "a round allocates nothing"


def test_a_prefill_is_one_upload_and_one_download_and_a_moved_base_one_more(sim: Simulator, demo: Pair) -> None:
    backend = backend_of(demo)
    ids = conversation(demo, 600, seed=3)
    sizes = []
    for start in range(0, 600, 200):
        num_compactions = backend.cache.num_compactions
        copies = copies_of(sim, backend.prefill, 0, ids[start : start + 200])
        uploads = [size for kind, size in copies.elements() if kind == "HostToDevice"]
        assert [kind for kind, _ in copies.elements()].count("DeviceToHost") == 1
        assert len(uploads) == 1 + (backend.cache.num_compactions - num_compactions)
        sizes.append(sum(uploads))
    assert backend.cache.num_compactions >= 1
    assert max(sizes) < 6144, "the ids of a chunk, and some numbers"


def test_from_the_second_round_of_a_bucket_and_state_on_a_round_is_one_launch(sim: Simulator, demo: Pair) -> None:
    backend = backend_of(demo)
    feed(backend, [conversation(demo, 100, seed=4)])
    seen: Counter[tuple[int, int, int]] = Counter()
    while backend.length[0] < 600:
        k = 0 if len(seen) % 3 == 1 else 4
        state, held, before = backend._current, backend.length[0], (sim.launches, sim.enqueues)
        backend.round(k, [k + 1])
        key = (k, backend.bucket, state)
        first = not seen[key]
        seen[key] += 1
        assert (sim.launches - before[0], sim.enqueues - before[1]) == ((0, 2 + bool(k)) if first else (1, 0))
        assert backend.bucket == capacity_bucket(held + k + 1, 1280)
    assert sim.captures == sum(count > 1 for count in seen.values())
    assert max(Counter((k, bucket) for k, bucket, _ in seen).values()) <= 2
    assert {bucket for _, bucket, _ in seen} == {128, 256, 512, 1024}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drawn_text_is_onnxruntimes_drafted_and_plain(sampling: dict[str, Any], edge: Pair, built: Built) -> None:
    """Drafts are the assistant's most likely tokens here, which changes how many are accepted, and nothing else."""
    with Pair(open_bundle(built("edge"))) as cpu:
        for seed in range(4):
            asked = GenerationSettings(max_new_tokens=30, seed=seed, **sampling)
            expected = cpu.generate("the sea", replace(asked, num_draft_tokens=0))
            for k in (0, 3):
                found = edge.generate("the sea", replace(asked, num_draft_tokens=k))
                assert found.token_ids == expected.token_ids
                assert found.sampling == expected.sampling


def test_rounds_run_over_as_few_slots_as_a_power_of_two_and_prefills_over_one(
    built: Built, sim: Simulator, tmp_path: Path
) -> None:
    """A prefill leaves the KV and the state of other slots alone, and a round those of slots after its last."""
    bundle = build_simulated(built("edge"), tmp_path / "bundle", max_batch=4)
    prompts = [random_prompt(20 + 7 * slot, slot) for slot in range(4)]
    with Pair(bundle, engine=ENGINE) as pair:
        backend = backend_of(pair, 4)

        def held(slots: list[int]) -> list[Any]:
            tensors = [*backend.cache.tensors.values(), *backend.state.values()]
            return [backend.memory.read(tensor)[slots] for tensor in tensors]

        for slot, ids in enumerate(prompts):
            others = [number for number in range(4) if number != slot]
            before = held(others)
            feed_slot(backend, slot, ids)
            assert all((now == then).all() for now, then in zip(held(others), before, strict=True))
        for last, batch in ((3, 4), (2, 4), (1, 2), (0, 1)):
            kv = [backend.memory.read(tensor)[batch:] for tensor in backend.cache.tensors.values()]
            step = backend.round(3, [4 * (slot <= last) for slot in range(4)])
            assert backend._last is not None
            assert (backend._last.batch, step.failed) == (batch, [])
            assert [bool(tokens) for tokens in step.tokens] == [slot <= last for slot in range(4)]
            after = [backend.memory.read(tensor)[batch:] for tensor in backend.cache.tensors.values()]
            assert all((now == then).all() for now, then in zip(after, kv, strict=True))
    sim.check_closed()


def test_drawn_and_greedy_text_share_a_batch(edge: Pair, built: Built) -> None:
    prompts = [random_prompt(30, 1), random_prompt(12, 2), random_prompt(20, 3)]
    samplings = [GREEDY, Sampling(1.0, 64, 0.95, 0.0, 5), Sampling(0.5, 20, 1.0, 0.05, 6)]
    backends = backend_of(edge, 3), onnxruntime_backend(open_bundle(built("edge")), 3)
    for backend in backends:
        for slot, each in enumerate(samplings):
            backend.set_sampling(slot, each)
    found, expected = (decode(backend, prompts, 40, 3).cut(40) for backend in backends)
    assert found == expected


def test_memory_is_flat_over_prompts_and_sessions(sim: Simulator, edge: Pair) -> None:
    backend = backend_of(edge)
    held = []
    for length in [*range(2, 120, 9)] * 2:
        backend.reset(0)
        decode(backend, [random_prompt(length, length)], 5, 3)
        held.append(sim.device_bytes)
    assert len(set(held[len(held) // 2 :])) == 1
    backend.close()
    held.clear()
    for _ in range(6):
        session = edge.session()
        session.append("the sea")
        session.generate(SHORT)
        session.close()
        held.append(sim.device_bytes)
    assert len(set(held[2:])) == 1, "the slots of the pair are its own, and all that is held"


def test_the_assistant_reads_the_targets_buffers_and_updates_are_in_place(sim: Simulator, edge: Pair) -> None:
    backend = backend_of(edge)
    decode(backend, [random_prompt(100, 0)], 40, 3)
    other = backend_of(edge)
    decode(other, [random_prompt(10, 0)], 5, 3)
    kv = {name: tensor.address for name, tensor in backend.cache.tensors.items()}
    bound = [[*draft._contexts, *rest._contexts] for draft, rest in backend._captured.values()]
    drafts, targets, choices = ([dict(part[i]._context._addresses) for part in bound] for i in range(3))
    assert len(drafts) == len(targets) == 4, "two states in two buckets"
    for addresses in drafts:
        donors = {name: address for name, address in addresses.items() if name.startswith("kv.")}
        assert donors == {name: kv[name] for name in donors}
        assert len(donors) == 4
        assert addresses["next_draft"] in {target["draft"] for target in targets}
    for addresses in targets:
        assert {name: addresses[name] for name in kv} == kv
        assert {name: addresses[f"next_{name}"] for name in kv} == kv
    for draft, target, choice in zip(drafts, targets, choices, strict=True):
        live = {draft["hidden"], draft["position"], *(target[name] for name in ("token", "past_length"))}
        assert not live & {address for name, address in choice.items() if name.startswith("next_")}
        assert choice["logits"] == target["logits"]
        assert choice["draft"] == target["draft"]
    given = [context._addresses for context in sim.contexts]
    tables = [addresses["embedding_table"] for addresses in given if "embedding_table" in addresses]
    assert len(tables) == 4 * 2 + 2 * 2 + 2
    assert len(set(tables)) == 1, "both engines and every sequence share one table"


def test_non_finite_rows_raise_and_are_not_kept(edge: Pair) -> None:
    ids = random_prompt(20, 1)
    backend, clean = backend_of(edge), backend_of(edge)
    for fresh in (backend, clean):
        fresh.prefill(0, ids)
    tensor = backend.cache.tensors[f"kv.{backend.manifest.kv[0].layer}.value"]
    saved = backend.memory.read(tensor)
    broken = saved.copy()
    broken[0, 0, 15] = np.nan
    backend.memory.write(tensor, broken)
    assert backend.round(3, [4]).failed == [0]
    assert "NaN or infinity at positions 20" in backend.not_finite(0)
    assert backend.length[0] == 20
    rows = backend.memory.read(tensor)
    assert not rows[:, :, 20:].any()
    backend.memory.write(tensor, np.where(np.isnan(rows), saved, rows))
    for held in backend.cache.tensors.values():
        assert np.isfinite(backend.memory.read(held)).all()
    for fresh in (backend, clean):
        fresh.rewind(0, 19)
        fresh.prefill(0, ids[19:])
    assert [backend.round(3, [4]) for _ in range(4)] == [clean.round(3, [4]) for _ in range(4)]
    backend.reset(0)
    clean.reset(0)
    assert decode(backend, [random_prompt(30, 2)], 10, 3) == decode(clean, [random_prompt(30, 2)], 10, 3)


def test_a_result_that_is_not_finite_is_an_error_and_the_next_prompt_works(sim: Simulator, edge: Pair) -> None:
    expected = edge.generate("the sea", SHORT).token_ids

    def spoil(graph: str, outputs: dict[str, Any]) -> None:
        if graph == "target":
            outputs["is_finite"][:] = False

    sim.tamper = spoil
    with pytest.raises(NonFiniteError, match="nothing of this call was kept"):
        edge.generate("the moon", SHORT)
    sim.tamper = None
    assert edge.generate("the sea", SHORT).token_ids == expected


# What can't be is refused, with the way out.


def test_engines_of_another_gpu_are_refused(built: Built, sim: Simulator, tmp_path: Path) -> None:
    bundle = build_simulated(built("edge"), tmp_path / "bundle", device="sm120")
    shutil.rmtree(bundle.folder / FOLDER)
    message = r"no tensorrt-rtx engines for this GPU \(sm89\); there are tensorrt-rtx-sm120\. Build them: "
    with pytest.raises(BackendError, match=message + "slipstream build .* --engine tensorrt-rtx --device sm89"):
        Pair(bundle, engine=ENGINE)


def test_a_bundle_that_was_never_built_says_how(bundle_folder: Callable[[str], Path], sim: Simulator) -> None:
    with pytest.raises(BackendError, match=r"no tensorrt-rtx engines for this GPU \(sm89\)\. Build them: slipstream "):
        Pair(open_bundle(bundle_folder("edge")), engine=ENGINE)
    sim.check_closed()


def reexport(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text() + "\n")


def truncate(folder: Path) -> None:
    path = folder / FOLDER / "target.engine"
    path.write_bytes(path.read_bytes()[:-1])


def damage(folder: Path) -> None:
    path = folder / FOLDER / "assistant.engine"
    path.write_bytes(b"?" + path.read_bytes()[1:])


def remove(folder: Path) -> None:
    (folder / FOLDER / "target.engine").unlink()


def scribble(folder: Path) -> None:
    (folder / FOLDER / "record.json").write_text("{]")


def forge(folder: Path) -> None:
    """An engine that the record knows, and TensorRT does not."""
    path = folder / FOLDER / "record.json"
    (folder / FOLDER / "target.engine").write_bytes(b"{}")
    record = json.loads(path.read_text())
    record["target"] |= {"size_bytes": 2, "sha256": file_sha256(folder / FOLDER / "target.engine")}
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reexport, "the bundle was exported anew since .* was built. Build again: slipstream build"),
        (truncate, r"target\.engine is missing or damaged. Copy it again, or build again: slipstream build"),
        (damage, r"assistant\.engine is missing or damaged. Copy it again, or build again: slipstream build"),
        (remove, r"target\.engine is missing or damaged. Copy it again, or build again: slipstream build"),
        (scribble, r"record\.json is not JSON: .* Build again: slipstream build"),
        (forge, r"tensorrt-rtx 1\.7\.1\.116 can't load .*target\.engine: this is no engine for"),
    ],
)
def test_engines_that_do_not_belong_are_refused(
    change: Callable[[Path], None], message: str, copied: Path, sim: Simulator
) -> None:
    change(copied)
    with pytest.raises(BackendError, match=f"(?s){message}"):
        Pair(open_bundle(copied), engine=ENGINE)
    gc.collect()
    sim.check_closed()


def test_engines_of_another_tensorrt_are_refused(built: Built, sim: Simulator) -> None:
    sim.module.__version__ = "1.8.0"
    message = r"built with tensorrt-rtx 1\.7\.1\.116, installed is 1\.8\.0\. Install that version, or build again: "
    with pytest.raises(BackendError, match=message):
        Pair(open_bundle(built("edge")), engine=ENGINE)
    sim.check_closed()


def test_what_the_engines_were_not_built_for_is_a_request_error(edge: Pair) -> None:
    for batch in (0, 4):
        with pytest.raises(RequestError, match=f"{batch} slots do not fit: .* built with --max-batch 3"):
            edge.new_backend(batch)
    for k in (1, 2, 4):
        message = f"num_draft_tokens is {k}; it can be 0 or 3 with these engines: build others with slipstream build -k"
        with pytest.raises(RequestError, match=message):
            edge.generate("the sea", GenerationSettings(num_draft_tokens=k))


def test_a_machine_without_a_gpu_says_so(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = install(monkeypatch, num_devices=0)
    with pytest.raises(BackendError, match=r"no CUDA-capable device is detected.* slipstream doctor"):
        Pair(open_bundle(built("edge")), engine=ENGINE)
    sim.check_closed()


def test_without_cuda_python_it_says_what_to_install(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(MissingExtraError, match=r"needs cuda-python .*pip install 'slipstream\[gpu\]'"):
        Pair(open_bundle(built("edge")), engine=ENGINE)


def test_without_tensorrt_it_says_what_to_install(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'slipstream\[tensorrt-rtx\]'"):
        Pair(open_bundle(built("edge")), engine=ENGINE)


def test_an_engine_that_copies_its_cache_is_refused(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_tensorrt.ICudaEngine, "get_aliased_input_tensor", lambda self, name: None)
    with pytest.raises(BackendError, match=r"target\.engine does not update kv\.0\.key in place: .* Build again"):
        Pair(open_bundle(built("edge")), engine=ENGINE)


@pytest.mark.parametrize("name", ["kv.1.value", "next_kv.1.value"])
def test_an_engine_that_copies_its_cache_is_noted_in_every_result(name: str, built: Built, sim: Simulator) -> None:
    """Not refused: what TensorRT's inspector calls a reformat was never seen on hardware."""
    layer = {"Name": "copy", "LayerType": "Reformat", "Inputs": [{"Name": "x"}], "Outputs": [{"Name": name}]}
    sim.extra_layers.append(layer)
    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        notes = pair.generate("the sea", SHORT).notes
    assert f"target.engine copies {name} on every call: steps cost more than they should" in notes


def test_a_bucket_of_the_cache_is_no_copy_to_note(built: Built, sim: Simulator) -> None:
    names = [{"Name": "next_kv.1.value"}], [{"Name": "next_kv.1.value.bucket"}]
    sim.extra_layers.append({"Name": "slice", "LayerType": "Reformat", "Inputs": names[0], "Outputs": names[1]})
    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        assert not any("copies" in note for note in pair.generate("the sea", SHORT).notes)


def test_engines_that_want_a_value_on_the_host_are_refused(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        simulated_tensorrt.ICudaEngine, "is_shape_inference_io", lambda self, name: name == "past_length"
    )
    with pytest.raises(BackendError, match="wants past_length in host memory"):
        Pair(open_bundle(built("edge")), engine=ENGINE)
    sim.check_closed()


def test_engines_of_another_model_of_gpu_are_noted(built: Built, sim: Simulator, tmp_path: Path) -> None:
    bundle = build_simulated(built("edge"), tmp_path / "bundle")
    record = bundle.folder / FOLDER / "record.json"
    record.write_text(record.read_text().replace('"device_name": ""', '"device_name": "NVIDIA Other"'))
    with Pair(bundle, engine=ENGINE) as pair:
        assert "these engines were built on a NVIDIA Other, this GPU is a NVIDIA Simulator" in pair.engine.notes


def test_a_capture_that_fails_keeps_its_first_error_and_can_be_tried_again(built: Built, sim: Simulator) -> None:
    def fail() -> None:
        raise BackendError("the first error")

    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        backend = pair.new_backend()
        assert isinstance(backend, TensorRTBackend)
        with pytest.raises(BackendError, match="the first error"):
            backend.memory.stream.capture(fail)
        assert decode(backend, [random_prompt(20, 1)], 20, 3).tokens
    sim.check_closed()


def test_sessions_of_a_pair_run_on_threads_of_their_own(built: Built, sim: Simulator) -> None:
    """Captures included: each has its own stream."""
    prompts = ["the sea", "a the b", "c and the rest"]
    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        expected = [pair.generate(text, SHORT).token_ids for text in prompts]

        def run(text: str) -> list[list[int]]:
            found = []
            for _ in range(3):
                session = pair.session()
                session.append(text)
                found.append(session.generate(SHORT).token_ids)
                session.close()
            return found

        with ThreadPoolExecutor(len(prompts)) as threads:
            texts = list(threads.map(run, prompts))
    assert texts == [[tokens] * 3 for tokens in expected]
    sim.check_closed()


def test_other_layers_that_reformat_are_no_matter(built: Built, sim: Simulator) -> None:
    sim.extra_layers += [{"Name": "copy", "LayerType": "Reformat", "Inputs": [{"Name": "hidden"}]}, "a name only"]
    Pair(open_bundle(built("edge")), engine=ENGINE).close()
    sim.check_closed()


def refuse_alias(sim: Simulator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(simulated_tensorrt.ICudaEngine, "get_aliased_input_tensor", lambda self, name: None)


def fill_memory(sim: Simulator, patch: pytest.MonkeyPatch) -> None:
    sim.total_bytes = 1 << 10


def hide_library(sim: Simulator, patch: pytest.MonkeyPatch) -> None:
    sim.onnxruntime_cuda(patch, is_loadable=False)


@pytest.mark.parametrize(
    ("engine", "spoil"), [(ENGINE, refuse_alias), (ENGINE, fill_memory), ("onnxruntime-cuda", hide_library)]
)
def test_a_pair_that_could_not_be_loaded_leaves_nothing_behind(
    engine: EngineName,
    spoil: Callable[[Simulator, pytest.MonkeyPatch], None],
    built: Built,
    sim: Simulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(sim, monkeypatch)
    with pytest.raises(BackendError):
        Pair(open_bundle(built("edge")), engine=engine)
    gc.collect()
    sim.check_closed()


def test_slots_that_do_not_fit_leave_the_pair_as_it_was(built: Built, sim: Simulator) -> None:
    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        room = -sim.device_bytes
        backend = pair.new_backend()
        room += sim.device_bytes - 1
        pair._resources.close_backend(backend)
        before = set(sim.allocations)
        sim.total_bytes = sim.device_bytes + room
        with pytest.raises(BackendError, match="out of memory"):
            pair.generate("the sea", SHORT)
        gc.collect()
        assert set(sim.allocations) == before
        sim.total_bytes = 1 << 30
        pair.generate("the sea", SHORT)
    sim.check_closed()


# What results say about how they were made.


def test_engines_without_a_stamp_say_so_in_every_result(edge: Pair) -> None:
    result = edge.generate("the sea", SHORT)
    assert result.engine == "tensorrt-rtx 1.7.1.116 sm89"
    assert result.to_dict()["engine"] == result.engine
    assert len(result.notes) == 1
    assert "no parity stamp for this GPU and driver: run slipstream verify" in result.notes[0]
    assert result.to_dict()["notes"] == list(result.notes)


def stamp(folder: Path, **changes: Any) -> None:
    engines = {name: file_sha256(folder / FOLDER / f"{name}.engine") for name in ("target", "assistant")}
    values: dict[str, Any] = {
        **{f"{name}_sha256": sha256 for name, sha256 in engines.items()},
        "engine_version": "1.7.1.116",
        "device": "NVIDIA Simulator",
        "driver_version": 13000,
        "slipstream_version": "0",
        "reference": "onnxruntime",
        "largest_difference": 0.0,
        "tolerance": 1e-4,
        "num_calls": 1,
        "num_tokens": 1,
        "near_ties": 0,
    }
    (folder / FOLDER / "parity.json").write_text(ParityStamp(**(values | changes)).model_dump_json())


def test_a_stamp_of_these_engines_silences_the_note_and_no_other_does(copied: Path, sim: Simulator) -> None:
    for changes, is_noted in (({}, False), ({"target_sha256": "0" * 64}, True)):
        stamp(copied, **changes)
        with Pair(open_bundle(copied), engine=ENGINE) as pair:
            assert bool(pair.generate("the sea", SHORT).notes) == is_noted
    sim.check_closed()


def test_rounds_that_can_not_be_captured_are_right_and_said(sim: Simulator, edge: Pair, built: Built) -> None:
    sim.is_capturable = False
    backend = backend_of(edge)
    found = decode(backend, [random_prompt(30, 9)], 30, 3)
    assert found == decode(onnxruntime_backend(open_bundle(built("edge"))), [random_prompt(30, 9)], 30, 3)
    assert (sim.captures, sim.launches) == (0, 0)
    assert any("does not let this round be captured" in note for note in edge.generate("the sea", SHORT).notes)


def test_compiled_kernels_are_kept_and_used_again(copied: Path, sim: Simulator) -> None:
    texts, compiled = [], []
    for _ in range(2):
        with Pair(open_bundle(copied), engine=ENGINE) as pair:
            texts.append(pair.generate("the sea", SHORT).token_ids)
        compiled.append(sim.compilations)
    assert (copied / FOLDER / "runtime.cache").is_file()
    assert texts[0] == texts[1]
    assert compiled[0] == compiled[1] > 0
    sim.check_closed()


def test_a_foreign_runtime_cache_is_a_note_and_written_anew(copied: Path, sim: Simulator) -> None:
    path = copied / FOLDER / "runtime.cache"
    path.write_bytes(b"of another driver")
    with Pair(open_bundle(copied), engine=ENGINE) as pair:
        notes = pair.generate("the sea", SHORT).notes
        assert any("runtime.cache is damaged, or of another GPU" in note for note in notes)
    assert path.read_bytes() != b"of another driver"
    with Pair(open_bundle(copied), engine=ENGINE) as pair:
        assert len(pair.generate("the sea", SHORT).notes) == 1, "the missing stamp"
    sim.check_closed()


def test_a_bundle_that_can_not_be_written_works(copied: Path, sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, content: bytes) -> int:
        raise PermissionError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with Pair(open_bundle(copied), engine=ENGINE) as pair:
        assert len(pair.generate("the sea", SHORT).token_ids) == 20
    assert sorted(path.name for path in (copied / FOLDER).iterdir()) == [
        "assistant.engine",
        "choose_greedy.engine",
        "choose_sampled.engine",
        "record.json",
        "target.engine",
    ]
    sim.check_closed()


def test_tensorrt_proper_gives_the_same_tokens(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = build_simulated(built("edge"), tmp_path / "bundle", flavour="tensorrt", device="sm90")
    sim = install(monkeypatch, flavour="tensorrt", compute_capability="sm90")
    with Pair(bundle, engine="tensorrt") as pair:
        found = decode(backend_of(pair, 2), [random_prompt(60, 1), random_prompt(20, 2)], 40, 3)
        result = pair.generate("the sea", SHORT)
    expected = decode(onnxruntime_backend(bundle, 2), [random_prompt(60, 1), random_prompt(20, 2)], 40, 3)
    assert found == expected
    assert (result.engine, len(result.notes)) == ("tensorrt 11.0.0.114 sm90", 1)
    assert not (bundle.folder / "engines" / "tensorrt-sm90" / "runtime.cache").exists()
    assert sim.launches > 0
    sim.check_closed()


# Closing.


def test_a_pair_closes_its_open_sessions_first(built: Built, sim: Simulator) -> None:
    pair = Pair(open_bundle(built("edge")), engine=ENGINE)
    sessions = [pair.session() for _ in range(3)]
    for session in sessions:
        session.append("the sea")
        session.generate(SHORT)
    pair.generate("the moon", SHORT)
    sessions[0].close()
    sessions[1].append(" and the sky")
    sessions[1].generate(SHORT)
    pair.close()
    sim.check_closed()
    pair.close()
    with pytest.raises(RequestError, match="the pair is closed: load the bundle again"):
        sessions[1].generate(SHORT)
    with pytest.raises(RequestError, match="the pair is closed: load the bundle again"):
        pair.new_backend(2)


@pytest.mark.parametrize("closed", ["pair", "session", "pair of a session"])
def test_what_was_closed_can_not_be_used(closed: str, built: Built, sim: Simulator) -> None:
    with Pair(open_bundle(built("edge")), engine=ENGINE) as pair:
        session = pair.session()
        session.append("the sea")
        session.generate(SHORT)
        pair.generate("the sea", SHORT)
        use: dict[str, Callable[[], Any]] = {
            "pair": lambda: pair.generate("the sea", SHORT),
            "session": lambda: session.generate(SHORT),
            "pair of a session": lambda: session.generate(SHORT),
        }
        (session if closed == "session" else pair).close()
        with pytest.raises(RequestError, match="closed"):
            use[closed]()
    sim.check_closed()


def test_a_pair_that_is_dropped_with_its_sessions_leaves_nothing_behind(built: Built, sim: Simulator) -> None:
    pair = Pair(open_bundle(built("edge")), engine=ENGINE)
    session = pair.session()
    session.append("the sea")
    session.generate(SHORT)
    del pair
    session.append(" and the sky")
    assert len(session.generate(SHORT).token_ids) == 20, "a session holds its pair"
    del session
    gc.collect()
    sim.check_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_pair_that_generated_and_is_dropped_leaves_nothing_behind(built: Built, sim: Simulator) -> None:
    pair = Pair(open_bundle(built("edge")), engine=ENGINE)
    pair.generate("the sea", SHORT)
    del pair
    gc.collect()
    sim.check_closed()


# ONNX Runtime's CUDA provider, over the same memory.


@pytest.mark.parametrize("name", ["demo", LAST])
def test_onnxruntimes_cuda_provider_gives_the_cpus_tokens(
    name: str, built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(built(name))
    prompts = [random_prompt(length, length) for length in (100, 30)]
    sim.onnxruntime_cuda(monkeypatch)
    with Pair(bundle, engine="onnxruntime-cuda") as pair:
        assert pair.engine.name.startswith(f"onnxruntime {ort.__version__} cuda")
        for batch in (1, 2):
            for k in (bundle.manifest.generation.num_draft_tokens, 5, 0):
                backend = pair.new_backend(batch)
                assert isinstance(backend, PairBackend)
                found = decode(backend, prompts[:batch], 50, k)
                assert found == decode(onnxruntime_backend(bundle, batch), prompts[:batch], 50, k)
                backend.close()
    sim.check_closed()


def test_a_round_of_the_cuda_provider_downloads_its_decision_only(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.onnxruntime_cuda(monkeypatch)
    with Pair(open_bundle(built("edge", ple="device")), engine="onnxruntime-cuda") as pair:
        backend = pair.new_backend()
        backend.prefill(0, random_prompt(20, 1))
        for k in (3, 3, 0, 0):
            backend.round(k, [k + 1])
        for k in (3, 0):
            backend.round(k, [k + 1])
            for _ in range(4):
                assert copies_of(sim, backend.round, k, [k + 1]) == {("DeviceToHost", 768): 1}
        assert pair.generate("the sea", SHORT).engine == pair.engine.name
    sim.check_closed()


def test_a_cuda_provider_that_does_not_load_names_the_missing_library(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.onnxruntime_cuda(monkeypatch, is_loadable=False)
    with pytest.raises(BackendError, match=r"CUDA provider did not load: \S+\.so: cannot open .* Install that "):
        Pair(open_bundle(built("edge")), engine="onnxruntime-cuda")


def test_an_onnxruntime_without_the_provider_says_what_to_install(
    built: Built, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    message = (
        r"has no CUDA provider\. pip install 'slipstream\[gpu\]', then pip uninstall .*or run on the CPU with --engine "
    )
    with pytest.raises(BackendError, match=message):
        Pair(open_bundle(built("edge")), engine="onnxruntime-cuda")
    sim.check_closed()


# Half precision differs from float32 in dtypes alone, so what is found here holds there.


DTYPES = ("to", "stash_type", "softmax_precision", "dtype")  # attributes
FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def described(model: ir.Model) -> tuple[list[tuple[str, str, str]], Counter[str]]:
    """How each output is computed, and the operators by count: everything but floats' dtypes and casts of them."""
    forms = {str(value.name): f"input {value.name} {value.shape}" for value in model.graph.inputs}
    forms |= {name: constant(value) for name, value in model.graph.initializers.items()}
    operators: Counter[str] = Counter()
    for node in model.graph:
        read = [forms[str(value.name)] if value is not None else "" for value in node.inputs]
        if node.op_type == "Cast" and {node.inputs[0].dtype, node.outputs[0].dtype} <= FLOATS:  # type: ignore[union-attr]
            forms[str(node.outputs[0].name)] = read[0]
            continue
        operators[node.op_type] += 1
        attributes = {name: str(attribute.value) for name, attribute in node.attributes.items() if name not in DTYPES}
        for index, value in enumerate(node.outputs):
            form = [node.op_type, sorted(attributes.items()), index, str(value.shape), read]
            forms[str(value.name)] = sha256(repr(form).encode()).hexdigest()
    return [(str(out.name), str(out.shape), forms[str(out.name)]) for out in model.graph.outputs], operators


def constant(value: ir.Value) -> str:
    """A weight by name, anything else by its numbers, which half precision rounds."""
    if isinstance(value.const_value, ir.ExternalTensor):
        return f"weight {value.name} {value.shape}"
    assert value.const_value is not None
    return f"{value.shape} " + " ".join(f"{float(number):.2g}" for number in value.const_value.numpy().flatten())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_graphs_differ_from_half_precision_ones_only_in_dtypes(
    dtype: str, bundle_folder: Callable[..., Path]
) -> None:
    half, full = open_bundle(bundle_folder("edge", dtype=dtype)), open_bundle(bundle_folder("edge"))
    for graph in ("target.onnx", "assistant.onnx"):
        models = [edited(bundle, graph) for bundle in (half, full)]
        assert described(models[0]) == described(models[1])
        assert described(models[0])[1].total() > 90
        kinds = [{str(value.dtype) for value in model.graph.inputs} for model in models]
        assert kinds == [{dtype.upper(), "INT64"}, {"FLOAT", "INT64"}]


def edited(bundle: Bundle, graph: str) -> ir.Model:
    return edited_model(bundle.path(graph), bundle.manifest.kv, {"sliding": 304, "full": 416})
