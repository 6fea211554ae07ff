"""What a build gives back, whichever engine it was for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from slipstream.runtime.bundle.manifest import Record

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Outcome(Generic[AnyRecord]):
    """What a build made.

    folder: of what was built and its record. is_new: False where a matching build was there already.
    note: what whoever builds should know, such as an ignored timing cache.
    """

    folder: Path
    record: AnyRecord
    is_new: bool
    note: str | None = None
