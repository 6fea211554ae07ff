"""A pair's modules, checked against its checkpoints, and the graphs traced from them; no weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import onnx_ir as ir
import torch

from slipstream.export.checkpoint.opening import CheckpointPair
from slipstream.export.model.assistant import Assistant
from slipstream.export.model.graphs import TracedGraph, assistant_graph, target_graph
from slipstream.export.model.layers import Recipe, recipes_of
from slipstream.export.model.target import Target
from slipstream.export.weights.per_layer_table import per_layer_recipe, table_record
from slipstream.export.weights.quantize import check_is_worth, quantized
from slipstream.export.weights.recipes import DTYPES, check_leftovers, check_recipes
from slipstream.export.weights.stored_matrices import with_stored_matrices
from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.graph_io import kv_name, kv_output_name
from slipstream.runtime.machine.progress import Progress
from slipstream.runtime.sampling import NUM_CANDIDATES

from .settings import ResolvedSettings

EMBEDDING = "embed.weight"  # the initializer both graphs name
_MAX_UNROLLED_STEPS = 8  # a longer draft runs this graph and single steps


@dataclass(frozen=True)
class TracedPair:
    """drafts: by number of steps. per_layer_table: with its recipe, where it stays outside the target's graph."""

    target: TracedGraph
    drafts: Mapping[int, TracedGraph]
    per_layer_table: tuple[contract.PerLayerTableFile, Recipe] | None = None

    @property
    def target_recipes(self) -> list[Recipe]:
        """Recipes of all that is read from the target's checkpoint: of its graph, and of a table outside it."""
        outside = [] if self.per_layer_table is None else [self.per_layer_table[1]]
        return [*self.target.recipes.values(), *outside]

    @property
    def assistant_recipes(self) -> dict[str, Recipe]:
        """Recipes of the assistant's own weights by name: the same in each of its graphs."""
        recipes = next(iter(self.drafts.values())).recipes
        return {name: recipe for name, recipe in recipes.items() if name != EMBEDDING}


def _modules(pair: CheckpointPair, settings: ResolvedSettings) -> tuple[Target, dict[int, Assistant], Recipe | None]:
    """What is traced, its weights checked by name, shape and dtype: tracing takes minutes.

    Assistants by number of steps; the recipe of a per-layer table that stays outside the target's graph.
    """
    dtype, target, assistant = DTYPES[settings.dtype], pair.target_config, pair.assistant_config
    module = Target(
        target, dtype, suppress_tokens=pair.suppress_tokens, has_per_layer_table=settings.has_table_in_graph
    )
    top = num_draft_top_logits(pair)
    drafts = {
        num_steps: Assistant(assistant, target, dtype, num_steps=num_steps, num_top_logits=top)
        for num_steps in sorted({1, min(settings.num_draft_tokens, _MAX_UNROLLED_STEPS)})
    }
    table = per_layer_recipe(target) if module.takes_per_layer_rows else None
    recipes = list(recipes_of(module).values()), recipes_of(drafts[1])
    check_weights(pair, [*recipes[0], *([table] if table else [])], recipes[1], before_tracing=True)
    if settings.blocks is not None:
        check_is_worth([*recipes[0], *recipes[1].values()], settings.blocks)
    return module, drafts, table


def num_draft_top_logits(pair: CheckpointPair) -> int:
    head, vocab_size = pair.assistant_config.centroid_head, pair.target_config.vocab_size
    return min(NUM_CANDIDATES, vocab_size // head.num_centroids * head.top_k if head else vocab_size)


def trace(pair: CheckpointPair, settings: ResolvedSettings, progress: Progress) -> TracedPair:
    """The graphs of a pair, without content. Raises CheckpointError for weights that are missing or don't fit."""
    drafts, blocks, kv = {}, settings.blocks, kv_table(pair, settings.dtype)
    donors = [[buffer for buffer in kv if buffer.type == kind][-1] for kind in ("sliding", "full")]
    with _default_dtype(DTYPES[settings.dtype]):
        target_module, assistants, recipe = _modules(pair, settings)
        progress.start("tracing the target", 0)
        target = with_stored_matrices(target_graph(target_module, kv), pair.target)
        for num_steps, module in assistants.items():
            progress.start(f"tracing the assistant, {num_steps} step{'s' if num_steps > 1 else ''}", 0)
            graph = assistant_graph(module, pair.target_config, donors)
            drafts[num_steps] = with_stored_matrices(graph, pair.assistant)
    if blocks is not None:
        target = quantized(target, blocks)
        drafts = {num_steps: quantized(graph, blocks) for num_steps, graph in drafts.items()}
    table = None if recipe is None else (table_record(recipe, pair.target, settings.dtype), recipe)
    for graph in (target, *drafts.values()):
        mark(graph.model, kv)
    return TracedPair(target, drafts, table)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules take their parameters' dtype from torch's default, as transformers does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def kv_table(pair: CheckpointPair, dtype: DType) -> list[contract.KVBuffer]:
    target, assistant = pair.target_config, pair.assistant_config.text
    return [
        contract.KVBuffer(
            layer=layer.index,
            type=layer.type,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=dtype,
            key_scale=1.0,
            value_scale=1.0,
            target_readers=[r.index for r in target.layers if r.kv_owner == layer.index and r.index != layer.index],
            assistant_readers=[r.index for r in assistant.layers if target.donor(r.type).index == layer.index],
        )
        for layer in target.kv_layers
    ]


def mark(model: ir.Model, table: list[contract.KVBuffer]) -> None:
    """Mark every KV input and output as a shared binding, and drop what tracing left on the nodes."""
    for node in model.graph.all_nodes():
        node.doc_string = None
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for value in (*values.values(), *model.graph.initializers.values()):
        value.metadata_props.clear()
    for buffer in table:
        for part in ("key", "value"):
            names = kv_name(buffer.layer, part), kv_output_name(buffer.layer, part)
            for name, alias in (names, names[::-1]):
                if name in values:
                    props = {
                        "slipstream.binding": "shared",
                        "slipstream.owner_layer": str(buffer.layer),
                        "slipstream.layer_type": buffer.type,
                        "slipstream.assistant_readers": json.dumps(buffer.assistant_readers),
                        **({"slipstream.alias": alias} if alias in values else {}),
                    }
                    values[name].metadata_props.update(props)
    model.metadata_props.clear()
    model.metadata_props["slipstream.kv"] = json.dumps([buffer.model_dump() for buffer in table])
    model.producer_name, model.producer_version = "slipstream", version("slipstream")
    model.doc_string = None
    domains = {node.domain for node in model.graph.all_nodes()}
    if domains - {""} or model.functions:
        raise AssertionError(f"the graph is not standard ONNX: domains {domains}, functions {list(model.functions)}")


def check_weights(
    pair: CheckpointPair, target: list[Recipe], assistant: Mapping[str, Recipe], *, before_tracing: bool = False
) -> None:
    check_recipes(target, pair.target, before_tracing=before_tracing)
    check_leftovers(target, pair.target, pair.target_config)
    recipes = [recipe for name, recipe in assistant.items() if name != EMBEDDING]
    check_recipes(recipes, pair.assistant, before_tracing=before_tracing)
    embedding = Recipe(("embed_tokens.weight",), "as_is", ())  # its own, used by a tied head only
    check_leftovers([*recipes, embedding], pair.assistant, pair.assistant_config.text)
