"""What doctor finds, and probes whose failure is a finding, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from slipstream.runtime.errors import SlipstreamError

Outcome = Literal["ok", "missing", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    state: "missing" is not there, which may be fine; "problem" is there and does not do.
    detail: what was found. advice: what to do about it.
    """

    name: str
    state: Outcome
    detail: str
    advice: str = ""


def guarded(name: str, probe: Callable[..., Finding], *arguments: object) -> Finding:
    """What a probe finds, its failure included."""
    try:
        return probe(*arguments)
    except SlipstreamError as error:
        return Finding(name, "problem", one_line(error.found), error.advice)
    except Exception as error:  # noqa: BLE001 (broken installations fail in every way; doctor has to go on)
        return Finding(name, "problem", one_line(f"{type(error).__name__}: {error}"))


def one_line(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def package_version(name: str) -> str:
    """The version of an installed package, "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def advice_for_packaged(library: str) -> str:
    """What to do about a library that pip brought to where the loader does not look, "" for one it did not bring."""
    for place in sys.path:
        for path in Path(place).glob(f"nvidia/*/lib/{library}"):
            return f"pip has it where the loader does not look: export LD_LIBRARY_PATH={path.parent}:$LD_LIBRARY_PATH"
    return ""
