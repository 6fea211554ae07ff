"""Prompts as the command line takes them: an option, JSON lines, chat messages or piped text, all in UTF-8."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .runtime.bundle.json_reader import JsonError, parse_json
from .runtime.errors import RequestError
from .runtime.session import Messages


def read_prompts(prompt: str | None, prompt_file: Path | None, messages: Path | None) -> list[str | Messages]:
    """What one of three options gives, or stdin. Raises RequestError."""
    given = [option for option in (prompt, prompt_file, messages) if option is not None]
    if len(given) > 1:
        raise RequestError("give one of --prompt, --prompt-file and --messages")
    if prompt_file is not None:
        return list(_json_lines(_read_file(prompt_file), str(prompt_file)))
    if messages is not None:
        return [_message_list(_parsed(_read_file(messages), str(messages)), str(messages))]
    if prompt is None or prompt == "-":
        return [_non_empty(_read_stdin().rstrip("\n"), "stdin")]
    return [_non_empty(prompt, "--prompt")]


def read_text(path: Path) -> str:
    """A text file's content. Raises RequestError, also where there is none."""
    return _non_empty(_read_file(path), str(path))


def read_schema(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises RequestError."""
    schema = _parsed(_read_file(path), str(path))
    if not isinstance(schema, dict):
        raise RequestError(f"{path}: a JSON schema is an object; this is {type(schema).__name__}")
    return schema


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():  # None: it was closed before the start
        raise RequestError("there is no prompt: give --prompt TEXT, --prompt-file, --messages, or pipe text in")
    return _text(sys.stdin.buffer.read, "stdin")


def _read_file(path: Path) -> str:
    return _text(path.read_bytes, str(path))


def _text(read: Callable[[], bytes], where: str) -> str:
    """Text with any kind of line ends, a byte order mark left out, whatever encoding the locale has."""
    try:
        return io.TextIOWrapper(io.BytesIO(read()), encoding="utf-8-sig").read()
    except OSError as error:
        raise RequestError(f"{where} can't be read: {error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8 text, which is expected: {error}") from error


def _non_empty(text: str, where: str) -> str:
    if not text:
        raise RequestError(f"the prompt from {where} is empty")
    return text


def _json_lines(text: str, where: str) -> Iterator[str | Messages]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(f"{where} has no prompts")
    for number, line in lines:
        at = f"{where}, line {number}"
        content = _parsed(line, at)
        if isinstance(content, dict) and set(content) == {"messages"}:
            yield _message_list(content["messages"], at)
        elif isinstance(content, dict) and set(content) == {"prompt"} and isinstance(content["prompt"], str):
            yield _non_empty(content["prompt"], at)
        elif isinstance(content, str):
            yield _non_empty(content, at)
        else:
            raise RequestError(
                f'{at} is {line.strip()[:60]!r}; expected a string, {{"prompt": "..."}} or {{"messages": [...]}}'
            )


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except JsonError as error:
        raise RequestError(f"{where} {error}") from error


def _message_list(content: Any, where: str) -> Messages:
    if not isinstance(content, list):
        raise RequestError(f"{where}: a list of chat messages is expected, found {type(content).__name__}")
    return content
