"""Closing from other threads, and after refusals: everything is given back, in order, and nothing under a call."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle.engine_record import EngineName
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.settings import GenerationSettings
from slipstream.runtime.errors import BackendError, RequestError, SlipstreamError
from slipstream.runtime.session import Pair
from slipstream.runtime.trt.backend import TensorRTBackend
from tests.simulator.machine import Simulator, install
from tests.support.engine_fixtures import build_simulated

ENGINES: list[EngineName] = ["tensorrt-rtx", "onnxruntime-cuda", "onnxruntime"]
LONG = GenerationSettings(max_new_tokens=100)


@pytest.fixture(scope="module")
def built(bundle_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_simulated(bundle_folder("edge"), tmp_path_factory.mktemp("built")).folder


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    simulator = install(monkeypatch)
    simulator.onnxruntime_cuda(monkeypatch)
    return simulator


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pair_closed_by_another_thread_waits_for_the_call_that_runs(
    engine: EngineName, built: Path, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(open_bundle(built), engine=engine)
    closer, run = threading.Thread(target=pair.close), PairBackend.round
    waited: list[bool] = []

    def close_midway(self: PairBackend, *arguments: Any) -> Any:
        if not waited:
            closer.start()
            closer.join(0.2)
            waited.append(closer.is_alive())
        return run(self, *arguments)

    monkeypatch.setattr(TensorRTBackend if engine == "tensorrt-rtx" else PairBackend, "round", close_midway)
    stream = pair.stream("the sea", LONG)
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    closer.join(10)
    assert (waited, closer.is_alive()) == ([True], False)
    sim.check_closed()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_close_that_fails_leaves_nothing_else_open(engine: EngineName, built: Path, sim: Simulator) -> None:
    pair = Pair(open_bundle(built), engine=engine)
    backends: list[Any] = [pair.new_backend() for _ in range(3)]
    close = backends[1]._close

    def fail() -> None:
        close()
        raise BackendError("the device is lost")

    backends[1]._close = fail
    with pytest.raises(BackendError, match="the device is lost"):
        pair.close()
    assert all(backend.is_closed for backend in backends)
    pair.close()
    sim.check_closed()


def test_no_backend_is_made_while_a_pair_closes(built: Path, sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, errors, made = Pair(open_bundle(built), engine="tensorrt-rtx"), list[str](), list[threading.Thread]()
    pair.new_backend()
    close = PairBackend.close

    def new_backend() -> None:
        try:
            pair.new_backend()
        except RequestError as error:
            errors.append(str(error))

    def slow_close(backend: PairBackend) -> None:
        made.append(threading.Thread(target=new_backend))
        made[0].start()
        made[0].join(0.1)
        close(backend)

    monkeypatch.setattr(PairBackend, "close", slow_close)
    pair.close()
    made[0].join(10)
    assert errors == ["the pair is closed: load the bundle again"]
    sim.check_closed()


@pytest.mark.parametrize("engine", ["tensorrt-rtx", "onnxruntime-cuda"])
def test_a_refusal_after_the_stream_was_made_gives_it_back(
    engine: EngineName, built: Path, sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(shutil.copytree(built, tmp_path / "bundle"))
    if engine == "onnxruntime-cuda":
        weights = bundle.path(bundle.manifest.target_file)
        weights.rename(tmp_path / "target.bin")
        weights.symlink_to(tmp_path / "target.bin")
    else:
        monkeypatch.setattr(sim.module, "Runtime", lambda logger: 1 / 0)
    with pytest.raises((SlipstreamError, ZeroDivisionError)):
        Pair(bundle, engine=engine)
    sim.check_closed()


@pytest.mark.parametrize("engine", ["tensorrt-rtx", "onnxruntime-cuda"])
def test_a_backend_is_made_on_the_pairs_gpu_whatever_the_thread(
    engine: EngineName, built: Path, sim: Simulator
) -> None:
    with Pair(open_bundle(built), engine=engine) as pair:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                pair.new_backend()
            except BaseException as error:  # noqa: BLE001 (compared below)
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
    assert errors == []
    assert sim.errors == []
