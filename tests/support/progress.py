"""Progress that nobody watches, and progress that a test looks at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class SilentProgress:
    def start(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


@dataclass
class RecordedProgress:
    """announced, written: bytes by stage, in the order of the stages."""

    announced: dict[str, int] = field(default_factory=dict)
    written: Counter[str] = field(default_factory=Counter)

    @property
    def stages(self) -> list[str]:
        return list(self.announced)

    @property
    def total(self) -> int:
        return sum(self.announced.values())

    @property
    def done(self) -> int:
        return self.written.total()

    def start(self, stage: str, total_bytes: int) -> None:
        self.announced[stage] = total_bytes

    def advance(self, num_bytes: int) -> None:
        self.written[self.stages[-1]] += num_bytes
