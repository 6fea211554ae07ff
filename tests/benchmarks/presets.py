"""The five released pairs from random checkpoints to engines, and true-width periods of E2B and E4B.

    python -m tests.benchmarks.presets [--true-width] [--only NAME ...] [--vocab-size V] [--out FILE]

Without --true-width: each preset at --scale tiny in float32 is written, exported, compared with transformers (logits,
drafts, greedy text with prompts on both sides of the window) and built with tensorrt-rtx for every device. With it: one
period of layers and one of KV-shared layers at true width are exported in bfloat16 and in int4, and built; nothing is
compared, since no CPU runs bfloat16. Builds are processes of their own, for a builder that crashes. No GPU is needed,
and none is used: whether engines run right is for ``slipstream verify`` on one.

Results of other cases in FILE are kept. script_peak_mib is the largest that this process has been so far, which Linux
also counts as the least peak of a build that it starts. Exits with 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.synth.presets import PRESETS, PairConfigs, configs_of, preset_configs
from slipstream.export.synth.synth import synthesize
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.report import Report
from slipstream.export.verify.verify import sample_prompts, verify
from slipstream.runtime.bundle.engine_record import RECORD, EngineRecord, engine_folder
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import SlipstreamError
from tests.support.pairs import BOS
from tests.support.progress import SilentProgress

from .yardstick import Yardstick

RESULTS = Path(__file__).with_name("results") / "presets.json"
DEVICES = ("sm89", "sm120")
TINY = ("e2b", "e4b", "12b", "26b-a4b", "31b")
TRUE_WIDTH = ("e2b", "e4b")
TRUE_VOCAB_SIZE = 262_144
WEIGHTS = ("float", "int4")
BLOCK_SIZE = 32
DRAFT_COUNTS = (0, 2, 6)
_K, _NUM_TOKENS = 2, 8
_TRUE_WIDTH_LENGTH = 4096


@dataclass(frozen=True)
class Verified:
    """A tiny pair's bundle, and what comparing it with transformers found."""

    bundle: Bundle
    report: Report
    prompt_lengths: list[int]
    seconds: Mapping[str, float]


@dataclass
class Stopwatch:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[name] = round(perf_counter() - start, 2)


def verified(
    preset: str, folder: Path, draft_counts: Sequence[int], *, num_draft_tokens: int = _K, window: int | None = None
) -> Verified:
    """A preset at tiny scale in float32, exported to folder/bundle and compared on both sides of its window.

    num_draft_tokens: that one graph unrolls. window: another one than the preset's.
    """
    configs = configs_of(preset) if window is None else _changed(preset, sliding_window=window)
    target, assistant, watch = folder / "pair" / "target", folder / "pair" / "assistant", Stopwatch()
    with watch.stage("synth"):
        synthesize(configs, folder / "pair", "tiny", SilentProgress(), dtype="float32")
    with watch.stage("export"):
        pair = open_pair(target, assistant)
        max_length = pair.target_config.sliding_window + 100
        settings = ExportSettings(max_length=max_length, num_draft_tokens=num_draft_tokens)
        export_pair(pair, folder / "bundle", settings, SilentProgress())
    bundle = open_bundle(folder / "bundle")
    prompts = sample_prompts(range(300, 900), BOS, 2, max_length - 60, max_length, _NUM_TOKENS)
    with watch.stage("verify"):
        reference = Reference(target, assistant, "float32")
        report = verify(bundle, reference, prompts, _NUM_TOKENS, draft_counts, SilentProgress())
    return Verified(bundle, report, [len(prompt) for prompt in prompts], watch.seconds)


def build(bundle: Bundle, device: str, max_length: int) -> EngineRecord:
    """Engines of tensorrt-rtx, by ``slipstream build``. Raises RuntimeError with what it said, or that it crashed."""
    command = [sys.executable, "-m", "slipstream", "build", str(bundle.folder), "--engine", "tensorrt-rtx"]
    command += ["--device", device, "--max-length", str(max_length)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"build for {device} ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}")
    content = (engine_folder(bundle, "tensorrt-rtx", device) / RECORD).read_text(encoding="utf-8")
    return EngineRecord.model_validate_json(content, strict=False)


def true_width_configs(preset: str, vocab_size: int) -> PairConfigs:
    """One period of layers and one of KV-shared layers, with every width and the per-layer embedding of a preset."""
    period = PRESETS[preset].period
    return _changed(preset, num_hidden_layers=2 * period, num_kv_shared_layers=period, vocab_size=vocab_size)


def _changed(preset: str, **text: int) -> PairConfigs:
    """Configs of a preset with other fields in the target's text part."""
    spec = PRESETS[preset]
    return preset_configs(replace(spec, text={**spec.text, **text}))


def tiny_case(preset: str, folder: Path) -> dict[str, Any]:
    found = verified(preset, folder, DRAFT_COUNTS)
    manifest, report = found.bundle.manifest, found.report
    assert min(found.prompt_lengths) < manifest.sliding_window < max(found.prompt_lengths)
    assert max(check.context_length for check in report.logits) > manifest.sliding_window
    return {
        "failures": report.failures,
        "window": manifest.sliding_window,
        "prompt_lengths": found.prompt_lengths,
        "largest_difference_of_scale": {
            graph: max(check.relative for check in report.logits if check.graph == graph)
            for graph in dict.fromkeys(check.graph for check in report.logits)
        },
        "drafts": {"compared": report.drafts.num_drafts, "different": len(report.drafts.different)},
        "greedy_by_k": {
            str(check.num_draft_tokens): {
                "tokens": check.num_tokens,
                "different": sum(not miss.is_excused for miss in check.mismatches),
                "near_ties": sum(miss.is_excused for miss in check.mismatches),
                "is_plain_text": not check.differs_from_plain,
            }
            for check in report.greedy
        },
        "seconds": found.seconds,
        "engines": {device: _engines(build(found.bundle, device, manifest.max_length)) for device in DEVICES},
    }


def true_width_case(preset: str, weights: str, vocab_size: int, folder: Path) -> dict[str, Any]:
    watch = Stopwatch()
    with watch.stage("synth"):
        synthesize(true_width_configs(preset, vocab_size), folder / "pair", "full", SilentProgress())
    with watch.stage("export"):
        pair = open_pair(folder / "pair" / "target", folder / "pair" / "assistant")
        settings = ExportSettings(
            dtype="bfloat16",
            max_length=_TRUE_WIDTH_LENGTH,
            num_draft_tokens=_K,
            weights="int4" if weights == "int4" else "float",
            block_size=BLOCK_SIZE,
        )
        export_pair(pair, folder / "bundle", settings, SilentProgress())
    bundle = open_bundle(folder / "bundle")
    records = {device: build(bundle, device, _TRUE_WIDTH_LENGTH) for device in DEVICES}
    return {
        "failures": [],
        "vocab_size": vocab_size,
        "num_layers": bundle.manifest.num_target_layers,
        "hidden_size": bundle.manifest.hidden_size,
        "file_bytes": {name: file.size_bytes for name, file in bundle.manifest.files.items() if file.size_bytes >> 20},
        "seconds": watch.seconds,
        "engines": {device: _engines(record) for device, record in records.items()},
        "build_peak_mib": max(record.peak_memory_mib for record in records.values()),
    }


def _engines(record: EngineRecord) -> dict[str, Any]:
    return {
        "target_bytes": record.target.size_bytes,
        "assistant_bytes": record.assistant.size_bytes,
        "seconds": round(record.target.build_seconds + record.assistant.build_seconds, 2),
        "prefill_chunk": record.target.profiles["prefill"]["num_draft_tokens"][2] + 1,
        "fused_attentions": f"{sum(shape.is_fused for shape in record.attention)} of {len(record.attention)} shapes",
    }


def outcome_of(case: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What a case found, with whether it passed and how quiet it was; a case that raises what it may has failed."""
    watch = Yardstick(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = case(Path(folder))
        except (SlipstreamError, RuntimeError, AssertionError) as error:
            found = {"failures": [f"{type(error).__name__}: {error}"]}
    seconds = {stage: [taken] for stage, taken in found.get("seconds", {"all": 0.0}).items()}
    return {"passed": not found["failures"], **found, "yardstick": watch.report(seconds)}


def cases(arguments: argparse.Namespace) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """The cases asked for, by name."""

    def tiny(preset: str) -> Callable[[Path], dict[str, Any]]:
        return lambda folder: tiny_case(preset, folder)

    def wide(preset: str, weights: str) -> Callable[[Path], dict[str, Any]]:
        return lambda folder: true_width_case(preset, weights, arguments.vocab_size, folder)

    named = {f"{preset}, tiny, float32": tiny(preset) for preset in TINY}
    if arguments.true_width:
        kinds = {"float": "bfloat16", "int4": f"int4 blocks of {BLOCK_SIZE} and bfloat16"}
        named = {f"{p}, true width, {kinds[w]}": wide(p, w) for p in TRUE_WIDTH for w in WEIGHTS}
    return {name: case for name, case in named.items() if name.split(",")[0] in (arguments.only or TINY)}


def write(out: Path, results: Mapping[str, Any]) -> None:
    """Add results to those in a file."""
    kept = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**kept, **results}, indent=2) + "\n")


def versions() -> dict[str, str]:
    packages = ("slipstream", "tensorrt-rtx", "onnxruntime", "onnx", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--true-width", action="store_true")
    parser.add_argument("--only", nargs="+", choices=TINY, metavar="NAME")
    parser.add_argument("--vocab-size", type=int, default=TRUE_VOCAB_SIZE)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    has_failed = False
    for name, case in cases(arguments).items():
        outcome = outcome_of(case)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        write(arguments.out, {name: {**outcome, "script_peak_mib": peak_mib, "versions": versions()}})
        print(name, "passed" if outcome["passed"] else f"FAILED: {outcome['failures']}", flush=True)
        has_failed |= not outcome["passed"]
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
