"""What the commands show: progress on stderr, reports and summaries as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import typer
from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .runtime.bundle.engine_record import EngineName, EngineRecord
from .runtime.bundle.graph_io import kv_name
from .runtime.bundle.manifest import Bundle, Manifest
from .runtime.bundle.onnxruntime_record import FILTERS, OnnxRuntimeRecord
from .runtime.decode.results import Result
from .runtime.machine.host import bytes_text, read_state
from .runtime.machine.plan import MemoryPlan, build_peak, engine_plans

if TYPE_CHECKING:
    from .engines.parity.call_check import CallCheck
    from .engines.parity.compare import ParityReport
    from .export.verify.report import Report
    from .runtime.doctor.diagnosis import Diagnosis
    from .runtime.doctor.findings import Outcome

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True)

_STYLES: dict[Outcome, str] = {"ok": "green", "missing": "yellow", "problem": "red"}
_SHOWN_WHEN_THERE = ("  of which read while loading only", "PLE table mapped on the host, file cache beside the total")


def say(text: str) -> None:
    """One line on stderr as it is, with nothing in it taken for markup."""
    stderr.print(text, markup=False, soft_wrap=True)


def say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def print_json(value: object, indent: int | None = None) -> None:
    """One JSON text on stdout; where its encoding may lack letters they are escaped, so that none is lost."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    typer.echo(json.dumps(value, ensure_ascii=not encoding.lower().startswith("utf"), indent=indent))


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
    shares = result.acceptance.by_position
    if result.num_draft_tokens == 0:
        parts.append("no drafting")
    elif not shares:
        parts.append("no drafting, which would have been slower")
    else:
        chosen = f"K chosen, up to {len(shares)}" if result.num_draft_tokens is None else f"K={result.num_draft_tokens}"
        parts.append(f"{chosen}, accepted by position {shares_text(shares)}")
        parts.append(f"{result.acceptance.tokens_per_round:.2f} tokens per round")
    if not result.sampling.is_greedy:
        parts.append(f"drawn at temperature {result.sampling.temperature:g} with seed {result.sampling.seed}")
    return ", ".join(parts)


def shares_text(acceptance: Iterable[float]) -> str:
    return " ".join(f"{share:.2f}" for share in acceptance) or "–"


def _table(title: str, *headings: str, overflow: OverflowMethod = "ellipsis") -> Table:
    """An empty table. Sizes are in columns called "size", to the right."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow=overflow, justify="right" if heading == "size" else "left")
    return table


def binding_table(manifest: Manifest) -> Table:
    """Which target and assistant layers read which KV buffer."""
    headings = ("tensors", "type", "heads", "head size", "dtype", "target layers", "assistant layers")
    table = _table(escape("KV buffers [batch, heads, capacity, head size]"), *headings, overflow="fold")
    for buffer in manifest.kv:
        readers = [buffer.layer, *buffer.target_readers], buffer.assistant_readers
        layers = (", ".join(map(str, each)) or "–" for each in readers)
        sizes = str(buffer.num_kv_heads), str(buffer.head_dim)
        style = "bold" if buffer.assistant_readers else None
        name = f"{kv_name(buffer.layer, 'key')}, .value"
        table.add_row(name, buffer.type, *sizes, buffer.dtype, *layers, style=style)
    return table


def memory_table(plan: MemoryPlan) -> Table:
    """A memory plan as a table: the rows above "total" add up to it, and it has to fit."""
    runner = "ONNX Runtime CPU" if plan.place == "host" else "GPU memory"
    table = _table(f"Memory at {plan.length} tokens, {_slots(plan.num_slots)} ({runner})", "what", "size")
    rows = [
        ("weights", plan.weights),
        ("  of which the embedding both graphs share", plan.embedding),
        ("  of which read while loading only", -plan.released),
        ("copies of weights that the engine makes", plan.packed),
        ("KV of sliding layers (bounded)", plan.kv_sliding),
        ("KV of full layers", plan.kv_full),
        ("largest buffer while it grows", plan.growth),
        ("workspace, at most", plan.workspace),
        ("total", plan.total),
        ("peak while loading", plan.start),
        ("more with penalties, biases, schemas or logprobs, at most", plan.whole_rows),
        ("PLE table mapped on the host, file cache beside the total", plan.per_layer_table),
    ]
    for name, num_bytes in rows:
        if num_bytes or name not in _SHOWN_WHEN_THERE:
            table.add_row(name, f"-{bytes_text(-num_bytes)}" if num_bytes < 0 else bytes_text(num_bytes))
    return table


def peaks_table(bundle: Bundle) -> Table:
    """What builds of a bundle need, and what the engines it has take on a GPU."""
    table = _table("Memory of builds, and of the engines that are there", "what", "size")
    onnxruntime, tensorrt = build_peak(bundle.manifest, "onnxruntime"), build_peak(bundle.manifest, "tensorrt")
    table.add_row("slipstream build --engine onnxruntime", bytes_text(onnxruntime))
    table.add_row("slipstream build --engine tensorrt, tensorrt-rtx", bytes_text(tensorrt))
    for name, plan in engine_plans(bundle).items():
        table.add_row(f"{name} on its GPU, {plan.length} tokens, {_slots(plan.num_slots)}", bytes_text(plan.total))
    return table


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count > 1 else ''}"


def memory_line(plan: MemoryPlan) -> str:
    """A plan in one line, with what this machine has where the plan is about its memory."""
    kv = f"{bytes_text(plan.kv)} KV at {plan.length} tokens"
    parts = [f"{bytes_text(plan.held_weights)} weights", kv, f"{bytes_text(plan.workspace)} workspace at most"]
    if plan.per_layer_table:
        parts.append(f"PLE {bytes_text(plan.per_layer_table)} mapped on the host")
    text = f"memory: {', '.join(parts)}"
    if plan.place == "gpu":
        return f"{text}; all but the PLE on the GPU" if plan.per_layer_table else f"{text}; all on the GPU"
    return f"{text}; {available_text()}"


def available_text() -> str:
    memory = read_state()
    return "what is available is not known here" if memory is None else f"{bytes_text(memory.available)} available"


def engine_table(record: EngineRecord) -> Table:
    """What was built, and how TensorRT will run each attention shape."""
    settings = record.settings
    title = (
        f"{settings.flavour} {record.engine_version} engines for {settings.device}, {record.dtype}, "
        f"up to {settings.max_length} tokens, batch {settings.max_batch}, K={settings.num_draft_tokens}"
    )
    table = _table(title, "file", "size", "seconds", "profiles")
    for engine in (record.target, record.assistant):
        size, profiles = bytes_text(engine.size_bytes), ", ".join(engine.profiles)
        table.add_row(engine.file, size, f"{engine.build_seconds:.1f}", profiles)
    for shape in record.attention:
        kernel = "one kernel" if shape.is_fused else "taken apart"
        table.add_row(f"attention {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}", "", "", kernel)
    return table


def rewrite_table(record: OnnxRuntimeRecord) -> Table:
    """Which rewrites each graph got."""
    title = f"Graphs for ONNX Runtime {record.onnxruntime_version} on the CPU"
    table = _table(title, "graph", "size", "rewrites", overflow="fold")
    for graph in record.graphs:
        table.add_row(graph.file, bytes_text(graph.size_bytes), ", ".join(graph.passes) or "–")
    if record.filters is not None:
        what = f"matrices in blocks of {record.filters.block}, as this kind of CPU reads them"
        table.add_row(FILTERS, bytes_text(record.filters.size_bytes), what)
    return table


def parity_table(report: ParityReport) -> Table:
    """A comparison of engines with ONNX Runtime, by kind of call and batch."""
    title = f"{report.engine} against ONNX Runtime (allowed {report.tolerance:.0e} of the scale)"
    table = _table(title, "call", "rows", "batch", "contexts", "largest difference", "tokens", "near-ties", "")
    groups: dict[tuple[str, int, int], list[CallCheck]] = {}
    for check in report.calls:
        groups.setdefault((check.call, check.rows, check.batch), []).append(check)
    for (call, rows, batch), checks in groups.items():
        contexts = f"{len(checks)}, {checks[0].context} to {checks[-1].context}"
        difference = f"{max(check.difference for check in checks):.1e}"
        sums = sum(check.num_tokens for check in checks), sum(check.near_ties for check in checks)
        verdict = "MISS" if any(check.problem for check in checks) else "ok"
        table.add_row(call, str(rows), str(batch), contexts, difference, *map(str, sums), verdict)
    return table


def report_tables(report: Report) -> list[Table]:
    """A verification as tables a person can read."""
    allowed = f"allowed {report.tolerance:.0e} of the scale"
    if report.rounding:
        allowed += f", and {report.rounding:.0e} for int8 steps of the target's KV"
    reference = "transformers with this bundle's quantized values" if report.is_quantized else "transformers"
    logits = _table(f"Logits against {reference} ({allowed})", "graph", "context", "max |Δ|", "scale", "relative", "")
    for check in report.logits:
        verdict = "ok" if check.relative <= report.allowed(check) and check.tokens_equal else "MISS"
        sizes = f"{check.difference:.1e}", f"{check.scale:.2f}", f"{check.relative:.1e}"
        logits.add_row(check.graph, str(check.context_length), *sizes, verdict)
    counted = ": quantized, so other tokens are counted and are no miss" if report.is_quantized else ""
    title = f"Greedy text against transformers' generate{counted}, and drafted against plain"
    headings = ("K", "prompts", "tokens", "differ", "near-ties", "drafted = plain", "accepted by position")
    greedy = _table(title, *headings)
    for item in report.greedy:
        num_excused = sum(miss.is_excused for miss in item.mismatches)
        counts = item.num_draft_tokens, item.num_prompts, item.num_tokens
        misses = len(item.mismatches) - num_excused, num_excused
        is_plain = "–" if not item.num_draft_tokens else ("no" if item.differs_from_plain else "yes")
        greedy.add_row(*map(str, counts + misses), is_plain, shares_text(item.acceptance))
    logits.caption = "; ".join(
        f"{cost.what} move logits by {cost.rms:.1e} RMS and {cost.largest:.1e} at most, of the scale"
        for cost in report.costs
    )
    drafts = report.drafts
    greedy.caption = f"{drafts.num_drafts} drafts of {drafts.num_rounds} rounds compared with transformers' own: " + (
        f"{len(drafts.different)} differ" if drafts.different else "all equal"
    )
    return [logits, greedy, *([_sampled_table(report)] if report.sampled else [])]


def _sampled_table(report: Report) -> Table:
    title = f"Drawn text at temperature {report.sampled[0].temperature:g}, drafted against plain"
    table = _table(title, "K", "prompts", "tokens", "drafted = plain")
    for item in report.sampled:
        counts = item.num_draft_tokens, item.num_prompts, item.num_tokens
        table.add_row(*map(str, counts), "no" if item.differs_from_plain else "yes")
    if (first := report.first_drafts) is not None:
        table.caption = (
            f"{first.accepted:.2f} of {first.num_drafts} first drafts accepted, of {first.possible:.2f} possible for "
            "any lossless method (1 - total variation)"
        )
    return table


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """Findings, then each way of running."""
    table = Table()
    for heading, ratio in (("what", None), ("state", None), ("found", 3), ("what to do", 2)):
        table.add_column(heading, overflow="fold", ratio=ratio, no_wrap=ratio is None)
    for finding in diagnosis.findings:
        state = Text(finding.state, _STYLES[finding.state])
        table.add_row(finding.name, state, Text(finding.detail), Text(finding.advice))
    table.add_section()
    for way in diagnosis.ways:
        state = Text("runs", "bold green") if way.can_run else Text("can't run", "red")
        table.add_row(Text(way.engine, "bold"), state, Text(way.detail), Text(way.advice))
    return table


def verdict(diagnosis: Diagnosis, engine: EngineName | None = None) -> Text:
    """One line on what can run, or on the engine that was asked about."""
    what = "slipstream" if diagnosis.bundle is None else str(diagnosis.bundle)
    for way in diagnosis.ways:
        if way.engine == engine and not way.can_run:
            return Text(f"{what} can't run here with --engine {engine}: {way.detail}", "red")
    engines = [way.engine for way in diagnosis.ways if way.can_run]
    if not engines:
        return Text(f"{what} can't run here", "red")
    return Text(f"{what} can run here with --engine {' or '.join(engines)}", "green")
