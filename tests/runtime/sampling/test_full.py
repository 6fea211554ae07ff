"""The graph over the whole row against transformers' own processors, and numpy where they have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from slipstream.runtime.backend.contract import MAX_SEED
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.sampling import FORBIDDEN, NUM_CANDIDATES
from slipstream.runtime.sampling.files import choose_path

from .reference import pick, run

V, OFFSET = 200, -1
NAMES = {b.name for b in graph_io.inputs("choose_sampled")}


def opened(name: graph_io.ChooseName) -> ort.InferenceSession:
    return ort.InferenceSession(choose_path(name, "float32"), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def full() -> ort.InferenceSession:
    return opened("choose_full")


@pytest.fixture(scope="module", params=["choose_processed", "choose_full"])
def either(request: pytest.FixtureRequest) -> ort.InferenceSession:
    return opened(request.param)


def case(rng: np.random.Generator, batch: int, num_draft_tokens: int, **changes: Any) -> dict[str, Array]:
    """A round with neutral settings, but for changes."""
    rows = num_draft_tokens + 1
    fed: dict[str, Array] = {
        "token": rng.integers(0, V, (batch, 1)),
        "draft": rng.integers(0, V, (batch, num_draft_tokens)),
        "past_length": rng.integers(0, 9999, batch),
        "scored_rows": np.tile(np.arange(rows), (batch, 1)),
        "commit_limit": np.full(batch, rows),
        "is_generated": np.ones(batch, np.int64),
        "logits": (rng.standard_normal((batch, rows, V)) * 5).astype(np.float32),
        "hidden": rng.standard_normal((batch, rows, 4)).astype(np.float32),
        "temperature": np.zeros(batch, np.float32),
        "top_k": np.full(batch, NUM_CANDIDATES),
        "top_p": np.ones(batch, np.float32),
        "min_p": np.zeros(batch, np.float32),
        "seed": rng.integers(0, MAX_SEED, batch),
        "repetition_penalty": np.ones(batch, np.float32),
        "presence_penalty": np.zeros(batch, np.float32),
        "frequency_penalty": np.zeros(batch, np.float32),
        "prompt_seen": (rng.random((batch, V)) < 0.2).astype(np.float32),
        "token_counts": rng.integers(0, 3, (batch, V)).astype(np.float32) * (rng.random((batch, V)) < 0.2),
        "logit_bias": np.zeros((batch, V), np.float32),
        "row_bias": np.zeros((batch, rows, V), np.float32),
        "position_offset": np.array([OFFSET]),
        "logit_softcap": np.zeros(1, np.float32),
    }
    assert set(changes) <= set(fed)
    made = {name: np.broadcast_to(value, fed[name].shape).astype(fed[name].dtype) for name, value in changes.items()}
    typed = {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in fed.items()}
    return {**typed, **made}


def seen_by(fed: dict[str, Array], sequence: int, row: int) -> list[int]:
    """Tokens of the call's rows up to a scored one."""
    rows = [*fed["token"][sequence], *fed["draft"][sequence]]
    return [int(token) for token in rows[: fed["scored_rows"][sequence, row] + 1]]


def processed(fed: dict[str, Array], sequence: int, row: int) -> Array:
    """Logits [V] after penalties, bias and mask, by transformers where it has them."""
    new = seen_by(fed, sequence, row) * int(fed["is_generated"][sequence])
    counts = fed["token_counts"][sequence].copy()
    np.add.at(counts, new, 1)
    seen = np.flatnonzero((fed["prompt_seen"][sequence] + counts) > 0)
    penalty = float(fed["repetition_penalty"][sequence])
    logits = torch.from_numpy(fed["logits"][sequence, row].copy())[None]
    scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(seen)[None], logits)[0].numpy()
    scores = scores - fed["frequency_penalty"][sequence] * counts
    scores = scores - fed["presence_penalty"][sequence] * (counts > 0)
    found: Array = scores + fed["logit_bias"][sequence] + fed["row_bias"][sequence, row]
    return found


def best_tokens(fed: dict[str, Array]) -> Array:
    batch, rows = fed["logits"].shape[:2]
    return np.array([[processed(fed, b, r).argmax() for r in range(rows)] for b in range(batch)])


PENALTIES = {
    "none": {},
    "repetition": {"repetition_penalty": [1.5]},
    "a reward for repetition": {"repetition_penalty": [0.6]},
    "presence": {"presence_penalty": [1.5]},
    "frequency": {"frequency_penalty": [0.7]},
    "all": {"repetition_penalty": [1.2], "presence_penalty": [0.5], "frequency_penalty": [-0.4]},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_transformers_and_openai(name: str, either: ort.InferenceSession) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        fed = case(rng, 3, 4, **PENALTIES[name])
        fed["draft"][:, 1] = fed["draft"][:, 0]  # a token that comes twice counts twice
        assert (run(either, fed)["own_token"] == best_tokens(fed)).all()


def test_each_row_sees_the_drafts_before_it(either: ort.InferenceSession) -> None:
    """A token that is likeliest everywhere is drafted in the second row: from there on it is penalized."""
    rng = np.random.default_rng(1)
    fed = case(rng, 1, 3, presence_penalty=[2.0], token_counts=np.zeros((1, V)), prompt_seen=np.zeros((1, V)))
    fed["logits"][:, :, 7], fed["logits"][:, :, 9] = 51, 50
    fed["token"][:], fed["draft"][:] = 3, [5, 7, 11]
    assert run(either, fed)["own_token"].tolist() == [[7, 7, 9, 9]]


def test_biases_and_masks_are_added_and_forbid(either: ort.InferenceSession) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        bias = np.where(rng.random((2, V)) < 0.3, rng.normal(0, 5, (2, V)), 0)
        mask = np.where(rng.random((2, 4, V)) < 0.9, FORBIDDEN, 0)
        mask[..., 5] = 0
        fed = case(rng, 2, 3, logit_bias=bias, row_bias=mask)
        found = run(either, fed)["own_token"]
        assert (found == best_tokens(fed)).all()
        assert (np.take_along_axis(mask, found[..., None], -1) == 0).all()


@pytest.mark.parametrize("top_k", [V, 65, 100])
def test_more_than_the_candidates_may_be_drawn(top_k: int, full: ort.InferenceSession) -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        fed = case(
            rng, 3, 3, temperature=[rng.choice([0.7, 1.5, 3.0])], top_k=[top_k], top_p=[rng.choice([0.5, 0.99, 1])]
        )
        position = fed["past_length"][:, None] + fed["scored_rows"] + 1
        order = np.argsort(-fed["logits"], axis=-1, kind="stable")
        expected = pick(np.take_along_axis(fed["logits"], order, -1), order, position, fed)
        close = expected.lead < 1e-4
        assert ((run(full, fed)["own_token"] == expected.token) | close).all()


def test_what_is_drawn_from_the_whole_row_follows_the_law(full: ort.InferenceSession) -> None:
    """Chi-square over a flat row, where the 64 likeliest hold a third of the probability."""
    logits = np.random.default_rng(4).standard_normal(V).astype(np.float32) * 0.3
    counts = np.zeros(V)
    for seed in range(100):
        fed = case(np.random.default_rng(seed), 8, 19, temperature=[1.0], top_k=[V])
        fed["logits"][:] = logits
        np.add.at(counts, run(full, fed)["own_token"].ravel(), 1)
    shares = np.exp(logits.astype(np.float64))
    expected = shares / shares.sum() * counts.sum()
    z = (((counts - expected) ** 2 / expected).sum() - (V - 1)) / np.sqrt(2 * (V - 1))
    assert abs(z) < 4


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_who_needs_only_candidates_gets_the_tokens_of_the_smaller_graph(seed: int, has_softcap: bool) -> None:
    """Bit by bit the same choice, whoever else is in the batch."""
    rng = np.random.default_rng(seed)
    fed = case(rng, 4, 4, logit_softcap=[30.0 * has_softcap], temperature=rng.choice([0, 0.5, 1, 2], 4))
    fed |= {"top_k": rng.integers(1, 65, 4), "top_p": rng.choice([0.3, 0.9, 1], 4).astype(np.float32)}
    wanted = run(opened("choose_sampled"), {n: v for n, v in fed.items() if n in NAMES})
    fed["presence_penalty"] = np.array([1, 0, 0, 0], np.float32)
    processed = run(opened("choose_processed"), fed)
    fed["top_k"] = np.array([V, *fed["top_k"][1:]])
    check_alike(wanted, processed)
    check_alike(wanted, run(opened("choose_full"), fed))


def check_alike(wanted: dict[str, Array], found: dict[str, Array]) -> None:
    """All sequences but the first."""
    for name in ("own_token", "num_accepted", "next_token", "next_past_length", "next_position", "next_hidden"):
        assert (found[name][1:] == wanted[name][1:]).all(), name


def test_counts_follow_what_is_committed_in_place(either: ort.InferenceSession) -> None:
    """Bound to the very buffer that is read, as the runtime does."""
    rng = np.random.default_rng(5)
    fed = case(rng, 4, 3, commit_limit=[0, 1, 4, 4], is_generated=[1, 1, 1, 0], frequency_penalty=[0.3])
    fed["draft"] = best_tokens(fed)[:, :3].copy()
    before = fed["token_counts"].copy()
    binding = either.io_binding()
    for name, value in fed.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(value))
    counts = np.ascontiguousarray(fed["token_counts"])
    binding.bind_input("token_counts", "cpu", 0, np.float32, counts.shape, counts.ctypes.data)
    binding.bind_output("next_token_counts", "cpu", 0, np.float32, counts.shape, counts.ctypes.data)
    binding.bind_output("own_token")
    binding.bind_output("num_accepted")
    either.run_with_iobinding(binding)
    own, accepted = (value.numpy() for value in binding.get_outputs()[1:])
    assert (own == run(either, fed)["own_token"]).all()
    for sequence in range(4):
        added = seen_by(fed, sequence, accepted[sequence]) if fed["commit_limit"][sequence] else []
        np.add.at(before[sequence], added * int(fed["is_generated"][sequence]), 1)
    assert (counts == before).all()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_logprobs_are_transformers(softcap: float, either: ort.InferenceSession) -> None:
    """Of the model's own logits, whatever changes the choice."""
    rng = np.random.default_rng(6)
    fed = case(rng, 2, 3, logit_softcap=[softcap], temperature=[1.5], presence_penalty=[1.0], top_k=[V])
    found = run(either, fed)
    logits = torch.from_numpy(fed["logits"])
    capped = torch.tanh(logits / softcap) * softcap if softcap else logits
    expected = torch.log_softmax(capped, -1).numpy()
    own = np.take_along_axis(expected, found["own_token"][..., None], -1)[..., 0]
    np.testing.assert_allclose(found["logprob"], own, atol=1e-4)
    order = np.argsort(-expected, axis=-1, kind="stable")[..., : graph_io.NUM_LOGPROBS]
    assert (found["top_logprob_tokens"] == order).all()
    np.testing.assert_allclose(found["top_logprobs"], np.take_along_axis(expected, order, -1), atol=1e-4)


def test_penalties_come_before_temperature(either: ort.InferenceSession) -> None:
    """In transformers' order; after it a penalty of 1 would weigh more at low temperatures."""
    rng = np.random.default_rng(7)
    fed = case(rng, 1, 0, repetition_penalty=[1.3], temperature=[0.25], top_k=[V])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.25)])
    seen = np.flatnonzero(fed["prompt_seen"][0] + fed["token_counts"][0])
    ids = torch.from_numpy(np.append(seen, fed["token"][0]))[None]
    law = processors(ids, torch.from_numpy(fed["logits"][0].copy())).softmax(-1)[0].numpy()
    counts = np.zeros(V)
    for seed in range(3000):
        counts[run(either, fed | {"seed": np.array([seed])})["own_token"][0, 0]] += 1
    assert np.abs(counts / 3000 - law).max() < 4 * np.sqrt(0.25 / 3000)
