"""``slipstream doctor``: what this machine has, what a bundle needs, and which ways of running it work here.

Nothing is guessed, nothing raises: the machine's parts are tried in ``probes.py``,
``providers.py`` and ``jetson.py``, the bundle and its engines here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from slipstream.runtime.bundle import engine_record as records
from slipstream.runtime.bundle.engine_record import EngineName, Flavour
from slipstream.runtime.bundle.json_reader import JsonError
from slipstream.runtime.bundle.manifest import Bundle, check_hashes, check_links, open_bundle
from slipstream.runtime.bundle.onnxruntime_record import check_matrices, open_optimized, optimized_folder
from slipstream.runtime.machine.host import bytes_text
from slipstream.runtime.machine.plan import MemoryPlan, engine_plan, memory_plan

from .findings import Finding, guarded
from .jetson import jetson_findings
from .probes import Machine

# What a way of running needs of the machine, by the findings' names.
_NEEDS: Mapping[EngineName, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime cpu"),
    "onnxruntime-cuda": ("gpu", "onnxruntime", "onnxruntime cuda"),
    "tensorrt": ("gpu", "tensorrt"),
    "tensorrt-rtx": ("gpu", "tensorrt-rtx"),
}


@dataclass(frozen=True)
class Way:
    """A way of running, as --engine names it. detail: why not, or with what. advice: the way out."""

    engine: EngineName
    can_run: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """bundle: the folder that was asked about. can_run: at least one way works, for the bundle if there is one."""

    bundle: Path | None
    findings: tuple[Finding, ...]
    ways: tuple[Way, ...]

    @property
    def can_run(self) -> bool:
        return any(way.can_run for way in self.ways)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: findings and ways in the order they are shown."""
        return {
            "can_run": self.can_run,
            "bundle": None if self.bundle is None else str(self.bundle),
            "findings": [asdict(finding) for finding in self.findings],
            "ways": [asdict(way) for way in self.ways],
        }


def examine(bundle_path: Path | None = None, root: Path = Path("/"), *, reads_files: bool = False) -> Diagnosis:
    """Look at this machine, and at what a bundle needs of it.

    root: where /proc, /etc, /sys and /dev are. reads_files: compare every file's SHA-256, of large ones too.
    """
    machine = Machine(root)
    jetson = jetson_findings(root)
    findings = [*machine.findings[:1], *jetson, *machine.findings[1:]]
    if bundle_path is None:
        needs = {engine: [machine.finding(name) for name in names] for engine, names in _NEEDS.items()}
    else:
        exam = _BundleExam(bundle_path, machine, shares_memory=bool(jetson), reads_files=reads_files)
        findings += exam.findings
        needs = {engine: exam.needs(engine) for engine in _NEEDS}
    return Diagnosis(bundle_path, tuple(findings), tuple(_way(engine, needs[engine]) for engine in _NEEDS))


def _way(engine: EngineName, needed: list[Finding]) -> Way:
    for finding in needed:
        if finding.state != "ok":
            return Way(engine, False, f"{finding.name}: {finding.detail}", finding.advice)
    last = needed[-1]
    is_listed = last.name.startswith(f"{records.ENGINE_FOLDER}/")
    return Way(engine, True, last.name if is_listed else f"{last.name}: {last.detail}", last.advice)


class _BundleExam:
    """A bundle on this machine.

    findings: of the bundle and of every engine it has. shares_memory: the GPU uses the host's.
    """

    def __init__(self, folder: Path, machine: Machine, *, shares_memory: bool, reads_files: bool) -> None:
        self._folder, self._reads_files = folder, reads_files
        self._machine, self._shares_memory = machine, shares_memory
        self._bundle: Bundle | None = None
        self.findings = [guarded("bundle", self._open)]
        self._by_engine: dict[EngineName, list[Finding]] = {}
        if self._bundle is None:
            return
        bundle = self._bundle
        memory = guarded("bundle memory", self._host_memory, bundle)
        runs = {engine: guarded("bundle", self._runs, bundle, engine) for engine in _NEEDS}
        graphs = optimized_folder(bundle)
        optimized = guarded(f"engines/{graphs.name}", self._optimized, bundle)
        engines = {
            path.parent: guarded(f"engines/{path.parent.name}", self._engines, bundle, path.parent)
            for path in sorted((folder / records.ENGINE_FOLDER).glob(f"*/{records.RECORD}"))
            if path.parent != graphs
        }
        self.findings += [memory, *([optimized] if graphs.exists() else []), *engines.values()]
        gpu_memory = guarded("gpu memory", self._cuda_memory, bundle)
        self._by_engine["onnxruntime"] = [runs["onnxruntime"], optimized, memory]
        self._by_engine["onnxruntime-cuda"] = [runs["onnxruntime-cuda"], gpu_memory]
        for flavour in get_args(Flavour):
            self._by_engine[flavour] = [self._engines_here(bundle, flavour, engines)]

    def needs(self, engine: EngineName) -> list[Finding]:
        if self._bundle is None:
            return [Finding("bundle", "problem", "can't be opened", "see bundle")]
        return [*(self._machine.finding(name) for name in _NEEDS[engine]), *self._by_engine[engine]]

    def _open(self) -> Finding:
        bundle = open_bundle(self._folder)
        if self._reads_files:
            check_hashes(bundle)
        self._bundle, manifest = bundle, bundle.manifest
        pair = f"{manifest.source.target} with {manifest.source.assistant}"
        return Finding("bundle", "ok", f"{pair}, {manifest.precision}, up to {manifest.max_length} tokens")

    def _runs(self, bundle: Bundle, engine: EngineName) -> Finding:
        records.check_runs(bundle.manifest, engine)
        return Finding("bundle", "ok", "")

    def _host_memory(self, bundle: Bundle) -> Finding:
        plan = memory_plan(bundle.manifest)
        detail = f"up to {bytes_text(plan.total)} on the CPU at {plan.length} tokens"
        available = self._machine.available_bytes
        if available is not None and plan.total > available:
            advice = f"close other programs; slipstream inspect {self._folder} shows what takes the memory"
            return Finding("bundle memory", "problem", f"{detail}; {bytes_text(available)} are available", advice)
        return Finding("bundle memory", "ok", detail)

    def _cuda_memory(self, bundle: Bundle) -> Finding:
        plan = memory_plan(bundle.manifest, place="gpu")
        return self._on_gpu("gpu memory", plan, f"weights, KV and activations of {plan.length} tokens")

    def _on_gpu(self, name: str, plan: MemoryPlan, what: str, advice: str = "") -> Finding:
        """Whether the GPU has room for what is planned."""
        free, available = self._machine.gpu_free_bytes, self._machine.available_bytes
        if self._shares_memory and available is not None:
            free = available  # CUDA leaves out what the file cache would give back
        if self._machine.gpu and plan.total > free:
            out = "close what else uses the GPU, or build for a smaller --max-length"
            return Finding(name, "problem", f"{what} take {bytes_text(plan.total)}; {bytes_text(free)} are free", out)
        return Finding(name, "ok", f"{what} take {bytes_text(plan.total)}", advice)

    def _engines(self, bundle: Bundle, folder: Path) -> Finding:
        """Engines that the bundle has, for whatever GPU."""
        name = f"engines/{folder.name}"
        try:
            record = records.EngineRecord.read(folder / records.RECORD)
        except (FileNotFoundError, JsonError) as error:
            advice = f"slipstream build {self._folder} makes engines anew"
            return Finding(name, "problem", f"{records.RECORD} {error}", advice)
        settings, gpu = record.settings, self._machine.gpu
        purpose = (
            f"{settings.flavour} {record.engine_version} for {settings.device}, up to {settings.max_length} tokens"
        )
        named = records.engine_folder(bundle, settings.flavour, settings.device)
        if folder != named:
            detail = f"{purpose}, in a folder that is not looked for"
            return Finding(name, "problem", detail, f"rename it to {named.name}")
        here = gpu.compute_capability if gpu else None
        if here != settings.device:
            reason = f"this GPU is {here}" if here else "there is no GPU here"
            return Finding(name, "problem", f"{purpose}; {reason}", self._build(settings.flavour, here))
        trt = self._machine.flavours.get(settings.flavour)
        if trt is None:
            return Finding(name, "problem", f"{purpose}; no {settings.flavour} here", f"see {settings.flavour}")
        record = records.open_record(bundle, settings.flavour, settings.device, trt.version)
        stamp = gpu and records.read_stamp(folder, record, gpu.name, gpu.driver_version)
        checked = "compared with ONNX Runtime" if stamp else "never compared with ONNX Runtime"
        advice = "" if stamp else f"slipstream verify {self._folder} --engine {settings.flavour}"
        return self._on_gpu(name, engine_plan(bundle.manifest, record), f"{purpose}, {checked}; they", advice)

    def _optimized(self, bundle: Bundle) -> Finding:
        check_links(bundle)
        name = f"engines/{optimized_folder(bundle).name}"
        if self._machine.has_onnxruntime:
            from slipstream.runtime.ort.probes import open_graphs

            record = open_graphs(bundle)
        else:
            record = open_optimized(bundle, None)
        if record is None:
            return Finding(name, "ok", "none")
        if self._reads_files:
            check_matrices(bundle, record)
        threads = f"{record.num_threads} threads" if record.num_threads > 1 else "1 thread"
        return Finding(name, "ok", f"graphs for {threads}, made with onnxruntime {record.onnxruntime_version}")

    def _engines_here(self, bundle: Bundle, flavour: Flavour, engines: Mapping[Path, Finding]) -> Finding:
        gpu = self._machine.gpu
        if gpu is None:
            return self._machine.finding("gpu")
        found = engines.get(records.engine_folder(bundle, flavour, gpu.compute_capability))
        if found is not None:
            return found
        detail = f"the bundle has none of {flavour} for this GPU ({gpu.compute_capability})"
        return Finding("engines", "missing", detail, self._build(flavour, gpu.compute_capability))

    def _build(self, flavour: Flavour, here: str | None) -> str:
        if here is None:
            return "copy the bundle to a machine with that GPU"
        device = f" --device {here}" if flavour == "tensorrt-rtx" else ""
        return f"slipstream build {self._folder} --engine {flavour}{device}"
