"""``python -m slipstream.export.sampling_graphs`` makes the graphs of ``runtime/sampling``, which the package ships."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import onnx_ir as ir
from onnx_ir.tensor_adapters import from_torch_dtype

from slipstream.export.model.graphs import SamplingModule, sampling_graph
from slipstream.export.model.sampling import ChooseGreedy, ChooseSampled, Draw
from slipstream.export.model.sampling_full import ChooseFull, ChooseProcessed
from slipstream.export.weights.recipes import DTYPES
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.sampling.files import DRAW, choose_path


def contents() -> dict[Path, bytes]:
    """What each file holds."""
    made = {DRAW: _serialized(_bare(Draw()))}
    for module in (ChooseGreedy(), ChooseSampled(), ChooseProcessed(), ChooseFull()):
        choose = _bare(module)
        for dtype in get_args(DType):
            for value in (*choose.graph.inputs, *choose.graph.outputs):
                if value.name in {"hidden", "next_hidden"}:  # rows are picked, whatever their type
                    value.dtype = from_torch_dtype(DTYPES[dtype])
            made[choose_path(module.name, dtype)] = _serialized(choose)
    return made


def _bare(module: SamplingModule) -> ir.Model:
    """A module's graph without what torch says of itself, and without shapes but those of the table."""
    model = sampling_graph(module)
    model.producer_name = model.producer_version = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.name = node.doc_string = None
        node.metadata_props.clear()
        for value in node.outputs:
            value.shape = None
            value.metadata_props.clear()
    for value, binding in zip(model.graph.outputs, graph_io.outputs(module.name), strict=True):
        value.shape = ir.Shape(binding.shape)
    return model


def _serialized(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return content


if __name__ == "__main__":
    for path, content in contents().items():
        path.write_bytes(content)
