"""``slipstream build --engine onnxruntime``: the graphs as ONNX Runtime's CPU provider runs them best.

They stand beside the portable graphs, with the same inputs and outputs, and name the same weight files; large float32
matrices alone are stored once more, see filter_file.py. Graphs are written to a hidden folder, loaded once, and appear
together. A build whose record matches is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from slipstream.engines.onnxruntime.passes.add_masks import add_masks
from slipstream.engines.onnxruntime.passes.block_matrices import ROWS_RUN, block_matrices
from slipstream.engines.onnxruntime.passes.fold_layer_scalars import fold_layer_scalars
from slipstream.engines.onnxruntime.passes.fold_query_heads import fold_query_heads
from slipstream.engines.onnxruntime.passes.fuse_cached_attention import fuse_cached_attention
from slipstream.engines.onnxruntime.passes.join_head_rows import join_head_rows
from slipstream.engines.outcome import Outcome
from slipstream.runtime.bundle import onnxruntime_record as records
from slipstream.runtime.bundle.engine_record import ENGINE_FOLDER, RECORD, check_runs
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import MANIFEST, Bundle, Manifest, check_links
from slipstream.runtime.bundle.staging import check_writable, staged
from slipstream.runtime.errors import BackendError, RequestError
from slipstream.runtime.machine.host import read_state, usual_num_threads
from slipstream.runtime.machine.plan import check_build, check_disk
from slipstream.runtime.machine.progress import Progress
from slipstream.runtime.ort.probes import channels_of_a_block, open_graphs
from slipstream.runtime.ort.session import open_session, session_options

from .filter_file import FilterFile, layout_graph

# Of a graph's matrices: fewer stay in caches, where a convolution's own nodes cost more than it gains.
LEAST_FILTER_BYTES = 64 * 2**20
# In this order; each takes the model and the number of threads, and says whether it changed the model. One thread
# runs models that stay in caches, where a node costs more than what it computes.
REWRITES: Mapping[str, Callable[[ir.Model, int], bool]] = {
    "fuse_cached_attention": lambda model, _: fuse_cached_attention(model),
    "add_masks": lambda model, _: add_masks(model),
    "join_head_rows": lambda model, num_threads: num_threads == 1 and join_head_rows(model),
    "fold_query_heads": fold_query_heads,
    "fold_layer_scalars": lambda model, num_threads: num_threads == 1 and fold_layer_scalars(model),
}


def build_onnxruntime(bundle: Bundle, progress: Progress) -> Outcome[records.OnnxRuntimeRecord]:
    """Write the graphs for ONNX Runtime's CPU provider here.

    Raises RequestError where this machine can't build the bundle, BackendError where the provider can't run it.
    """
    check_build(bundle.manifest, "onnxruntime", read_state())
    check_runs(bundle.manifest, "onnxruntime")
    check_links(bundle)
    for name in bundle.manifest.files:
        if (num_links := bundle.path(name).stat().st_nlink) > 1:
            raise RequestError(
                f"{bundle.path(name)} has {num_links} hard links, and onnx refuses to read such files: "
                "copy the bundle without links (cp -r, not cp -l), and build there"
            )
    folder, num_threads = records.optimized_folder(bundle), usual_num_threads(bundle.manifest)
    existing = _matching_record(bundle, num_threads)
    if existing is not None:
        return Outcome(folder, existing, is_new=False)
    check_writable(folder)
    with staged(folder) as work:
        record = _build(bundle, num_threads, work, progress)
        (work / RECORD).write_bytes(record.to_json())
    return Outcome(folder, record, is_new=True)


def rewritten(bundle: Bundle, graph: str, rewrites: Iterable[str], num_threads: int) -> tuple[ir.Model, list[str]]:
    """A portable graph after some of REWRITES, and those that changed it; weights stay where they are.

    Raises BackendError where a node that a rewrite is meant for is not there.
    """
    model, done = ir.load(bundle.path(graph)), []
    for name in rewrites:
        is_meant = name != fuse_cached_attention.__name__ or _has_cached_attention(bundle.manifest, graph)
        if is_meant and REWRITES[name](model, num_threads):
            done.append(name)
    return model, done


def serialized(model: ir.Model) -> bytes:
    """The model without initializers that no node reads any more."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _has_cached_attention(manifest: Manifest, graph: str) -> bool:
    """Whether the graph writes KV that GroupQueryAttention can write, and this ONNX Runtime's takes calls as they are.

    Before 1.32 it took no calls of several rows of several sequences; onnxruntime-gpu is behind in versions.
    """
    is_new = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)
    return is_new and graph == manifest.target_graph and all(buffer.dtype == "float32" for buffer in manifest.kv)


def _matching_record(bundle: Bundle, num_threads: int) -> records.OnnxRuntimeRecord | None:
    try:
        record = open_graphs(bundle)
        records.check_matrices(bundle, record)
    except BackendError:  # of another bundle, version or CPU, or damaged: built again
        return None
    if record is None or (record.slipstream_version, record.num_threads) != (version("slipstream"), num_threads):
        return None
    return record


def _build(bundle: Bundle, num_threads: int, work: Path, progress: Progress) -> records.OnnxRuntimeRecord:
    manifest, graphs = bundle.manifest, []
    filters = _filter_file(bundle, work)
    for file in (manifest.target_graph, *(graph.file for graph in manifest.draft_graphs)):
        progress.start(f"rewriting {file} for ONNX Runtime", 0)
        model, passes = rewritten(bundle, file, REWRITES, num_threads)
        if filters is not None and block_matrices(model, filters, LEAST_FILTER_BYTES):
            passes.append(block_matrices.__name__)
            filters.move(model, f"{ENGINE_FOLDER}/{work.name}/{records.FILTERS}")
        _check_loads(bundle, file, serialized(model))
        if filters is not None:
            filters.move(model, f"{ENGINE_FOLDER}/{records.ONNXRUNTIME_FOLDER}/{records.FILTERS}")
        content = serialized(model)
        (work / file).write_bytes(content)
        digest = file_sha256(work / file)
        graphs.append(
            records.OptimizedGraph(file=file, graph=file, sha256=digest, size_bytes=len(content), passes=passes)
        )
    progress.start("hashing", 0)
    if filters is None or not filters.num_bytes:
        written = None
        (work / records.LAYOUT).unlink(missing_ok=True)
    else:
        layout, digest = file_sha256(work / records.LAYOUT), file_sha256(filters.path)
        size = filters.num_bytes
        written = records.Filters(block=filters.block, layout_sha256=layout, size_bytes=size, sha256=digest)
    return records.OnnxRuntimeRecord(
        bundle_sha256=file_sha256(bundle.folder / MANIFEST),
        slipstream_version=version("slipstream"),
        onnxruntime_version=ort.__version__,
        num_threads=num_threads,
        graphs=graphs,
        filters=written,
        rows_run={} if written is None else ROWS_RUN,
    )


def _filter_file(bundle: Bundle, work: Path) -> FilterFile | None:
    """An empty file for matrices as filters, beside the graph that shows their layout; None where none are written.

    Raises RequestError where the disk has no room for them, BundleError where links lead there.
    """
    manifest = bundle.manifest
    files = manifest.target_file, manifest.assistant_file, manifest.embedding_file  # the embedding is a tied head
    needed = sum(manifest.files[file].size_bytes for file in files)
    if manifest.weights.format != "float" or manifest.dtype != "float32" or needed < LEAST_FILTER_BYTES:
        return None
    (work / records.LAYOUT).write_bytes(layout_graph())
    block = channels_of_a_block(work / records.LAYOUT)
    if block == 1:
        return None
    check_links(bundle, records.optimized_folder(bundle))
    check_disk(work, needed, "writing the matrices once more", "copy the bundle to another disk")
    return FilterFile(work / records.FILTERS, block)


def _check_loads(bundle: Bundle, file: str, content: bytes) -> None:
    try:
        what = f"{file} of this {bundle.manifest.dtype} bundle as rewritten for its CPU provider"
        open_session(content, session_options(bundle.folder), what)
    except BackendError as error:
        raise RequestError(f"{error}. Export with --dtype float32, or run the bundle without building") from error
