"""Compares a bundle with transformers: logits of both graphs, then greedy text with and without drafting.

The reference is transformers' own modeling code on the checkpoints the bundle was made from.
Target logits are compared over contexts below, at and beyond the sliding window with large
values in every unused KV row; the assistant through its ``forward`` with explicit inputs:
rows 0..N-1, of sliding layers the last window, different data in every buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.runtime.bundle import Bundle
from slipstream.runtime.errors import CheckpointError, RequestError
from slipstream.runtime.graph_io import kv_name, kv_output_name
from slipstream.runtime.loop import Loop, Request
from slipstream.runtime.onnxruntime_backend import Graphs
from slipstream.runtime.session import Pair

from .pair import Progress, open_pair

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}  # of the logit scale
_POISON = 1e4  # large, finite, and within float16
_VERIFIED_ROWS = 5
_EXCUSED_SHARE = 1 / 2000

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LogitCheck:
    """Largest difference over one context. scale: largest |logit| of the reference there."""

    graph: str
    context_length: int
    difference: float
    scale: float
    tokens_equal: bool

    @property
    def relative(self) -> float:
        return self.difference / self.scale


@dataclass(frozen=True)
class Mismatch:
    """A token that differs from the reference's argmax; excused when the reference itself nearly ties."""

    prompt: int
    position: int
    num_draft_tokens: int
    found: int
    expected: int
    margin: float
    is_excused: bool


@dataclass(frozen=True)
class GreedyCheck:
    """Greedy text of one K. differs_from_plain: prompts where drafting changed our own text."""

    num_draft_tokens: int
    num_prompts: int
    num_tokens: int
    mismatches: tuple[Mismatch, ...]
    differs_from_plain: tuple[int, ...]
    acceptance: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    tolerance: float
    logits: tuple[LogitCheck, ...]
    greedy: tuple[GreedyCheck, ...]

    @property
    def difference(self) -> float:
        """Largest target |Δlogit|."""
        return max(check.difference for check in self.logits if check.graph == "target")

    @property
    def failures(self) -> list[str]:
        """What missed, one line each; empty when the bundle is verified."""
        lines = [
            f"{check.graph} logits at context {check.context_length}: |Δ| {check.difference:.2e} is "
            f"{check.relative:.1e} of the scale, allowed {self.tolerance:.0e}"
            for check in self.logits
            if not check.relative <= self.tolerance
        ]
        lines += [
            f"{check.graph} tokens at context {check.context_length} differ from transformers'"
            for check in self.logits
            if not check.tokens_equal
        ]
        for greedy in self.greedy:
            lines += _greedy_failures(greedy)
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {"passed": not self.failures, "failures": self.failures, **asdict(self)}


def _greedy_failures(check: GreedyCheck) -> list[str]:
    lines = [
        f"K={check.num_draft_tokens}, prompt {miss.prompt}, token {miss.position}: {miss.found} instead of "
        f"{miss.expected}, margin {miss.margin:.2e}"
        for miss in check.mismatches
        if not miss.is_excused
    ]
    num_excused = sum(miss.is_excused for miss in check.mismatches)
    if num_excused > max(1, check.num_tokens * _EXCUSED_SHARE):
        lines.append(f"K={check.num_draft_tokens}: {num_excused} near-ties in {check.num_tokens} tokens are too many")
    if check.differs_from_plain:
        lines.append(
            f"K={check.num_draft_tokens}: drafted text differs from the same rows with drafts rejected in prompts "
            f"{list(check.differs_from_plain)}"
        )
    return lines


class Reference:
    """The checkpoints in transformers, as plain functions of token ids. Needs the weights in memory."""

    def __init__(self, target: Path, assistant: Path, dtype: str) -> None:
        import transformers

        pair = open_pair(target, assistant)
        self.target_config, self.assistant_config = pair.target_config, pair.assistant_config
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        load = {"dtype": getattr(torch, dtype), "local_files_only": True}
        self.target: Any = transformers.AutoModelForCausalLM.from_pretrained(target, **load).eval()
        self.assistant: Any = transformers.AutoModelForCausalLM.from_pretrained(assistant, **load).eval()
        self.target.generation_config.eos_token_id = None  # compared over a fixed number of tokens

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Array:
        """[len(ids), V] float32."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # transformers 5.24 fails on a KV-shared target without PLE unless it has to keep every row
            out = self.target(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
        result: Array = out.logits[0].float().numpy()
        suppressed = self.target.generation_config.suppress_tokens
        if suppressed:
            result[:, suppressed] = np.finfo(np.float32).min
        return result

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """transformers' plain greedy generate; prompts of one length share a call."""
        texts: dict[int, list[int]] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            members = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[i] for i in members])
            out = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                output_hidden_states=True,
                return_dict_in_generate=True,
            ).sequences
            texts |= dict(zip(members, out[:, length:].tolist(), strict=True))
        return [texts[i] for i in range(len(prompts))]

    @torch.no_grad()
    def draft_step(
        self, token: int, hidden: Array, position: int, donors: dict[str, tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        """One assistant step: logits [V] and the next hidden row [1, 1, N].

        donors: key and value [1, H, rows, D] per layer type, exactly the rows that may be seen.
        """
        embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
        out = self.assistant(
            inputs_embeds=torch.cat([embedded, torch.from_numpy(hidden)], dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states={
                f"{name}_attention": tuple(torch.from_numpy(part) for part in pair) for name, pair in donors.items()
            },
        )
        return out.logits[0, 0].float().numpy(), out.last_hidden_state.numpy()


def verify(
    bundle: Bundle,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    draft_counts: Sequence[int],
    progress: Progress,
) -> Report:
    """Compare a bundle with the checkpoints it was made from. Raises CheckpointError when it was made from others."""
    _check_same(bundle, reference)
    if bundle.manifest.dtype == "bfloat16":
        raise RequestError("a bfloat16 bundle does not run on the CPU: verify a float32 export of the same pair")
    pair = Pair(bundle)
    tolerance = TOLERANCE[bundle.manifest.dtype]
    checks = []
    for length in context_lengths(bundle.manifest.sliding_window, bundle.manifest.max_length):
        progress.start(f"logits at context {length}", 0)
        checks.append(_check_target(pair.graphs, reference, length))
        checks += _check_assistant(pair.graphs, reference, length)
    difference = max(check.difference for check in checks if check.graph == "target")
    progress.start("greedy text by transformers", 0)
    expected = reference.generate(prompts, num_tokens)
    greedy = []
    for num_draft_tokens in draft_counts:
        progress.start(f"greedy text, K = {num_draft_tokens}", 0)
        greedy.append(_check_greedy(pair, reference, prompts, expected, num_tokens, num_draft_tokens, 2 * difference))
    return Report(tolerance, tuple(checks), tuple(greedy))


def _check_same(bundle: Bundle, reference: Reference) -> None:
    manifest, config = bundle.manifest, reference.target_config
    found = (config.vocab_size, config.hidden_size, config.sliding_window, len(config.layers))
    expected = (manifest.vocab_size, manifest.hidden_size, manifest.sliding_window, manifest.num_target_layers)
    if found != expected:
        raise CheckpointError(
            "the bundle was made from another pair: vocabulary, width, window and layers are "
            f"{expected} in the bundle, {found} in the checkpoint"
        )


def context_lengths(window: int, max_length: int) -> list[int]:
    """Below, at and beyond the window, and near the context end for short contexts."""
    lengths = {max(2, window // 2), window - 1, window, window + 1, 2 * window + 3}
    if max_length <= 4096:
        lengths.add(max_length - _VERIFIED_ROWS)
    return sorted(length for length in lengths if 1 <= length <= max_length - _VERIFIED_ROWS)


def sample_prompts(
    ids: Sequence[int], bos: int, count: int, window: int, max_length: int, num_tokens: int
) -> list[list[int]]:
    """Prompts of a few lengths round the window and one up to the context end, cut from ids at different places."""
    longest = max_length - num_tokens
    lengths = sorted({min(n, longest) for n in (8, window - num_tokens // 2, window + 3, 2 * window + 1)} | {longest})
    if longest > 4096:
        lengths = lengths[:-1]
    lengths = [n for n in lengths if n >= 2]
    tiled = list(ids) * (2 + max(lengths) // max(len(ids), 1))
    random = np.random.default_rng(0)
    starts = random.integers(0, len(ids), count).tolist()
    return [[bos, *tiled[start : start + lengths[i % len(lengths)] - 1]] for i, start in enumerate(starts)]


class _TargetRun:
    """The target graph through numpy: a path of its own, with no binding in place."""

    def __init__(self, graphs: Graphs, capacity: int) -> None:
        self._session = graphs.target
        self.kv: dict[str, Array] = {}
        self.length = 0
        for buffer in graphs.manifest.kv:
            for part in ("key", "value"):
                shape = (1, buffer.num_kv_heads, capacity, buffer.head_dim)
                self.kv[kv_name(buffer.layer, part)] = np.full(shape, _POISON, buffer.dtype)
        self._layers = [buffer.layer for buffer in graphs.manifest.kv]

    def call(self, ids: Sequence[int], scored_rows: Sequence[int]) -> dict[str, Array]:
        names = [output.name for output in self._session.get_outputs()]
        values = self._session.run(
            names,
            {
                "token": np.array([ids[:1]]),
                "draft": np.array([ids[1:]], np.int64),
                "past_length": np.array([self.length]),
                "base": np.array([0]),
                "scored_rows": np.array([scored_rows]),
                "draft_length": np.array([0]),
                **self.kv,
            },
        )
        out = dict(zip(names, values, strict=True))
        for layer in self._layers:
            for part in ("key", "value"):
                self.kv[kv_name(layer, part)] = out.pop(kv_output_name(layer, part))
        self.length += len(ids)
        return out


def _check_target(graphs: Graphs, reference: Reference, length: int) -> LogitCheck:
    """Prefill length tokens in chunks, then score a few rows at once, poison in every unused KV row."""
    random = np.random.default_rng(length)
    ids = random.integers(0, graphs.manifest.vocab_size, length + _VERIFIED_ROWS).tolist()
    run = _TargetRun(graphs, length + _VERIFIED_ROWS + 7)
    chunk = max(2, length // 3)
    for start in range(0, length, chunk):
        part = ids[start : min(start + chunk, length)]
        run.call(part, [len(part) - 1])
    out = run.call(ids[length:], range(_VERIFIED_ROWS))
    expected = reference.logits(ids)[length:]
    return _compare("target", length, out["top_logits"][0], out["top_tokens"][0], expected)


def _compare(graph: str, length: int, found: Array, tokens: Array, expected: Array) -> LogitCheck:
    """found, tokens [rows, T]; expected [rows, V]."""
    there = np.take_along_axis(expected, tokens, axis=1)
    difference = float(np.abs(found - there).max())
    # the selection is right when nothing left out is above the smallest selected by more than the difference
    cut = np.partition(expected, -tokens.shape[1], axis=1)[:, -tokens.shape[1]]
    tokens_equal = bool((there.min(axis=1) >= cut - 2 * max(difference, 1e-6)).all())
    scale = float(np.abs(there).max())
    return LogitCheck(graph, length, difference, scale, tokens_equal)


def _check_assistant(graphs: Graphs, reference: Reference, length: int) -> Iterator[LogitCheck]:
    """Every assistant graph at one past length, sliding buffer with and without rows before the window."""
    for num_steps in graphs.drafts:
        yield _check_draft(graphs, reference, length, num_steps, first_row=0)
        if length > graphs.manifest.sliding_window + 2:
            yield _check_draft(
                graphs, reference, length, num_steps, first_row=length - graphs.manifest.sliding_window - 2
            )


def _check_draft(graphs: Graphs, reference: Reference, length: int, num_steps: int, first_row: int) -> LogitCheck:
    manifest = graphs.manifest
    random = np.random.default_rng((length, num_steps))
    position = length + manifest.draft_position_offset
    inputs: dict[str, Array] = {
        "token": random.integers(0, manifest.vocab_size, (1, 1)),
        "draft": np.zeros((1, 0), np.int64),
        "hidden": random.standard_normal((1, 1, manifest.hidden_size)).astype(manifest.dtype),
        "position": np.array([position]),
        "past_length": np.array([length]),
        "base": np.array([first_row]),
    }
    seen: dict[str, tuple[Array, Array]] = {}
    for donor in manifest.donors:
        start = first_row if donor.type == "sliding" else 0
        pair = []
        for part in ("key", "value"):
            shape = (1, donor.num_kv_heads, length - start + 3, donor.head_dim)
            buffer = random.standard_normal(shape).astype(donor.dtype)
            buffer[:, :, length - start :] = _POISON
            inputs[kv_name(donor.layer, part)] = buffer
            rows = buffer[:, :, : length - start]
            pair.append(rows[:, :, -manifest.sliding_window :] if donor.type == "sliding" else rows)
        seen[donor.type] = (pair[0], pair[1])
    wanted = {node.name for node in graphs.drafts[num_steps].get_inputs()}
    names = ["next_draft", "draft_top_logits", "draft_top_tokens", "next_hidden"]
    draft, logits, tokens, hidden = graphs.drafts[num_steps].run(
        names, {name: value for name, value in inputs.items() if name in wanted}
    )
    token, state, expected = int(inputs["token"][0, 0]), inputs["hidden"], []
    for step in range(num_steps):
        step_logits, state = reference.draft_step(token, state, position, seen)
        expected.append(step_logits)
        token = int(draft[0, step])  # follow our own draft, so that each step is compared on the same input
    check = _compare(_draft_label(num_steps, first_row), length, logits[0], tokens[0], np.array(expected))
    hidden_gap = float(np.abs(hidden - state).max() / np.abs(state).max())
    if hidden_gap > TOLERANCE[manifest.dtype]:  # reported in the same terms as the logits
        return LogitCheck(f"{check.graph} hidden", length, hidden_gap, 1.0, check.tokens_equal)
    return check


def _draft_label(num_steps: int, first_row: int) -> str:
    moved = ", moved window" if first_row else ""
    return f"assistant ({num_steps} step{'s' if num_steps > 1 else ''}{moved})"


def _check_greedy(
    pair: Pair,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    num_tokens: int,
    num_draft_tokens: int,
    near_tie: float,
) -> GreedyCheck:
    session = pair.session()
    loop = Loop(session.backend, pair.codec)
    mismatches: list[Mismatch] = []
    differs = []
    offered = [0] * num_draft_tokens
    accepted = [0] * num_draft_tokens
    for number, prompt in enumerate(prompts):
        texts = []
        for rejects_drafts in (False, True) if num_draft_tokens else (False,):
            loop.reset()
            loop.tokens += prompt
            request = Request(num_draft_tokens, num_tokens, (), (), rejects_drafts)
            for _ in loop.run(request, lambda: False):
                pass
            assert loop.result is not None
            texts.append(loop.result.token_ids)
            if not rejects_drafts:
                for i in range(num_draft_tokens):
                    offered[i] += loop.result.acceptance.offered[i]
                    accepted[i] += loop.result.acceptance.accepted[i]
        if texts[0] != texts[-1]:
            differs.append(number)
        if texts[0] != list(expected[number]):
            mismatches += _explain(reference, number, prompt, texts[0], num_draft_tokens, near_tie)
    return GreedyCheck(
        num_draft_tokens,
        len(prompts),
        len(prompts) * num_tokens,
        tuple(mismatches),
        tuple(differs),
        tuple(a / o if o else 0.0 for a, o in zip(accepted, offered, strict=True)),
    )


def _explain(
    reference: Reference,
    number: int,
    prompt: Sequence[int],
    text: Sequence[int],
    num_draft_tokens: int,
    near_tie: float,
) -> list[Mismatch]:
    """Teacher-forced through our own text: every row whose reference argmax is another token."""
    rows = reference.logits([*prompt, *text])[len(prompt) - 1 : -1]
    found = []
    for position, (token, row) in enumerate(zip(text, rows, strict=True)):
        best = int(row.argmax())
        if best != token:
            margin = float(row[best] - row[token])
            found.append(Mismatch(number, position, num_draft_tokens, token, best, margin, margin < near_tie))
    if not found:  # one pass over all rows agrees with us where step-by-step generate did not: its own near-tie
        row = int(np.argmin([float(np.subtract(*np.sort(r)[:-3:-1])) for r in rows]))
        margin = float(np.subtract(*np.sort(rows[row])[:-3:-1]))
        found.append(Mismatch(number, row, num_draft_tokens, text[row], text[row], margin, margin < near_tie))
    return found
