"""What each precision costs the demo pair: logit error, greedy agreement and acceptance, against its float32 export.

    python -m tests.benchmarks.bench_precision [--out FILE]

As users run it: on ONNX Runtime's CPU provider, which multiplies quantized matrices with int8 activations; but
bfloat16 is rounded to between float32 operators (rounded_to_bfloat16.py), since nothing here multiplies it.
A setting that can't be exported or run here is listed with the reason. Not about speed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import GenerationSettings, load
from slipstream.demo import PAIR, PROMPTS
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.verify.target_run import TargetRun, top_logits
from slipstream.runtime.decode.results import Acceptance
from slipstream.runtime.errors import SlipstreamError
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from tests.support.progress import SilentProgress

from .measuring import machine
from .rounded_to_bfloat16 import round_to_bfloat16

NUM_TOKENS = 96
SETTINGS = (
    ExportSettings(weights="int8", block_size=32),
    ExportSettings(weights="int8", block_size=64),
    ExportSettings(weights="int8", block_size=128),
    ExportSettings(weights="int4", block_size=32),
    ExportSettings(weights="int4", block_size=64),
    ExportSettings(weights="int4", block_size=128),
    ExportSettings(dtype="float16"),
    ExportSettings(dtype="bfloat16"),
    ExportSettings(kv="int8"),
    ExportSettings(weights="int4", block_size=32, kv="int8"),
)


@dataclass(frozen=True)
class Outcome:
    """What a bundle gave. texts: prompt and greedy tokens after it. rows: logits [V] after each of a text's tokens,
    NaN below the top ones; those of the float32 bundle's texts.
    """

    texts: list[tuple[list[int], list[int]]]
    rows: np.ndarray[Any, np.dtype[np.float32]]
    acceptance: Acceptance
    weight_bytes: int


def outcome(folder: Path, settings: ExportSettings, reference: Outcome | None) -> Outcome:
    export_pair(open_pair(PAIR / "target", PAIR / "assistant"), folder, settings, SilentProgress())
    if settings.dtype == "bfloat16":
        round_to_bfloat16(folder)
    texts, acceptance = [], Acceptance()
    with load(folder, num_threads=1) as pair:
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            ids = pair.codec.encode_prompt(pair.chat_text(messages))
            result = pair.generate(messages, GenerationSettings(max_new_tokens=NUM_TOKENS))
            acceptance.add(result.acceptance)
            texts.append((ids, result.token_ids))
        assert isinstance(pair.engine, OnnxRuntimeEngine)
        rows = [own_rows(pair.engine, *text) for text in (reference.texts if reference else texts)]
        manifest = pair.manifest
    names = (manifest.target_file, manifest.assistant_file, manifest.embedding_file)
    return Outcome(texts, np.concatenate(rows), acceptance, sum(manifest.files[name].size_bytes for name in names))


def own_rows(
    graphs: OnnxRuntimeEngine, prompt: Sequence[int], text: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits [len(text), V] of the rows that each token of the text was chosen from."""
    ids = [*prompt, *text[:-1]]
    logits = TargetRun(graphs, len(ids)).call(ids, range(len(prompt) - 1, len(ids)))["logits"][0]
    top, tokens = top_logits(logits, graphs.manifest.logit_softcap)
    rows = np.full(logits.shape, np.nan, np.float32)
    np.put_along_axis(rows, tokens, top, axis=1)
    return rows


def loss(found: Outcome, reference: Outcome) -> dict[str, Any]:
    """Differences are shares of the largest |logit|, over tokens that are among the top ones of both."""
    difference = np.abs(found.rows - reference.rows) / np.nanmax(np.abs(reference.rows))
    same = np.nanargmax(found.rows, axis=1) == np.nanargmax(reference.rows, axis=1)
    equal = [ours == theirs for ours, theirs in zip(found.texts, reference.texts, strict=True)]
    return {
        "largest_logit_difference": float(np.nanmax(difference)),
        "rms_logit_difference": float(np.sqrt(np.nanmean(difference**2))),
        "greedy_agreement": float(same.mean()),
        "equal_texts": f"{sum(equal)} of {len(equal)}",
        "acceptance": [round(share, 4) for share in found.acceptance.by_position],
        "acceptance_of_float32": [round(share, 4) for share in reference.acceptance.by_position],
        "weight_bytes_over_float32": found.weight_bytes / reference.weight_bytes,
    }


def label(settings: ExportSettings) -> str:
    """The fields that differ from the defaults."""
    plain = ExportSettings()
    changed = [f"{f.name} {getattr(settings, f.name)}" for f in fields(settings) if _differs(settings, plain, f.name)]
    return ", ".join(changed) or "float32"


def _differs(settings: ExportSettings, plain: ExportSettings, name: str) -> bool:
    is_stated = name == "block_size" and settings.weights != "float"
    return is_stated or bool(getattr(settings, name) != getattr(plain, name))


def measure() -> dict[str, Any]:
    losses: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        reference = outcome(Path(folder) / "float32", ExportSettings(), None)
        for number, settings in enumerate(SETTINGS):
            try:
                found = outcome(Path(folder) / str(number), settings, reference)
            except SlipstreamError as error:
                losses[label(settings)] = {"refused": str(error)}
            else:
                losses[label(settings)] = loss(found, reference)
            print(f"{label(settings):36} {json.dumps(losses[label(settings)])}")
    return {"pair": "demo", "num_rows": len(reference.rows), "losses": losses, **machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "precision.json")
    out = parser.parse_args().out
    result = measure()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
