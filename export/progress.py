"""What long work tells whoever watches it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what an export is doing. total_bytes is 0 for stages that are not counted."""

    def start(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...
