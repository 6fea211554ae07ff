"""Arguments and options that several commands share, and what commands need installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from .runtime.errors import MissingExtraError, RequestError

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by [bold]slipstream export[/].")]
TargetPath = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target checkpoint.")]
AssistantPath = Annotated[Path, typer.Argument(metavar="ASSISTANT", help="Folder of its assistant checkpoint.")]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens", "-k", help="Draft tokens per round (K); 0 decodes plainly. \\[default: the pair's]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads per operator. \\[default: 1 for small models, else all cores]")
]


def need_export_extra(command: str) -> None:
    """Raises MissingExtraError when something that export/ imports is not installed."""
    need_packages(command, ("torch", "transformers", "onnx", "onnxscript", "safetensors"), "slipstream[export]")


def need_packages(command: str, packages: tuple[str, ...], requirement: str) -> None:
    """Raises MissingExtraError naming what is missing and what to install."""
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if missing:
        raise MissingExtraError(
            f"slipstream {command} needs {', '.join(missing)}: install with pip install '{requirement}'. "
            "Running a bundle needs none of them"
        )


def non_empty(text: str, where: str) -> str:
    """The text, refused when there is none."""
    if not text:
        raise RequestError(f"the prompt from {where} is empty")
    return text


def read_file(path: Path) -> str:
    """A text file's content. Raises RequestError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} can't be read: {error}") from error


def read_text(path: Path) -> str:
    """As read_file, refused when it is empty."""
    return non_empty(read_file(path), str(path))
