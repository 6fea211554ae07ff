"""``slipstream doctor`` on machines that have everything, little, or something broken: what it finds and what runs."""

from __future__ import annotations

import ctypes
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from rich.console import Console

from slipstream.display import diagnosis_table, verdict
from slipstream.engines.tensorrt.build import build_engines
from slipstream.runtime.bundle.engine_record import EngineRecord, EngineSettings, ParityStamp
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.doctor import findings as doctor_findings
from slipstream.runtime.doctor import probes as doctor_probes
from slipstream.runtime.doctor.diagnosis import Diagnosis, Way, examine
from slipstream.runtime.doctor.findings import Finding
from slipstream.runtime.doctor.providers import PROBE_MODEL
from slipstream.runtime.errors import BackendError
from slipstream.runtime.machine.host import bytes_text
from slipstream.runtime.machine.plan import run_plan
from tests.simulator.machine import MODULES, install, simulate_builds
from tests.support.progress import SilentProgress

ENGINES = ["onnxruntime", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
MEMINFO = "MemTotal: 8000000 kB\nMemAvailable: {available} kB\nSwapTotal: {swap} kB\n"
ABSENT = "cannot open shared object file: No such file or directory"


class FakeDriver:
    """Stands in for libcuda.so.1."""

    def __init__(self, names: tuple[str, ...] = ("NVIDIA L4",), version: int = 13020, error: int = 0) -> None:
        self.names, self.version, self.error = names, version, error

    def cuInit(self, flags: int) -> int:  # noqa: N802 (CUDA's name)
        return self.error

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"no CUDA-capable device is detected"
        return 0

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, number: Any) -> int:  # noqa: N802
        number._obj.value = len(self.names)
        return 0

    def cuDeviceGetName(self, text: Any, size: int, index: int) -> int:  # noqa: N802
        text.value = self.names[index].encode()
        return 0


def cudnn(version: int) -> Any:
    return SimpleNamespace(cudnnGetVersion=type("Function", (), {"__call__": lambda self: version})())


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The shared libraries that the loader finds; none at first."""
    there: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in there:
            raise OSError(f"{name}: {ABSENT}")
        return there[name]

    monkeypatch.setattr(doctor_probes, "load_library", load)
    return there


@pytest.fixture
def bundle(bundle_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(bundle_folder("edge"), tmp_path / "bundle")


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def finding(diagnosis: Diagnosis, name: str) -> Finding:
    (found,) = [item for item in diagnosis.findings if item.name == name]
    return found


def way(diagnosis: Diagnosis, engine: str) -> Way:
    (found,) = [item for item in diagnosis.ways if item.engine == engine]
    return found


def shown(diagnosis: Diagnosis, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(diagnosis_table(diagnosis))
        console.print(verdict(diagnosis))
    return captured.get().splitlines()


# this machine


def test_the_model_that_providers_are_tried_with_is_one_reduction() -> None:
    model = onnx.load_from_string(PROBE_MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == PROBE_MODEL
    assert [node.op_type for node in model.graph.node] == ["ReduceMin"]


def test_this_machine_runs_something_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    start = process_time()
    diagnosis = examine()
    assert process_time() - start < 3
    assert capfd.readouterr() == ("", "")
    assert diagnosis.can_run
    assert way(diagnosis, "onnxruntime").can_run
    assert [finding(diagnosis, name).state for name in ("slipstream", "cpu", "memory", "onnxruntime cpu")] == ["ok"] * 4
    assert "GiB available" in finding(diagnosis, "memory").detail
    assert ort.__version__ in finding(diagnosis, "onnxruntime").detail


def test_json_has_stable_keys(bundle: Path) -> None:
    content = json.loads(json.dumps(examine(bundle).to_dict()))
    assert list(content) == ["can_run", "bundle", "findings", "ways"]
    assert content["bundle"] == str(bundle)
    assert {tuple(item) for item in content["findings"]} == {("name", "state", "detail", "advice")}
    assert {tuple(item) for item in content["ways"]} == {("engine", "can_run", "detail", "advice")}
    assert [item["engine"] for item in content["ways"]] == ENGINES
    assert {item["state"] for item in content["findings"]} <= {"ok", "missing", "problem"}


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_keeps_its_width_and_names_everything(width: int, bundle: Path, libraries: dict[str, Any]) -> None:
    diagnosis = examine(bundle)
    *table, last = shown(diagnosis, width)
    assert max(map(len, table)) <= width
    assert last.endswith("can run here with --engine onnxruntime")
    text = "\n".join(table)
    assert [item.name for item in diagnosis.findings if f"│ {item.name} " not in text] == []
    assert [engine for engine in ENGINES if f"│ {engine} " not in text] == []


def test_a_cpu_machine_runs_a_float32_bundle_and_says_why_not_on_gpus(bundle: Path, libraries: dict[str, Any]) -> None:
    diagnosis = examine(bundle)
    assert finding(diagnosis, "bundle").detail == "target with assistant, float32, up to 160 tokens"
    assert finding(diagnosis, "bundle memory").state == "ok"
    assert [item.engine for item in diagnosis.ways if item.can_run] == ["onnxruntime"]
    assert finding(diagnosis, "driver").detail == f"libcuda.so.1: {ABSENT}"
    assert "start a container with --gpus all (Jetson: --runtime nvidia)" in finding(diagnosis, "driver").advice
    assert way(diagnosis, "tensorrt") == Way("tensorrt", False, "gpu: none without a driver", "see driver")


# what can be wrong with the host


def test_a_broken_onnxruntime_is_a_finding(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    diagnosis = examine()
    assert not diagnosis.can_run
    assert finding(diagnosis, "onnxruntime").state == "problem"
    assert "ModuleNotFoundError" in way(diagnosis, "onnxruntime").detail
    assert shown(diagnosis, 100)[-1] == "slipstream can't run here"


def test_a_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("what\nnobody expected")

    monkeypatch.setattr(doctor_probes, "load_library", fail)
    monkeypatch.setattr(doctor_probes, "load_flavour", fail)
    diagnosis = examine()
    for name in ("driver", "cudnn", "tensorrt", "tensorrt-rtx"):
        assert finding(diagnosis, name) == Finding(name, "problem", "RuntimeError: what nobody expected")
    assert diagnosis.can_run


def test_an_empty_root_is_survived(tmp_path: Path, bundle: Path, libraries: dict[str, Any]) -> None:
    diagnosis = examine(bundle, tmp_path / "empty")
    assert finding(diagnosis, "memory").state == "missing"
    assert diagnosis.can_run


def test_memory_of_a_container_with_compressed_swap(tmp_path: Path, libraries: dict[str, Any]) -> None:
    files = {
        "proc/meminfo": MEMINFO.format(available=6_000_000, swap=4_000_000),
        "proc/swaps": "Filename Type\n/dev/zram0 partition 4000000 0 5\n",
        "sys/fs/cgroup/memory.max": f"{1 << 30}\n",
    }
    assert finding(examine(root=write(tmp_path, files)), "memory").detail == (
        "1.0 GiB of 7.6 GiB available, limited to 1.0 GiB in this container, "
        "swap 3.8 GiB (compressed, in memory itself)"
    )


def test_a_bundle_that_memory_can_not_hold_does_not_run(
    tmp_path: Path, bundle: Path, libraries: dict[str, Any]
) -> None:
    root = write(tmp_path / "root", {"proc/meminfo": MEMINFO.format(available=100, swap=0)})
    diagnosis = examine(bundle, root)
    assert not diagnosis.can_run
    assert way(diagnosis, "onnxruntime").detail.startswith("bundle memory: up to ")
    assert "close other programs" in way(diagnosis, "onnxruntime").advice


def test_memory_is_planned_as_the_runtime_plans_it(bundle: Path, libraries: dict[str, Any]) -> None:
    plan = run_plan(open_bundle(bundle), "onnxruntime")
    assert plan is not None
    found = finding(examine(bundle), "bundle memory")
    assert found.detail == f"up to {bytes_text(plan.total)} on the CPU at {plan.length} tokens"


@pytest.mark.parametrize(("value", "text"), [("1", "telemetry off"), ("0", "telemetry on"), (None, "telemetry on")])
def test_whether_onnxruntime_reports_home_is_said(
    value: str | None, text: str, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    if value is not None:
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", value)
    found = finding(examine(), "onnxruntime")
    assert found.detail.endswith(f", {text}")
    assert found.advice == ("ORT_DISABLE_TELEMETRY=1 turns it off" if text == "telemetry on" else "")


def test_an_errors_advice_is_the_findings_whatever_its_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BackendError("it failed. Twice. slipstream doctor said so", "Do this. Then that")

    monkeypatch.setattr(doctor_probes, "load_library", fail)
    assert finding(examine(), "driver") == Finding(
        "driver", "problem", "it failed. Twice. slipstream doctor said so", "Do this. Then that"
    )


# drivers and libraries


def test_a_driver_names_its_gpus_without_cuda_python(
    libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries["libcuda.so.1"] = FakeDriver(("NVIDIA L4", "NVIDIA T4"), version=13020)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    diagnosis = examine()
    assert finding(diagnosis, "driver").detail.startswith("CUDA 13.2")
    assert finding(diagnosis, "gpu").state == "missing"
    assert "NVIDIA L4, NVIDIA T4; cuda-python is missing" in finding(diagnosis, "gpu").detail
    assert "pip install" in way(diagnosis, "tensorrt-rtx").advice


def test_a_driver_older_than_cuda_python_is_told(libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries["libcuda.so.1"] = FakeDriver(version=12040)
    monkeypatch.setattr(doctor_findings, "version", lambda name: {"cuda-bindings": "13.4.4"}.get(name, "1.0"))
    found = finding(examine(), "driver")
    assert (found.state, found.detail) == ("problem", "CUDA 12.4; cuda-python is for CUDA 13")
    assert found.advice == "update the driver to one for CUDA 13, on Jetson with JetPack"


def test_a_kernel_module_without_the_drivers_library(tmp_path: Path, libraries: dict[str, Any]) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build\n"
    found = finding(examine(root=write(tmp_path, {"proc/driver/nvidia/version": line})), "driver")
    assert found.detail == f"libcuda.so.1: {ABSENT}; kernel module 580.65.06 is there"


def test_a_device_that_can_not_be_opened_is_named(
    tmp_path: Path, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries["libcuda.so.1"] = FakeDriver(error=100)
    root, access = write(tmp_path, {"dev/nvmap": ""}), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "nvmap" not in str(path) and access(path, mode))
    found = finding(examine(root=root), "driver")
    assert found.detail == "cuInit: error 100 (no CUDA-capable device is detected)"
    assert found.advice.startswith("no permission for /dev/nvmap: join the groups video and render")


def test_hidden_devices_are_told(tmp_path: Path, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries["libcuda.so.1"] = FakeDriver(error=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert finding(examine(root=tmp_path), "driver").advice == "CUDA_VISIBLE_DEVICES is '': unset it"


@pytest.mark.parametrize(
    ("name", "version", "state", "detail"),
    [
        ("libcudnn.so.9", 92000, "ok", "9.20.0 (libcudnn.so.9)"),
        ("libcudnn.so.8", 8907, "problem", "8.9.7 (libcudnn.so.8)"),
    ],
)
def test_cudnns_version(name: str, version: int, state: str, detail: str, libraries: dict[str, Any]) -> None:
    libraries[name] = cudnn(version)
    found = finding(examine(), "cudnn")
    assert (found.state, found.detail) == (state, detail)


def test_a_cudnn_package_that_the_loader_does_not_see(
    tmp_path: Path, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"nvidia/cudnn/lib/libcudnn.so.9": ""})
    monkeypatch.syspath_prepend(tmp_path)
    found = finding(examine(), "cudnn")
    assert found.state == "missing"
    assert found.advice == (
        "pip has it where the loader does not look: "
        f"export LD_LIBRARY_PATH={tmp_path}/nvidia/cudnn/lib:$LD_LIBRARY_PATH"
    )


def test_a_tensorrt_that_lacks_a_library_is_not_called_uninstalled(
    tmp_path: Path, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"tensorrt/__init__.py": f'raise ImportError("libnvinfer.so.11: {ABSENT}")\n'})
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = finding(examine(), "tensorrt")
    assert (found.state, found.detail) == ("problem", f"can't be imported: libnvinfer.so.11: {ABSENT}")


def test_an_old_tensorrt_is_a_problem(libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.3.0", LayerType=None))
    found = finding(examine(), "tensorrt")
    assert found.state == "problem"
    assert "tensorrt 10.3.0 has no KV cache update or attention layer" in found.detail


# ONNX Runtime's CUDA provider


def cuda_provider(monkeypatch: pytest.MonkeyPatch, *, is_loadable: bool = True, failure: str = "") -> None:
    """A CUDA provider that is listed, as in onnxruntime-gpu. failure: of its kernels."""
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    real = ort.InferenceSession

    def run(*_: Any) -> None:
        if failure:
            raise NotImplementedError(failure)

    def session(model: bytes, options: Any, providers: list[Any], **rest: Any) -> Any:
        assert rest == {"enable_fallback": 0}, "it would print to stdout"
        if providers == [(names[0], {})]:
            return SimpleNamespace(get_providers=lambda: names if is_loadable else names[1:], run=run)
        return real(model, options, providers=providers, **rest)

    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: names)


def test_a_cuda_provider_that_works_runs_the_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    cuda_provider(monkeypatch)
    diagnosis = examine(bundle)
    assert finding(diagnosis, "onnxruntime cuda") == Finding("onnxruntime cuda", "ok", "loads and runs")
    assert way(diagnosis, "onnxruntime-cuda").can_run
    assert "weights, KV and activations of 160 tokens take" in way(diagnosis, "onnxruntime-cuda").detail


def test_a_cuda_provider_whose_kernels_lack_cudnn_does_not_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    cuda_provider(monkeypatch, failure="a cuDNN handle is required")
    assert way(examine(bundle), "onnxruntime-cuda") == Way(
        "onnxruntime-cuda",
        False,
        "onnxruntime cuda: does not run: a cuDNN handle is required",
        "see driver, gpu and cudnn",
    )


def test_a_library_that_pip_has_where_the_loader_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *_: Any) -> Any:
        raise OSError(f"libcublasLt.so.13: {ABSENT}")

    install(monkeypatch)
    cuda_provider(monkeypatch, is_loadable=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.syspath_prepend(write(tmp_path, {"nvidia/cu13/lib/libcublasLt.so.13": ""}))
    advice = finding(examine(), "onnxruntime cuda").advice
    assert advice.endswith(f"export LD_LIBRARY_PATH={tmp_path}/nvidia/cu13/lib:$LD_LIBRARY_PATH")


def test_a_provider_that_falls_back_in_silence_is_told_with_the_library(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Any]
) -> None:
    def load(name: str, *_: Any) -> Any:
        raise OSError(f"libcudnn.so.9: {ABSENT}")

    install(monkeypatch)
    cuda_provider(monkeypatch, is_loadable=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    diagnosis = examine(bundle)
    found = finding(diagnosis, "onnxruntime cuda")
    assert (found.state, found.detail) == ("problem", f"does not load: libcudnn.so.9: {ABSENT}")
    assert "Install that library (CUDA or cuDNN)" in found.advice
    assert not way(diagnosis, "onnxruntime-cuda").can_run
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *_: None)
    found = finding(examine(), "onnxruntime cuda")
    assert (found.detail, found.advice) == ("does not load, though its libraries are there", "see driver and gpu")


def test_two_onnxruntimes_on_top_of_each_other(libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_findings, "version", lambda name: "1.0")
    found = finding(examine(), "onnxruntime cuda")
    assert "both installed" in found.detail
    assert found.advice.startswith("pip uninstall onnxruntime onnxruntime-gpu")


# engines


def build(monkeypatch: pytest.MonkeyPatch, bundle: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {"flavour": "tensorrt-rtx", "device": "sm89", "max_length": 100, "max_batch": 1}
    settings = EngineSettings(**values | {"num_draft_tokens": 3, "workspace_mib": 256} | changes)
    simulate_builds(monkeypatch, settings.flavour)
    return build_engines(open_bundle(bundle), settings, SilentProgress()).folder


def test_a_gpu_without_engines_says_how_to_build_them(
    bundle: Path, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    libraries["libcuda.so.1"] = FakeDriver()
    diagnosis = examine(bundle)
    assert finding(diagnosis, "gpu") == Finding(
        "gpu", "ok", "NVIDIA Simulator, sm89, 1.0 GiB of 1.0 GiB free, CUDA driver 13.0, runtime 13.0"
    )
    assert way(diagnosis, "tensorrt-rtx") == Way(
        "tensorrt-rtx",
        False,
        "engines: the bundle has none of tensorrt-rtx for this GPU (sm89)",
        f"slipstream build {bundle} --engine tensorrt-rtx --device sm89",
    )
    assert way(examine(), "tensorrt-rtx").can_run


def test_a_gpu_that_tensorrt_rtx_does_not_serve(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, compute_capability="sm90")
    assert way(examine(bundle), "tensorrt-rtx") == Way(
        "tensorrt-rtx",
        False,
        "tensorrt-rtx: 1.7.1.116, which has no engines for sm90",
        "use --engine tensorrt on this GPU",
    )


@pytest.mark.parametrize("flavour", list(MODULES))
def test_engines_of_this_gpu_run_with_or_without_a_stamp(
    flavour: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = install(monkeypatch, flavour=flavour)
    folder = build(monkeypatch, bundle, flavour=flavour, device="sm89" if flavour == "tensorrt-rtx" else "")
    name = f"engines/{flavour}-sm89"
    diagnosis = examine(bundle)
    found = finding(diagnosis, name)
    version = simulator.module.__version__
    assert found.detail.startswith(f"{flavour} {version} for sm89, up to 100 tokens, never compared with ONNX Runtime")
    assert found.advice == f"slipstream verify {bundle} --engine {flavour}"
    assert way(diagnosis, flavour) == Way(flavour, True, name, found.advice)  # type: ignore[arg-type]
    record = EngineRecord.model_validate_json((folder / "record.json").read_text(), strict=False)
    stamp = ParityStamp(
        target_sha256=record.target.sha256,
        assistant_sha256=record.assistant.sha256,
        engine_version=version,
        device="NVIDIA Simulator",
        driver_version=13000,
        slipstream_version="0.1.0",
        reference="onnxruntime",
        largest_difference=0.0,
        tolerance=0.01,
        num_calls=1,
        num_tokens=1,
        near_ties=0,
    )
    (folder / "parity.json").write_text(stamp.model_dump_json())
    found = finding(examine(bundle), name)
    assert ", compared with ONNX Runtime; they take" in found.detail
    assert found.advice == ""


def damage_engine(bundle: Path, folder: Path) -> None:
    (folder / "target.engine").write_bytes(b"damaged")


def export_anew(bundle: Path, folder: Path) -> None:
    manifest = bundle / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")


def change_version(bundle: Path, folder: Path) -> None:
    record = folder / "record.json"
    record.write_text(record.read_text().replace('"1.7.1.116"', '"1.6.0"'))


def break_record(bundle: Path, folder: Path) -> None:
    (folder / "record.json").write_text("{}")


def rename(bundle: Path, folder: Path) -> None:
    folder.rename(folder.with_name("tensorrt-rtx-sm89-old"))


@pytest.mark.parametrize(
    ("change", "detail", "advice"),
    [
        (damage_engine, "target.engine is missing or damaged", "Copy it again, or build again: slipstream build"),
        (export_anew, "the bundle was exported anew since", "Build again: slipstream build"),
        (change_version, "was built with tensorrt-rtx 1.6.0, installed is 1.7.1.116", "Install that version, or build"),
        (break_record, "record.json is not as expected: bundle_sha256: Field required", "slipstream build"),
        (rename, "in a folder that is not looked for", "rename it to tensorrt-rtx-sm89"),
    ],
)
def test_engines_that_do_not_do_say_why(
    change: Callable[[Path, Path], None], detail: str, advice: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    change(bundle, build(monkeypatch, bundle))
    diagnosis = examine(bundle)
    (found,) = [item for item in diagnosis.findings if item.name.startswith("engines/")]
    assert found.state == "problem"
    assert detail in found.detail
    assert found.advice.startswith(advice)
    assert not way(diagnosis, "tensorrt-rtx").can_run
    assert diagnosis.can_run, "the CPU still does"


def test_engines_of_other_gpus_are_listed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, compute_capability="sm120")
    for device in ("sm86", "sm120"):
        build(monkeypatch, bundle, device=device)
    diagnosis = examine(bundle)
    found = finding(diagnosis, "engines/tensorrt-rtx-sm86")
    assert found.detail.endswith("for sm86, up to 100 tokens; this GPU is sm120")
    assert way(diagnosis, "tensorrt-rtx").can_run
    install(monkeypatch, num_devices=0)
    diagnosis = examine(bundle)
    found = finding(diagnosis, "engines/tensorrt-rtx-sm86")
    assert found.detail.endswith("for sm86, up to 100 tokens; there is no GPU here")
    assert [item.engine for item in diagnosis.ways if item.can_run] == ["onnxruntime"]


def test_engines_that_the_gpu_has_no_room_for(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    build(monkeypatch, bundle)
    install(monkeypatch, total_bytes=1 << 12)
    diagnosis = examine(bundle)
    assert "4.0 KiB are free" in way(diagnosis, "tensorrt-rtx").detail
    assert not way(diagnosis, "tensorrt-rtx").can_run


# bundles


def test_a_bfloat16_bundle_does_not_run_on_the_cpu(bundle: Path, libraries: dict[str, Any]) -> None:
    manifest = bundle / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"float32"', '"bfloat16"'))
    diagnosis = examine(bundle)
    assert not diagnosis.can_run
    assert way(diagnosis, "onnxruntime") == Way(
        "onnxruntime",
        False,
        "bundle: this bundle is bfloat16, which ONNX Runtime's CPU provider can't multiply",
        "Export the pair with --dtype float32 for the CPU",
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json has 2 bytes, the manifest says"),
        ("manifest.json", b"{", "manifest.json is not JSON"),
        ("manifest.json", None, "is not a bundle: it has no manifest.json"),
    ],
)
def test_a_broken_bundle_is_a_finding(file: str, content: bytes | None, message: str, bundle: Path) -> None:
    (bundle / file).unlink()
    if content is not None:
        (bundle / file).write_bytes(content)
    diagnosis = examine(bundle)
    assert not diagnosis.can_run
    found = finding(diagnosis, "bundle")
    assert found.state == "problem"
    assert message in found.detail
    assert found.advice
    assert {(item.detail, item.advice) for item in diagnosis.ways} == {("bundle: can't be opened", "see bundle")}


def test_graphs_built_for_the_cpu_that_were_changed_since(bundle: Path, libraries: dict[str, Any]) -> None:
    write(bundle, {"engines/onnxruntime-cpu/record.json": "{}"})
    diagnosis = examine(bundle)
    assert finding(diagnosis, "engines/onnxruntime-cpu").state == "problem"
    assert not way(diagnosis, "onnxruntime").can_run


# Jetson

ORIN = "NVIDIA Jetson AGX Orin Developer Kit"
MODES = "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n< PM_CONFIG DEFAULT=0 >\n"


def jetson(root: Path, release: str = "R39 (release), REVISION: 2.2", **files: str) -> Path:
    content = {"etc/nv_tegra_release": f"# {release}, GCID: 1, BOARD: generic\n"}
    return write(root, content | {"proc/device-tree/model": f"{ORIN}\0"} | files)


@pytest.mark.parametrize(
    ("release", "state", "detail"),
    [
        ("R36 (release), REVISION: 4.3", "problem", "TensorRT 10.3 has no TensorScatter and Attention import"),
        ("R38 (release), REVISION: 4.0", "problem", "JetPack before 7.2.2: TensorRT 11.0 to 11.3 leave it out"),
        ("R39 (release), REVISION: 2.1", "problem", "JetPack before 7.2.2"),
        ("R39 (release), REVISION: 2.2", "ok", "Jetson Linux 39.2.2; CPU and GPU share the memory"),
        ("R40 (release), REVISION: 1", "ok", "Jetson Linux 40.1.0"),
        ("what nobody expected", "missing", "does not tell its release"),
    ],
)
def test_a_jetsons_release(release: str, state: str, detail: str, tmp_path: Path, libraries: dict[str, Any]) -> None:
    found = finding(examine(root=jetson(tmp_path, release)), "jetson")
    assert found.state == state
    assert found.detail.startswith(ORIN)
    assert detail in found.detail
    assert bool(found.advice) == (state != "ok")


def test_a_container_on_a_jetson_sees_the_kernel_only(tmp_path: Path, libraries: dict[str, Any]) -> None:
    diagnosis = examine(root=write(tmp_path, {"proc/sys/kernel/osrelease": "6.8.12-tegra\n"}))
    states = {name: finding(diagnosis, name).state for name in ("jetson", "power mode", "temperature")}
    assert states == dict.fromkeys(states, "missing")
    assert finding(diagnosis, "power mode").advice == "on the board: sudo nvpmodel -q"


def test_no_other_machine_is_a_jetson(tmp_path: Path, libraries: dict[str, Any]) -> None:
    names = [item.name for item in examine(root=tmp_path).findings]
    assert not {"jetson", "power mode", "temperature"} & set(names)


@pytest.mark.parametrize(
    ("files", "state", "detail", "advice"),
    [
        (
            {"status": "pmode:0000\n", "conf": MODES},
            "problem",
            "15W (0): slow",
            "sudo nvpmodel -m 2; sudo jetson_clocks",
        ),
        ({"status": "pmode:0002 fmode:cool\n", "conf": MODES}, "ok", "MAXN_SUPER (2)", ""),
        ({"status": "pmode:0000\n"}, "ok", "mode (0)", ""),
        ({"status": "pmode:0003\n"}, "problem", "mode (3): slow", "sudo nvpmodel -m 0; sudo jetson_clocks"),
        (
            {"answer": "NV Power Mode: MODE_30W\n2\n"},
            "problem",
            "MODE_30W (2): slow",
            "sudo nvpmodel -m 0; sudo jetson_",
        ),
        ({"answer": "NV Power Mode: MAXN\n0\n", "status": "pmode:0003\n"}, "ok", "MAXN (0)", ""),
        ({"answer": "", "status": "pmode:0003\n"}, "problem", "mode (3): slow", "sudo nvpmodel -m 0"),
    ],
)
def test_a_jetsons_power_mode(
    files: dict[str, str],
    state: str,
    detail: str,
    advice: str,
    tmp_path: Path,
    libraries: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {"status": "var/lib/nvpmodel/status", "conf": "etc/nvpmodel.conf"}
    root = jetson(tmp_path / "root", **{places[name]: text for name, text in files.items() if name in places})
    if "answer" in files:
        command = write(tmp_path, {"bin/nvpmodel": f"#!/bin/sh\nprintf '{files['answer']}'\n"}) / "bin/nvpmodel"
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    found = finding(examine(root=root), "power mode")
    assert (found.state, found.detail) == (state, detail)
    assert found.advice.startswith(advice)


@pytest.mark.parametrize(("heat", "state"), [(61_500, "ok"), (99_500, "problem")])
def test_a_jetsons_heat(heat: int, state: str, tmp_path: Path, libraries: dict[str, Any]) -> None:
    zone = "sys/class/thermal/thermal_zone"
    files = {
        f"{zone}0/type": "cpu-thermal\n",
        f"{zone}0/temp": "45000\n",
        f"{zone}1/type": "gpu-thermal\n",
        f"{zone}1/temp": f"{heat}\n",
        f"{zone}1/trip_point_0_type": "active\n",
        f"{zone}1/trip_point_0_temp": "30000\n",
        f"{zone}1/trip_point_1_type": "passive\n",
        f"{zone}1/trip_point_1_temp": "99000\n",
        f"{zone}2/type": "off\n",
    }
    found = finding(examine(root=jetson(tmp_path, **files)), "temperature")
    assert found.state == state
    assert f"{heat / 1000:.0f} °C at most (gpu-thermal)" in found.detail
    assert ("slowed down by gpu-thermal" in found.detail) == (state == "problem")


def test_a_jetsons_gpu_has_the_memory_that_the_host_can_give(
    tmp_path: Path, bundle: Path, libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, flavour="tensorrt", compute_capability="sm110")
    build(monkeypatch, bundle, flavour="tensorrt", device="")
    install(monkeypatch, flavour="tensorrt", compute_capability="sm110", total_bytes=1 << 12)
    meminfo = {"proc/meminfo": MEMINFO.format(available=6_000_000, swap=0)}
    assert way(examine(bundle, jetson(tmp_path / "board", **meminfo)), "tensorrt").can_run
    assert not way(examine(bundle, write(tmp_path / "server", meminfo)), "tensorrt").can_run
