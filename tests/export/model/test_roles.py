"""What the nodes of exported graphs say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from slipstream.export.model.roles import name_roles
from slipstream.runtime.bundle.graph_roles import (
    CACHED_ATTENTION,
    EXPERTS,
    EXPERTS_INPUTS,
    HEAD,
    LAYER,
    LAYER_SCALAR,
    LAYER_TYPE,
    ROLE,
    SHARED_ATTENTION,
    WINDOW,
)

S, F = "sliding", "full"


def attentions(model: ir.Model) -> list[tuple[str, str, str, str | None]]:
    """Role, layer, its type and its window, of every attention in order."""
    said = [node.metadata_props for node in model.graph if node.op_type == "Attention"]
    return [(of[ROLE], of[LAYER], of[LAYER_TYPE], of.get(WINDOW)) for of in said]


def operators(model: ir.Model, role: str) -> list[str]:
    return [node.op_type for node in model.graph if node.metadata_props.get(ROLE) == role]


def test_a_targets_attentions_say_their_layer_and_window(bundle_folder: Callable[..., Path]) -> None:
    model = ir.load(bundle_folder("edge") / "target.onnx")
    types = [S, S, F, S, S, F]
    roles = [CACHED_ATTENTION] * 3 + [SHARED_ATTENTION] * 3
    windows = ["16" if kind == S else None for kind in types]
    assert attentions(model) == list(zip(roles, map(str, range(6)), types, windows, strict=True))
    assert operators(model, HEAD) == ["Gemm"]
    assert operators(model, "embed") == ["Gather", "Mul"]
    assert operators(model, "mlp.gate_up") == ["MatMul"] * 6
    assert operators(model, "attention.key_cache") == ["TensorScatter"] * 3
    assert operators(model, "post_mlp_norm") == ["RMSNormalization"] * 6
    assert operators(model, LAYER_SCALAR) == ["Mul"] * 6


def test_every_draft_step_says_it_again(bundle_folder: Callable[..., Path]) -> None:
    model = ir.load(bundle_folder("edge") / "assistant_3_steps.onnx")
    assert attentions(model) == [(SHARED_ATTENTION, "0", S, "16"), (SHARED_ATTENTION, "1", F, None)] * 3
    assert operators(model, "head.centroids") == ["MatMul"] * 3


def test_experts_say_what_they_gather(bundle_folder: Callable[..., Path]) -> None:
    model = ir.load(bundle_folder("experts") / "target.onnx")
    loops = [node for node in model.graph if node.op_type == "Loop"]
    assert [(loop.metadata_props[ROLE], loop.metadata_props[LAYER]) for loop in loops] == [
        (EXPERTS, str(layer)) for layer in range(3)
    ]
    for loop in loops:
        said = {node.metadata_props[ROLE] for node in loop.attributes["body"].as_graph() if node.op_type == "Gather"}
        assert said == {f"{EXPERTS}.{name}" for name in EXPERTS_INPUTS}


def test_nothing_that_torch_left_stays(bundle_folder: Callable[..., Path]) -> None:
    model = ir.load(bundle_folder("edge") / "target.onnx")
    keys = {key for node in model.graph.all_nodes() for key in node.metadata_props}
    assert keys == {ROLE, LAYER, LAYER_TYPE, WINDOW}


def test_a_torch_that_names_no_modules_is_an_error() -> None:
    model = ir.from_onnx_text('<ir_version: 11, opset_import: ["" : 24]> tiny (float x) => (float y) { y = Neg(x) }')
    config: Any = SimpleNamespace(layers=[SimpleNamespace(index=0)])
    with pytest.raises(AssertionError, match=r"no attention of the layers \[0\]"):
        name_roles(model, config)
