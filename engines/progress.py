"""How long work says what it is doing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def start(self, stage: str, total_bytes: int) -> None:
        """A new stage begins; total_bytes is 0 where nothing is counted."""
