"""Writes into the nodes of a traced graph what they are, from the modules that torch says made them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import onnx_ir as ir

from slipstream.export.checkpoint.config import TextConfig
from slipstream.runtime.bundle import graph_roles

_SCOPES = "pkg.torch.onnx.name_scopes"  # names of the modules round a node from the outermost on, then its own


def name_roles(model: ir.Model, config: TextConfig) -> None:
    """Replace the metadata that torch left on nodes by that of ``runtime/bundle/graph_roles.py``.

    config: of the model that was traced. Raises AssertionError when a layer is not met.
    """
    found = set()
    for node in model.graph:
        scopes: Sequence[str] = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        role = graph_roles.HEAD if node.op_type == "Gemm" else "".join(scopes[-2:-1])
        node.metadata_props.clear()
        within = re.fullmatch(r"layers\.(\d+)\.?(.*)", role)
        if within is not None:
            layer, role = config.layers[int(within[1])], within[2]
            node.metadata_props.update({graph_roles.LAYER: str(layer.index), graph_roles.LAYER_TYPE: layer.type})
            if not role and node.op_type == "Mul":
                role = graph_roles.LAYER_SCALAR
            if node.op_type == "Attention":
                found.add(layer.index)
                role = graph_roles.CACHED_ATTENTION if layer.owns_kv else graph_roles.SHARED_ATTENTION
                if layer.type == "sliding":
                    node.metadata_props[graph_roles.WINDOW] = str(config.sliding_window)
        if role and not role.startswith("_"):  # what torch has no module for
            node.metadata_props[graph_roles.ROLE] = role
    missing = {layer.index for layer in config.layers} - found
    assert not missing, f"torch named no attention of the layers {sorted(missing)} in {_SCOPES}"
