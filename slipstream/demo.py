"""``slipstream demo``: the shipped tiny pair, from checkpoint to drafted text, in under a minute."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import display
from .export.checkpoint.opening import open_pair
from .export.pair import export_pair
from .export.settings import ExportSettings
from .runtime.decode.results import Result, total_acceptance
from .runtime.decode.settings import GenerationSettings
from .runtime.session import Pair, load

PAIR = Path(__file__).parent / "export" / "demo_pair"
PROMPTS = (
    "Tell me a story about a fox and a lantern.",
    "Write a short story with a bear, a rabbit and a kite.",
    "I would like a story that happens by the lighthouse.",
)
_ROUNDS = 5


def run(keep: Path | None) -> bool:
    """Export, generate and compare; whether drafted and plain text were identical. keep: where to leave the bundle."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = keep or Path(folder) / "bundle"
        with display.StageProgress() as progress:
            pair = open_pair(PAIR / "target", PAIR / "assistant")
            export_pair(pair, bundle, ExportSettings(), progress)
        return _compare(load(bundle))


def _compare(pair: Pair) -> bool:
    num_draft_tokens = pair.manifest.generation.num_draft_tokens
    drafted, plain = [], []
    for prompt in PROMPTS:
        display.stdout.print(f"\n[bold]{prompt}[/]")
        drafted.append(_stream(pair, prompt, num_draft_tokens))
        plain.append(pair.generate(_chat(prompt), GenerationSettings(num_draft_tokens=0)))
    is_identical = [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    speeds = _speeds(pair, num_draft_tokens)
    acceptance = total_acceptance(drafted)
    shares = display.shares_text(acceptance.by_position)
    display.stdout.print(
        f"\nplain      {speeds[0]:6.0f} tokens/s\n"
        f"drafted    {speeds[1]:6.0f} tokens/s, {speeds[1] / speeds[0]:.2f} times plain "
        f"(medians of {_ROUNDS}, alternating)\n"
        f"acceptance {shares} by draft position, "
        f"{acceptance.tokens_per_round:.2f} tokens per round of K={num_draft_tokens}\n"
        f"outputs    {'identical, token for token' if is_identical else '[red]DIFFERENT[/]'}"
    )
    display.stdout.print(
        "[dim]A grammar wrote this pair's training text, so it is easy to draft: the ratio is this demo's alone.[/]"
    )
    return is_identical


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _stream(pair: Pair, prompt: str, num_draft_tokens: int) -> Result:
    with pair.stream(_chat(prompt), GenerationSettings(num_draft_tokens=num_draft_tokens)) as stream:
        for chunk in stream:
            display.stdout.print(chunk.text, end="", markup=False)
    display.stdout.print()
    return stream.result


def _speeds(pair: Pair, num_draft_tokens: int) -> tuple[float, float]:
    """Median tokens/s of plain and drafted decoding, measured in turn."""
    measured: dict[int, list[float]] = {0: [], num_draft_tokens: []}
    for _ in range(_ROUNDS):
        for k, speeds in measured.items():
            results = [pair.generate(_chat(p), GenerationSettings(num_draft_tokens=k)) for p in PROMPTS]
            num_tokens = sum(len(r.token_ids) - 1 for r in results)
            speeds.append(num_tokens / sum(r.timings.decode for r in results))
    return sorted(measured[0])[_ROUNDS // 2], sorted(measured[num_draft_tokens])[_ROUNDS // 2]
