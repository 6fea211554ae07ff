"""Kernel timings that TensorRT measured, kept beside the engines so that the next build is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.runtime.bundle.engine_record import ENGINE_FOLDER
from slipstream.runtime.bundle.staging import write_whole


class TimingCache:
    """A file per TensorRT version and device: timings of another one are worth nothing.

    note: set when a cache was there and TensorRT did not take it.
    """

    def __init__(self, bundle: Path, version: str, device: str) -> None:
        self._path = bundle / ENGINE_FOLDER / f"timing-{version}-{device}.cache"
        self.note: str | None = None

    def attach(self, config: Any) -> None:
        """Give a build the timings of earlier ones, or an empty cache when there are none that fit."""
        content = self._path.read_bytes() if self._path.is_file() else b""
        if content:
            cache = config.create_timing_cache(content)
            if cache is not None and config.set_timing_cache(cache, False):
                return
            self.note = f"{self._path} is damaged, or of another TensorRT or GPU: ignored, and written anew"
        config.set_timing_cache(config.create_timing_cache(b""), False)

    def save(self, config: Any) -> None:
        """Keep what the build has measured."""
        content = bytes(config.get_timing_cache().serialize())
        self._path.parent.mkdir(exist_ok=True)
        write_whole(self._path, content)
