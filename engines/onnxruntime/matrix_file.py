"""Matrices that graphs for ONNX Runtime read in another form than the bundle's, in one file beside those graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_ALIGNMENT = 4096


class MatrixFile:
    """Matrices of several graphs, each written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._tensors: dict[Hashable, ir.ExternalTensor] = {}

    def add(
        self,
        graph: ir.Graph,
        key: Hashable,
        dtype: ir.DataType,
        shape: Sequence[int],
        strips: Iterable[NDArray[np.generic]],
    ) -> ir.Value:
        """An initializer of a graph. key: tells it from every other; strips: its content, read where it is new."""
        if key not in self._tensors:
            self._tensors[key] = self._write(dtype, ir.Shape(shape), strips)
        tensor = self._tensors[key]
        name = str(tensor.name)
        if name not in graph.initializers:
            kind = ir.TensorType(dtype)
            graph.initializers[name] = ir.Value(name=name, shape=tensor.shape, type=kind, const_value=tensor)
        return graph.initializers[name]

    def move(self, model: ir.Model, location: str) -> None:
        """Make a model name the file by this path, relative to the folder of its weights."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.location).name == self.path.name:
                value.const_value = self._tensor(
                    location, tensor.offset or 0, tensor.nbytes, tensor.dtype, tensor.shape
                )

    def _write(self, dtype: ir.DataType, shape: ir.Shape, strips: Iterable[NDArray[np.generic]]) -> ir.ExternalTensor:
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self.path.open("ab") as file:
            file.write(bytes(start - self.num_bytes))
            for strip in strips:
                file.write(strip.data)
            self.num_bytes = file.tell()
        return self._tensor(self.path.name, start, self.num_bytes - start, dtype, shape)

    def _tensor(
        self, location: str, offset: int, length: int, dtype: ir.DataType, shape: ir.Shape
    ) -> ir.ExternalTensor:
        name = f"{self.path.stem}.{offset}"
        return ir.ExternalTensor(location, offset, length, dtype, shape=shape, name=name, base_dir=self.path.parent)
