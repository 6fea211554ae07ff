"""Filters of the shipped graphs against transformers' own processors: what is kept, and its probabilities."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.sampling.files import DRAW

from .reference import opened, run

VOCAB_SIZE, COUNT = 300, 64
SETTINGS = [*product([0.3, 0.7, 1.0, 1.5], [1, 5, 40, 64], [0.1, 0.5, 0.9, 0.95, 1.0], [0.0, 0.05, 0.3])]


def processed(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """Probabilities [V] of one row of logits [V], as transformers' generate() has them."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    scores = processors(torch.zeros((1, 1), dtype=torch.int64), torch.from_numpy(logits)[None])
    probs: Array = scores.double().softmax(-1)[0].numpy()
    return probs


def drawn_from(rows: Array) -> tuple[Array, Array]:
    """One row of logits [V] per setting -> tokens [N, T] and the probability that each is drawn with."""
    tokens = np.argsort(-rows, axis=-1)[:, None, :COUNT]
    temperature, top_k, top_p, min_p = np.array(SETTINGS).T
    fed = graph_io.feeds("draw", {
        "draft": np.zeros((len(rows), 0)), "past_length": np.arange(len(rows)), "seed": np.arange(len(rows)),
        "draft_top_logits": np.take_along_axis(rows[:, None], tokens, -1), "draft_top_tokens": tokens,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
    })  # fmt: skip
    found = run(opened(DRAW), fed)
    noise = -np.log(-np.log(found["uniform"].astype(np.float64)))
    scaled = found["score"] / temperature[:, None, None] - noise
    weights = np.exp(scaled - scaled[..., :1]) * found["kept"]
    return tokens[:, 0], (weights / weights.sum(-1, keepdims=True))[:, 0]


def test_filters_are_those_of_transformers() -> None:
    """What is left is drawn with softmax(score / temperature - noise): transformers' probabilities."""
    for seed in range(4):
        rows = np.random.default_rng(seed).standard_normal((len(SETTINGS), VOCAB_SIZE)).astype(np.float32) * 4
        tokens, probs = drawn_from(rows)
        expected = np.stack([processed(row, *settings) for row, settings in zip(rows, SETTINGS, strict=True)])
        found = np.zeros_like(expected)
        np.put_along_axis(found, tokens, probs, -1)
        differing = ((found > 0) != (expected > 0)).any(-1)
        assert [settings for settings, is_other in zip(SETTINGS, differing, strict=True) if is_other] == []
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)
