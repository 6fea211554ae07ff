"""What the commands show: progress on stderr, reports and summaries as text."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .runtime.bundle import Manifest
from .runtime.engine_record import EngineRecord
from .runtime.graph_io import kv_name
from .runtime.onnxruntime_record import OnnxRuntimeRecord
from .runtime.plan import MemoryPlan
from .runtime.results import Result

if TYPE_CHECKING:
    from .engines.parity import CallCheck, ParityReport
    from .export.report import Report

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True)


class StageProgress:
    """Shows one line per stage of long work, with a bar where bytes are counted."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            console=stderr,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> StageProgress:
        return self  # the display starts with the first stage: a refusal before it leaves no empty line

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if kind is None:
            self._finish_stage()
        if self._task is not None:  # stopping what never started prints an empty line where there is no terminal
            self._progress.stop()

    def start(self, stage: str, total_bytes: int) -> None:
        self._finish_stage()
        self._progress.start()
        size = bytes_text(total_bytes) if total_bytes else ""
        self._task = self._progress.add_task(stage, total=total_bytes or None, size=size)

    def advance(self, num_bytes: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, num_bytes)

    def _finish_stage(self) -> None:
        if self._task is not None:
            total = self._progress.tasks[self._task].total or 1
            self._progress.update(self._task, total=total, completed=total)


def summary_line(result: Result) -> str:
    """One line under a generated text."""
    speed = result.timings.tokens_per_second(len(result.token_ids))
    parts = [f"{len(result.token_ids)} tokens", f"{speed:.0f} tokens/s", f"ended by {result.finish_reason}"]
    if result.num_draft_tokens:
        shares = " ".join(f"{share:.2f}" for share in result.acceptance.by_position)
        parts.append(f"K={result.num_draft_tokens}, accepted by position {shares}")
        parts.append(f"{result.acceptance.tokens_per_round:.2f} tokens per round")
    else:
        parts.append("no drafting")
    return ", ".join(parts)


def bytes_text(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _layers_text(layers: list[int]) -> str:
    return ", ".join(map(str, layers)) or "–"


def binding_table(manifest: Manifest) -> Table:
    """Which target and assistant layers read which KV buffer."""
    table = Table(title=escape("KV buffers [batch, heads, capacity, head size]"), title_justify="left")
    for heading in ("tensors", "type", "heads", "head size", "dtype", "target layers", "assistant layers"):
        table.add_column(heading, overflow="fold")
    for buffer in manifest.kv:
        table.add_row(
            f"{kv_name(buffer.layer, 'key')}, .value",
            buffer.type,
            str(buffer.num_kv_heads),
            str(buffer.head_dim),
            buffer.dtype,
            _layers_text([buffer.layer, *buffer.target_readers]),
            _layers_text(buffer.assistant_readers),
            style="bold" if buffer.assistant_readers else None,
        )
    return table


def memory_table(plan: MemoryPlan) -> Table:
    table = Table(title=f"Memory at {plan.length} tokens, batch {plan.batch} (ONNX Runtime CPU)", title_justify="left")
    table.add_column("what")
    table.add_column("size", justify="right")
    rows = [
        ("weights", plan.weights),
        ("  of which the embedding both graphs share", plan.embedding),
        ("copies packed for matrix products, at most", plan.packed),
        ("KV of sliding layers (bounded)", plan.kv_sliding),
        ("KV of full layers", plan.kv_full),
        ("largest buffer while it grows", plan.growth),
        ("total", plan.total),
    ]
    for name, num_bytes in rows:
        table.add_row(name, bytes_text(num_bytes))
    return table


def engine_table(record: EngineRecord) -> Table:
    """What was built, and how TensorRT will run each attention shape."""
    settings = record.settings
    table = Table(
        title=f"{settings.flavour} {record.engine_version} engines for {settings.device}, {record.dtype}, "
        f"up to {settings.max_length} tokens, batch {settings.max_batch}, K={settings.num_draft_tokens}",
        title_justify="left",
    )
    for heading in ("file", "size", "seconds", "profiles"):
        table.add_column(heading)
    for engine in (record.target, record.assistant):
        size, profiles = bytes_text(engine.size_bytes), ", ".join(engine.profiles)
        table.add_row(engine.file, size, f"{engine.build_seconds:.1f}", profiles)
    for shape in record.attention:
        kernel = "one kernel" if shape.is_fused else "taken apart"
        table.add_row(f"attention {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}", "", "", kernel)
    return table


def rewrite_table(record: OnnxRuntimeRecord) -> Table:
    """Which rewrites each graph got."""
    table = Table(title=f"Graphs for ONNX Runtime {record.onnxruntime_version} on the CPU", title_justify="left")
    for heading in ("graph", "size", "rewrites"):
        table.add_column(heading, overflow="fold")
    for graph in record.graphs:
        table.add_row(graph.file, bytes_text(graph.size_bytes), ", ".join(graph.passes) or "–")
    return table


def parity_table(report: ParityReport) -> Table:
    """A comparison of engines with ONNX Runtime, by kind of call and batch."""
    table = Table(title=f"{report.engine} against ONNX Runtime (allowed {report.tolerance:.0e} of the scale)")
    for heading in ("call", "rows", "batch", "contexts", "largest difference", "tokens", "near-ties", ""):
        table.add_column(heading)
    groups: dict[tuple[str, int, int], list[CallCheck]] = {}
    for check in report.calls:
        groups.setdefault((check.call, check.rows, check.batch), []).append(check)
    for (call, rows, batch), checks in groups.items():
        table.add_row(
            call,
            str(rows),
            str(batch),
            f"{len(checks)}, {checks[0].context} to {checks[-1].context}",
            f"{max(check.difference for check in checks):.1e}",
            str(sum(check.num_tokens for check in checks)),
            str(sum(check.near_ties for check in checks)),
            "MISS" if any(check.problem for check in checks) else "ok",
        )
    return table


def report_tables(report: Report) -> list[Table]:
    """A verification as tables a person can read."""
    logits = Table(title=f"Logits against transformers (allowed {report.tolerance:.0e} of the scale)")
    for heading in ("graph", "context", "max |Δ|", "scale", "relative", ""):
        logits.add_column(heading)
    for check in report.logits:
        is_good = check.relative <= report.tolerance and check.tokens_equal
        logits.add_row(
            check.graph,
            str(check.context_length),
            f"{check.difference:.1e}",
            f"{check.scale:.2f}",
            f"{check.relative:.1e}",
            "ok" if is_good else "MISS",
        )
    greedy = Table(title="Greedy text against transformers' generate, and drafted against plain")
    for heading in ("K", "prompts", "tokens", "differ", "near-ties", "drafted = plain", "accepted by position"):
        greedy.add_column(heading)
    for item in report.greedy:
        num_excused = sum(miss.is_excused for miss in item.mismatches)
        greedy.add_row(
            str(item.num_draft_tokens),
            str(item.num_prompts),
            str(item.num_tokens),
            str(len(item.mismatches) - num_excused),
            str(num_excused),
            "–" if not item.num_draft_tokens else ("no" if item.differs_from_plain else "yes"),
            " ".join(f"{share:.2f}" for share in item.acceptance) or "–",
        )
    drafts = report.drafts
    greedy.caption = f"{drafts.num_drafts} drafts of {drafts.num_rounds} rounds compared with transformers' own: " + (
        f"{len(drafts.different)} differ" if drafts.different else "all equal"
    )
    return [logits, greedy]
