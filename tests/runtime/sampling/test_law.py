"""What the shipped graphs draw follows the law: exact probabilities, and noise that knows nothing of its neighbours.

Each test has a mutation that it must fail with: rounds of the hash left out of a copy of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.sampling.files import DRAW

from .reference import ADDED, opened, run

VOCAB_SIZE = 16
DRAWS = 100_000
NO_FILTER = {"temperature": 1.0, "top_k": VOCAB_SIZE, "top_p": 1.0, "min_p": 0.0}
SETTINGS = {
    "none": NO_FILTER,
    "cold": NO_FILTER | {"temperature": 0.5},
    "hot": NO_FILTER | {"temperature": 1.5},
    "top_k": NO_FILTER | {"top_k": 5},
    "top_p": NO_FILTER | {"top_p": 0.8},
    "min_p": NO_FILTER | {"min_p": 0.15},
    "all": {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
}
LOGITS = np.sort(np.random.default_rng(0).standard_normal(VOCAB_SIZE) * 1.5)[::-1].astype(np.float32)
TOKENS = np.random.default_rng(1).permutation(VOCAB_SIZE)


def without_round(*constants: int) -> Callable[[ir.Graph], None]:
    """Leave out the rounds of the hash that follow the addition of these constants."""

    def change(graph: ir.Graph) -> None:
        for constant in constants:
            first = remainder_after(graph, constant)
            after = first.outputs[0]
            last = next(n for n in graph if n.op_type == "Mul" and n.inputs[0] is not after and n.inputs[1] is after)
            (mod,) = last.outputs[0].consumers()
            mod.outputs[0].replace_all_uses_with(after)

    return change


def remainder_after(graph: ir.Graph, constant: int) -> ir.Node:
    """The Mod that a round begins with."""
    added = next(
        node
        for node in graph
        if node.op_type == "Add"
        and any(v is not None and v.const_value is not None and v.const_value.numpy() == constant for v in node.inputs)
    )
    (remainder,) = added.outputs[0].consumers()
    return remainder


def drawn(session: ort.InferenceSession, settings: dict[str, float], seed: Array, index: Array) -> dict[str, Array]:
    """Draw from LOGITS at absolute indices with seeds, one row each."""
    shape = (len(seed), 1, VOCAB_SIZE)
    given = {name: np.full(len(seed), value) for name, value in settings.items()}
    return run(
        session,
        graph_io.feeds("draw", {
            **given, "seed": seed, "past_length": index - 1, "draft": np.zeros((len(seed), 0)),
            "draft_top_logits": np.broadcast_to(LOGITS, shape), "draft_top_tokens": np.broadcast_to(TOKENS, shape),
        }),
    )  # fmt: skip


def exact(temperature: float, top_k: float, top_p: float, min_p: float) -> Array:
    """Probability of each candidate of LOGITS, float64."""
    probs: Array = np.exp(LOGITS.astype(np.float64) / temperature) * (np.arange(VOCAB_SIZE) < top_k)
    probs /= probs.sum()
    probs *= (probs.cumsum() - probs < top_p) & (probs >= min_p * probs[0])
    probs /= probs.sum()
    return probs


def deviation(found: dict[str, Array], settings: dict[str, float]) -> float:
    """How many standard deviations the chi-square of what was drawn is above its mean; infinite for what can't be."""
    probs = exact(**settings)
    counts = np.bincount(found["next_draft"][:, -1], minlength=VOCAB_SIZE)[TOKENS]
    there = probs > 0
    if counts[~there].any():
        return np.inf
    expected = probs[there] * counts.sum()
    freedom = there.sum() - 1
    return float((((counts[there] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.fixture(scope="module")
def draw() -> ort.InferenceSession:
    return opened(DRAW)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_tokens_come_with_their_probability(name: str, along: str, draw: ort.InferenceSession) -> None:
    many, one = np.arange(1, DRAWS + 1), np.full(DRAWS, 12345)
    seed, index = (one, many) if along == "positions" else (many, one)
    assert abs(deviation(drawn(draw, SETTINGS[name], seed, index), SETTINGS[name])) < 5


@pytest.mark.parametrize("name", SETTINGS)
def test_a_hash_without_the_tokens_round_is_found_out(name: str) -> None:
    biased = opened(DRAW, without_round(ADDED[4]))
    index = np.arange(1, DRAWS + 1)
    found = drawn(biased, SETTINGS[name], np.full(DRAWS, 12345), index)
    assert deviation(found, SETTINGS[name]) > 50


def noise(session: ort.InferenceSession, seed: Array, index: Array) -> Array:
    """Noise of the tokens 0 to VOCAB_SIZE - 1, standardized, [N, V]."""
    u = drawn(session, NO_FILTER, seed, index)["uniform"][:, 0, np.argsort(TOKENS)].astype(np.float64)
    gumbel = -np.log(-np.log(u))
    standardized: Array = (gumbel - np.euler_gamma) / (np.pi / np.sqrt(6))
    return standardized


def correlations(session: ort.InferenceSession) -> dict[str, Array]:
    """Correlations between tokens, positions and seeds, in standard deviations of what chance makes."""
    many, one = np.arange(1, DRAWS + 1), np.full(DRAWS, 2**61 + 7)
    along = {"positions": noise(session, one, many), "seeds": noise(session, many, one)}
    found = {}
    for name, x in along.items():
        scale = 1 / np.sqrt(DRAWS)
        found[f"mean by token, {name}"] = x.mean(0) / scale
        found[f"pairs of tokens, {name}"] = (x.T @ x * scale)[np.triu_indices(VOCAB_SIZE, 1)]
        for lag in (1, 2, 5):  # of every token with every token
            found[f"{lag} {name} on"] = (x[:-lag].T @ x[lag:]).ravel() * scale
    found["position against seed"] = (along["positions"].T @ along["seeds"]).ravel() / np.sqrt(DRAWS)
    return found


def worst(found: dict[str, Array]) -> dict[str, float]:
    """The largest by name, of those that chance would make once in ten thousand runs of all tests together."""
    total = sum(map(np.size, found.values()))
    bound = NormalDist().inv_cdf(1 - 1e-4 / total / 2)
    return {name: float(abs(z).max()) for name, z in found.items() if abs(z).max() > bound}


def test_noise_of_tokens_positions_and_seeds_is_uncorrelated(draw: ort.InferenceSession) -> None:
    assert worst(correlations(draw)) == {}


@pytest.mark.parametrize(
    ("constants", "names"),
    [
        ((ADDED[2], ADDED[3]), ["1 positions on", "2 positions on", "5 positions on"]),
        ((ADDED[0], ADDED[1], ADDED[2], ADDED[3]), ["1 seeds on", "2 seeds on", "5 seeds on"]),
        ((ADDED[4],), ["pairs of tokens, positions", "pairs of tokens, seeds"]),
    ],
    ids=["position", "seed", "token"],
)
def test_a_hash_without_rounds_is_found_out(constants: tuple[int, ...], names: list[str]) -> None:
    found = worst(correlations(opened(DRAW, without_round(*constants))))
    assert set(names) <= found.keys()


def test_every_seed_and_position_makes_noise_of_its_own(draw: ort.InferenceSession) -> None:
    seed = np.repeat([0, 1, 2**31 - 1, 2**31, 2**61, 2**62 - 1], 100)
    found = drawn(draw, NO_FILTER, seed, np.tile(np.arange(1, 101), 6))["uniform"]
    assert len(np.unique(found.reshape(len(seed), -1), axis=0)) == len(seed)
