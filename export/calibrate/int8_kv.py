"""A pass over the traced graphs: KV buffers in int8, one scale for each buffer's keys and one for its values.

Rows are quantized as they are written and the buffer is dequantized as it is read, so every reader of a buffer, the
assistant included, goes by the scales of its one entry in the manifest. Values beyond 127 scales saturate. Dequantizing
costs a float copy of each buffer per call; attention itself is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from slipstream.export.model.initializers import constant
from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.bundle.graph_io import kv_name

# Room above what calibration saw: a value that saturates does more harm than steps a quarter larger
# (demo pair, text it was not calibrated on: largest logit error 0.71 without room, 0.44 with it).
MARGIN = 1.25
_LARGEST_INT8 = 127


def int8_table(
    table: Iterable[contract.KVBuffer], largest: Mapping[int, tuple[float, float]]
) -> list[contract.KVBuffer]:
    """The buffers in int8. largest: absolute maximum of keys and of values, by layer."""
    made = []
    for buffer in table:
        key_scale, value_scale = (_scale(each, buffer.dtype) for each in largest[buffer.layer])
        made.append(buffer.model_copy(update={"dtype": "int8", "key_scale": key_scale, "value_scale": value_scale}))
    return made


def _scale(largest: float, dtype: str) -> float:
    """The factor from int8 to true values, rounded to dtype as the graph holds it; 1 for a buffer of zeros."""
    return float(np.dtype(dtype).type(largest * MARGIN / _LARGEST_INT8)) if largest else 1.0


def store_kv_as_int8(model: ir.Model, table: Sequence[contract.KVBuffer]) -> bool:
    """Store the KV buffers of a target or an assistant graph in int8; whether the model was changed.

    Before: a KV input is read by Shape and by TensorScatter or Attention. After: it is int8, rows go
    through QuantizeLinear into TensorScatter, and every Attention of a buffer reads one DequantizeLinear.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    is_changed = False
    for buffer in table:
        for part, scale in (("key", buffer.key_scale), ("value", buffer.value_scale)):
            value = inputs.get(kv_name(buffer.layer, part))
            if value is not None and value.dtype != ir.DataType.INT8:
                _store(model.graph, value, scale)
                is_changed = True
    return is_changed


def _store(graph: ir.Graph, buffer: ir.Value, scale: float) -> None:
    """Make a KV input int8: rows are quantized before TensorScatter, the buffer dequantized before Attention."""
    assert buffer.dtype is not None
    factor = constant(graph, f"{buffer.name}.scale", np.array(scale, buffer.dtype.numpy()))
    held = buffer
    for node in buffer.consumers():
        if node.op_type == "TensorScatter":
            _insert(node, 1, "QuantizeLinear", factor, ir.DataType.INT8)
            held = node.outputs[0]
    readers = [node for node in held.consumers() if node.op_type == "Attention"]
    position = next(position for node, position in held.uses() if node is readers[0])
    true_values = _insert(readers[0], position, "DequantizeLinear", factor, buffer.dtype)
    for node in readers[1:]:
        node.replace_input_with(position, true_values)
    held.type = buffer.type = ir.TensorType(ir.DataType.INT8)


def _insert(reader: ir.Node, position: int, op_type: str, scale: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Convert one input of a node on its way; the converted value."""
    value = reader.inputs[position]
    assert value is not None
    assert reader.graph is not None
    output = ir.val(f"{value.name}.{op_type}", dtype, value.shape)
    node = ir.node(op_type, [value, scale], {"output_dtype": dtype}, outputs=[output])
    reader.replace_input_with(position, output)
    reader.graph.insert_before(reader, node)
    return output


def check_scales(model: ir.Model, table: Sequence[contract.KVBuffer]) -> None:
    """Every KV input is int8 and read by the scale of its buffer's entry; anything else is an error of the export."""
    scales = _scales(model)
    for buffer in table:
        for part, expected in (("key", buffer.key_scale), ("value", buffer.value_scale)):
            name = kv_name(buffer.layer, part)
            if name in scales and scales[name] != {expected}:
                raise AssertionError(f"{name} is read with scales {scales[name]}, the manifest says {expected}")


def _scales(model: ir.Model) -> dict[str, set[float | None]]:
    """Every factor between a graph's KV inputs and those who attend to them; None where there is no conversion."""
    found: dict[str, set[float | None]] = {}
    for node in model.graph:
        for value in node.inputs[1:3] if node.op_type == "Attention" else ():
            source, stored, factor = None if value is None else value.producer(), value, None
            if source is not None and source.op_type == "DequantizeLinear":
                stored, factor = source.inputs[:2]
            assert stored is not None
            scale = None if factor is None or factor.const_value is None else float(factor.const_value.numpy())
            found.setdefault(str(stored.name).removeprefix("next_"), set()).add(scale)
    return found
