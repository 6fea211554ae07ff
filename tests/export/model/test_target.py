"""What the target graph promises beside its logits: acceptance, selection, and blindness to junk rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, feeds, kv_name, kv_output_name
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from tests.support.pairs import VOCAB_SIZE

Array = npt.NDArray[Any]
PROMPT = [2, 40, 300, 290, 61, 7, 299, 280, 150, 30, 270, 271, 272, 20, 266, 281, 285, 100, 101, 102]


@pytest.fixture(scope="module")
def graphs(bundle_folder: Callable[[str], Path]) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(open_bundle(bundle_folder("edge")), num_threads=1)


def fresh_kv(graphs: OnnxRuntimeEngine, batch: int = 1, capacity: int = 64, fill: float = 0.0) -> dict[str, Array]:
    return {
        kv_name(b.layer, part): np.full((batch, b.num_kv_heads, capacity, b.head_dim), fill, np.float32)
        for b in graphs.manifest.kv
        for part in ("key", "value")
    }


def call(
    graphs: OnnxRuntimeEngine,
    kv: dict[str, Array],
    rows: Sequence[Sequence[int]],
    past_length: Sequence[int],
    scored_rows: Sequence[Sequence[int]],
    commit_limit: Sequence[int],
    base: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Run the graph and what chooses after it; KV comes back under the input names in "kv"."""
    ids = np.array(rows)
    names = [output.name for output in graphs.target.get_outputs()]
    fed = {
        "token": ids[:, :1],
        "draft": ids[:, 1:],
        "past_length": np.array(past_length),
        "base": np.array(base if base is not None else [0] * len(rows)),
        "scored_rows": np.array(scored_rows),
    }
    if graphs.per_layer_table is not None:
        fed[PER_LAYER_INPUT] = graphs.per_layer_table.rows(ids)
    out: dict[str, Any] = dict(zip(names, graphs.target.run(names, fed | kv), strict=True))
    out["kv"] = {name: out.pop(f"next_{name}") for name in kv}
    given = {**{name: out[name] for name in ("logits", "hidden")}, "commit_limit": np.array(commit_limit)}
    given |= {name: fed[name] for name in ("draft", "past_length", "scored_rows")}
    choose = graphs.choose("choose_greedy")
    names = [output.name for output in choose.get_outputs()]
    return out | dict(zip(names, choose.run(names, feeds("choose_greedy", given)), strict=True))


def prefilled(graphs: OnnxRuntimeEngine, fill: float = 0.0) -> tuple[dict[str, Array], int]:
    """KV of PROMPT and the token after it."""
    out = call(graphs, fresh_kv(graphs, fill=fill), [PROMPT], [0], [[len(PROMPT) - 1]], [1])
    return out["kv"], int(out["next_token"][0, 0])


def plain_tokens(graphs: OnnxRuntimeEngine, count: int) -> list[int]:
    kv, token = prefilled(graphs)
    tokens = [token]
    for step in range(count - 1):
        out = call(graphs, kv, [[tokens[-1]]], [len(PROMPT) + step], [[0]], [1])
        kv = out["kv"]
        tokens.append(int(out["next_token"][0, 0]))
    return tokens


def test_drafts_are_accepted_up_to_the_first_that_differs(graphs: OnnxRuntimeEngine) -> None:
    tokens = plain_tokens(graphs, 6)
    kv, _ = prefilled(graphs)
    n = len(PROMPT)
    for wrong in range(5):
        draft = tokens[1:5]
        if wrong < 4:
            draft[wrong] = (draft[wrong] + 1) % VOCAB_SIZE
        out = call(graphs, kv, [[tokens[0], *draft]], [n], [range(5)], [5])
        assert out["num_accepted"].tolist() == [wrong]
        assert out["own_token"][0, : wrong + 1].tolist() == tokens[1 : wrong + 2]
        assert out["next_token"].tolist() == [[tokens[wrong + 1]]]
        assert out["next_past_length"].tolist() == [n + wrong + 1]
        assert out["next_position"].tolist() == [n + wrong + 1]
        assert (out["next_hidden"][0, 0] == out["hidden"][0, wrong]).all()


def test_commit_limit_bounds_what_is_added(graphs: OnnxRuntimeEngine) -> None:
    tokens = plain_tokens(graphs, 5)
    kv, _ = prefilled(graphs)
    for limit in range(1, 5):
        out = call(graphs, kv, [tokens[:4]], [len(PROMPT)], [range(4)], [limit])
        assert out["num_accepted"].tolist() == [limit - 1]
        assert out["next_past_length"].tolist() == [len(PROMPT) + limit]
    out = call(graphs, kv, [tokens[:4]], [len(PROMPT)], [range(4)], [0])
    assert out["num_accepted"].tolist() == [0]
    assert out["next_past_length"].tolist() == [len(PROMPT)]


def test_unscored_rows_are_taken_as_given(graphs: OnnxRuntimeEngine) -> None:
    """A prefill chunk moves the state to its last real row, whatever the model would have said."""
    out = call(graphs, fresh_kv(graphs), [[*PROMPT, 0, 0, 0]], [0], [[len(PROMPT) - 1]], [1])
    _, token = prefilled(graphs)
    assert out["next_token"].tolist() == [[token]]
    assert out["next_past_length"].tolist() == [len(PROMPT)]


@pytest.mark.parametrize("poison", [1e4, -1e4, 1e30])
def test_rows_at_or_above_the_length_change_nothing(graphs: OnnxRuntimeEngine, poison: float) -> None:
    """Unused tail and rejected rows: the same bits come out."""
    clean, token = prefilled(graphs)
    n = len(PROMPT)
    dirty = {name: value.copy() for name, value in clean.items()}
    for value in dirty.values():
        value[:, :, n:] = poison
    ids, scored = [[token, 300, 40]], [range(3)]
    one, other = call(graphs, clean, ids, [n], scored, [3]), call(graphs, dirty, ids, [n], scored, [3])
    for name in ("logits", "hidden", "own_token", "next_hidden"):
        assert (one[name] == other[name]).all(), name


def test_a_buffer_that_starts_later_gives_the_same(graphs: OnnxRuntimeEngine) -> None:
    """Masks go by absolute position: dropping sliding rows before the window, with base moved, changes nothing."""
    kv, token = prefilled(graphs)
    n, window = len(PROMPT), graphs.manifest.sliding_window
    base = n - window
    moved = dict(kv)
    for buffer in graphs.manifest.kv:
        for part in ("key", "value"):
            if buffer.type == "sliding":
                name = kv_name(buffer.layer, part)
                moved[name] = np.full_like(kv[name], 7e3)
                moved[name][:, :, : n - base] = kv[name][:, :, base:n]
    ids, scored = [[token, 300, 40]], [range(3)]
    one, other = call(graphs, kv, ids, [n], scored, [3]), call(graphs, moved, ids, [n], scored, [3], base=[base])
    np.testing.assert_allclose(one["logits"], other["logits"], rtol=0, atol=2e-5)
    assert (one["own_token"] == other["own_token"]).all()


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=3), st.integers(0, 3))
def test_each_sequence_of_a_batch_equals_its_solo_run(
    graphs: OnnxRuntimeEngine, lengths: list[int], num_draft: int
) -> None:
    """Different lengths, right-padded prefill."""
    random = np.random.default_rng(sum(lengths) + num_draft)
    prompts = [random.integers(8, VOCAB_SIZE, length).tolist() for length in lengths]
    drafts = random.integers(8, VOCAB_SIZE, (len(lengths), num_draft + 1)).tolist()
    width = max(lengths)
    padded = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
    batch = len(lengths)
    scored = [[length - 1] for length in lengths]
    together = call(graphs, fresh_kv(graphs, batch), padded, [0] * batch, scored, [1] * batch)
    rows = [range(num_draft + 1)] * batch
    verified = call(graphs, together["kv"], drafts, lengths, rows, [num_draft + 1] * batch)
    for i, prompt in enumerate(prompts):
        alone = call(graphs, fresh_kv(graphs), [prompt], [0], [[len(prompt) - 1]], [1])
        solo = call(graphs, alone["kv"], [drafts[i]], [len(prompt)], [range(num_draft + 1)], [num_draft + 1])
        np.testing.assert_allclose(verified["logits"][i], solo["logits"][0], rtol=0, atol=5e-5)
        assert verified["next_past_length"][i] == solo["next_past_length"][0]


def test_a_row_that_is_not_finite_is_reported_for_its_sequence_only(graphs: OnnxRuntimeEngine) -> None:
    kv = fresh_kv(graphs, batch=2)
    out = call(graphs, kv, [PROMPT, PROMPT], [0, 0], [[19], [19]], [1, 1])
    assert out["is_finite"].tolist() == [True, True]
    for bad in (np.nan, np.inf):
        broken = {name: value.copy() for name, value in out["kv"].items()}
        broken[kv_name(graphs.manifest.kv[-1].layer, "value")][1, :, 3] = bad
        verdict = call(graphs, broken, [[40], [40]], [20, 20], [[0], [0]], [0, 0])["is_finite"]
        assert verdict.tolist() == [True, False]


def test_every_kv_output_is_its_input_with_the_new_rows(graphs: OnnxRuntimeEngine) -> None:
    kv = fresh_kv(graphs, fill=5.0)
    out = call(graphs, kv, [PROMPT[:6]], [3], [[5]], [0])
    assert set(out["kv"]) == set(kv)
    for name, value in out["kv"].items():
        assert (value[:, :, :3] == 5).all(), name
        assert (value[:, :, 9:] == 5).all(), name
        assert (value[:, :, 3:9] != 5).all(), name
    assert kv_output_name(0, "key") == "next_kv.0.key"
