"""Traced graphs, each made once and kept: tracing takes most of an export's time, and reads no weight."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from slipstream.export import trace
from slipstream.export.model.graphs import TracedGraph

from .fixtures import MadeOnce

_KEY = "_made_with"  # what a module's graph follows from
_MODEL, _RECIPES = "model.onnx", "recipes.pickle"


def keep_traces(patch: pytest.MonkeyPatch, made_once: MadeOnce) -> None:
    """Exports of the same modules share a trace, in every test process. Modules of a test's own are traced as ever."""
    for name in ("Target", "Assistant"):
        patch.setattr(trace, name, _with_key(getattr(trace, name)))
    for name in ("target_graph", "assistant_graph"):
        patch.setattr(trace, name, _kept(getattr(trace, name), made_once))
    # what torch knows of ONNX's operators, which it would gather anew for every graph
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))


def _with_key(kind: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        module = kind(*args, **kwargs)
        setattr(module, _KEY, repr((kind, args, kwargs, torch.get_default_dtype())))
        return module

    return make


def _kept(make_graph: Callable[..., TracedGraph], made_once: MadeOnce) -> Callable[..., TracedGraph]:
    def graph(module: Any, *rest: Any) -> TracedGraph:
        if not hasattr(module, _KEY):
            return make_graph(module, *rest)
        name = sha256(repr((getattr(module, _KEY), rest)).encode()).hexdigest()[:16]
        return _load(made_once(f"trace-{name}", lambda work: _save(make_graph(module, *rest), work)))

    return graph


def _save(traced: TracedGraph, folder: Path) -> None:
    """With weights that are named only, as they have no values yet."""
    folder.mkdir()
    for name in traced.recipes:
        value = traced.model.graph.initializers[name]
        assert value.dtype is not None
        assert isinstance(value.shape, ir.Shape)
        value.const_value = ir.ExternalTensor("no file", 0, 0, value.dtype, shape=value.shape, name=name)
    ir.save(traced.model, folder / _MODEL)
    (folder / _RECIPES).write_bytes(pickle.dumps(traced.recipes))


def _load(folder: Path) -> TracedGraph:
    return TracedGraph(ir.load(folder / _MODEL), pickle.loads((folder / _RECIPES).read_bytes()))
