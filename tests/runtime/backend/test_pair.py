"""The ONNX Runtime backend: shared addresses, compaction, batches, non-finite rows, flat bindings."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.runtime.backend.contract import Step
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.generation import Request
from slipstream.runtime.errors import BackendError, NonFiniteError
from slipstream.runtime.ort import backend as onnxruntime_backend
from slipstream.runtime.ort.backend import OnnxRuntimeBackend, OnnxRuntimeEngine
from tests.support.fakes import make_codec
from tests.support.pairs import random_prompt
from tests.support.sequences import OneSequence


@pytest.fixture(scope="module", params=["edge", "dense", "wrapped"])
def graphs(request: pytest.FixtureRequest, bundle_folder: Callable[[str], Path]) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(open_bundle(bundle_folder(request.param)), num_threads=1)


def test_the_assistant_reads_the_donor_buffers_at_the_targets_address(
    graphs: OnnxRuntimeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the addresses that are bound, before and after the buffers grow."""
    bound: list[tuple[Any, dict[str, int], dict[str, int]]] = []
    original = onnxruntime_backend._Call.__init__

    def record(self: Any, session: Any, tensors: dict[str, Any], device: str, index: int) -> None:
        parts = (session.get_inputs(), session.get_outputs())
        names = [[node.name for node in part if node.name in tensors] for part in parts]
        bound.append((session, *({name: tensors[name].address for name in part} for part in names)))
        original(self, session, tensors, device, index)

    monkeypatch.setattr(onnxruntime_backend._Call, "__init__", record)
    backend = OnnxRuntimeBackend(graphs, max_draft_tokens=4)
    for length in (30, 100):
        backend.prefill(0, random_prompt(length, 0))
        backend.round(3, [4])
        target = next(call for call in reversed(bound) if call[0] is graphs.target)
        choose = next(call for call in reversed(bound) if call[0] is graphs.choose("choose_greedy"))
        assistant = next(call for call in reversed(bound) if call[0] in graphs.drafts.values())
        kv = {name: address for name, address in target[1].items() if name.startswith("kv.")}
        donors = {name: address for name, address in assistant[1].items() if name.startswith("kv.")}
        assert donors == {name: kv[name] for name in donors}
        assert len(donors) == 4
        assert kv == {name.removeprefix("next_"): a for name, a in target[2].items() if name.startswith("next_kv.")}
        read = {**assistant[1], **target[1], **choose[1]}
        live = {address for name, address in read.items() if not name.startswith("kv.")}
        assert not live & set(choose[2].values())
    assert backend.cache.capacity["full"] > 128, "the second prompt must have made the buffers grow"


def test_the_end_of_a_generation_binds_nothing_new(graphs: OnnxRuntimeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """K is a limit, not a shape: the cap bounds what is accepted, and rounds keep their number of rows."""
    bound = []
    original = onnxruntime_backend._Call.__init__

    def record(*args: Any) -> None:
        bound.append(args)
        original(*args)

    monkeypatch.setattr(onnxruntime_backend._Call, "__init__", record)
    backend = OnnxRuntimeBackend(graphs)
    for cap in range(2, 12):
        sequence = OneSequence(backend, make_codec(), random_prompt(9, cap))
        sequence.scheduler.forget()
        sequence.run(Request(3, cap, (), ()))
    choosing = {id(graphs.target), id(graphs.choose("choose_greedy"))}
    num_drafting = len({id(args[1]) for args in bound} - choosing)
    assert len(bound) == 2 + 2 * (2 + num_drafting)  # a prefill, and a round from either state


def test_an_assistant_sees_what_is_in_the_targets_buffers(graphs: OnnxRuntimeEngine) -> None:
    """Change donor rows in place, and the same state drafts something else."""
    backend = OnnxRuntimeBackend(graphs, max_draft_tokens=4)
    backend.prefill(0, random_prompt(40, 3))
    round_call = backend._round_call(3, 1)
    calls, draft = backend._bind_drafts(round_call), round_call.draft.array
    for call in calls:
        call.run()
    before = draft.copy()
    for donor in graphs.manifest.donors:
        backend.cache.tensors[f"kv.{donor.layer}.value"].array[:] *= -3
    for call in calls:
        call.run()
    assert (draft != before).any()


def decode(backend: OnnxRuntimeBackend, num_tokens: int, num_draft_tokens: int) -> list[list[int]]:
    """Greedy tokens of every sequence, at least num_tokens each."""
    texts: list[list[int]] = [[] for _ in range(backend.num_slots)]
    while min(map(len, texts)) < num_tokens:
        step = backend.round(num_draft_tokens, [num_draft_tokens + 1] * backend.num_slots)
        for text, tokens in zip(texts, step.tokens, strict=True):
            text.extend(tokens)
    return [text[:num_tokens] for text in texts]


def feed(backend: OnnxRuntimeBackend, slot: int, ids: list[int]) -> int:
    """Prefill in chunks; the token after them."""
    chunk = backend.prefill_chunk
    return [backend.prefill(slot, ids[start : start + chunk]) for start in range(0, len(ids), chunk)][-1]


def test_a_batch_of_different_lengths_equals_solo_runs_across_compactions(graphs: OnnxRuntimeEngine) -> None:
    """Small buffers: many compactions; rejected drafts leave junk behind at every round."""
    lengths, num_tokens = (37, 9), 100

    def run(prompts: list[list[int]], prefill_chunk: int) -> tuple[list[list[int]], OnnxRuntimeBackend]:
        backend = OnnxRuntimeBackend(graphs, num_slots=len(prompts), prefill_chunk=prefill_chunk, max_draft_tokens=3)
        first = [feed(backend, slot, ids) for slot, ids in enumerate(prompts)]
        return [[a, *b] for a, b in zip(first, decode(backend, num_tokens, 3), strict=True)], backend

    prompts = [random_prompt(length, length) for length in lengths]
    together, backend = run(prompts, 16)
    assert backend.cache.num_compactions >= 3
    for sequence, ids in enumerate(prompts):
        alone, _ = run([ids], 128)  # other chunks, no compaction to speak of
        assert together[sequence] == alone[0]


def test_ten_windows_with_compaction_equal_an_uncompacted_run(
    graphs: OnnxRuntimeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = graphs.manifest.sliding_window
    num_tokens = min(10 * window, graphs.manifest.max_length - 40)
    texts = []
    for chunk in (8, 2000):
        backend = OnnxRuntimeBackend(graphs, prefill_chunk=chunk, max_draft_tokens=3)
        start = feed(backend, 0, random_prompt(8, 5))
        texts.append([start] + decode(backend, num_tokens, 3)[0])
        assert (backend.cache.num_compactions > 0) == (chunk == 8)
    assert texts[0] == texts[1]


def propose(backend: OnnxRuntimeBackend, drafts: list[list[int]], commit_limit: list[int]) -> list[list[int]]:
    """A round whose drafts come from the test instead of the assistant."""
    k = len(drafts[0])
    backend._round_call(k, len(drafts)).draft.array[:] = drafts
    backend._release_bindings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_bind_drafts", lambda _: [])
        return backend.round(k, commit_limit).tokens


def test_ten_windows_of_random_accepts_with_compaction_equal_a_plain_uncompacted_run(
    bundle_folder: Callable[[str], Path],
) -> None:
    """Two sequences of real text, drafts right for a random while, random rewinds of up to K + 1 rows."""
    graphs = OnnxRuntimeEngine(open_bundle(bundle_folder("demo")), num_threads=1)
    num_tokens, k = 10 * graphs.manifest.sliding_window + 20, 3
    prompts = [[2, 4, *range(300, 328)], [2, 4, *range(400, 409)]]
    plain = []
    for ids in prompts:
        backend = OnnxRuntimeBackend(graphs, prefill_chunk=2000, max_draft_tokens=k)
        first = backend.prefill(0, ids)
        plain.append([*ids, first] + decode(backend, num_tokens + k, 0)[0])
        assert backend.cache.num_compactions == 0
    backend = OnnxRuntimeBackend(graphs, num_slots=2, prefill_chunk=16, max_draft_tokens=k)
    random = np.random.default_rng(1)
    for slot, ids in enumerate(prompts):
        feed(backend, slot, ids)
    num_rewinds, num_accepted = 0, 0
    while min(backend.length) < num_tokens:
        held = list(backend.length)
        if random.random() < 0.2:
            for sequence in range(2):
                backend.rewind(sequence, held[sequence] - int(random.integers(0, k + 2)))
            ends = list(backend.length)
            tokens = [[backend.prefill(i, plain[i][ends[i] : ends[i] + 1])] for i in range(2)]
            num_rewinds += 1
        else:
            right = random.integers(0, k + 1, 2)
            drafts = [plain[i][held[i] + 1 : held[i] + 1 + k] for i in range(2)]
            for i in range(2):
                drafts[i] = [t if j < right[i] else (t + 1) % 2048 for j, t in enumerate(drafts[i])]
            limits = [int(n) for n in random.integers(0, k + 1, 2)]
            ends = held
            tokens = propose(backend, drafts, [limit + 1 for limit in limits])
            assert [len(t) - 1 for t in tokens] == [min(int(right[i]), limits[i]) for i in range(2)]
            num_accepted += sum(len(t) - 1 for t in tokens)
        for i in range(2):
            assert tokens[i] == plain[i][ends[i] + 1 : ends[i] + 1 + len(tokens[i])]
    assert len(set(plain[0])) > 30, "the text must not be one token over and over"
    assert backend.cache.num_compactions >= 6
    assert num_rewinds >= 5
    assert num_accepted >= 40


def test_non_finite_rows_raise_and_are_not_kept(graphs: OnnxRuntimeEngine) -> None:
    backend = OnnxRuntimeBackend(graphs, max_draft_tokens=3)
    backend.prefill(0, random_prompt(20, 1))
    name = f"kv.{graphs.manifest.kv[0].layer}.value"
    row = backend.cache.tensors[name].array[0, 0, 15]
    saved = row.copy()
    row[:] = np.nan
    assert backend.round(2, [3]) == Step([[]], [0])
    assert "NaN or infinity at positions 20" in backend.not_finite(0)
    assert backend.length[0] == 20
    row[:] = saved
    for tensor in backend.cache.tensors.values():
        assert np.isfinite(tensor.array).all()
    clean = OnnxRuntimeBackend(graphs, max_draft_tokens=3)
    clean.prefill(0, random_prompt(20, 1))
    with pytest.raises(ValueError, match="slot 0 is not ready: a prefill comes first"):
        backend.round(2, [3])
    for each in (backend, clean):
        each.rewind(0, 19)
        each.prefill(0, random_prompt(20, 1)[19:])
    assert backend.round(2, [3]) == clean.round(2, [3])
    row[:] = np.nan
    backend.rewind(0, 19)
    with pytest.raises(NonFiniteError, match="NaN or infinity at positions 19"):
        backend.prefill(0, random_prompt(20, 1)[19:])
    assert backend.length[0] == 19


def test_a_round_after_a_rewind_needs_a_prefill_first(graphs: OnnxRuntimeEngine) -> None:
    backend = OnnxRuntimeBackend(graphs, prefill_chunk=64, max_draft_tokens=3)
    with pytest.raises(ValueError, match="slot 0 is not ready"):
        backend.round(2, [3])
    backend.prefill(0, random_prompt(20, 1))
    backend.rewind(0, 18)
    with pytest.raises(ValueError, match="slot 0 is not ready: a prefill comes first"):
        backend.round(2, [3])
    with pytest.raises(ValueError, match="prefill takes 1 to 64 tokens"):
        backend.prefill(0, random_prompt(65, 1))


def test_buffers_that_grew_are_not_held_by_old_bindings(graphs: OnnxRuntimeEngine) -> None:
    backend = OnnxRuntimeBackend(graphs, max_draft_tokens=3)
    backend.prefill(0, random_prompt(20, 0))
    backend.round(3, [4])
    name = f"kv.{graphs.manifest.kv[-1].layer}.key"
    old = weakref.ref(backend.cache.tensors[name])
    backend.prefill(0, random_prompt(100, 1))
    assert old() is None


def test_plain_steps_leave_the_assistant_ready(graphs: OnnxRuntimeEngine) -> None:
    mixed, drafted = (OnnxRuntimeBackend(graphs, max_draft_tokens=4) for _ in range(2))
    for backend in (mixed, drafted):
        backend.prefill(0, random_prompt(20, 2))
    tokens = [t for k in (0, 3, 0, 0, 2, 4) for t in mixed.round(k, [k + 1]).tokens[0]]
    assert tokens == decode(drafted, len(tokens), 3)[0]


def test_bindings_do_not_grow_with_prompt_lengths(graphs: OnnxRuntimeEngine) -> None:
    backend = OnnxRuntimeBackend(graphs, max_draft_tokens=3)
    for length in range(2, 120):
        backend.reset(0)
        backend.prefill(0, random_prompt(length, length))
        backend.round(2, [3])
    assert len(backend._bound_prefills) <= len(backend._prefills) <= 4
    assert len(backend._bound_rounds) <= 2, "the two states"


def test_bfloat16_is_refused_on_the_cpu(bundle_folder: Callable[[str], Path]) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    bundle.manifest = bundle.manifest.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(BackendError, match="Export the pair with --dtype float32"):
        OnnxRuntimeEngine(bundle, num_threads=1)


def test_a_graph_that_does_not_load_is_named(bundle_folder: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    (tmp_path / "target.onnx").write_bytes(b"not a graph")
    bundle.folder = tmp_path
    with pytest.raises(BackendError, match=r"can't load .*target\.onnx"):
        OnnxRuntimeEngine(bundle, num_threads=1)
