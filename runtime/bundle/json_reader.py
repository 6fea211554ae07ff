"""The one reader of JSON that comes from outside: checkpoints, bundles, records, prompt files and messages.

It takes what RFC 8259 calls JSON, in UTF-8 with or without a byte order mark, and refuses what Python's reader lets
through (NaN, names that occur twice) or answers with other exceptions than its own (huge numbers, deep nesting).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """What is wrong with a text or file, worded to follow its name: "is not JSON: ..."."""


def parse_json(content: str | bytes) -> Any:
    """The value that a JSON text holds; bytes are UTF-8. Raises JsonError."""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise JsonError(f"is not UTF-8 text: {error}") from error
    try:
        value = json.loads(
            text.removeprefix("\ufeff"),
            parse_int=_whole_number,
            parse_float=_finite_number,
            parse_constant=_refused_constant,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise JsonError("is not JSON that can be read: it is nested too deeply") from error
    if _SURROGATE_ESCAPE.search(text):
        _check_unicode(value)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError where there is none, JsonError for everything else."""
    try:
        value = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():  # damaged is not absent
            raise JsonError(f"is a link that leads nowhere, to {path.readlink()}") from error
        raise FileNotFoundError(path) from error
    except PermissionError as error:
        raise JsonError("may not be read by this user: change its permissions, or run as its owner") from error
    except OSError as error:
        raise JsonError(f"can't be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise JsonError(f"holds a {type(value).__name__}; a JSON object is expected")
    return value


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python converts no more than 4300 digits
        raise JsonError(f"is not JSON that can be read: a number has {len(digits)} digits") from error


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonError(f"is not JSON that can be read: {digits[:40]} is beyond what a float64 holds")
    return number


def _refused_constant(name: str) -> Any:
    raise JsonError(f"is not JSON: {name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise JsonError(f"is not JSON that can be read: an object names {twice[:60]!r} twice")
    return found


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise JsonError(f"is not JSON that can be read: it escapes half of a character: {error}") from error
