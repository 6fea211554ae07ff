"""Arguments and options that several commands share, and what commands need installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from .runtime.bundle.capacity import MAX_DRAFT_TOKENS
from .runtime.errors import MissingExtraError

MAX_BATCH = 1024
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by [bold]slipstream export[/].")]


def draft_tokens(explained: str, least: int = 0) -> Any:
    """The option -k. explained: its help."""
    return typer.Option("--num-draft-tokens", "-k", min=least, max=MAX_DRAFT_TOKENS, help=explained)


DraftTokens = Annotated[
    int | None, draft_tokens("Draft tokens per round (K); 0 decodes plainly. \\[default: the pair's]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


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
