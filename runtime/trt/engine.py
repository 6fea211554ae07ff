"""TensorRT engines of a bundle, loaded and checked: what they read and write, and in place.

Never run on hardware here; ``tests/simulator/machine.py`` stands in for it.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from slipstream.runtime.backend.cuda import Cuda, CudaMemory, Stream
from slipstream.runtime.backend.per_layer_table import open_per_layer_table
from slipstream.runtime.bundle import engine_record as records
from slipstream.runtime.bundle.engine_record import Flavour
from slipstream.runtime.bundle.graph_io import BUCKET_SUFFIX, ChooseName, kv_name, kv_output_name
from slipstream.runtime.bundle.manifest import Bundle, Manifest
from slipstream.runtime.bundle.staging import write_whole
from slipstream.runtime.errors import BackendError

from .flavour import TensorRT, load_flavour

_KV_TENSOR = re.compile(r"(next_)?kv\.\d+\.(key|value)")
_RUNTIME_CACHE = "runtime.cache"  # kernels that TensorRT-RTX compiled for this GPU


class CudaEngine:
    """One deserialized engine.

    inputs, outputs: element types by name. aliases: outputs that are an input's buffer.
    workspace_bytes: scratch memory of its largest profile.
    """

    def __init__(self, trt: TensorRT, runtime: Any, path: Path, record: records.EngineFile) -> None:
        self.trt = trt
        self.path = path
        self._profiles = list(record.profiles)
        # mapped, so that small boards do not hold the file beside the engine
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise BackendError(f"{trt.flavour} {trt.version} can't load {path}: {trt.last_errors()}")
        try:
            self._read_interface()
        except BaseException:
            self.close()
            raise

    def _read_interface(self) -> None:
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == self.trt.module.TensorIOMode.INPUT for name in names}
        dtypes = {name: self._dtype(name) for name in names}
        host = self.trt.module.TensorLocation.HOST
        on_host = [n for n in names if engine.get_tensor_location(n) == host or engine.is_shape_inference_io(n)]
        if on_host:
            raise BackendError(
                f"{self.path} wants {', '.join(on_host)} in host memory, which slipstream never gives it"
            )
        self.inputs = {name: dtypes[name] for name in names if is_input[name]}
        self.outputs = {name: dtypes[name] for name in names if not is_input[name]}
        aliases = {name: engine.get_aliased_input_tensor(name) for name in self.outputs}
        self.aliases: dict[str, str] = {name: alias for name, alias in aliases.items() if alias}
        if engine.num_optimization_profiles != len(self._profiles):
            raise BackendError(f"{self.path} has {engine.num_optimization_profiles} profiles, not {self._profiles}")
        sizes = [engine.get_device_memory_size_for_profile_v2(i) for i in range(len(self._profiles))]
        self.workspace_bytes = int(max(sizes))

    def check_kv(self, manifest: Manifest) -> None:
        """KV tensors have the bundle's type and are updated in place. Raises BackendError."""
        for buffer in manifest.kv:
            for part in ("key", "value"):
                name, output = kv_name(buffer.layer, part), kv_output_name(buffer.layer, part)
                if self.inputs.get(name, buffer.dtype) != buffer.dtype:
                    raise BackendError(f"{self.path}: {name} is {self.inputs[name]}, not {buffer.dtype}. Build again")
                if output in self.outputs and self.aliases.get(output) != name:
                    raise BackendError(
                        f"{self.path} does not update {name} in place: every step would copy it. Build again, with "
                        "another TensorRT if that does not help"
                    )

    def copied_kv(self) -> list[str]:
        """KV tensors that a layer copies on every call, as far as this TensorRT tells; bucket slices are meant to."""
        inspector = self._engine.create_engine_inspector()
        text = inspector.get_engine_information(self.trt.module.LayerInformationFormat.JSON)
        try:
            content = json.loads(text or "{}")
        except ValueError:
            return []
        layers, names = content.get("Layers", []) if isinstance(content, dict) else [], set()
        for layer in (layer for layer in layers if isinstance(layer, dict)):
            touched = {str(t.get("Name")) for part in ("Inputs", "Outputs") for t in layer.get(part) or []}
            is_slice = any(name.endswith(BUCKET_SUFFIX) for name in touched)
            if layer.get("LayerType") == "Reformat" and not is_slice:
                names |= {name for name in touched if _KV_TENSOR.fullmatch(name)}
        return sorted(names)

    def context(self, profile: str, config: Any) -> Any:
        """An execution context of one profile, without memory and addresses."""
        context = self._engine.create_execution_context(config)
        if context is None:
            raise BackendError(f"{self.path}: no execution context for {profile}: {self.trt.last_errors()}")
        return context

    def profile_index(self, profile: str) -> int:
        return self._profiles.index(profile)

    def runtime_config(self) -> Any:
        """Contexts share one workspace that the backend gives them."""
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            self.trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        return config

    def close(self) -> None:
        self._engine = None

    def _dtype(self, name: str) -> str:
        module, dtype = self.trt.module, self._engine.get_tensor_dtype(name)
        known = ("float32", "float16", "bfloat16", "int64", "bool")
        found = [text for text in known if getattr(module, text) == dtype]
        if not found:
            raise BackendError(f"{self.path}: {name} is {dtype}; one of {', '.join(known)} is expected. Build again")
        return found[0]


class LoadedEngines:
    """All engines of a bundle on this GPU, and the embedding that two share; each backend has a stream of its own.

    name, notes: what every result says about how it was made.
    """

    def __init__(self, bundle: Bundle, flavour: Flavour) -> None:
        """Raises MissingExtraError, BackendError."""
        self.manifest = bundle.manifest
        self.per_layer_table = open_per_layer_table(bundle)
        self.trt = load_flavour(flavour)
        self.cuda = Cuda()
        device = self.cuda.compute_capability
        self.record = records.open_record(bundle, flavour, device, self.trt.version)
        self.folder = records.engine_folder(bundle, flavour, device)
        self.name = f"{flavour} {self.trt.version} {device}"
        self.max_length = self.record.settings.max_length
        self.num_draft_tokens = self.record.settings.num_draft_tokens
        self.draft_counts: Sequence[int] = (0, self.num_draft_tokens)
        self.has_whole_rows = False
        stamp = records.read_stamp(self.folder, self.record, self.cuda.name, self.cuda.driver_version)
        self.is_stamped = stamp is not None
        self.notes: tuple[str, ...] = ()
        if not self.is_stamped:
            again = f"slipstream verify {bundle.folder} --engine {flavour}"
            self.notes = (f"these engines carry no parity stamp for this GPU and driver: run {again}",)
        if self.record.device_name not in ("", self.cuda.name):
            self.notes += (f"these engines were built on a {self.record.device_name}, this GPU is a {self.cuda.name}",)
        self._engines: list[CudaEngine] = []
        self.configs: dict[str, Any] = {}  # by profile
        self._cache = _RuntimeCache(self.folder / _RUNTIME_CACHE)
        with ExitStack() as held:  # given back from the last to the first, and to the end whatever fails
            self.stream = Stream(self.cuda)  # for loading; each backend has its own
            held.callback(self.stream.close)
            self.memory = CudaMemory(self.stream)
            held.callback(self.memory.close)
            self._runtime: Any = self.trt.module.Runtime(self.trt.logger)
            held.callback(self._release_engines)
            held.callback(self._cache.save)
            self._load(bundle)
            held.callback(self.cuda.activate)
            self._held = held.pop_all()

    def _load(self, bundle: Bundle) -> None:
        for file in self.record.engines:
            self._engines.append(CudaEngine(self.trt, self._runtime, self.folder / file.file, file))
            self._engines[-1].check_kv(self.manifest)
            if copied := self._engines[-1].copied_kv():
                self.notes += (
                    f"{file.file} copies {', '.join(copied)} on every call: steps cost more than they should",
                )
        self.target, self.assistant, *choosing = self._engines
        self.choosing: dict[ChooseName, CudaEngine] = dict(zip(self.record.choosing, choosing, strict=True))
        shape = (self.manifest.vocab_size, self.manifest.hidden_size)
        path = bundle.path(self.manifest.embedding_file)
        self.embedding = self.memory.load_file(path, shape, self.manifest.dtype)
        self.configs["prefill"] = self._config(self.target, is_captured=False)
        self.configs["verify"] = self._config(self.target, is_captured=True)
        self.configs["draft"] = self._config(self.assistant, is_captured=True)
        for name, engine in self.choosing.items():
            self.configs[name] = self._config(engine, is_captured=True)
        self.notes += self._cache.notes

    @property
    def all(self) -> Sequence[CudaEngine]:
        return self._engines

    def close(self) -> None:
        """Close backends first."""
        self._held.close()

    def _release_engines(self) -> None:
        self.configs.clear()
        for engine in self._engines:
            engine.close()
        self._runtime = None

    def _config(self, engine: CudaEngine, *, is_captured: bool) -> Any:
        config = engine.runtime_config()
        if self.trt.flavour == "tensorrt-rtx":
            self._cache.attach(config)
            if is_captured:  # compile for the shapes at once: a captured graph keeps the kernels it was captured with
                strategy = self.trt.module.DynamicShapesKernelSpecializationStrategy.EAGER
                config.dynamic_shapes_kernel_specialization_strategy = strategy
        return config


class _RuntimeCache:
    """What TensorRT-RTX compiled on this machine, kept beside the engines so that the next start is quick.

    The blob knows where it belongs: another GPU, driver or version refuses it, which is a note.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cache: Any = None
        self.notes: tuple[str, ...] = ()

    def attach(self, config: Any) -> None:
        """Share one cache between the engines."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._path.is_file() and not self._cache.deserialize(self._path.read_bytes()):
                self.notes = (
                    f"{self._path} is damaged, or of another GPU, driver or TensorRT-RTX: ignored, and written anew",
                )
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Keep it where the folder can be written; a read-only bundle works without."""
        if self._cache is None:
            return
        content = bytes(self._cache.serialize())
        self._cache = None
        with suppress(OSError):  # read-only bundles are normal in containers
            write_whole(self._path, content)


def check_names(engine: CudaEngine, tensors: Mapping[str, Any]) -> None:
    """Everything the engine reads and writes is there, of its type, in-place pairs at one address."""
    for name, dtype in {**engine.inputs, **engine.outputs}.items():
        if name not in tensors:
            raise BackendError(f"{engine.path} has a tensor {name} that this slipstream does not know. Build again")
        if tensors[name].dtype != dtype:
            raise BackendError(f"{engine.path}: {name} is {dtype}; {tensors[name].dtype} is bound. Build again")
    for output, source in engine.aliases.items():
        if tensors[output].address != tensors[source].address:
            raise AssertionError(f"{output} must be bound to the address of {source}")
