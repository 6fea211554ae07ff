"""The command bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.runtime.bench.measure import Bench
from slipstream.runtime.errors import RequestError

BundleFolder = Callable[[str], Path]
ROOT = Path(__file__).parents[2]
QUICK = ("--seconds", "0", "-n", "4", "-k", "2")


def test_a_report_has_what_its_page_says(bundle_folder: BundleFolder, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = CliRunner().invoke(
        app, ["bench", str(bundle_folder("edge")), *QUICK, "--workload", "chat,code", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["workload"], row["num_draft_tokens"]) for row in report["rows"]] == [
        ("code", 0), ("code", 2), ("chat", 0), ("chat", 2),
    ]  # fmt: skip
    assert (report["passes"], report["stopped"], report["widest_interval"]) == (1, "", None)
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    names = {*report, *(name for row in report["rows"] for name in row)}
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert "time is over after 1 passes: too few passes for intervals, 3% is wanted; give more --seconds" in done.stderr
    assert "code" in done.stdout


def test_prompts_of_a_file_are_a_workload(bundle_folder: BundleFolder, tmp_path: Path) -> None:
    prompts, out = tmp_path / "mine.jsonl", tmp_path / "report.json"
    prompts.write_text('{"prompt": "the fox"}\n')
    done = CliRunner().invoke(
        app, ["bench", str(bundle_folder("edge")), *QUICK, "--prompts", str(prompts), "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert {row["workload"] for row in json.loads(out.read_text())["rows"]} == {"mine.jsonl"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workload", "code,verse"), "there is no verse; code, prose, chat, json are there"),
        (("-k", "two"), "-k two: numbers with commas between them are expected, such as 0,2,4"),
        (("-k", "99"), "num_draft_tokens"),
        (("--json", "/nowhere/report.json"), "there is no folder /nowhere"),
        (("--json", "/"), "--json / can't be written: give a file in a folder that can"),
    ],
)
def test_what_can_not_be_measured_is_told(options: tuple[str, ...], message: str, bundle_folder: BundleFolder) -> None:
    done = CliRunner().invoke(app, ["bench", str(bundle_folder("edge")), *options])
    assert isinstance(done.exception, RequestError)
    assert message in str(done.exception)


def test_an_engine_that_fails_ends_it_with_the_reason(
    bundle_folder: BundleFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run = tmp_path / "report.json", Bench.run

    def failing(self: Bench, most_seconds: float, on_pass: Callable[[Bench], None]) -> None:
        run(self, most_seconds, on_pass)
        self.stopped = "the GPU has fallen off the bus"

    monkeypatch.setattr(Bench, "run", failing)
    done = CliRunner().invoke(app, ["bench", str(bundle_folder("edge")), *QUICK, "--json", str(out)])
    assert done.exit_code == 1
    assert "stopped after 1 passes: the GPU has fallen off the bus" in done.stderr
    assert json.loads(out.read_text())["stopped"] == "the GPU has fallen off the bus"
