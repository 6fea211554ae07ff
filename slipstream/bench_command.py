"""The command bench: what drafting gains on this device, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import display
from .options import BundlePath
from .prompts import read_prompts
from .runtime.bench.measure import WANTED, Bench
from .runtime.bench.workloads import WORKLOADS, Workload
from .runtime.bundle.engine_record import EngineName
from .runtime.bundle.manifest import CHAT_TEMPLATE, Bundle, open_bundle
from .runtime.bundle.staging import write_whole
from .runtime.decode.settings import GenerationSettings
from .runtime.errors import RequestError
from .runtime.machine.cpu_time import cpu_times, share_of_others
from .runtime.session import Pair

FORMAT = 1  # of the JSON file; docs/bench.md has its names
QUIET = 0.05  # share of the cores that others may take


def bench(
    bundle: BundlePath,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompts", help="JSON lines, as for generate --prompt-file, instead of workloads.")
    ] = None,
    workload: Annotated[str, typer.Option(help="Prompts of slipstream's own, of these kinds.")] = ",".join(
        get_args(Workload)
    ),
    num_draft_tokens: Annotated[
        str, typer.Option("--num-draft-tokens", "-k", help="K to compare, such as 0,2,4; 0 is measured in any case.")
    ] = "0,1,2,4",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Most tokens of each text.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token; above it tokens are drawn with seed 0.")
    ] = 0.0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Stop after the pass in which so much time is over, whatever is known by then.")
    ] = 60.0,
    engine: Annotated[EngineName, typer.Option(help="What runs it; onnxruntime is the CPU.")] = "onnxruntime",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per operator. \\[default: 1 for small models, else all cores]")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Measure what drafting gains here: plain and drafted runs of the same prompts, alternating."""
    counts = sorted({0, *_counts(num_draft_tokens)})
    if json_file is not None:
        _check_file(json_file)
    prompts = _prompts(prompt_file, workload)
    opened = open_bundle(bundle)
    with Pair(opened, engine=engine, num_threads=num_threads) as pair:
        settings = GenerationSettings(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=0 if temperature else None
        )
        requests = {k: pair.request(replace(settings, num_draft_tokens=k)) for k in counts}
        ids = {name: [_prompt_ids(pair, prompt) for prompt in each] for name, each in prompts.items()}
        made = Bench(pair, ids, requests)
        stat, own = cpu_times()
        _run(made, seconds)
        later, own_later = cpu_times()
        others = share_of_others(stat, later, range(os.cpu_count() or 1), own_later - own)
        device = {"engine": pair.engine.name, "notes": made.notes, "share_of_others": others}
    report = {**_about(opened, device), **_findings(made, max_new_tokens, temperature)}
    if json_file is not None:
        write_whole(json_file, (json.dumps(report, indent=2) + "\n").encode())  # before a table that may go nowhere
    if made.num_passes:
        display.stdout.print(_table(report))
    for line in _remarks(made, others):
        display.say(line)
    display.say_notes(made.notes)
    if made.stopped or not _is_lossless(made):
        raise typer.Exit(1)


def _check_file(path: Path) -> None:
    """Before a minute of work. Raises RequestError."""
    folder = path.parent
    if not folder.is_dir():
        raise RequestError(f"--json {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise RequestError(f"--json {path} can't be written: give a file in a folder that can")


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"-k {text}: numbers with commas between them are expected, such as 0,2,4") from None


def _prompts(prompt_file: Path | None, workload: str) -> Mapping[str, Sequence[Any]]:
    if prompt_file is not None:
        return {prompt_file.name: read_prompts(None, prompt_file, None)}
    names = workload.split(",")
    if unknown := sorted(set(names) - set(WORKLOADS)):
        raise RequestError(f"--workload {workload}: there is no {', '.join(unknown)}; {', '.join(WORKLOADS)} are there")
    return {name: WORKLOADS[name] for name in get_args(Workload) if name in names}


def _prompt_ids(pair: Pair, prompt: Any) -> list[int]:
    if isinstance(prompt, str) and CHAT_TEMPLATE in pair.manifest.files:
        prompt = [{"role": "user", "content": prompt}]
    ids = pair.prompt_ids(prompt)
    pair.check_room(len(ids))
    return ids


def _run(made: Bench, seconds: float) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=display.stderr, transient=True) as shown:
        task = shown.add_task("warming up", total=seconds)

        def on_pass(bench: Bench) -> None:
            widest = bench.widest
            known = "" if widest is None else f", ratios within {widest:.1%}, {WANTED:.0%} is wanted"
            shown.update(task, completed=bench.seconds, description=f"pass {bench.num_passes}{known}")

        made.run(seconds, on_pass)


def _about(bundle: Bundle, device: dict[str, Any]) -> dict[str, Any]:
    from . import __version__

    manifest = bundle.manifest
    return {
        "format": FORMAT,
        "slipstream": __version__,
        "command": sys.argv[1:],
        "target": manifest.source.target,
        "assistant": manifest.source.assistant,
        "precision": manifest.precision,
        "files": {name: file.sha256 for name, file in manifest.files.items()},
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        **device,
    }


def _findings(made: Bench, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    rows = [row.to_dict(made.plain(row) if row.num_draft_tokens else None) for row in made.rows.values() if row.passes]
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "passes": made.num_passes,
        "seconds": made.seconds,
        "wanted_interval": WANTED,
        "widest_interval": made.widest,
        "stopped": made.stopped,
        "rows": rows,
    }


def _is_lossless(made: Bench) -> bool:
    return all(row.passes[0].texts == made.plain(row).passes[0].texts for row in made.rows.values() if row.passes)


def _table(report: Mapping[str, Any]) -> Table:
    title = f"{report['engine']}, medians of {report['passes']} passes; between chunks: half, and 99 of 100"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    timed = "tokens/s", "times plain", "first ms", "between ms"
    for heading in ("workload", "K", *timed, "a round", "accepted"):
        table.add_column(heading, justify="left" if heading in {"workload", "accepted"} else "right")
    for row in report["rows"]:
        times, gaps = row["over_plain"], row["between_chunks_ms"]
        interval = "" if not times or times["low"] is None else f" {times['low']:.2f}–{times['high']:.2f}"
        table.add_row(
            row["workload"],
            str(row["num_draft_tokens"]),
            f"{row['tokens_per_second']['median']:.1f}",
            f"{times['median']:.2f}{interval}" if times else "",
            f"{row['first_token_ms']['p50']:.1f}",
            "" if gaps is None else f"{gaps['p50']:.1f} {gaps['p99']:.1f}",
            f"{row['tokens_per_round']:.2f}",
            display.shares_text(row["acceptance"]),
        )
    return table


def _remarks(made: Bench, others: float | None) -> list[str]:
    """What a reader has to know beside the table."""
    lines = []
    if made.stopped:
        lines.append(f"stopped after {made.num_passes} passes: {made.stopped}")
    elif not made.is_known:
        known = "too few passes for intervals" if made.widest is None else f"ratios are known within {made.widest:.1%}"
        over = f"time is over after {made.num_passes} passes"
        lines.append(f"{over}: {known}, {WANTED:.0%} is wanted; give more --seconds")
    if others is None:
        lines.append("what other programs took of the cores is not known here")
    elif others > QUIET:
        lines.append(f"other programs took {others:.0%} of the cores: compare ratios, not times")
    if not _is_lossless(made):
        lines.append("drafted text differs from plain text: slipstream verify shows where")
    return lines
