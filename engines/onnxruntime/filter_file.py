"""Matrices that graphs for ONNX Runtime read as filters of convolutions, in one file beside those graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipstream.engines.graph_edit import initializer

_ALIGNMENT = 4096
_STRIP_BYTES = 16 * 2**20
_LAYOUT = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft.nchwc" : 1]>
layout () => (float[1,16,1,2] blocked) <float[1,16,1,2] counted = {%s}> {
    blocked = com.microsoft.nchwc.ReorderInput(counted)
}"""


def layout_graph() -> bytes:
    """A graph without inputs whose answer shows the layout: 0 to 31 of 16 channels over 2 rows, as they are stored."""
    content: bytes = ir.to_proto(ir.from_onnx_text(_LAYOUT % ", ".join(map(str, range(32))))).SerializeToString()
    return content


class FilterFile:
    """Filters of several graphs, each written once."""

    def __init__(self, path: Path, block: int) -> None:
        """block: channels that lie together, as this kind of CPU reads them."""
        self.path = path
        self.block = block
        self.num_bytes = 0
        self._tensors: dict[tuple[str, int | None, bool], ir.ExternalTensor] = {}

    def add(self, graph: ir.Graph, matrix: ir.Value, *, is_transposed: bool) -> ir.Value:
        """A filter [N, K, 1, 1] for x @ matrix; matrix [K, N], or [N, K] where it is transposed."""
        stored = matrix.const_value
        assert isinstance(stored, ir.ExternalTensor)
        key = (str(stored.location), stored.offset, is_transposed)
        if key not in self._tensors:
            self._tensors[key] = self._write(stored.numpy().T if is_transposed else stored.numpy())
        tensor = self._tensors[key]
        return graph.initializers.get(str(tensor.name)) or initializer(graph, tensor)

    def move(self, model: ir.Model, location: str) -> None:
        """Make a model name the file by this path, relative to the folder of its weights."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.location).name == self.path.name:
                value.const_value = self._tensor(location, tensor.offset or 0, tensor.nbytes, tensor.shape)

    def _write(self, matrix: NDArray[np.float32]) -> ir.ExternalTensor:
        height, width = matrix.shape
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self.path.open("ab") as file:
            file.write(bytes(start - self.num_bytes))
            for strip in self._strips(matrix):
                file.write(strip.data)
            self.num_bytes = file.tell()
        return self._tensor(self.path.name, start, self.num_bytes - start, ir.Shape([width, height, 1, 1]))

    def _strips(self, matrix: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """matrix [K, N] as filters lie: [N / block, K / block, block of K, block of N], some blocks of N at a time."""
        height, block = len(matrix), self.block
        step = max(1, _STRIP_BYTES // (4 * height * block)) * block
        for start in range(0, matrix.shape[1], step):
            strip = matrix[:, start : start + step].reshape(height // block, block, -1, block)
            yield np.ascontiguousarray(strip.transpose(2, 0, 1, 3))

    def _tensor(self, location: str, offset: int, length: int, shape: ir.Shape) -> ir.ExternalTensor:
        name, folder = f"{self.path.stem}.{offset}", self.path.parent
        return ir.ExternalTensor(location, offset, length, ir.DataType.FLOAT, shape=shape, name=name, base_dir=folder)
