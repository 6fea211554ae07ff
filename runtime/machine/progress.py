"""What long work tells whoever watches it: exports, builds, comparisons."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told which stage work is in, and how far it is."""

    def start(self, stage: str, total_bytes: int) -> None:
        """A new stage begins. total_bytes: what ``advance`` will count up to, 0 for stages that are not counted."""

    def advance(self, num_bytes: int) -> None:
        """num_bytes more of the stage are done."""
