"""A bfloat16 bundle as one of float32 that rounds every tensor to bfloat16: what its precision costs, on any CPU.

Nothing here multiplies bfloat16. Operators compute in float32, as tensor cores accumulate; what
they read and give is bfloat16 wherever the bundle's graphs say so. Not a way to run a bundle.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from slipstream.engines.parity.reference_graphs import in_float32
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import MANIFEST, open_bundle

_BFLOAT16, _FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_COPIED = frozenset("TensorScatter Reshape Transpose Split Slice Concat Gather Unsqueeze Cast".split())


def round_to_bfloat16(folder: Path) -> int:
    """Make a bfloat16 bundle in a folder such a float32 one; how many tensors its graphs round."""
    manifest = open_bundle(folder).manifest
    num_rounded, files = 0, dict(manifest.files)
    for name in (manifest.target_graph, *(graph.file for graph in manifest.draft_graphs)):
        model = ir.load(folder / name)
        outputs = [value for node in model.graph if node.op_type not in _COPIED for value in node.outputs]
        rounded = [value for value in outputs if value.dtype == _BFLOAT16]
        in_float32(model)
        for value in rounded:
            _round(model.graph, value)
        (folder / name).write_bytes(ir.serde.serialize_model(model).SerializeToString())
        size, digest = (folder / name).stat().st_size, file_sha256(folder / name)
        files[name] = files[name].model_copy(update={"size_bytes": size, "sha256": digest})
        num_rounded += len(rounded)
    kv = [buffer.model_copy(update={"dtype": "float32"}) for buffer in manifest.kv]
    changed = manifest.model_copy(update={"dtype": "float32", "kv": kv, "files": files})
    (folder / MANIFEST).write_text(changed.model_dump_json(indent=2), encoding="utf-8")
    return num_rounded


def _round(graph: ir.Graph, value: ir.Value) -> None:
    readers, producer, name = list(value.uses()), value.producer(), str(value.name)
    assert producer is not None
    value.name = f"{name}.exact"
    narrow, wide = (ir.Node("", "Cast", [value], [ir.AttrInt64("to", to)]) for to in (_BFLOAT16, _FLOAT))
    wide.replace_input_with(0, narrow.outputs[0])
    for node, suffix, dtype in ((narrow, ".bfloat16", _BFLOAT16), (wide, "", _FLOAT)):
        output = node.outputs[0]
        output.name, output.type, output.shape = f"{name}{suffix}", ir.TensorType(dtype), value.shape
    graph.insert_after(producer, [narrow, wide])
    for reader, position in readers:
        reader.replace_input_with(position, wide.outputs[0])
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = wide.outputs[0]
