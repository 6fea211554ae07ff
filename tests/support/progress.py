"""For work whose progress nobody watches."""

from __future__ import annotations


class SilentProgress:
    def start(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...
