"""Export of a checkpoint pair to a bundle: check, trace, write, and only then appear.

Everything that can be refused is refused from config.json, tensor headers and tokenizer files, before a weight is read.
The bundle is built in a hidden folder beside its place and renamed when it is complete.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from slipstream.export.calibrate.calibration import calibrate
from slipstream.export.calibrate.int8_kv import check_scales, int8_table, store_kv_as_int8
from slipstream.export.checkpoint.opening import CheckpointPair
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.ops import OPSET
from slipstream.export.weights.check import Part, check_values
from slipstream.export.weights.memory import check_export, export_plan
from slipstream.export.weights.per_layer_table import write_table
from slipstream.export.weights.quantize import float_matrices, initializer_names, separate_uses
from slipstream.export.weights.recipes import DTYPES, ExternalData, write_weights
from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.staging import check_writable, staged
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.machine.host import bytes_text, read_state
from slipstream.runtime.machine.progress import Progress

from . import trace as tracing
from .settings import ExportSettings, ResolvedSettings, resolve

_EMBEDDING_FILE, _TARGET_FILE, _ASSISTANT_FILE = "embedding.bin", "target.bin", "assistant.bin"


def export_pair(
    pair: CheckpointPair, out: Path, settings: ExportSettings, progress: Progress, *, overwrite: bool = False
) -> None:
    """Write the bundle of a pair to the folder ``out``.

    Raises CheckpointError before anything is written when the pair or the settings do not allow it, RequestError
    when the disk doesn't, and leaves nothing behind when it fails later.
    """
    _check_place(out, overwrite=overwrite)
    resolved = resolve(settings, pair)
    graphs = tracing.trace(pair, resolved, progress)
    tracing.check_weights(pair, graphs.target_recipes, graphs.assistant_recipes)
    recipes = [*graphs.target.recipes.values(), *graphs.assistant_recipes.values()]
    plan = export_plan(recipes, graphs.per_layer_table, DTYPES[resolved.dtype].itemsize)
    check_export(plan, out, read_state())
    progress.start(f"{bytes_text(plan.bundle)} on disk, {bytes_text(plan.peak)} in memory", 0)
    parts = [Part(pair.target, graphs.target_recipes), Part(pair.assistant, graphs.assistant_recipes.values())]
    check_values(parts, DTYPES[resolved.dtype], progress)
    with staged(out) as folder:
        _write_graphs(pair, graphs, folder, DTYPES[resolved.dtype], progress)
        shutil.copyfile(pair.target.folder / contract.TOKENIZER, folder / contract.TOKENIZER)
        if pair.chat_template is not None:
            (folder / contract.CHAT_TEMPLATE).write_text(pair.chat_template, encoding="utf-8")
        kv = tracing.kv_table(pair, resolved.dtype)
        if resolved.is_calibrated:
            progress.start("calibrating", 0)
            sizes = {p.name: contract.FileRecord(size_bytes=p.stat().st_size, sha256="") for p in folder.iterdir()}
            bundle = contract.Bundle(folder, _manifest(pair, graphs, resolved, kv, sizes))
            largest = calibrate(bundle, pair.codec)
            if resolved.kv == "int8":
                kv = int8_table(kv, largest)
                _store_kv_as_int8(graphs, kv, folder)
        progress.start("hashing", 0)
        manifest = _manifest(pair, graphs, resolved, kv, _hashed(folder))
        (folder / contract.MANIFEST).write_bytes(manifest.to_json())


def _check_place(out: Path, *, overwrite: bool) -> None:
    """Raises CheckpointError where something is in the way, RequestError where nothing can be written."""
    if out.exists() and not overwrite:
        raise CheckpointError(f"{out} exists already: choose another folder or pass --overwrite")
    if out.exists() and not (out / contract.MANIFEST).exists():
        raise CheckpointError(f"{out} exists and is not a bundle, so it is not overwritten: choose another folder")
    check_writable(out)


def _write_graphs(
    pair: CheckpointPair, graphs: tracing.TracedPair, folder: Path, dtype: torch.dtype, progress: Progress
) -> None:
    embedding = {tracing.EMBEDDING: graphs.target.recipes[tracing.EMBEDDING]}
    own = {name: recipe for name, recipe in graphs.target.recipes.items() if name != tracing.EMBEDDING}
    groups = [
        (_EMBEDDING_FILE, graphs.target, embedding, pair.target, "writing the embedding"),
        (_TARGET_FILE, graphs.target, own, pair.target, "writing the target"),
        (_ASSISTANT_FILE, graphs.drafts[1], graphs.assistant_recipes, pair.assistant, "writing the assistant"),
    ]
    for file, graph, recipes, checkpoint, stage in groups:
        progress.start(stage, sum(recipe.num_bytes(dtype.itemsize) for recipe in recipes.values()))
        with closing(ExternalData(folder / file)) as data:
            write_weights(graph.model, recipes, checkpoint, data, dtype, progress.advance)
    if graphs.per_layer_table is not None:
        record, recipe = graphs.per_layer_table
        progress.start("writing the per-layer table", recipe.num_bytes(DTYPES[record.dtype].itemsize))
        write_table(record, recipe, pair.target, folder, progress.advance)
    for graph in graphs.drafts.values():
        for name in initializer_names(graph.recipes):
            source = graphs.target if name == tracing.EMBEDDING else graphs.drafts[1]
            graph.model.graph.initializers[name].const_value = source.model.graph.initializers[name].const_value
    for file, graph in _graph_files(graphs).items():
        separate_uses(graph.model)
        _save(graph.model, folder / file)


def _save(model: ir.Model, path: Path) -> None:
    ir.save(model, path)
    onnx.checker.check_model(path)


def _store_kv_as_int8(graphs: tracing.TracedPair, table: list[contract.KVBuffer], folder: Path) -> None:
    """Rewrite every graph for KV buffers in int8, with the scales of their table."""
    for file, graph in _graph_files(graphs).items():
        store_kv_as_int8(graph.model, table)
        tracing.mark(graph.model, table)
        _save(graph.model, folder / file)
        check_scales(ir.load(folder / file), table)


def _graph_files(graphs: tracing.TracedPair) -> dict[str, TracedGraph]:
    drafts = {_draft_file(num_steps): graph for num_steps, graph in graphs.drafts.items()}
    return {"target.onnx": graphs.target, **drafts}


def _draft_file(num_steps: int) -> str:
    return "assistant.onnx" if num_steps == 1 else f"assistant_{num_steps}_steps.onnx"


def _weights(graphs: tracing.TracedPair, settings: ResolvedSettings) -> contract.Weights:
    each = {"target.onnx": graphs.target, "assistant.onnx": graphs.drafts[1]}
    left = [f"{file}:{name}" for file, graph in each.items() for name in float_matrices(graph)]
    if (stored := settings.stored) is not None:
        return contract.Weights(format=stored.format, block_size=stored.block_size, float_matrices=left)
    if (blocks := settings.blocks) is not None:
        return contract.Weights(format=blocks.format, block_size=blocks.size, float_matrices=left)
    return contract.Weights(format="float", block_size=None, float_matrices=[])


def _manifest(
    pair: CheckpointPair,
    graphs: tracing.TracedPair,
    settings: ResolvedSettings,
    kv: list[contract.KVBuffer],
    files: dict[str, contract.FileRecord],
) -> contract.Manifest:
    configs = [file_sha256(checkpoint.folder / "config.json") for checkpoint in (pair.target, pair.assistant)]
    return contract.Manifest(
        format_version=contract.FORMAT_VERSION,
        slipstream_version=version("slipstream"),
        versions={"opset": str(OPSET), "torch": torch.__version__, "onnx": onnx.__version__},
        source=contract.Source(
            target=pair.target.folder.resolve().name,
            assistant=pair.assistant.folder.resolve().name,
            target_config_sha256=configs[0],
            assistant_config_sha256=configs[1],
        ),
        dtype=settings.dtype,
        weights=_weights(graphs, settings),
        vocab_size=pair.target_config.vocab_size,
        hidden_size=pair.target_config.hidden_size,
        sliding_window=pair.target_config.sliding_window,
        max_length=settings.max_length,
        logit_softcap=pair.target_config.logit_softcap,
        num_draft_top_logits=tracing.num_draft_top_logits(pair),
        draft_position_offset=settings.draft_position_offset,
        num_target_layers=len(pair.target_config.layers),
        target_graph="target.onnx",
        draft_graphs=[contract.DraftGraph(file=_draft_file(n), num_steps=n) for n in graphs.drafts],
        embedding_file=_EMBEDDING_FILE,
        target_file=_TARGET_FILE,
        assistant_file=_ASSISTANT_FILE,
        per_layer_table=graphs.per_layer_table[0] if graphs.per_layer_table else None,
        kv=kv,
        generation=pair.generation.model_copy(update={"num_draft_tokens": settings.num_draft_tokens}),
        files=files,
    )


def _hashed(folder: Path) -> dict[str, contract.FileRecord]:
    return {
        path.name: contract.FileRecord(size_bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(folder.iterdir())
    }
