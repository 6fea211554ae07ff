"""Weight-only int4 and int8: which matrices are quantized, the values they get, and the nodes that undo it.

A matrix [K, N] is stored as whole numbers with one scale per column and block of K. In the graph
stands ``DequantizeLinear(INT4|INT8 [K, N], scales [K / block, N], axis 0) -> MatMul``: standard ONNX, which
ONNX Runtime fuses to MatMulNBits and TensorRT keeps quantized. Activations are no part of this file,
nor are tables that are gathered: no form of those serves both runtimes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import onnx_ir as ir
import torch

from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.initializers import initializer
from slipstream.export.model.layers import Blocks, Recipe
from slipstream.runtime.bundle.manifest import WeightFormat
from slipstream.runtime.errors import CheckpointError

BLOCK_SIZES = (32, 64, 128)
# They choose what is computed: an error in them is not a small one, and they are small themselves.
_SELECTORS = ("router.proj.weight", "masked_embedding.centroids.weight")
_HEAD = "head.weight"
_IR_DTYPES = {
    "int4": ir.DataType.INT4,
    "int8": ir.DataType.INT8,
    "fp8": ir.DataType.FLOAT8E4M3FN,
    "nvfp4": ir.DataType.FLOAT4E2M1,
}
# What a block's largest value is tried as. The whole ones restore a block that was quantized to int4 before (of int8,
# those they are multiples of); the others round or clip it.
_LARGEST_CODES = {
    "int4": (1, 2, 3, 4, 5, 6, 7, 7.5, 8, 8.5, 9, 9.5, 10, 11, 12),
    "int8": (120, 124, 125, 126, 127, 128),
}
_ROUNDING = 1 + 2.0**-21  # of sums in float32: what gains less is not better, but a multiple of the same codes
_TILE = 256, 512  # columns and rows of a matrix that are searched at once, in a core's own cache


def blocks_of(weights: WeightFormat, block_size: int) -> Blocks | None:
    """What an export asks for; None for float weights. Raises CheckpointError."""
    if weights == "float":
        return None
    if block_size not in BLOCK_SIZES:
        raise CheckpointError(f"--block-size is {block_size}; served are {', '.join(map(str, BLOCK_SIZES))}")
    return Blocks(weights, block_size)


def is_quantizable(sources: Sequence[str], num_inputs: int, blocks: Blocks) -> bool:
    """Whether a matrix of these Linear weights is quantized. sources: their names."""
    return num_inputs % blocks.size == 0 and not sources[0].endswith(_SELECTORS)


def scales_name(name: str) -> str:
    return f"{name}.scales"


def column_scales_name(name: str) -> str:
    return f"{name}.column_scales"


def initializer_names(recipes: Mapping[str, Recipe]) -> list[str]:
    """Names of the initializers that recipes are written to: theirs, and those of the scales of quantized ones."""
    blocks = {name: recipe.blocks for name, recipe in recipes.items() if recipe.blocks is not None}
    columns = [column_scales_name(name) for name, each in blocks.items() if each.format == "nvfp4"]
    return [*recipes, *map(scales_name, blocks), *columns]


def quantize(weight: torch.Tensor, blocks: Blocks, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] of a Linear, taken in dtype -> codes int8 [K, N] and scales [K / block, N] in dtype.

    Of the scales that are tried for a block, the one of least squared error is kept. What lies on a
    grid of int4 already comes out as it is.
    """
    num_columns, num_rows = weight.shape
    codes = torch.empty((num_rows, num_columns), dtype=torch.int8)
    scales = torch.empty((num_rows // blocks.size, num_columns), dtype=dtype)

    def run(corner: tuple[int, int]) -> None:
        column, row = corner
        columns, rows = slice(column, column + _TILE[0]), slice(row, row + _TILE[1])
        groups = slice(row // blocks.size, (row + _TILE[1]) // blocks.size)
        tile = weight[columns, rows].to(dtype).float().t().contiguous()
        codes[rows, columns], scales[groups, columns] = _quantize_tile(tile, blocks, dtype)

    corners = [(c, r) for c in range(0, num_columns, _TILE[0]) for r in range(0, num_rows, _TILE[1])]
    # one thread a tile: torch would split its small operators over all cores and wait for each
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=lambda: torch.set_num_threads(1)) as threads:
        list(threads.map(run, corners))
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] that the graph multiplies with, in the dtype of scales."""
    grouped = codes.view(len(scales), -1, codes.shape[1]).to(scales.dtype)
    return (grouped * scales.unsqueeze(1)).view(codes.shape).t()


def _quantize_tile(tile: torch.Tensor, blocks: Blocks, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """tile [K, N] float32 -> codes int8 [K, N], scales [K / block, N] in dtype."""
    lowest, highest = blocks.code_range
    values = tile.view(-1, blocks.size, tile.shape[1])
    scales = _least_error_scales(values, blocks).to(dtype).float()
    # of zeros, or of values too small for a scale in dtype: they are stored as zeros
    scales[scales == 0] = 1.0
    codes = (values / scales).round_().clamp_(lowest, highest)
    return codes.to(torch.int8).view(tile.shape), scales.squeeze(1).to(dtype)


def _least_error_scales(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Scales [G, 1, N] with the least squared error for values [G, block, N].

    Those of int4 are negative where that lets the largest value have the lowest code.

    Of int8 they are positive: nothing is gained there, and TensorRT takes negative ones for int4 only.
    For given codes q the best scale is wq / qq, and the squared error it leaves is ww - wq² / qq.
    """
    lowest, highest = blocks.code_range
    smallest, largest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    inverse = torch.maximum(largest, -smallest).reciprocal()
    if blocks.format == "int4":
        inverse = torch.where(largest > -smallest, -inverse, inverse)
    best, scales = torch.zeros_like(inverse), torch.zeros_like(inverse)
    codes, products = torch.empty_like(values), torch.empty_like(values)
    for code in _LARGEST_CODES[blocks.format]:
        torch.mul(values, inverse * code, out=codes).round_().clamp_(lowest, highest)
        wq = torch.mul(values, codes, out=products).sum(1, keepdim=True)
        qq = torch.mul(codes, codes, out=products).sum(1, keepdim=True)
        explained = wq * wq / qq
        is_better = explained > best * _ROUNDING  # false for a block of zeros, where it is NaN
        best = torch.where(is_better, explained, best)
        scales = torch.where(is_better, wq / qq, scales)
    return scales


def quantized(graph: TracedGraph, blocks: Blocks) -> TracedGraph:
    """The graph with its matrices quantized; recipes say how they are filled.

    Before: MatMul reads a float initializer, and a dense head is a Gemm on its table [V, N]. After: each
    reads a DequantizeLinear, heads as a matrix [N, V] of their own; what is gathered is as it was.
    """
    recipes = dict(graph.recipes)
    for node in list(graph.model.graph):
        if node.op_type == "Gemm":
            _separate_head(node, recipes, blocks)
    for name, recipe in recipes.items():
        if recipe.layout == "transposed" and is_quantizable(recipe.sources, recipe.shape[0], blocks):
            recipes[name] = Recipe(recipe.sources, recipe.layout, recipe.shape, blocks)
            dequantize_initializer(graph.model.graph, name, blocks)
    return TracedGraph(graph.model, recipes)


def _separate_head(node: ir.Node, recipes: dict[str, Recipe], blocks: Blocks) -> None:
    """Make a head's Gemm on a table [V, N] a MatMul on a matrix [N, V]."""
    graph, (x, table) = node.graph, node.inputs
    assert isinstance(graph, ir.Graph)
    assert x is not None and table is not None and table.name is not None  # noqa: PT018
    old = recipes[table.name]
    if not is_quantizable(old.sources, old.shape[1], blocks):
        return
    if _HEAD not in recipes:  # several draft steps share it
        recipes[_HEAD] = Recipe(old.sources, "transposed", old.shape[::-1])
        initializer(graph, _HEAD, table.dtype, recipes[_HEAD].shape)
    product = ir.Node("", "MatMul", [x, graph.initializers[_HEAD]], name=node.name, metadata_props=node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [product], node.outputs, product.outputs)
    if not table.uses():
        del graph.initializers[table.name], recipes[table.name]


def dequantize_initializer(graph: ir.Graph, name: str, blocks: Blocks) -> None:
    """Put the nodes that undo a format between an initializer [K, N], now of codes, and what reads it."""
    codes = graph.initializers[name]
    dtype, shape, uses = codes.dtype, codes.shape, list(codes.uses())
    assert dtype is not None
    assert shape is not None
    num_rows, num_columns = (int(str(dim)) for dim in shape)
    codes.type, codes.const_value = ir.TensorType(_IR_DTYPES[blocks.format]), None
    tape, float32 = ir.tape.Tape(), ir.DataType.FLOAT
    if blocks.format == "fp8":
        scales, attributes = initializer(graph, scales_name(name), float32, [num_columns]), {"axis": 1}
    else:
        scales_dtype = ir.DataType.FLOAT8E4M3FN if blocks.format == "nvfp4" else dtype
        scales = initializer(graph, scales_name(name), scales_dtype, [num_rows // blocks.size, num_columns])
        attributes = {"axis": 0, "block_size": blocks.size}
    if blocks.format == "nvfp4":
        columns = initializer(graph, column_scales_name(name), float32, [num_columns])
        made = ir.val(f"{scales.name}.dequantized", float32, scales.shape)
        scales = tape.op("DequantizeLinear", [scales, columns], {"axis": 1}, name=made.name, output=made)
    made = ir.val(f"{name}.dequantized", scales.dtype, shape)
    weight = tape.op("DequantizeLinear", [codes, scales], attributes, name=made.name, output=made)
    if weight.dtype != dtype:
        made = ir.val(f"{name}.cast", dtype, shape)
        weight = tape.op("Cast", [weight], {"to": dtype}, name=made.name, output=made)
    readers = {reader for reader, _ in uses}
    graph.insert_before(next(node for node in graph if node in readers), tape.nodes)
    for reader, position in uses:
        reader.replace_input_with(position, weight)


def separate_uses(model: ir.Model) -> bool:
    """Give every reader of a quantized matrix nodes of its own; whether the model was changed.

    ONNX Runtime fuses no matrix that two nodes read. Before: weights are external data. After: further readers have
    a DequantizeLinear whose initializers are other names for the same bytes.
    """
    graph, is_changed = model.graph, False
    for node in [node for node in graph if _is_fused(node)]:
        for number, (reader, position) in enumerate(list(node.outputs[0].uses())[1:], start=1):
            inputs = [_renamed(graph, value, f"use_{number}") for value in node.inputs if value is not None]
            clone = ir.Node("", node.op_type, inputs, node.attributes.values(), name=f"{node.name}.use_{number}")
            output, made = node.outputs[0], clone.outputs[0]
            made.name, made.type, made.shape = f"{output.name}.use_{number}", output.type, output.shape
            graph.insert_before(reader, clone)
            reader.replace_input_with(position, made)
            is_changed = True
    return is_changed


def _is_fused(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return codes is not None and codes.dtype in (ir.DataType.INT4, ir.DataType.INT8)


def _renamed(graph: ir.Graph, value: ir.Value, suffix: str) -> ir.Value:
    assert isinstance(value.const_value, ir.ExternalTensor)
    tensor = copy.copy(value.const_value)
    tensor.name = f"{value.name}.{suffix}"
    return initializer(graph, tensor.name, tensor.dtype, tensor.shape, tensor)


def float_matrices(graph: TracedGraph) -> list[str]:
    """Initializers of matrices that are not quantized, a head's table among them."""
    heads = {value.name for node in graph.model.graph if node.op_type == "Gemm" for value in node.inputs[1:] if value}
    left = {name: recipe for name, recipe in graph.recipes.items() if recipe.blocks is None}
    return [name for name, recipe in left.items() if recipe.layout == "transposed" or name in heads]


def check_is_worth(recipes: Collection[Recipe], blocks: Blocks) -> None:
    """Refuse blocks that would leave most of the matrices float. Raises CheckpointError."""
    matrices = [recipe for recipe in recipes if recipe.layout == "transposed"]
    left = [recipe for recipe in matrices if not is_quantizable(recipe.sources, recipe.shape[0], blocks)]
    if 2 * sum(recipe.num_values for recipe in left) > sum(recipe.num_values for recipe in matrices):
        widths = sorted({recipe.shape[0] for recipe in left})
        raise CheckpointError(
            f"--weights {blocks.format} --block-size {blocks.size} would leave most matrices float: those with "
            f"{', '.join(map(str, widths))} inputs don't divide into blocks. Choose a smaller block, or --weights float"
        )
