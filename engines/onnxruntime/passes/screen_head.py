"""A pass for ONNX Runtime: a draft step scores every token roughly, and a few of them exactly.

A dense head is most of what a draft step reads: 32 MiB of the 60 of ``mid``'s assistant, 1 GiB of
26B-A4B's. Its rows are stored once more with a byte per value, and products with those choose the
tokens that are scored with the rows as they are. Where values are normally distributed, rounding
adds to a logit less than a hundredth of the spread of all, and the 8th and the 65th of 262144 lie
more than 50 times that apart. A channel that towers above others coarsens those in its block: with
one of 300 times their size among 256, the largest logit was still the 16th of the rough ones at
worst. What could get lost is a draft and never a token: the target's own head is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipstream.engines.graph_edit import CONTRIB_DOMAIN, insert, integers, only_reader, operand
from slipstream.engines.onnxruntime.matrix_file import MatrixFile

NUM_CANDIDATES = 64
_MOST_TOP = 8  # tokens a step gives with their logits, where the margin above holds
_BLOCKS = (32, 16)  # values that share a scale, in the head and in the state; MatMulNBits takes these and larger ones
_ZERO = 128  # what MatMulNBits takes off every byte
_STRIP_BYTES = 16 * 2**20

_ROUNDING = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
rounding (float[1,32] x) => (float[1,16] y)
    <uint8[16,1,32] codes = {%s}, float[16] scales = {%s}>
{
    y = com.microsoft.MatMulNBits<K = 32, N = 16, bits = 8, block_size = 32, accuracy_level = 4>(x, codes, scales)
}"""

Matrix = NDArray[np.float32]


def rounding_graph() -> bytes:
    """A graph that adds up 32 values with bytes, 16 times: where x is rounded to int8, 127 hides 0.4 beside it.

    Without a kernel for that, ONNX Runtime restores the whole head to float32 in every call, which is slow.
    """
    model = ir.from_onnx_text(_ROUNDING % (", ".join(["129"] * 512), ", ".join(["1.0"] * 16)))
    content: bytes = ir.serde.serialize_model(model).SerializeToString()
    return content


def screen_head(model: ir.Model, screens: MatrixFile, least_bytes: int) -> bool:
    """Screen the dense head of an assistant; whether the model was changed.

    least_bytes: of a head; smaller ones stay in caches, where there is nothing to gain.

    Before: logits = Gemm(x [B, N], table [V, N] transposed), and a TopK of them. After: the TopK is of
    exact logits of the NUM_CANDIDATES tokens whose rough ones, by MatMulNBits, are the largest. They
    stand in the order of their ids, so that of equal logits the smaller id wins, as before.
    """
    heads = [node for node in model.graph if _is_head(node, least_bytes)]
    for node in heads:
        _rewrite(model.graph, node, screens)
    if heads:
        model.graph.opset_imports[CONTRIB_DOMAIN] = 1
    return bool(heads)


def _is_head(node: ir.Node, least_bytes: int) -> bool:
    top = only_reader(node, "TopK") if node.op_type == "Gemm" else None
    if top is None or len(node.inputs) != 2 or _numbers(node) != {"transB": 1}:
        return False
    table, count = operand(node, 1).const_value, operand(top, 1).const_value
    is_stored = isinstance(table, ir.ExternalTensor) and table.dtype == ir.DataType.FLOAT
    is_output = any(output.is_graph_output() for output in (*node.outputs, *top.outputs))
    is_usual = _numbers(top) in ({"axis": -1}, {"axis": -1, "largest": 1, "sorted": 1})
    if table is None or not is_stored or table.nbytes < least_bytes or count is None or is_output or not is_usual:
        return False
    num_tokens, width = table.shape.numpy()
    return int(count.numpy().item()) <= _MOST_TOP and num_tokens > NUM_CANDIDATES and width % _BLOCKS[-1] == 0


def _numbers(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _rewrite(graph: ir.Graph, node: ir.Node, screens: MatrixFile) -> None:
    state, table, top, name = operand(node, 0), operand(node, 1), only_reader(node, "TopK"), node.outputs[0].name
    assert top is not None
    assert state.shape is not None
    (batch, width), count = state.shape, integers(graph, [NUM_CANDIDATES])
    _, likely = _top(top, _rough_logits(graph, node, screens), count, f"{name}.likely", largest=1)
    candidates, _ = _top(top, likely, count, f"{name}.candidates", largest=0)
    rows = insert(top, "Gather", [table, candidates], f"{name}.rows", [batch, NUM_CANDIDATES, width])
    column = insert(top, "Unsqueeze", [state, integers(graph, [2])], f"{name}.column", [batch, width, 1])
    products = insert(top, "MatMul", [rows, column], f"{name}.products", [batch, NUM_CANDIDATES, 1])
    exact = insert(top, "Squeeze", [products, integers(graph, [2])], f"{name}.exact", [batch, NUM_CANDIDATES])
    logits, best = _top(top, exact, operand(top, 1), f"{name}.best", largest=1)
    assert best.shape is not None
    tokens = insert(top, "GatherElements", [candidates, best], f"{name}.tokens", list(best.shape), axis=-1)
    ir.convenience.replace_nodes_and_values(graph, top, [top, node], [], top.outputs, [logits, tokens])


def _top(before: ir.Node, value: ir.Value, count: ir.Value, name: str, *, largest: int) -> Sequence[ir.Value]:
    """The largest or smallest of value [B, V], in order, and where they are: [B, count]."""
    graph, number = before.graph, count.const_value
    assert isinstance(graph, ir.Graph)
    assert value.shape is not None
    assert number is not None
    attributes = ir.convenience.convert_attributes({"axis": -1, "largest": largest})
    node = ir.Node("", "TopK", [value, count], attributes, num_outputs=2)
    graph.insert_before(before, node)
    kinds = value.type, ir.TensorType(ir.DataType.INT64)
    for output, part, kind in zip(node.outputs, ("values", "positions"), kinds, strict=True):
        output.name, output.type = f"{name}.{part}", kind
        output.shape = ir.Shape([value.shape[0], int(number.numpy().item())])
    return node.outputs


def _rough_logits(graph: ir.Graph, node: ir.Node, screens: MatrixFile) -> ir.Value:
    state, table, logits = operand(node, 0), operand(node, 1).const_value, node.outputs[0]
    assert isinstance(table, ir.ExternalTensor)
    assert logits.shape is not None
    num_tokens, width = map(int, table.shape.numpy())
    block = next(size for size in _BLOCKS if width % size == 0)
    key, shape = (str(table.location), table.offset), [num_tokens, width // block]

    def strips(convert: Callable[[Matrix], NDArray[np.generic]]) -> Iterator[NDArray[np.generic]]:
        content, step = table.numpy(), max(1, _STRIP_BYTES // (4 * width))
        for start in range(0, num_tokens, step):
            yield convert(content[start : start + step].reshape(-1, width // block, block))

    codes = screens.add(graph, (*key, "codes"), ir.DataType.UINT8, [*shape, block], strips(_codes))
    scales = screens.add(graph, (*key, "scales"), ir.DataType.FLOAT, shape, strips(_scales))
    return insert(
        node,
        "MatMulNBits",
        [state, codes, scales],
        f"{logits.name}.rough",
        list(logits.shape),
        domain=CONTRIB_DOMAIN,
        K=width,
        N=num_tokens,
        bits=8,
        block_size=block,
        accuracy_level=4,
    )


def _scales(blocks: Matrix) -> Matrix:
    """blocks [V, N / block, block] -> what a step of their bytes is worth, [V, N / block]."""
    largest: Matrix = np.abs(blocks).max(axis=-1)
    return np.where(largest > 0, largest / np.float32(_ZERO - 1), np.float32(1))


def _codes(blocks: Matrix) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = (np.rint(blocks / _scales(blocks)[..., None]) + _ZERO).astype(np.uint8)
    return codes
