"""The law of ``runtime/sampling`` in numpy, and the shipped graphs with their inner values as outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.ort.session import open_session, session_options
from slipstream.runtime.sampling import NUM_CANDIDATES

PRIME = 2**31 - 1
ADDED = (0x1B873593, 0x2545F491, 0x6A09E667, 0x3C6EF372, 0x510E527F)
LEAST = np.float32(-3.0e38)
INNER = ("kept", "uniform", "score")


class Picked(NamedTuple):
    """Of rows [B, R]: the token drawn, what was kept [B, R, T], and by how much the best score leads."""

    token: Array
    kept: Array
    lead: Array


def uniform(seed: Array, position: Array, tokens: Array) -> Array:
    """seed [B], position [B, R], tokens [B, R, T] -> u of the law."""
    key = _fifth_power(_fifth_power(seed % PRIME + ADDED[0]) + seed // PRIME % PRIME + ADDED[1])
    row = _fifth_power(_fifth_power(key[:, None] + position + ADDED[2]) + ADDED[3])
    bits = _fifth_power(row[..., None] + tokens + ADDED[4]) // 256
    u: Array = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return u


def pick(logits: Array, tokens: Array, position: Array, settings: Mapping[str, Array]) -> Picked:
    """logits, tokens [B, R, T], descending; position [B, R]; settings by the graphs' names, [B]."""
    temperature, top_k, top_p, min_p = (settings[n][:, None, None] for n in ("temperature", "top_k", "top_p", "min_p"))
    among_k = np.arange(tokens.shape[2]) < top_k
    scaled = np.where(among_k, logits / np.maximum(temperature, np.float32(1e-6)), LEAST)
    weights = np.exp(scaled - scaled[..., :1])
    probs = weights / weights.sum(-1, keepdims=True)
    before = probs.cumsum(-1, dtype=np.float32) - probs
    kept = among_k & ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[..., :1])
    noise = -np.log(-np.log(uniform(settings["seed"], position, tokens)))
    score = np.where(kept, logits + temperature * noise, LEAST)
    best = np.sort(np.append(score, np.full_like(score[..., :1], LEAST), -1), -1)
    token = np.take_along_axis(tokens, score.argmax(-1)[..., None], -1)[..., 0]
    return Picked(token, kept, best[..., -1] - best[..., -2])


def candidates(logits: Array, softcap: float) -> tuple[Array, Array]:
    """The largest NUM_CANDIDATES of logits [B, R, V], softcapped, descending, and their tokens."""
    tokens = np.argsort(-logits, axis=-1, kind="stable")[..., :NUM_CANDIDATES]
    top = np.take_along_axis(logits, tokens, -1)
    is_capped = (softcap > 0) & (top > -1e37)
    return np.where(is_capped, np.tanh(top / np.float32(softcap or 1)) * np.float32(softcap), top), tokens


def accepted(draft: Sequence[int], own_token: Sequence[int], scored_rows: Sequence[int], commit_limit: int) -> int:
    """How many drafts of one sequence its own tokens accept."""
    count = 0
    while count + 1 < commit_limit and draft[scored_rows[count]] == own_token[count]:
        count += 1
    return count


def opened(path: Path, change: Callable[[ir.Graph], None] | None = None) -> ort.InferenceSession:
    """A shipped graph with INNER as outputs, too. change: what a test does to its copy."""
    model = ir.load(path)
    graph = model.graph
    (argmax,) = (node for node in graph if node.op_type == "ArgMax")
    score = argmax.inputs[0]
    first_log = next(node for node in graph if node.op_type == "Log")
    assert score is not None
    chosen = score.producer()
    assert chosen is not None
    for name, value in zip(INNER, (chosen.inputs[0], first_log.inputs[0], score), strict=True):
        assert value is not None
        value.name = name
        graph.outputs.append(value)
    if change is not None:
        change(graph)
    return open_session(ir.to_proto(model).SerializeToString(), session_options(num_threads=1), path)


def run(session: ort.InferenceSession, fed: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(fed)), strict=True))


def _fifth_power(x: Array) -> Array:
    x = x % PRIME
    square = x * x % PRIME
    fifth: Array = square * square % PRIME * x % PRIME
    return fifth
