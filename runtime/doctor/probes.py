"""What ``slipstream doctor`` finds on a machine: each thing is tried, and whatever fails is a finding of its own."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from slipstream.runtime.backend.cuda import Cuda
from slipstream.runtime.bundle.engine_record import Flavour
from slipstream.runtime.errors import BackendError, MissingExtraError, SlipstreamError
from slipstream.runtime.machine.host import read_state, read_text
from slipstream.runtime.trt.flavour import TensorRT, load_flavour

Outcome = Literal["ok", "missing", "problem"]
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_PROVIDER_NAMES = {_CPU: "onnxruntime cpu", _CUDA: "onnxruntime cuda"}
# What containers are given in part, and users without the right group can't open.
_DEVICE_NODES = ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvmap", "dev/dri/renderD128")
_NAME_BYTES = 256

# y = ReduceMin(x, axes=[1]) of int64 [1, 2], in ONNX's bytes: how the target counts accepted drafts. ONNX Runtime's
# CUDA provider loads without cuDNN and fails where a kernel needs it, so that loading alone proves little.
PROBE_MODEL = (
    b'\x08\n:\\\n%\n\x01x\n\x01a\x12\x01y"\tReduceMin*\x0f\n\x08keepdims\x18\x00\xa0\x01\x02\x12\x01g'
    b"*\n\x08\x01\x10\x07:\x01\x01B\x01aZ\x13\n\x01x\x12\x0e\n\x0c\x08\x07\x12\x08\n\x02\x08\x01\n\x02\x08\x02"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x07\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x18"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    state: "missing" is not there, which may be fine; "problem" is there and does not do.
    detail: what was found. advice: what to do about it.
    """

    name: str
    state: Outcome
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """The current GPU. free_bytes, total_bytes: of its memory, as CUDA counts it."""

    compute_capability: str
    name: str
    driver_version: int
    free_bytes: int
    total_bytes: int


def guarded(name: str, probe: Callable[[], Finding]) -> Finding:
    """What a probe finds, its failure included."""
    try:
        return probe()
    except SlipstreamError as error:
        return Finding(name, "problem", *split_message(error))
    except Exception as error:  # noqa: BLE001 (broken installations fail in every way; doctor has to go on)
        return Finding(name, "problem", _one_line(f"{type(error).__name__}: {error}"))


def split_message(error: Exception | str) -> tuple[str, str]:
    """What an error says happened, and its last sentence, which says what to do."""
    text = _one_line(str(error))
    happened, _, advice = text.rpartition(". ")
    if not happened:
        return text, ""
    return happened, "" if advice.startswith("slipstream doctor") else advice


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _one_line(text: str) -> str:
    return " ".join(text.split())


class Machine:
    """What this machine has, besides a Jetson's own matters.

    findings: in the order they are shown. available_bytes: host memory that programs can get, None when unknown.
    gpu: None without a usable one. has_onnxruntime: whether it can be imported. flavours: the TensorRTs that load.
    """

    def __init__(self, root: Path) -> None:
        """root: where /proc, /etc and /dev are."""
        self._root = root
        self._gpu_names: list[str] = []
        self.available_bytes: int | None = None
        self.gpu: Gpu | None = None
        self.has_onnxruntime = False
        self.flavours: dict[Flavour, TensorRT] = {}
        self.findings = [
            guarded("slipstream", self._software),
            guarded("cpu", self._cpu),
            guarded("memory", self._memory),
            guarded("driver", self._driver),
        ]
        self.findings.append(guarded("gpu", self._gpu))
        # before anything else loads CUDA libraries: what they bring into this process would hide what is missing
        self.findings += self._onnxruntime()
        self.findings.append(guarded("cudnn", self._cudnn))
        for flavour in get_args(Flavour):
            self.findings.append(guarded(flavour, partial(self._flavour, flavour)))

    def finding(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def _software(self) -> Finding:
        detail = f"{version('slipstream')}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
        return Finding("slipstream", "ok", detail)

    def _cpu(self) -> Finding:
        num_cores, num_allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
        allowed = f", {num_allowed} of them for this process" if num_allowed < num_cores else ""
        return Finding("cpu", "ok", f"{num_cores} cores{allowed}")

    def _memory(self) -> Finding:
        memory = read_state(self._root)
        if memory is None:
            return Finding("memory", "missing", "/proc/meminfo does not tell")
        self.available_bytes = memory.available
        detail = f"{size_text(memory.available)} of {size_text(memory.total)} available"
        if memory.limit is not None:
            detail += f", limited to {size_text(memory.limit)} in this container"
        swap = memory.swap
        detail += f", swap {size_text(swap)}" if swap else ", no swap"
        if swap and "zram" in read_text(self._root / "proc/swaps"):
            detail += " (compressed, in memory itself)"
        return Finding("memory", "ok", detail)

    def _driver(self) -> Finding:
        """The driver's own library, which tells more than CUDA's runtime: that calls a missing driver too old."""
        kernel = re.search(r"Module\S* +(?:for \S+ +)?(\d[\d.]+)", read_text(self._root / "proc/driver/nvidia/version"))
        module = f"kernel module {kernel[1]}" if kernel else ""
        try:
            library = load_library("libcuda.so.1")
        except OSError as error:
            seen = f"; {module} is there" if module else ""
            advice = "install NVIDIA's driver; start a container with --gpus all (Jetson: --runtime nvidia)"
            return Finding("driver", "missing", f"{error}{seen}", advice)
        code = library.cuInit(0)
        if code:
            return Finding("driver", "problem", f"cuInit: {_driver_error(library, code)}", self._permission_advice())
        number = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.byref(number))
        self._gpu_names = list(_gpu_names(library))
        detail = f"CUDA {_cuda_text(number.value)}" + (f", {module}" if module else "")
        needed = _package_version("cuda-bindings").partition(".")[0]
        if needed.isdigit() and number.value // 1000 < int(needed):
            advice = f"update the driver to one for CUDA {needed}, on Jetson with JetPack"
            return Finding("driver", "problem", f"{detail}; cuda-python is for CUDA {needed}", advice)
        return Finding("driver", "ok", detail)

    def _permission_advice(self) -> str:
        nodes = [self._root / node for node in _DEVICE_NODES]
        closed = [f"/{node.relative_to(self._root)}" for node in nodes if _is_closed(node)]
        if closed:
            return f"no permission for {', '.join(closed)}: join the groups video and render (docker: --group-add)"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}: unset it"
        return "nvidia-smi tells more; start a container with --gpus all (Jetson: --runtime nvidia)"

    def _gpu(self) -> Finding:
        names = ", ".join(self._gpu_names)
        try:
            cuda = Cuda()
            free, total = cuda.free_bytes()
        except MissingExtraError as error:
            if self.finding("driver").state == "missing":
                return Finding("gpu", "missing", "none without a driver", "see driver")
            detail = f"{names + '; ' if names else ''}cuda-python is missing ({error.__cause__})"
            advice = "pip install 'slipstream[tensorrt]' or 'slipstream[tensorrt-rtx]'"
            return Finding("gpu", "missing", detail, advice)
        except SlipstreamError as error:
            if self.finding("driver").state == "missing":
                return Finding("gpu", "missing", "none without a driver", "see driver")
            detail, advice = split_message(error)
            return Finding("gpu", "problem", detail, advice or self._permission_advice())
        self.gpu = Gpu(cuda.compute_capability, cuda.name, cuda.driver_version, free, total)
        others = f", 1 of {len(self._gpu_names)} GPUs" if len(self._gpu_names) > 1 else ""
        return Finding(
            "gpu",
            "ok",
            f"{cuda.name}, {cuda.compute_capability}, {size_text(free)} of {size_text(total)} free, "
            f"CUDA driver {_cuda_text(cuda.driver_version)}, runtime {_cuda_text(cuda.runtime_version)}{others}",
        )

    def _onnxruntime(self) -> list[Finding]:
        providers: list[str] = []

        def package() -> Finding:
            import onnxruntime as ort

            providers.extend(ort.get_available_providers())
            others = [name for name in providers if name not in (_CPU, _CUDA)]
            self.has_onnxruntime = True
            detail = ort.__version__
            if others:
                tried = {name: guarded(name, partial(_provider, name, name)) for name in others}
                texts = [name if found.state == "ok" else f"{name} (does not load)" for name, found in tried.items()]
                detail += f", has what slipstream does not use: {', '.join(texts)}"
            return Finding("onnxruntime", "ok", detail)

        found = guarded("onnxruntime", package)
        if found.state != "ok":
            return [found, *(Finding(name, "missing", "no ONNX Runtime") for name in _PROVIDER_NAMES.values())]
        by_provider = {
            name: guarded(name, partial(_provider, provider, name)) if provider in providers else _absent_provider(name)
            for provider, name in _PROVIDER_NAMES.items()
        }
        return [found, *by_provider.values()]

    def _cudnn(self) -> Finding:
        errors = []
        for name in ("libcudnn.so.9", "libcudnn.so.8"):
            try:
                library = load_library(name)
            except OSError as error:
                errors.append(str(error))
                continue
            library.cudnnGetVersion.restype = ctypes.c_size_t
            number = library.cudnnGetVersion()
            major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
            text = f"{major}.{rest // 100}.{rest % 100} ({name})"
            if major >= 9:
                return Finding("cudnn", "ok", text)
            return Finding("cudnn", "problem", text, "ONNX Runtime's CUDA provider needs cuDNN 9")
        advice = _packaged("libcudnn.so.9") or "only --engine onnxruntime-cuda needs it: install cuDNN 9"
        return Finding("cudnn", "missing", errors[0], advice)

    def _flavour(self, flavour: Flavour) -> Finding:
        try:
            trt = load_flavour(flavour)
        except MissingExtraError as error:
            cause = error.__cause__
            # a package that is there but lacks a library fails with the library's name
            is_absent = isinstance(cause, ModuleNotFoundError)
            detail = "not installed" if is_absent else _one_line(f"can't be imported: {cause}")
            return Finding(
                flavour, "missing" if is_absent else "problem", detail, f"pip install 'slipstream[{flavour}]'"
            )
        self.flavours[flavour] = trt
        device = self.gpu.compute_capability if self.gpu else None
        if flavour == "tensorrt-rtx" and device and not hasattr(trt.module.ComputeCapability, device.upper()):
            detail = f"{trt.version}, which has no engines for {device}"
            return Finding(flavour, "problem", detail, "use --engine tensorrt on this GPU")
        return Finding(flavour, "ok", trt.version)


def load_library(name: str) -> Any:
    """A shared library by the name that the loader looks for. Raises OSError in the loader's words."""
    return ctypes.CDLL(name)


def _gpu_names(library: Any) -> Iterator[str]:
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        text = ctypes.create_string_buffer(_NAME_BYTES)
        library.cuDeviceGetName(text, _NAME_BYTES, index)
        yield text.value.decode("utf-8", "replace")


def _driver_error(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return f"error {code} ({text.value.decode() if text.value else 'unknown'})"


def _cuda_text(number: int) -> str:
    """CUDA's 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _is_closed(node: Path) -> bool:
    return node.exists() and not os.access(node, os.R_OK | os.W_OK)


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _packaged(library: str) -> str:
    """What to do about a library that pip brought to where the loader does not look, "" for one it did not bring."""
    for place in sys.path:
        for path in Path(place).glob(f"nvidia/*/lib/{library}"):
            return f"pip has it where the loader does not look: export LD_LIBRARY_PATH={path.parent}:$LD_LIBRARY_PATH"
    return ""


def _absent_provider(name: str) -> Finding:
    from slipstream.runtime.ort.probes import CUDA_PROVIDER_ADVICE

    both = _package_version("onnxruntime") and _package_version("onnxruntime-gpu")
    if both:
        detail = "hidden: onnxruntime and onnxruntime-gpu are both installed and overwrite each other"
        return Finding(name, "problem", detail, CUDA_PROVIDER_ADVICE.partition("then ")[2])
    detail = "this onnxruntime has no such provider"
    if name == _PROVIDER_NAMES[_CUDA]:
        return Finding(name, "missing", detail, CUDA_PROVIDER_ADVICE)
    return Finding(name, "missing", detail, "pip install --force-reinstall onnxruntime")


def _provider(provider: str, name: str) -> Finding:
    """Whether a provider works: ONNX Runtime lists some whose libraries are missing, and goes on without them."""
    import onnxruntime as ort

    from slipstream.runtime.ort.probes import missing_library

    options = ort.SessionOptions()
    options.log_severity_level = 4  # what fails is a finding, not a log line
    ort.set_default_logger_severity(4)
    try:
        # without its fallback, which prints to stdout
        session = ort.InferenceSession(PROBE_MODEL, options, providers=[provider], enable_fallback=0)
        if session.get_providers()[0] == provider:
            session.run(None, {"x": np.zeros((1, 2), np.int64)})
            return Finding(name, "ok", "loads and runs")
    except Exception as error:  # onnxruntime has one class per status code and no common base
        advice = "See driver, gpu and cudnn" if provider == _CUDA else "Reinstall onnxruntime"
        raise BackendError(f"does not run: {error}. {advice}") from error
    finally:
        ort.set_default_logger_severity(2)
    if provider != _CUDA:
        return Finding(name, "problem", "does not load")
    text = missing_library()
    if text.startswith("its libraries are there"):
        return Finding(name, "problem", "does not load, though its libraries are there", "see driver and gpu")
    detail, advice = split_message(text)
    return Finding(name, "problem", f"does not load: {detail}", _packaged(detail.partition(":")[0]) or advice)
