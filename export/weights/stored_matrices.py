"""Graphs that read an already-quantized checkpoint's matrices as they are stored, in standard ONNX.

- int4: as ``export/weights/quantize.py`` has it;
- fp8: ``DequantizeLinear(FLOAT8E4M3FN [K, N], scales float32 [N], axis 1)``;
- nvfp4: ``DequantizeLinear(FLOAT4E2M1 [K, N], scales, axis 0, block 16)`` whose scales are
  ``DequantizeLinear(FLOAT8E4M3FN [K / 16, N], column scales float32 [N], axis 1)``.

One scale for each column, where the checkpoint has one for a whole matrix, keeps matrices exact that are joined
along their outputs and differ in it. Scales stay float32 and the product is cast to the graph's dtype: TensorRT-RTX
1.7.1 keeps the codes in its engine with that cast, and builds no nvfp4 whose output has another dtype than its
scales. Activations stay in the graph's dtype, though both formats were calibrated with quantized ones: a step of a few
rows is bound by the bytes of the weights. Neither float form was ever run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.export.checkpoint.quantized import QuantizedCheckpoint
from slipstream.export.checkpoint.tensors import Checkpoint
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.layers import Blocks, Recipe
from slipstream.runtime.errors import CheckpointError

from .quantize import dequantize_initializer


def with_stored_matrices(graph: TracedGraph, checkpoint: Checkpoint) -> TracedGraph:
    """The graph with nodes that undo the checkpoint's quantization; recipes say what is stored how.

    Before: MatMul reads a float initializer. After: where all of its sources are quantized, it reads a dequantized one.
    Raises CheckpointError for a quantized table, and for a joined matrix only some of whose sources are quantized.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return graph
    recipes = dict(graph.recipes)
    for name, recipe in graph.recipes.items():
        blocks = _blocks(recipe, checkpoint)
        if blocks is not None:
            recipes[name] = replace(recipe, blocks=blocks)
            dequantize_initializer(graph.model.graph, name, blocks)
    return TracedGraph(graph.model, recipes)


def _blocks(recipe: Recipe, checkpoint: QuantizedCheckpoint) -> Blocks | None:
    held = [source for source in recipe.sources if source in checkpoint.headers]
    stored = [source for source in held if checkpoint.is_quantized(source)]
    if not stored:
        return None
    if recipe.layout != "transposed":
        raise CheckpointError(
            f"{checkpoint.folder}: {stored[0]} is quantized, but it is read as a table, which is served in float only"
        )
    if len(stored) < len(held):
        raise CheckpointError(
            f"{checkpoint.folder}: {' and '.join(stored)} are quantized, but not the rest of {' + '.join(held)}, "
            "which are one matrix here: quantize all of them or none"
        )
    quantization = checkpoint.quantization
    return Blocks(quantization.format, quantization.block_size or recipe.shape[0])
