"""Folders that appear complete or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.runtime.bundle.staging import check_writable, staged, write_whole
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


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("num_links", [1, 3])
def test_what_a_link_names_is_replaced_where_it_is_and_the_link_stays(
    tmp_path: Path, num_links: int, is_relative: bool
) -> None:
    write(tmp_path / "disk" / "bundle", "old")
    (tmp_path / "here").mkdir()
    named = [tmp_path / "disk" / "bundle", *(tmp_path / "here" / f"link{i}" for i in range(num_links))]
    for target, link in pairwise(named):
        link.symlink_to(os.path.relpath(target, link.parent) if is_relative else target)
    check_writable(named[-1])
    write(named[-1], "new")
    assert (tmp_path / "disk" / "bundle" / "file").read_text() == "new"
    assert names(tmp_path / "disk") == ["bundle"]
    assert names(tmp_path / "here") == [link.name for link in named[1:]]
    assert all(link.is_symlink() for link in named[1:])


def test_a_link_to_what_is_not_there_yet_gets_it_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/bundle")
    write(tmp_path / "link", "new")
    assert (tmp_path / "disk" / "bundle" / "file").read_text() == "new"
    assert names(tmp_path) == ["disk", "link"]
    assert names(tmp_path / "disk") == ["bundle"]


@pytest.mark.parametrize("target", ["missing/disk/bundle", "link", "file"])
def test_a_link_that_no_folder_can_follow_is_refused_and_stays(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(target)
    for begin in (check_writable, lambda folder: write(folder, "new")):
        with pytest.raises(RequestError, match=r"is a link to|is not a folder|can't be written"):
            begin(tmp_path / "link")
    assert names(tmp_path) == ["file", "link"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("kept")
    with pytest.raises(RequestError, match="out is not a folder"):
        write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"]


def test_files_written_at_once_are_each_whole(tmp_path: Path) -> None:
    contents = [bytes([letter]) * 100_000 for letter in b"abcdefgh"]
    with ThreadPoolExecutor(len(contents)) as threads:
        for _ in range(5):
            list(threads.map(partial(write_whole, tmp_path / "cache"), contents))
            assert (tmp_path / "cache").read_bytes() in contents
    assert names(tmp_path) == ["cache"]


def test_a_file_that_a_killed_process_left_goes_with_the_next_writing(tmp_path: Path) -> None:
    (tmp_path / ".cache.staging-1").write_text("half")
    write_whole(tmp_path / "cache", b"whole")
    assert names(tmp_path) == ["cache"]


def test_a_file_in_place_of_the_parent_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"out can't be written: .*Nothing was left"), staged(tmp_path / "file/out"):
        pass
