"""Arguments and options that several commands share, and what commands need installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from .runtime.bundle.capacity import MAX_DRAFT_TOKENS
from .runtime.errors import MissingExtraError

MAX_BATCH = 1024
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by [bold]slipstream export[/].")]
TargetPath = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target checkpoint.")]
AssistantPath = Annotated[Path, typer.Argument(metavar="ASSISTANT", help="Folder of its assistant checkpoint.")]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        min=0,
        max=MAX_DRAFT_TOKENS,
        help="Draft tokens per round (K); 0 decodes plainly. \\[default: the pair's]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads per operator. \\[default: 1 for small models, else all cores]")
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
