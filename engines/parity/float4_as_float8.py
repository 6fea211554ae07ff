"""NVFP4 matrices for ONNX Runtime, which has no kernels for FLOAT4E2M1: its sixteen values are float8 values too.

For the reference of engines only: codes take twice their size in memory, and are widened whenever a graph is opened.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort


def float4_as_float8(model: ir.Model) -> dict[str, ort.OrtValue]:
    """Retype FLOAT4E2M1 initializers as FLOAT8E4M3FN; their contents by name, {} where there are none.

    Before: initializers are external data. After: they still name it, though what lies there is no float8: sessions
    have to be given the contents as external initializers.
    """
    contents, float8 = {}, ir.DataType.FLOAT8E4M3FN
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if value.dtype != ir.DataType.FLOAT4E2M1:
            continue
        assert isinstance(tensor, ir.ExternalTensor)
        codes = tensor.numpy().astype(float8.numpy()).view(np.uint8)
        contents[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(codes, float8.value)
        value.type, place = ir.TensorType(float8), (tensor.location, tensor.offset, tensor.length)
        value.const_value = ir.ExternalTensor(*place, float8, shape=tensor.shape, name=name, base_dir=tensor.base_dir)
    return contents
