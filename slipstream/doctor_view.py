"""What ``slipstream doctor`` shows: one table, and one line on what can run."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .runtime.bundle.engine_record import EngineName
from .runtime.doctor.diagnosis import Diagnosis
from .runtime.doctor.findings import Outcome

_STYLES: dict[Outcome, str] = {"ok": "green", "missing": "yellow", "problem": "red"}


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
