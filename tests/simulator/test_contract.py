"""What the simulator stands in for exists: every name and argument is compared with the real bindings.

Both packages import without a GPU. The fakes are enumerated, so that nothing is left out, and
the runtime's sources may use no more of TensorRT and CUDA than the fakes have.
"""

from __future__ import annotations

import ast
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from slipstream import runtime

from .cuda import CudaRuntime
from .device import Device
from .machine import Simulator

FOLDER = Path(runtime.__file__).parent
CUDA_SOURCES = ["backend/cuda.py"]
TENSORRT_SOURCES = ["trt/engine.py", "trt/backend.py"]
SIMULATOR = Simulator("tensorrt-rtx", "sm89", 1 << 30)
CUDA = CudaRuntime(SIMULATOR, "sm89", 1)


def public(thing: object) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in dir(thing) if not name.startswith("_")}


def overloads(function: Any) -> list[list[str]]:
    """Argument names of each signature in a pybind11 docstring, without self."""
    signatures = re.findall(rf"^(?:\d+\. )?{function.__name__}\((self: .*)\) -> ", function.__doc__, re.MULTILINE)
    return [re.findall(r"(?:^|, )(\w+): ", signature)[1:] for signature in signatures]


def values(fake: Any) -> dict[str, int]:
    return {member.name: member.value for member in fake}


def members(real: Any) -> dict[str, int]:
    return {name: int(getattr(real, name)) for name in dir(real) if isinstance(getattr(real, name), real)}


CLASSES = {name: part for name, part in vars(SIMULATOR.module).items() if isinstance(part, type)}
ENUMS = {name: part for name, part in CLASSES.items() if issubclass(part, Enum)}
METHODS = [
    (kind, name)
    for kind, part in CLASSES.items()
    if kind not in ENUMS
    for name in [*public(part), "__init__"]
    if name != "__init__" or kind == "Runtime"
]


@pytest.fixture(scope="module")
def tensorrt() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")


@pytest.fixture(scope="module")
def cuda() -> Any:
    return pytest.importorskip("cuda.bindings.runtime", reason="pip install 'slipstream[gpu]'")


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_method_takes_what_tensorrts_own_takes(kind: str, name: str, tensorrt: Any) -> None:
    fake, real = inspect.getattr_static(CLASSES[kind], name), getattr(getattr(tensorrt, kind), name)
    if isinstance(fake, type):
        assert values(fake) == members(real)
    elif not inspect.isfunction(fake):
        assert isinstance(real, property)
        assert isinstance(fake, property) or real.fset is not None, "the fake can be set, the real one can't"
    else:
        assert list(inspect.signature(fake).parameters)[1:] in overloads(real)


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_tensorrts_members_and_values(name: str, tensorrt: Any) -> None:
    real = members(getattr(tensorrt, name))
    assert values(ENUMS[name]).items() <= real.items()


def test_the_module_has_the_same_names(tensorrt: Any) -> None:
    for name, part in public(SIMULATOR.module).items():
        assert hasattr(tensorrt, name), name
        if isinstance(part, Enum):
            assert getattr(tensorrt, name).name == part.name
    assert SIMULATOR.module.__version__ == tensorrt.__version__


def test_a_shape_is_no_more_than_tensorrts(tensorrt: Any) -> None:
    for dims in (tensorrt.Dims((2, 3)), SIMULATOR.module.Dims((2, 3))):
        assert (dims, tuple(dims), list(dims[1:]), len(dims)) == ((2, 3), (2, 3), [3], 2)
        assert not isinstance(dims, tuple)
        with pytest.raises(TypeError, match="unhashable"):
            hash(dims)


@pytest.mark.parametrize("name", public(CUDA))
def test_a_cuda_function_takes_what_cudas_own_takes(name: str, cuda: Any) -> None:
    fake, real = getattr(CUDA, name), getattr(cuda, name)
    if isinstance(fake, int):
        assert fake == real
    elif not isinstance(fake, type):
        assert list(inspect.signature(fake).parameters) == list(inspect.signature(real).parameters)
    elif issubclass(fake, Enum):
        assert values(fake).items() <= members(real).items()
    else:
        handles: list[Any] = [fake, real]
        assert [int(handle(7)) for handle in handles] == [7, 7]


def test_without_a_gpu_the_real_functions_answer_in_the_same_form(cuda: Any) -> None:
    status, *results = cuda.cudaGetDeviceCount()
    if status == cuda.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU here")
    assert len(results) == len(CudaRuntime(Device(1), "sm89", 0).cudaGetDeviceCount()[1:]) == 1
    _, text = cuda.cudaGetErrorString(status)
    assert isinstance(text, bytes)


def attributes(file: str) -> list[ast.Attribute]:
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


@pytest.mark.parametrize("file", [*CUDA_SOURCES, *TENSORRT_SOURCES])
def test_the_runtime_calls_no_cuda_that_the_simulator_lacks(file: str) -> None:
    source = (FOLDER / file).read_text(encoding="utf-8")
    used = set(re.findall(r"\bcuda[A-Z]\w+", source))
    used |= {f"cudaMemcpy{kind}" for kind in re.findall(r'"((?:Host|Device)To(?:Host|Device))"', source)}
    fakes = public(CUDA)
    enums = [part for part in fakes.values() if isinstance(part, type) and issubclass(part, Enum)]
    known = {*fakes, *(name for part in enums for name in part.__members__)}
    assert used - {"cudaMemcpy"} <= known


@pytest.mark.parametrize("file", TENSORRT_SOURCES)
def test_the_runtime_calls_no_tensorrt_that_the_simulator_lacks(file: str, tensorrt: Any) -> None:
    kinds = [kind for kind in CLASSES if kind not in ENUMS]
    real = {name for kind in kinds for name in public(getattr(tensorrt, kind))} - {
        "name",
        "logger",
    }  # ours have them too
    fakes = {name for kind in kinds for name in public(CLASSES[kind])}
    nodes = attributes(file)
    assert {node.attr for node in nodes} & real <= fakes
    owners = [(getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr) for node in nodes]
    assert {name for owner, name in owners if owner == "module"} <= set(vars(SIMULATOR.module))
    for owner, name in owners:
        if owner in ENUMS:
            assert name in ENUMS[owner].__members__
