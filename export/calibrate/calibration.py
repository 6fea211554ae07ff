"""Runs freshly written graphs over a short text on ONNX Runtime's CPU provider, for what weights don't tell.

Two questions: does every float16 value of the graphs stay within float16, and how large do keys and
values get. The run is bounded, one window and a little more. No matrix is packed, folded or widened
ahead of time, so weights stay mapped pages but for the one matrix at work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from slipstream.runtime.backend.per_layer_table import open_per_layer_table
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import NUMPY, Array
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, feeds, kv_name
from slipstream.runtime.bundle.manifest import Bundle
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.ort.session import open_session, run_bound, session_options
from slipstream.runtime.text.codec import TextCodec

from .watch_float16 import LARGEST_OUTPUT, watch_float16

_CHUNK = 128
_BEYOND_WINDOW = 64
_MOST_TOKENS = 1152
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)

# Prose, code, numbers and other scripts: what moves activations apart. Repeated beyond the window.
TEXT = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")


def calibrate(bundle: Bundle, codec: TextCodec) -> dict[int, tuple[float, float]]:
    """Run the target over the text, then each assistant graph on what it left; the largest |key| and |value| by layer.

    The bundle's KV is float, as its dtype is: float32 or float16. Raises CheckpointError with the place in text
    and graph at the first value that is not finite, or that float16 can't hold where it is meant to.
    """
    ids = _tokens(bundle, codec)
    target = _Target(bundle, len(ids))
    hidden = [target.call(ids[start : start + _CHUNK], start) for start in range(0, len(ids), _CHUNK)][-1]
    position = len(ids) + bundle.manifest.draft_position_offset
    call = {"token": [ids[-1:]], "draft": [[]], "hidden": hidden, "position": [position], "past_length": [len(ids)]}
    for graph in bundle.manifest.draft_graphs:
        _Graph(bundle, graph.file).run(feeds("assistant", {**call, **target.kv}), {}, "after the last token")
    largest = {name: max(float(values.max()), -float(values.min())) for name, values in target.kv.items()}
    layers = [buffer.layer for buffer in bundle.manifest.kv]
    return {layer: (largest[kv_name(layer, "key")], largest[kv_name(layer, "value")]) for layer in layers}


def _tokens(bundle: Bundle, codec: TextCodec) -> list[int]:
    """The text's ids from BOS on, repeated to a little beyond the sliding window where the context allows it."""
    manifest = bundle.manifest
    ids = codec.encode_more(TEXT)
    length = min(manifest.sliding_window + _BEYOND_WINDOW, manifest.max_length - 1, _MOST_TOKENS)
    return [codec.bos_token_id, *(ids * (1 + length // len(ids)))][:length]


class _Graph:
    """A graph of the bundle whose float16 values are watched."""

    def __init__(self, bundle: Bundle, file: str) -> None:
        model = ir.load(bundle.path(file))
        self._file, self._dtype = file, bundle.manifest.dtype
        self._places = watch_float16(model)
        options = session_options(bundle.folder)
        # Hold no copy of a weight for longer than one node needs it. A float16 graph of 640 MiB peaked at 3.0 GiB in
        # the usual order, which widens every weight at the start, and at 0.3 GiB with all of this.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        content = ir.to_proto(model).SerializeToString()
        self._session = open_session(content, options, f"{file} to calibrate")

    def run(self, feeds: Mapping[str, Array], in_place: Mapping[str, Array], where: str) -> dict[str, Array]:
        """Outputs by name, but for those written ``in_place``. feeds may hold more than the graph reads.

        where: which part of the text this is, for the CheckpointError.
        """
        binding = self._session.io_binding()
        for node in self._session.get_inputs():
            _bind(binding.bind_input, node.name, feeds[node.name])
        names = [node.name for node in self._session.get_outputs()]
        for name in names:
            if name in in_place:
                _bind(binding.bind_output, name, in_place[name])
            else:
                binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        made = zip(names, binding.get_outputs(), strict=True)
        outputs = {name: value.numpy() for name, value in made if name not in in_place}
        self._check(outputs, where)
        return outputs

    def _check(self, outputs: dict[str, Array], where: str) -> None:
        for place, largest in zip(self._places, outputs.pop(LARGEST_OUTPUT, np.zeros(0)).tolist(), strict=True):
            if not largest <= _LARGEST_FLOAT16:
                raise self._error(f"{largest:.3g} {place} where float16 ends at {_LARGEST_FLOAT16:.0f}", where)
        for name, value in outputs.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise self._error(f"NaN or infinity in {name}", where)

    def _error(self, found: str, where: str) -> CheckpointError:
        advice = "--dtype bfloat16 or float32" if self._dtype == "float16" else "--kv float, or repair the weights"
        return CheckpointError(f"{self._file} has {found}, {where} of the calibration text: export with {advice}")


def _bind(bind: Any, name: str, array: Array) -> None:
    assert array.flags.c_contiguous
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class _Target:
    """The target with KV buffers of its own, updated in place."""

    def __init__(self, bundle: Bundle, num_rows: int) -> None:
        self._graph = _Graph(bundle, bundle.manifest.target_graph)
        self._table = open_per_layer_table(bundle)
        sizes = {"batch": 1, "sliding_capacity": num_rows, "full_capacity": num_rows}
        buffers = graph_io.for_layers(graph_io.placed(graph_io.inputs("target"), "cache"), bundle.manifest.kv)
        self.kv = {buffer.name: np.zeros(buffer.sized(sizes), NUMPY[buffer.dtype]) for buffer in buffers}
        self._outputs = {f"next_{name}": rows for name, rows in self.kv.items()}

    def call(self, ids: Sequence[int], start: int) -> Array:
        """Run ids at positions from start on, every row scored; the last hidden row [1, 1, N]."""
        tokens = np.array([ids])
        call = {"token": tokens[:, :1], "draft": tokens[:, 1:], "past_length": [start]}
        call["scored_rows"] = np.arange(len(ids))[None]
        if self._table is not None:
            call[PER_LAYER_INPUT] = self._table.rows(tokens)
        fed = feeds("target", {**call, **self.kv}, has_per_layer_rows=self._table is not None)
        outputs = self._graph.run(fed, self._outputs, f"in tokens {start} to {start + len(ids) - 1}")
        return outputs["hidden"][:, -1:].copy()
