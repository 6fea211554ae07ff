"""Export of a checkpoint pair to a bundle: check, trace, write, and only then appear.

Everything that can be refused is refused from config.json, tensor headers and tokenizer
files, before a weight is read. The bundle is built in a hidden folder beside its place and
renamed when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol

import onnx
import onnx_ir as ir
import torch

from slipstream.runtime import bundle as contract
from slipstream.runtime.backend import MAX_DRAFT_TOKENS
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.graph_io import kv_name, kv_output_name
from slipstream.runtime.host import read_state

from .assistant import Assistant
from .calibration import calibrate
from .checkpoint import Checkpoint, read_json
from .graphs import Graph, assistant_graph, target_graph
from .int8_kv import check_scales, int8_table, store_kv_as_int8
from .layers import Recipe
from .memory import check_export, export_plan, plan_text
from .opening import Pair
from .ops import OPSET
from .per_layer_table import per_layer_recipe, table_record, write_table
from .quantize import blocks_of, check_is_worth, float_matrices, initializer_names, quantized, separate_uses
from .staging import disk_errors, staged
from .stored_matrices import stored_quantization, with_stored_matrices
from .target import Target
from .weight_check import Part, check_values
from .weights import DTYPES, ExternalData, check_leftovers, check_recipes, write_weights

_EMBEDDING = "embed.weight"  # the initializer both graphs name
_EMBEDDING_FILE, _TARGET_FILE, _ASSISTANT_FILE = "embedding.bin", "target.bin", "assistant.bin"
_TOP_LOGITS = 64  # Gemma's default top-k
_DRAFT_TOP_LOGITS = 8
_MAX_UNROLLED_STEPS = 8  # a longer draft runs this graph and single steps


@dataclass(frozen=True)
class ExportSettings:
    """dtype: of weights, KV and hidden rows.
    max_length: tokens per sequence; None takes the model's.
    num_draft_tokens: default K and the steps unrolled in one graph; None takes generation_config's.
    draft_position: where the assistant's query stands: "pending" is N, "last" is N - 1.
    weights: how matrices are stored; "float" quantizes none and takes those that are quantized already as they are.
    block_size: values that share a scale, where "int8" or "int4" quantizes.
    ple: where a per-layer embedding table is looked up: by the runtime on the "host", or in the graph ("device").
    kv: "int8" stores KV in a quarter of float32's bytes, on ONNX Runtime only.
    """

    dtype: contract.DType = "float32"
    max_length: int | None = None
    num_draft_tokens: int | None = None
    draft_position: Literal["pending", "last"] = "pending"
    weights: contract.WeightFormat = "float"
    block_size: int = 32
    ple: Literal["host", "device"] = "host"
    kv: Literal["float", "int8"] = "float"


class Progress(Protocol):
    """Told what an export is doing. total_bytes is 0 for stages that are not counted."""

    def start(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


def export_pair(
    pair: Pair, out: Path, settings: ExportSettings, progress: Progress, *, overwrite: bool = False
) -> None:
    """Write the bundle of a pair to the folder ``out``.

    Raises CheckpointError before anything is written when the pair, the settings or the disk
    do not allow it, and leaves nothing behind when it fails later.
    """
    if out.exists() and not overwrite:
        raise CheckpointError(f"{out} exists already: choose another folder or pass --overwrite")
    if out.exists() and not (out / contract.MANIFEST).exists():
        raise CheckpointError(f"{out} exists and is not a bundle, so it is not overwritten: choose another folder")
    max_length = pair.target_config.max_positions if settings.max_length is None else settings.max_length
    if not 2 <= max_length <= pair.target_config.max_positions:
        raise CheckpointError(
            f"--max-length {max_length} is outside 2..{pair.target_config.max_positions}, the model's"
        )
    num_draft_tokens = settings.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = pair.generation.num_draft_tokens
    if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise CheckpointError(f"{num_draft_tokens} draft tokens are outside 1..{MAX_DRAFT_TOKENS}: set -k")
    if settings.kv == "int8" and settings.dtype == "bfloat16":
        raise CheckpointError(
            "--kv int8 needs its scales measured on the CPU, which can't multiply bfloat16: "
            "export with --dtype float16 or float32, or with --kv float"
        )
    stored_quantization([pair.target, pair.assistant], settings)
    graphs = _trace(pair, settings, num_draft_tokens, progress)
    _check_weights(pair, graphs)
    recipes = [*graphs.target.recipes.values(), *graphs.assistant_recipes.values()]
    plan = export_plan(recipes, graphs.per_layer_table, DTYPES[settings.dtype].itemsize)
    check_export(plan, out, read_state())
    progress.start(plan_text(plan), 0)
    parts = [Part(pair.target, graphs.target_recipes), Part(pair.assistant, graphs.assistant_recipes.values())]
    check_values(parts, DTYPES[settings.dtype], progress)
    with disk_errors(out), staged(out) as folder:
        _write_graphs(pair, graphs, folder, settings, progress)
        _copy_texts(pair.target.folder, folder)
        manifest = _manifest(pair, graphs, folder, settings, max_length, num_draft_tokens)
        if settings.dtype == "float16" or settings.kv == "int8":
            progress.start("calibrating", 0)
            manifest = _calibrated(graphs, contract.Bundle(folder, manifest), settings.kv)
        progress.start("hashing", 0)
        manifest = manifest.model_copy(update={"files": _hashed(folder)})
        content = json.dumps(manifest.model_dump(), indent=2) + "\n"
        (folder / contract.MANIFEST).write_text(content, encoding="utf-8")


@dataclass(frozen=True)
class _Graphs:
    """drafts: by number of steps. per_layer_table: with its recipe, where it stays outside the target's graph."""

    target: Graph
    drafts: Mapping[int, Graph]
    num_top_logits: int
    num_draft_top_logits: int
    per_layer_table: tuple[contract.PerLayerTable, Recipe] | None = None

    @property
    def target_recipes(self) -> list[Recipe]:
        """Of everything that comes from the target's checkpoint."""
        outside = [] if self.per_layer_table is None else [self.per_layer_table[1]]
        return [*self.target.recipes.values(), *outside]

    @property
    def assistant_recipes(self) -> dict[str, Recipe]:
        """The assistant's own weights: the same in each of its graphs."""
        recipes = next(iter(self.drafts.values())).recipes
        return {name: recipe for name, recipe in recipes.items() if name != _EMBEDDING}


def _trace(pair: Pair, settings: ExportSettings, num_draft_tokens: int, progress: Progress) -> _Graphs:
    dtype, blocks = DTYPES[settings.dtype], blocks_of(settings.weights, settings.block_size)
    target, assistant = pair.target_config, pair.assistant_config
    num_top_logits = min(_TOP_LOGITS, target.vocab_size)
    head = assistant.centroid_head
    num_scored = target.vocab_size // head.num_centroids * head.top_k if head else target.vocab_size
    num_draft_top_logits = min(_DRAFT_TOP_LOGITS, num_scored)
    with _default_dtype(dtype):
        progress.start("tracing the target", 0)
        offset = 0 if settings.draft_position == "pending" else -1
        module = Target(
            target,
            dtype,
            num_top_logits=num_top_logits,
            draft_position_offset=offset,
            suppress_tokens=pair.suppress_tokens,
            has_per_layer_table=settings.ple == "device",
        )
        traced_target = target_graph(module)
        drafts = {}
        for num_steps in sorted({1, min(num_draft_tokens, _MAX_UNROLLED_STEPS)}):
            progress.start(f"tracing the assistant, {num_steps} step{'s' if num_steps > 1 else ''}", 0)
            drafted = Assistant(assistant, target, dtype, num_steps=num_steps, num_top_logits=num_draft_top_logits)
            drafts[num_steps] = assistant_graph(drafted, target)
    traced_target = with_stored_matrices(traced_target, pair.target)
    drafts = {num_steps: with_stored_matrices(graph, pair.assistant) for num_steps, graph in drafts.items()}
    if blocks is not None:
        traced_target = quantized(traced_target, blocks)
        drafts = {num_steps: quantized(graph, blocks) for num_steps, graph in drafts.items()}
        check_is_worth([*traced_target.recipes.values(), *drafts[1].recipes.values()], blocks)
    table = None
    if module.takes_per_layer_rows:
        recipe = per_layer_recipe(target)
        check_recipes([recipe], pair.target)
        table = table_record(recipe, pair.target, settings.dtype), recipe
    graphs = _Graphs(traced_target, drafts, num_top_logits, num_draft_top_logits, table)
    for graph in (graphs.target, *drafts.values()):
        _mark(graph.model, _kv_table(pair, settings.dtype))
    return graphs


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules take their parameters' dtype from torch's default, as transformers does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _kv_table(pair: Pair, dtype: contract.DType) -> list[contract.KVBuffer]:
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


def _mark(model: ir.Model, table: list[contract.KVBuffer]) -> None:
    """Mark every KV input and output as a shared binding, and drop what tracing left on the nodes."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for value in (*values.values(), *model.graph.initializers.values()):
        value.metadata_props.clear()
    for buffer in table:
        for part in ("key", "value"):
            names = kv_name(buffer.layer, part), kv_output_name(buffer.layer, part)
            for name, alias in (names, names[::-1]):
                if name in values:
                    values[name].metadata_props.update(
                        {
                            "slipstream.binding": "shared",
                            "slipstream.owner_layer": str(buffer.layer),
                            "slipstream.layer_type": buffer.type,
                            "slipstream.assistant_readers": json.dumps(buffer.assistant_readers),
                            **({"slipstream.alias": alias} if alias in values else {}),
                        }
                    )
    model.metadata_props.clear()
    model.metadata_props["slipstream.kv"] = json.dumps([buffer.model_dump() for buffer in table])
    model.producer_name, model.producer_version = "slipstream", version("slipstream")
    model.doc_string = None
    domains = {node.domain for node in model.graph.all_nodes()}
    if domains - {""} or model.functions:
        raise AssertionError(f"the graph is not standard ONNX: domains {domains}, functions {list(model.functions)}")


def _check_weights(pair: Pair, graphs: _Graphs) -> None:
    check_recipes(graphs.target_recipes, pair.target)
    check_leftovers(graphs.target_recipes, pair.target, pair.target_config)
    recipes = graphs.assistant_recipes.values()
    check_recipes(recipes, pair.assistant)
    embedding = Recipe(("embed_tokens.weight",), "as_is", ())  # its own, used by a tied head only
    check_leftovers([*recipes, embedding], pair.assistant, pair.assistant_config.text)


def _num_bytes(recipes: Mapping[str, Recipe], item_bytes: int) -> int:
    return sum(recipe.num_bytes(item_bytes) for recipe in recipes.values())


def _write_graphs(pair: Pair, graphs: _Graphs, folder: Path, settings: ExportSettings, progress: Progress) -> None:
    dtype = DTYPES[settings.dtype]
    embedding = {_EMBEDDING: graphs.target.recipes[_EMBEDDING]}
    own = {name: recipe for name, recipe in graphs.target.recipes.items() if name != _EMBEDDING}
    groups = [
        (_EMBEDDING_FILE, graphs.target, embedding, pair.target, "writing the embedding"),
        (_TARGET_FILE, graphs.target, own, pair.target, "writing the target"),
        (_ASSISTANT_FILE, graphs.drafts[1], graphs.assistant_recipes, pair.assistant, "writing the assistant"),
    ]
    for file, graph, recipes, checkpoint, stage in groups:
        progress.start(stage, _num_bytes(recipes, dtype.itemsize))
        data = ExternalData(folder / file)
        try:
            write_weights(graph.model, recipes, checkpoint, data, dtype, progress.advance)
        finally:
            data.close()
    if graphs.per_layer_table is not None:
        record, recipe = graphs.per_layer_table
        progress.start("writing the per-layer table", _num_bytes({"": recipe}, DTYPES[record.dtype].itemsize))
        write_table(record, recipe, pair.target, folder, progress.advance)
    for graph in graphs.drafts.values():
        for name in initializer_names(graph.recipes):
            source = graphs.target if name == _EMBEDDING else graphs.drafts[1]
            graph.model.graph.initializers[name].const_value = source.model.graph.initializers[name].const_value
    for file, graph in _graph_files(graphs).items():
        separate_uses(graph.model)
        _save(graph.model, folder / file)


def _save(model: ir.Model, path: Path) -> None:
    ir.save(model, path)
    onnx.checker.check_model(path)


def _calibrated(graphs: _Graphs, bundle: contract.Bundle, kv: Literal["float", "int8"]) -> contract.Manifest:
    """The manifest of graphs that passed a run, and whose KV is int8 where that is wanted."""
    largest = calibrate(bundle)
    if kv == "float":
        return bundle.manifest
    table = int8_table(bundle.manifest.kv, largest)
    for file, graph in _graph_files(graphs).items():
        store_kv_as_int8(graph.model, table)
        _mark(graph.model, table)
        _save(graph.model, bundle.path(file))
        check_scales(ir.load(bundle.path(file)), table)
    return bundle.manifest.model_copy(update={"kv": table})


def _graph_files(graphs: _Graphs) -> dict[str, Graph]:
    drafts = {_draft_file(num_steps): graph for num_steps, graph in graphs.drafts.items()}
    return {"target.onnx": graphs.target, **drafts}


def _draft_file(num_steps: int) -> str:
    return "assistant.onnx" if num_steps == 1 else f"assistant_{num_steps}_steps.onnx"


def _copy_texts(source: Path, folder: Path) -> None:
    shutil.copyfile(source / contract.TOKENIZER, folder / contract.TOKENIZER)
    template = source / contract.CHAT_TEMPLATE
    if template.exists():
        shutil.copyfile(template, folder / contract.CHAT_TEMPLATE)
        return
    inline = read_json(source / "tokenizer_config.json", required=False).get("chat_template")
    if isinstance(inline, list):  # several by name, in older checkpoints
        inline = next((entry["template"] for entry in inline if entry.get("name") == "default"), None)
    if isinstance(inline, str):
        (folder / contract.CHAT_TEMPLATE).write_text(inline, encoding="utf-8")


def _weights(pair: Pair, graphs: _Graphs, settings: ExportSettings) -> contract.Weights:
    stored = stored_quantization([pair.target, pair.assistant], settings)
    if stored is None and settings.weights == "float":
        return contract.Weights(format="float", block_size=None, float_matrices=[])
    each = {"target.onnx": graphs.target, "assistant.onnx": graphs.drafts[1]}
    left = [f"{file}:{name}" for file, graph in each.items() for name in float_matrices(graph)]
    if stored is not None:
        return contract.Weights(format=stored.format, block_size=stored.block_size, float_matrices=left)
    return contract.Weights(format=settings.weights, block_size=settings.block_size, float_matrices=left)


def _manifest(
    pair: Pair,
    graphs: _Graphs,
    folder: Path,
    settings: ExportSettings,
    max_length: int,
    num_draft_tokens: int,
) -> contract.Manifest:
    """Of the files only sizes: hashes come last."""

    def config_hash(checkpoint: Checkpoint) -> str:
        return contract.file_sha256(checkpoint.folder / "config.json")

    return contract.Manifest(
        format_version=contract.FORMAT_VERSION,
        slipstream_version=version("slipstream"),
        versions={"opset": str(OPSET), "torch": torch.__version__, "onnx": onnx.__version__},
        source=contract.Source(
            target=pair.target.folder.resolve().name,
            assistant=pair.assistant.folder.resolve().name,
            target_config_sha256=config_hash(pair.target),
            assistant_config_sha256=config_hash(pair.assistant),
        ),
        dtype=settings.dtype,
        weights=_weights(pair, graphs, settings),
        vocab_size=pair.target_config.vocab_size,
        hidden_size=pair.target_config.hidden_size,
        sliding_window=pair.target_config.sliding_window,
        max_length=max_length,
        num_top_logits=graphs.num_top_logits,
        num_draft_top_logits=graphs.num_draft_top_logits,
        draft_position_offset=0 if settings.draft_position == "pending" else -1,
        num_target_layers=len(pair.target_config.layers),
        target_graph="target.onnx",
        draft_graphs=[contract.DraftGraph(file=_draft_file(n), num_steps=n) for n in graphs.drafts],
        embedding_file=_EMBEDDING_FILE,
        target_file=_TARGET_FILE,
        assistant_file=_ASSISTANT_FILE,
        per_layer_table=graphs.per_layer_table[0] if graphs.per_layer_table else None,
        kv=_kv_table(pair, settings.dtype),
        generation=pair.generation.model_copy(update={"num_draft_tokens": num_draft_tokens}),
        files={p.name: contract.FileRecord(size_bytes=p.stat().st_size, sha256="") for p in folder.iterdir()},
    )


def _hashed(folder: Path) -> dict[str, contract.FileRecord]:
    return {
        path.name: contract.FileRecord(size_bytes=path.stat().st_size, sha256=contract.file_sha256(path))
        for path in sorted(folder.iterdir())
    }
