"""What to run both graphs of the edge-like pairs on: a few rows held, and junk behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT

CAPACITY = {"sliding": 96, "full": 160}
NUM_HELD = 40


def feeds_of(session: ort.InferenceSession, junk: float) -> dict[str, Any]:
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "token": np.array([[40]]),
        "draft": np.array([[41, 42]]),
        "hidden": random.standard_normal((1, 1, 48)).astype(np.float32),
        "position": np.array([NUM_HELD]),
        "past_length": np.array([NUM_HELD]),
        "base": np.array([8]),
        "scored_rows": np.array([[0, 1, 2]]),
    }
    for node in session.get_inputs():
        if node.name.startswith("kv."):
            kind = "sliding" if node.name.split(".")[1] in "01" else "full"
            shape = (1, node.shape[1], CAPACITY[kind], node.shape[3])
            feeds[node.name] = random.standard_normal(shape).astype(np.float32)
            feeds[node.name][:, :, NUM_HELD + 3 :] = junk
        elif node.name == PER_LAYER_INPUT:
            feeds[node.name] = 0.2 * random.standard_normal((1, 3, node.shape[2])).astype(np.float32)  # as a table's
    return feeds


def without_roles(model: ir.Model) -> ir.Model:
    """As graphs were exported before their nodes said what they are."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
    return model
