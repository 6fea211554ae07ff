"""The commands about what runs a bundle: build, verify, doctor. ``cli.py`` adds them to the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from . import display
from .options import MAX_BATCH, AsJson, BundlePath, DraftTokens, draft_tokens, need_export_extra, need_packages
from .prompts import read_text
from .runtime.bundle.engine_record import EngineName, EngineSettings
from .runtime.bundle.manifest import TOKENIZER, Bundle, open_bundle
from .runtime.errors import RequestError
from .runtime.machine.host import bytes_text
from .runtime.machine.plan import BuildEngine, build_peak
from .runtime.text.codec import TextCodec

if TYPE_CHECKING:
    from .engines.outcome import AnyRecord, Outcome
    from .engines.parity.compare import ParityReport
    from .export.verify.report import Report
    from .runtime.bundle.engine_record import Flavour
    from .runtime.machine.progress import Progress


def build(
    bundle: BundlePath,
    engine: Annotated[
        BuildEngine,
        typer.Option(help="onnxruntime for the CPU, tensorrt for this GPU, tensorrt-rtx for any of its targets."),
    ],
    device: Annotated[str | None, typer.Option(help="Compute capability for tensorrt-rtx, such as sm89.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per sequence. \\[default: the bundle's]")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, max=MAX_BATCH, help="Sequences per call. \\[default: 1]")
    ] = None,
    num_draft_tokens: DraftTokens = None,
    workspace: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Scratch memory of the build, in MiB. \\[default: 1024]")
    ] = None,
) -> None:
    """Build what runs a bundle best, beside its graphs. tensorrt-rtx needs no GPU to build."""
    need_packages("build", ("onnx", "onnx_ir"), f"slipstream[export,{engine}]")
    opened = open_bundle(bundle)
    if engine == "onnxruntime":
        given = {"--device": device, "--max-length": max_length, "--max-batch": max_batch}
        given |= {"--num-draft-tokens": num_draft_tokens, "--workspace": workspace}
        _refuse_options(given, "--engine onnxruntime serves every length, batch and K")
        from .engines.onnxruntime.build import build_onnxruntime

        _run_build(opened, engine, partial(build_onnxruntime, opened), display.rewrite_table)
        return
    from .engines.tensorrt.build import build_engines

    settings = EngineSettings(
        flavour=engine,
        device=device or "",
        max_length=max_length or opened.manifest.max_length,
        max_batch=max_batch or 1,
        num_draft_tokens=opened.manifest.generation.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
        workspace_mib=workspace or 1024,
    )
    _run_build(opened, engine, partial(build_engines, opened, settings), display.engine_table)


def _run_build(
    bundle: Bundle,
    engine: BuildEngine,
    build: Callable[[Progress], Outcome[AnyRecord]],
    table: Callable[[AnyRecord], Table],
) -> None:
    """Say what a build will take, build, and show what was made as a table."""
    needed = bytes_text(build_peak(bundle.manifest, engine))
    display.say(f"memory: up to about {needed} for the build; {display.available_text()}")
    with display.StageProgress() as progress:
        outcome = build(progress)
    display.stdout.print(table(outcome.record))
    display.say(f"{'built' if outcome.is_new else 'up to date, nothing built:'} {outcome.folder}")
    display.say_notes([outcome.note] if outcome.note else [])


def _refuse_options(given: Mapping[str, object], why: str) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise RequestError(f"{', '.join(named)}: {why}, so leave it out")


def verify(
    bundle: BundlePath,
    engine: Annotated[
        EngineName, typer.Option(help="tensorrt, tensorrt-rtx: compare these engines with ONNX Runtime, and stamp.")
    ] = "onnxruntime",
    target: Annotated[
        Path | None, typer.Option(help="Target checkpoint the bundle was made from; for --engine onnxruntime.")
    ] = None,
    assistant: Annotated[Path | None, typer.Option(help="Its assistant checkpoint.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, max=10_000, help="Prompts for the greedy comparison.")] = 20,
    num_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 48,
    draft_counts: Annotated[list[int] | None, draft_tokens("K to compare; repeatable. \\[default: 0 1 2 4 7]")] = None,
    prompt_text: Annotated[Path | None, typer.Option(help="Text file to cut the prompts from.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with transformers, or its engines with ONNX Runtime. Exit code 1 on a miss."""
    if engine == "tensorrt" or engine == "tensorrt-rtx":  # noqa: PLR1714 (narrows the type)
        _refuse_options({"--target": target, "--assistant": assistant}, "engines are compared with the bundle's graphs")
        _verify_engines(open_bundle(bundle), engine, as_json=as_json)
        return
    if target is None or assistant is None:
        raise RequestError(
            f"verify --engine {engine} compares with transformers: give the checkpoints that the bundle was made "
            "from with --target and --assistant"
        )
    need_export_extra("verify")
    from .export.verify.reference import Reference
    from .export.verify.verify import TEXT, check_source, sample_prompts
    from .export.verify.verify import verify as compare

    opened = open_bundle(bundle)
    check_source(opened, target, assistant)
    manifest = opened.manifest
    counts = draft_counts or [0, 1, 2, 4, 7]
    if num_tokens > manifest.max_length - 2:
        raise RequestError(f"--num-tokens {num_tokens} leaves no room for a prompt in {manifest.max_length} tokens")
    codec = TextCodec(opened.path(TOKENIZER), manifest.generation.bos_token_id)
    ids = codec.encode_more(read_text(prompt_text or TEXT))
    prompts = sample_prompts(
        ids, codec.bos_token_id, num_prompts, manifest.sliding_window, manifest.max_length, num_tokens
    )
    with display.StageProgress() as progress:
        progress.start("loading the checkpoints into transformers", 0)
        reference = Reference(target, assistant, manifest.dtype)
        report = compare(opened, reference, prompts, num_tokens, counts, progress, engine)
    shown = [*display.report_tables(report), *(f"near-tie {miss}" for miss in report.near_ties)]
    _show_report(report, shown, "[green]verified[/]", as_json=as_json)


def _show_report(report: Report | ParityReport, shown: list[Any], good: str, *, as_json: bool) -> None:
    """A comparison; exit code 1 on a miss. shown: of what was compared. good: said where nothing missed."""
    if as_json:
        display.print_json(report.to_dict(), indent=2)
    else:
        for item in shown:
            display.stdout.print(item, markup=False)
        for failure in report.failures:
            display.stdout.print(f"[red]MISS[/] {escape(failure)}")
        display.stdout.print("[red]not verified[/]" if report.failures else good)
    if report.failures:
        raise typer.Exit(1)


def _verify_engines(bundle: Bundle, engine: Flavour, *, as_json: bool) -> None:
    need_packages("verify", ("onnx", "onnx_ir"), f"slipstream[export,{engine}]")
    from .engines.parity.compare import compare_engines

    with display.StageProgress() as progress:
        report = compare_engines(bundle, engine, progress)
    good = "[green]verified[/]\nstamped: results of these engines no longer carry the note"
    _show_report(report, [display.parity_table(report)], good, as_json=as_json)


def doctor(
    bundle: Annotated[Path | None, typer.Argument(metavar="[BUNDLE]", help="Bundle to be run here.")] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="Exit with 0 only if this one can run. \\[default: any]")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read every file of the bundle and compare it with its SHA-256.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, and what of it can run a bundle. Exit code 1 when nothing can."""
    from .runtime.doctor.diagnosis import examine

    if check and bundle is None:
        raise RequestError("--check reads a bundle's files: name the bundle")
    diagnosis = examine(bundle, reads_files=check)
    if as_json:
        display.print_json(diagnosis.to_dict(), indent=2)
    else:
        display.stdout.print(display.diagnosis_table(diagnosis))
        display.stdout.print(display.verdict(diagnosis, engine))
    if not any(way.can_run for way in diagnosis.ways if engine in (None, way.engine)):
        raise typer.Exit(1)
