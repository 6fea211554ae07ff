"""Build hook: sources that were unpacked from a zip archive have text files where git has links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("engines", "export", "runtime")


class LinkedParts(BuildHookInterface):  # type: ignore[type-arg]
    """Makes slipstream/export and so on links again where an archive turned them into files with a path."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        for part in PARTS:
            link = root / "slipstream" / part
            if link.is_dir():
                continue
            if not (root / part / "__init__.py").is_file():
                raise RuntimeError(f"slipstream can't be built: {root / part} is missing. Get the whole source again")
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{part}")
