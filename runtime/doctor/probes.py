"""What ``slipstream doctor`` finds on a machine: each thing is tried, and whatever fails is a finding of its own."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from slipstream.runtime.backend.cuda import Cuda
from slipstream.runtime.bundle.engine_record import Flavour
from slipstream.runtime.errors import MissingExtraError, SlipstreamError
from slipstream.runtime.machine.cgroups import cpu_quota, read_text
from slipstream.runtime.machine.host import bytes_text, read_state
from slipstream.runtime.trt.flavour import TensorRT, load_flavour

from .findings import Finding, advice_for_packaged, guarded, one_line, package_version
from .providers import onnxruntime_findings

# What containers are given in part, and users without the right group can't open.
_DEVICE_NODES = ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvmap", "dev/dri/renderD128")
_NAME_BYTES = 256


class Machine:
    """What this machine has, besides a Jetson's own matters.

    findings: in the order they are shown. available_bytes: host memory that programs can get, None when unknown.
    gpu: None without a usable one. gpu_free_bytes: of its memory, as CUDA counts it.
    has_onnxruntime: whether it can be imported. flavours: the TensorRTs that load.
    """

    def __init__(self, root: Path) -> None:
        """root: where /proc, /etc and /dev are."""
        self._root = root
        self._gpu_names: list[str] = []
        self.available_bytes: int | None = None
        self.gpu: Cuda | None = None
        self.gpu_free_bytes = 0
        self.flavours: dict[Flavour, TensorRT] = {}
        self.findings = [
            guarded("slipstream", self._software),
            guarded("cpu", self._cpu),
            guarded("memory", self._memory),
            guarded("driver", self._driver),
        ]
        self.findings.append(guarded("gpu", self._gpu))
        # before anything else loads CUDA libraries: what they bring into this process would hide what is missing
        self.findings += onnxruntime_findings()
        self.has_onnxruntime = self.finding("onnxruntime").state == "ok"
        self.findings.append(guarded("cudnn", self._cudnn))
        for flavour in get_args(Flavour):
            self.findings.append(guarded(flavour, self._flavour, flavour))

    def finding(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def _software(self) -> Finding:
        detail = f"{version('slipstream')}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
        return Finding("slipstream", "ok", detail)

    def _cpu(self) -> Finding:
        num_cores, num_allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
        allowed = f", {num_allowed} of them for this process" if num_allowed < num_cores else ""
        quota = cpu_quota(self._root)
        limited = "" if quota is None else f", limited to the time of {quota:g} in this container"
        return Finding("cpu", "ok", f"{num_cores} cores{allowed}{limited}")

    def _memory(self) -> Finding:
        memory = read_state(self._root)
        if memory is None:
            return Finding("memory", "missing", "/proc/meminfo does not tell")
        self.available_bytes = memory.available
        detail = f"{bytes_text(memory.available)} of {bytes_text(memory.total)} available"
        if memory.limit is not None:
            detail += f", limited to {bytes_text(memory.limit)} in this container"
        swap = memory.swap
        detail += f", swap {bytes_text(swap)}" if swap else ", no swap"
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
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            words = text.value.decode() if text.value else "unknown"
            return Finding("driver", "problem", f"cuInit: error {code} ({words})", self._permission_advice())
        number = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.byref(number))
        self._gpu_names = list(_gpu_names(library))
        detail = f"CUDA {_cuda_text(number.value)}" + (f", {module}" if module else "")
        needed = package_version("cuda-bindings").partition(".")[0]
        if needed.isdigit() and number.value // 1000 < int(needed):
            advice = f"update the driver to one for CUDA {needed}, on Jetson with JetPack"
            return Finding("driver", "problem", f"{detail}; cuda-python is for CUDA {needed}", advice)
        return Finding("driver", "ok", detail)

    def _permission_advice(self) -> str:
        there = [node for node in _DEVICE_NODES if (self._root / node).exists()]
        closed = [f"/{node}" for node in there if not os.access(self._root / node, os.R_OK | os.W_OK)]
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
        except SlipstreamError as error:
            if self.finding("driver").state == "missing":
                return Finding("gpu", "missing", "none without a driver", "see driver")
            if not isinstance(error, MissingExtraError):
                return Finding("gpu", "problem", one_line(error.found), self._permission_advice())
            detail = f"{names + '; ' if names else ''}cuda-python is missing ({error.__cause__})"
            advice = "pip install 'slipstream[tensorrt]' or 'slipstream[tensorrt-rtx]'"
            return Finding("gpu", "missing", detail, advice)
        self.gpu, self.gpu_free_bytes = cuda, free
        others = f", 1 of {len(self._gpu_names)} GPUs" if len(self._gpu_names) > 1 else ""
        return Finding(
            "gpu",
            "ok",
            f"{cuda.name}, {cuda.compute_capability}, {bytes_text(free)} of {bytes_text(total)} free, "
            f"CUDA driver {_cuda_text(cuda.driver_version)}, runtime {_cuda_text(cuda.runtime_version)}{others}",
        )

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
        advice = advice_for_packaged("libcudnn.so.9") or "only --engine onnxruntime-cuda needs it: install cuDNN 9"
        return Finding("cudnn", "missing", errors[0], advice)

    def _flavour(self, flavour: Flavour) -> Finding:
        try:
            trt = load_flavour(flavour)
        except MissingExtraError as error:
            cause = error.__cause__
            # a package that is there but lacks a library fails with the library's name
            is_absent = isinstance(cause, ModuleNotFoundError)
            detail = "not installed" if is_absent else one_line(f"can't be imported: {cause}")
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


def _cuda_text(number: int) -> str:
    """CUDA's 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"
