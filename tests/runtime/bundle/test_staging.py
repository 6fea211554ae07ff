"""Folders that appear complete or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.runtime.bundle.staging import staged
from slipstream.runtime.errors import RequestError

WRITER = """
import sys, time
from pathlib import Path
from slipstream.runtime.bundle.staging import staged
with staged(Path(sys.argv[1])) as work:
    (work / "file").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def writer(folder: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def write(folder: Path, content: str) -> None:
    with staged(folder) as work:
        (work / "file").write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        write(tmp_path / "deep" / "out", content)
        assert (tmp_path / "deep" / "out" / "file").read_text() == content
    assert names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(error), staged(tmp_path / "out"):
        raise error
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "old"


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_left_goes_with_the_next_writing(tmp_path: Path, kind: signal.Signals) -> None:
    (tmp_path / ".out.backup").mkdir()
    (tmp_path / ".other.staging-1").mkdir()
    with writer(tmp_path / "out") as process:
        process.send_signal(kind)
    assert len(names(tmp_path)) == 3
    write(tmp_path / "out", "whole")
    assert names(tmp_path) == [".other.staging-1", ".out.backup", "out"]
    assert (tmp_path / "out" / "file").read_text() == "whole"


def test_a_folder_that_a_killed_process_had_moved_away_is_taken_back(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.staging-1.old")
    (tmp_path / ".out.staging-1").mkdir()
    with pytest.raises(ValueError, match="again"), staged(tmp_path / "out"):
        raise ValueError("again")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as process:
        write(tmp_path / "out", "whole")
        [other] = [path for path in tmp_path.iterdir() if path.name != "out"]
        assert (other / "file").read_text() == "half"
        process.kill()


def test_a_file_in_place_of_the_parent_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"out can't be written: .*Nothing was left"), staged(tmp_path / "file/out"):
        pass
