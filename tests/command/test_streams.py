"""The command as a process: closed and piped streams, encodings, interrupts, and what it tells other programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import slipstream
from slipstream.runtime.bundle.staging import staged

# What a terminal gives a program; tests may run in the background, where a shell has interrupts ignored.
FOREGROUND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.fixture(scope="module")
def bundle(bundle_folder: Callable[[str], Path]) -> Path:
    return bundle_folder("edge")


def shell(
    command: str, environment: Mapping[str, str] = MappingProxyType({}), stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """A shell's command line, with the command in $S."""
    variables = {**os.environ, "S": f"{sys.executable} -m slipstream", **environment}
    return subprocess.run(["sh", "-c", command], input=stdin, capture_output=True, check=False, env=variables)


def test_a_closed_stdin_is_no_prompt(bundle: Path) -> None:
    done = shell(f"$S generate {bundle} 0<&-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: there is no prompt: give --prompt TEXT")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_outputs_end_no_command(closed: str, bundle: Path) -> None:
    assert shell(f"$S inspect {bundle} {closed}").returncode == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONIOENCODING": "cp437"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=str,
)
def test_no_encoding_ends_a_command(environment: dict[str, str], bundle: Path) -> None:
    for command in (f"inspect {bundle}", "--help", f"generate {bundle} -n 2 --prompt x"):
        done = shell(f"$S {command}", environment)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    refused = shell("$S inspect /nowhere/\u00e9\u2713", environment)
    assert refused.returncode == 2
    assert refused.stderr.startswith(b"error: ")


def test_json_keeps_its_letters_in_every_encoding(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes('"\u00e9\u2713"'.encode())
    command = f"$S generate {bundle} --prompt-file {tmp_path}/prompts -n 8 --json"
    utf8, latin1 = (shell(command, {"PYTHONIOENCODING": encoding}).stdout for encoding in ("utf-8", "latin-1"))
    assert json.loads(utf8.decode())["text"] == json.loads(latin1.decode("latin-1"))["text"]


def test_piped_text_is_utf8_with_a_byte_order_mark_and_any_line_ends(bundle: Path) -> None:
    command = f"$S generate {bundle} -n 4 --json"
    plain = shell(command, stdin="the é\nfox\n".encode())
    marked = shell(
        command, stdin=b"\xef\xbb\xbf" + "the é\r\nfox\r\n".encode(), environment={"PYTHONIOENCODING": "ascii"}
    )
    assert plain.returncode == 0
    assert _said(marked) == _said(plain)


def test_a_prompt_file_may_have_a_byte_order_mark_and_crlf(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b'"the fox"\n{"prompt": "the owl"}\n')
    (tmp_path / "marked").write_bytes(b'\xef\xbb\xbf"the fox"\r\n{"prompt": "the owl"}\r\n')
    plain, marked = (
        shell(f"$S generate {bundle} --prompt-file {tmp_path}/{name} -n 4 --json") for name in ("plain", "marked")
    )
    assert len(_said(plain)) == 2
    assert _said(marked) == _said(plain)


def _said(done: subprocess.CompletedProcess[bytes]) -> list[tuple[Any, ...]]:
    results = [json.loads(line) for line in done.stdout.decode().splitlines()]
    return [(result["token_ids"], result["num_prompt_tokens"]) for result in results]


@pytest.mark.parametrize("module", ["typer", "numpy", "tokenizers"])
def test_an_interrupt_while_modules_are_imported_is_quiet(module: str) -> None:
    code = (
        "import builtins, os, signal, sys\n"
        "real = builtins.__import__\n"
        "def interrupting(name, *rest, **more):\n"
        f"    if name == {module!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = interrupting\n"
        "sys.argv = ['slipstream', 'inspect', 'none']\n"
        "from slipstream.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", FOREGROUND + code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_wait_for_stdin_is_quiet(number: signal.Signals, expected: int, bundle: Path) -> None:
    code = (
        "import sys, slipstream.prompts as prompts, slipstream.__main__ as start\n"
        f"sys.argv = ['slipstream', 'generate', {str(bundle)!r}]\n"
        "read = prompts._read_stdin\n"
        "def ready():\n"
        "    print(flush=True)\n"
        "    return read()\n"
        "prompts._read_stdin = ready\n"
        "start.main()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FOREGROUND + code], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.wait(timeout=60)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (expected, b"")


def test_an_error_that_an_interrupt_became_is_an_interrupt() -> None:
    """Libraries may raise an error of their own while they handle it."""
    code = (
        "import os, signal, slipstream.cli, slipstream.__main__ as start\n"
        "def run():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise RuntimeError('wrapped')\n"
        "slipstream.cli.main = run\n"
        "start.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", FOREGROUND + code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_folders_made_for_what_was_interrupted_do_not_stay(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staged(tmp_path / "engines" / "new") as work:
            assert work.parent == tmp_path / "engines"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "given", "expected"),
    [
        ("slipstream.cli", None, "1"),
        ("slipstream.cli", "0", "0"),
        ("slipstream.export.calibrate.calibration", None, "1"),
        ("slipstream.engines.parity.float4_as_float8", None, "1"),
    ],
)
def test_telemetry_of_onnxruntime_is_off_unless_it_was_set(module: str, given: str | None, expected: str) -> None:
    """At the time that ONNX Runtime is imported, whichever way leads there."""
    code = (
        "import builtins, os, sys\n"
        "real, seen = builtins.__import__, []\n"
        "def watched(name, *rest, **more):\n"
        "    if name.split('.')[0] == 'onnxruntime' and 'onnxruntime' not in sys.modules:\n"
        "        seen.append(os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = watched\n"
        f"import {module}, slipstream\n"
        "import slipstream.runtime.ort.session\n"
        "print(seen[0])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {} if given is None else {"ORT_DISABLE_TELEMETRY": given}
    done = subprocess.run(
        [sys.executable, "-c", FOREGROUND + code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == f"{expected}\n"


def test_a_generation_leaves_no_telemetry_files(bundle: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-m", "slipstream", "generate", str(bundle), "--prompt", "x", "-n", "2"]
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    subprocess.run(command, capture_output=True, check=True, env=environment | home)
    assert [path for path in tmp_path.rglob("*") if "Microsoft" in str(path)] == []


def test_every_public_name_is_there() -> None:
    assert all(hasattr(slipstream, name) for name in slipstream.__all__)
    with pytest.raises(AttributeError, match="module 'slipstream' has no attribute 'nothing'"):
        _ = slipstream.nothing
