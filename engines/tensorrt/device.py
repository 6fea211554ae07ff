"""Which GPU engines are built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.runtime.backend.cuda import Cuda
from slipstream.runtime.errors import RequestError
from slipstream.runtime.trt.flavour import TensorRT


@dataclass(frozen=True)
class Device:
    """What engines are built for.

    name: as in "sm89". gpu: the GPU's name where the flavour builds for that one only, else "".
    capability: TensorRT's ComputeCapability, None for the current device.
    """

    name: str
    gpu: str
    capability: Any


def device_to_build_for(trt: TensorRT, device: str | None) -> Device:
    """The device of a name; None takes the current one, where the flavour builds for that only.

    Raises RequestError when this flavour can't build for it, BackendError when it needs a GPU and there is none.
    """
    if trt.flavour == "tensorrt":
        cuda = Cuda()
        current = cuda.compute_capability
        if device not in (None, current):
            raise RequestError(f"--device {device}: tensorrt builds for the GPU it runs on, which is {current}")
        return Device(current, cuda.name, None)
    capabilities = trt.module.ComputeCapability
    names = sorted((name for name in dir(capabilities) if name.startswith("SM")), key=lambda name: int(name[2:]))
    members = {name.lower(): getattr(capabilities, name) for name in names}
    if device is None:
        raise RequestError(f"--engine tensorrt-rtx needs --device, one of {', '.join(members)}")
    if device not in members:
        raise RequestError(
            f"--device {device} is not a target of TensorRT-RTX {trt.version}, which builds for {', '.join(members)}; "
            "use --engine tensorrt on that machine for others"
        )
    return Device(device, "", members[device])
