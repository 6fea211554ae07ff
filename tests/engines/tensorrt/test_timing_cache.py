"""Timings are kept from build to build; those of another TensorRT or GPU are ignored with a note."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engines.outcome import Outcome
from slipstream.engines.tensorrt import build as build_module
from slipstream.engines.tensorrt.build import build_engines
from slipstream.engines.tensorrt.timing_cache import TimingCache
from slipstream.runtime.bundle.engine_record import EngineRecord, EngineSettings
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from tests.simulator.machine import install, simulate_builds
from tests.support.progress import SilentProgress


class Cache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> memoryview:
        return memoryview(self.content)


class Config:
    """Stands in for IBuilderConfig. taken: what a build began with. refuses: a cache that is not of this machine."""

    def __init__(self, *, refuses: str = "") -> None:
        self.refuses = refuses
        self.taken: bytes | None = None
        self._cache: Cache | None = None

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Cache | None:
        is_foreign = bool(serialized_timing_cache) and self.refuses == "create"
        return None if is_foreign else Cache(bytes(serialized_timing_cache))

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache.content and self.refuses == "set":
            return False
        self._cache, self.taken = cache, cache.content
        return True

    def measure(self, timing: bytes) -> None:
        assert self._cache is not None
        self._cache.content += timing

    def get_timing_cache(self) -> Cache | None:
        return self._cache


def build(cache: TimingCache, timing: bytes, *, refuses: str = "") -> bytes | None:
    """One build that measures timing; what it began with."""
    config = Config(refuses=refuses)
    cache.attach(config)
    config.measure(timing)
    cache.save(config)
    return config.taken


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "engines").iterdir()}


def test_a_build_begins_with_the_timings_of_the_one_before(tmp_path: Path) -> None:
    first = TimingCache(tmp_path, "11.0", "sm89")
    assert build(first, b"a") == b""
    second = TimingCache(tmp_path, "11.0", "sm89")
    assert build(second, b"b") == b"a"
    assert files(tmp_path) == {"timing-11.0-sm89.cache": b"ab"}
    assert (first.note, second.note) == (None, None)


def test_both_engines_of_one_build_share_it(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path, "11.0", "sm89")
    assert [build(cache, b"target"), build(cache, b"assistant")] == [b"", b"target"]


@pytest.mark.parametrize(("version", "device"), [("11.1", "sm89"), ("11.0", "sm86")])
def test_another_version_or_device_has_a_file_of_its_own(version: str, device: str, tmp_path: Path) -> None:
    build(TimingCache(tmp_path, "11.0", "sm89"), b"a")
    assert build(TimingCache(tmp_path, version, device), b"b") == b""
    assert sorted(files(tmp_path).values()) == [b"a", b"b"]


@pytest.mark.parametrize("refuses", ["create", "set"])
def test_one_that_tensorrt_refuses_is_ignored_with_a_note_and_written_anew(refuses: str, tmp_path: Path) -> None:
    build(TimingCache(tmp_path, "11.0", "sm89"), b"foreign")
    cache = TimingCache(tmp_path, "11.0", "sm89")
    assert build(cache, b"own", refuses=refuses) == b""
    assert cache.note is not None
    assert "timing-11.0-sm89.cache is damaged, or of another TensorRT or GPU: ignored, and written anew" in cache.note
    assert files(tmp_path) == {"timing-11.0-sm89.cache": b"own"}


def test_an_interrupted_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(TimingCache(tmp_path, "11.0", "sm89"), b"a")

    def fail(self: Path, content: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(KeyboardInterrupt):
        build(TimingCache(tmp_path, "11.0", "sm89"), b"b")
    monkeypatch.undo()
    assert files(tmp_path) == {"timing-11.0-sm89.cache": b"a"}


@pytest.fixture
def tensorrt_build(
    bundle_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Outcome[EngineRecord], list[bytes | None]]]:
    """Builds with the flavour "tensorrt" in the simulator; outcome, and what each engine's build began with."""
    install(monkeypatch, flavour="tensorrt")
    simulate_builds(monkeypatch, "tensorrt")
    bundle: Bundle = open_bundle(shutil.copytree(bundle_folder("edge"), tmp_path / "bundle"))
    simulated = vars(build_module)["engine_from_network"]

    def call(max_length: int, *, refuses: str = "") -> tuple[Outcome[EngineRecord], list[bytes | None]]:
        begun: list[bytes | None] = []

        def engine(trt: Any, parsed: Any, profiles: Any, options: Any, on_step: Any) -> bytes:
            begun.append(build(options.timing_cache, b"t", refuses=refuses))
            return bytes(simulated(trt, parsed, profiles, options, on_step))

        monkeypatch.setattr(build_module, "engine_from_network", engine)
        settings = EngineSettings(
            flavour="tensorrt", device="", max_length=max_length, max_batch=1, num_draft_tokens=3, workspace_mib=64
        )
        return build_engines(bundle, settings, SilentProgress()), begun

    return call


def test_engines_of_tensorrt_are_built_with_it(
    tensorrt_build: Callable[..., tuple[Outcome[EngineRecord], list[bytes | None]]], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, begun = tensorrt_build(100)
    assert begun == [b"", b"t", b"tt", b"ttt"]
    assert outcome.note is None
    assert outcome.record.settings.device == "sm89"
    version = sys.modules["tensorrt"].__version__
    assert (outcome.folder.parent / f"timing-{version}-sm89.cache").read_bytes() == b"tttt"
    outcome, begun = tensorrt_build(120)
    assert begun == [b"t" * count for count in range(4, 8)]
    outcome, begun = tensorrt_build(140, refuses="set")
    assert begun == [b""] * 4
    assert outcome.note is not None
