"""Compares a bundle with transformers: logits of both graphs, then greedy text with and without drafting.

The reference is transformers' own modeling code on the checkpoints the bundle was made from. Target logits are compared
over contexts below, at and beyond the sliding window with large values in every unused KV row; the assistant through
its ``forward`` with explicit inputs: rows 0..N-1, of sliding layers the last window, different data in every buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from slipstream.runtime.backend.contract import Backend
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle.engine_record import EngineName, check_runs
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.graph_io import feeds, kv_name
from slipstream.runtime.bundle.manifest import Bundle, Manifest, check_hashes
from slipstream.runtime.bundle.onnxruntime_record import FLOAT32_ACTIVATIONS, check_matrices, open_optimized
from slipstream.runtime.decode.generation import Request
from slipstream.runtime.decode.results import Acceptance
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.machine.progress import Progress
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.session import Pair

from .costs import WeightCost, activation_cost
from .generating import generate, new_scheduler
from .reference import Array, Reference
from .report import DraftCheck, GreedyCheck, LogitCheck, Mismatch, Report
from .sampled import check_first_drafts, check_sampled
from .target_run import TargetRun, poison, top_logits

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}  # of the logit scale
# Of the scale: a value between two int8 steps may round to the other one than transformers', which moves the logits
# of a random model by up to a percent. Of the demo pair it was 7e-5.
_INT8_STEP = 1e-2
TEXT = Path(__file__).with_name("text.txt")  # that prompts are cut from
_VERIFIED_ROWS = 5
_ROUND_PROMPTS, _ROUNDS_EACH = 5, 4


def verify(
    bundle: Bundle,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    draft_counts: Sequence[int],
    progress: Progress,
    engine: EngineName = "onnxruntime",
) -> Report:
    """Compare a bundle with the checkpoints it was made from. Raises CheckpointError when it was made from others.

    engine: what drafts and generates the text; logits are those of the portable graphs on the CPU.
    Of a quantized bundle, logits and drafts are compared with float32 activations and the very weights that
    it holds. Its text is compared as users get it, where int8 activations may choose another token, and the report
    says what they cost beside what the weights cost.
    """
    _check_files(bundle, engine)
    check_source(bundle, *reference.folders)
    check_runs(bundle.manifest, "onnxruntime")
    tolerance = TOLERANCE[bundle.manifest.dtype]
    weights, texts = bundle.manifest.weights, prompts[:_ROUND_PROMPTS]
    is_quantized = weights.format != "float"
    weight_cost = WeightCost(reference, texts) if weights.is_integer and reference.is_exact else None
    reference.round_weights(weights)
    costs = [] if weight_cost is None else [weight_cost.measure(f"{weights.format} weights")]
    reference.round_kv(bundle.manifest.kv)
    rounding = _INT8_STEP if bundle.manifest.has_int8_kv else 0.0
    with Pair(bundle, engine=engine) as pair, ExitStack() as stack:
        graphs, new_backend = pair.engine, pair.new_backend
        if is_quantized or not isinstance(graphs, OnnxRuntimeEngine):
            graphs = OnnxRuntimeEngine(bundle, num_threads=0, accuracy_level=FLOAT32_ACTIVATIONS)
            stack.callback(graphs.close)
        if is_quantized:
            new_backend = graphs.new_backend
        if weights.is_integer and isinstance(pair.engine, OnnxRuntimeEngine):
            costs.append(activation_cost(pair.engine, graphs, texts))
        checks = _check_calls(graphs, reference, progress)
        difference = max(check.difference for check in checks if check.graph == "target")
        progress.start("drafts of whole rounds", 0)
        near_tie = 2 * max(*(check.difference for check in checks), rounding * max(check.scale for check in checks))
        k = pair.engine.num_draft_tokens
        drafts = _check_rounds(new_backend, k, reference, texts, near_tie)
        progress.start("greedy text by transformers", 0)
        expected = reference.generate(prompts, num_tokens)
        greedy = []
        for k in draft_counts:
            progress.start(f"greedy text, K = {k}", 0)
            greedy.append(_check_greedy(pair, reference, prompts, expected, num_tokens, k, 2 * difference))
        sampled = []
        for k in filter(None, draft_counts):
            progress.start(f"drawn text, K = {k}", 0)
            sampled.append(check_sampled(pair, prompts, num_tokens, k))
        progress.start("first drafts of drawn text", 0)
        first = check_first_drafts(pair, reference, texts) if 1 in pair.engine.draft_counts else None
    is_rounded = is_quantized or rounding > 0
    return Report(
        tolerance, tuple(checks), drafts, tuple(greedy), tuple(sampled), first, is_rounded, rounding, tuple(costs)
    )


def _check_files(bundle: Bundle, engine: EngineName) -> None:
    """Compare every file that runs with its SHA-256. Raises BundleError or BackendError."""
    check_hashes(bundle)
    if engine == "onnxruntime":
        check_matrices(bundle, open_optimized(bundle, None))


def _check_calls(graphs: OnnxRuntimeEngine, reference: Reference, progress: Progress) -> list[LogitCheck]:
    """Target and every assistant graph at each length, sliding buffers with and without rows before the window."""
    manifest, checks = graphs.manifest, []
    for length in context_lengths(manifest.sliding_window, manifest.max_length):
        progress.start(f"logits at context {length}", 0)
        checks.append(_check_target(graphs, reference, length))
        rows = sorted({0, max(length - manifest.sliding_window - 2, 0)})
        checks += [_check_draft(graphs, reference, length, n, row) for n in graphs.drafts for row in rows]
    return checks


def check_source(bundle: Bundle, target: Path, assistant: Path) -> None:
    """Refuse checkpoints that the bundle was not made from. Raises CheckpointError."""
    source = bundle.manifest.source
    expected = {target: source.target_config_sha256, assistant: source.assistant_config_sha256}
    for folder, sha256 in expected.items():
        config = folder / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{config} is missing: give the checkpoint folders that the bundle was made from")
        if file_sha256(config) != sha256:
            raise CheckpointError(f"the bundle was made from another checkpoint than {folder}: config.json differs")


def context_lengths(window: int, max_length: int) -> list[int]:
    """Below, at and beyond the window, and near the context end for short contexts."""
    longest = max(1, max_length - _VERIFIED_ROWS)
    lengths = {max(2, window // 2), window - 1, window, window + 1, 2 * window + 3}
    if max_length <= 4096:
        lengths.add(longest)
    return sorted(length for length in lengths if 1 <= length <= longest)


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


def _check_target(graphs: OnnxRuntimeEngine, reference: Reference, length: int) -> LogitCheck:
    """Prefill length tokens in chunks, then score a few rows at once, poison in every unused KV row."""
    random = np.random.default_rng(length)
    ids = random.integers(0, graphs.manifest.vocab_size, length + _VERIFIED_ROWS).tolist()
    run = TargetRun(graphs, length + _VERIFIED_ROWS + 7)
    chunk = max(2, length // 3)
    for start in range(0, length, chunk):
        part = ids[start : min(start + chunk, length)]
        run.call(part, [len(part) - 1])
    out = run.call(ids[length:], range(_VERIFIED_ROWS))
    expected = reference.logits(ids)[length:]
    return _compare("target", length, *top_logits(out["logits"][0], graphs.manifest.logit_softcap), expected)


def _compare(graph: str, length: int, found: Array, tokens: Array, expected: Array) -> LogitCheck:
    """found, tokens [rows, T]; expected [rows, V]."""
    there = np.take_along_axis(expected, tokens, axis=1)
    difference = float(np.abs(found - there).max())
    # the selection is right when nothing left out is above the smallest selected by more than the difference
    cut = np.partition(expected, -tokens.shape[1], axis=1)[:, -tokens.shape[1]]
    is_top = bool((there.min(axis=1) >= cut - 2 * max(difference, 1e-6)).all())
    tokens_equal = is_top and all(len(set(row)) == len(row) for row in tokens.tolist())
    scale = float(np.abs(there).max())
    return LogitCheck(graph, length, difference, scale, tokens_equal)


def _check_draft(
    graphs: OnnxRuntimeEngine, reference: Reference, length: int, num_steps: int, first_row: int
) -> LogitCheck:
    """One assistant graph against transformers, step by step, over random donor rows.

    Rounding errors of float32 grow from step to step, by as much as the pair amplifies them. So each step of
    transformers starts from the state that our own single-step graph computed before it: the tolerance is that of
    one step, however many a graph unrolls.
    """
    random = np.random.default_rng((length, num_steps))
    position = length + graphs.manifest.draft_position_offset
    inputs, seen = _draft_inputs(graphs.manifest, random, length, first_row)
    draft, logits, tokens, hidden = _run_draft(graphs, num_steps, inputs)
    state, expected = inputs["hidden"], []
    for step in range(num_steps):
        if step:  # our own draft and state, so that each step is compared on the same input
            inputs |= {"hidden": _run_draft(graphs, 1, inputs)[-1], "token": draft[:, step - 1 : step]}
        step_logits, state = reference.draft_step(int(inputs["token"][0, 0]), inputs["hidden"], position, seen)
        expected.append(step_logits)
    label = f"assistant ({num_steps} step{'s' if num_steps > 1 else ''}{', moved window' if first_row else ''})"
    check = _compare(label, length, logits[0], tokens[0], np.array(expected))
    hidden_gap = float(np.abs(hidden - state).max() / np.abs(state).max())
    if not hidden_gap <= TOLERANCE[graphs.manifest.dtype]:  # NaN is a miss too; reported in the terms of logits
        return LogitCheck(f"{check.graph} hidden", length, hidden_gap, 1.0, check.tokens_equal)
    return check


def _run_draft(graphs: OnnxRuntimeEngine, num_steps: int, inputs: Mapping[str, Array]) -> list[Array]:
    """next_draft [1, n], draft_top_logits and draft_top_tokens [1, n, T] and next_hidden [1, 1, N] of n steps."""
    session = graphs.drafts[num_steps]
    wanted = {node.name for node in session.get_inputs()}
    names = ["next_draft", "draft_top_logits", "draft_top_tokens", "next_hidden"]
    fed = feeds("assistant", inputs)
    results: list[Array] = session.run(names, {name: value for name, value in fed.items() if name in wanted})
    return results


def _draft_inputs(
    manifest: Manifest, random: np.random.Generator, length: int, first_row: int
) -> tuple[dict[str, Array], dict[str, tuple[Array, ...]]]:
    """Random inputs of an assistant graph, and the donor rows that it may see, as Reference.draft_step takes them.

    first_row: the position of the first row of sliding buffers. Rows at and above length hold poison.
    """
    inputs: dict[str, Array] = {
        "token": random.integers(0, manifest.vocab_size, (1, 1)),
        "draft": np.zeros((1, 0)),
        "hidden": random.standard_normal((1, 1, manifest.hidden_size)).astype(manifest.dtype),
        "position": np.array([length + manifest.draft_position_offset]),
        "past_length": np.array([length]),
        "base": np.array([first_row]),
    }
    seen: dict[str, tuple[Array, ...]] = {}
    for donor in manifest.donors:
        start = first_row if donor.type == "sliding" else 0
        pair = []
        for part, scale in (("key", donor.key_scale), ("value", donor.value_scale)):
            shape = (1, donor.num_kv_heads, length - start + 3, donor.head_dim)
            values = random.standard_normal(shape)
            buffer = (np.rint(values / scale).clip(-128, 127) if donor.dtype == "int8" else values).astype(donor.dtype)
            buffer[:, :, length - start :] = poison(donor.dtype)
            inputs[kv_name(donor.layer, part)] = buffer
            rows = buffer[:, :, : length - start]
            rows = rows[:, :, -manifest.sliding_window :] if donor.type == "sliding" else rows
            pair.append(rows.astype(manifest.dtype) * np.dtype(manifest.dtype).type(scale))
        seen[donor.type] = tuple(pair)
    return inputs, seen


def _check_rounds(
    new_backend: Callable[[], Backend], k: int, reference: Reference, prompts: Sequence[Sequence[int]], near_tie: float
) -> DraftCheck:
    """Follow the runtime through a few rounds: hidden row, position and KV must be the reference's own."""
    num_rounds, num_drafts, different = 0, 0, list[str]()
    for number, prompt in enumerate(prompts):
        with closing(new_backend()) as backend:
            assert isinstance(backend, PairBackend)
            ids = list(prompt)
            added: list[int] = []
            for start in range(0, len(ids), backend.prefill_chunk):
                added = [backend.prefill(0, ids[start : start + backend.prefill_chunk])]
            for _ in range(_ROUNDS_EACH):
                ids += added
                if len(ids) + k + 1 > backend.max_length:
                    break
                added = backend.round(k, [k + 1]).tokens[0]
                rows = reference.draft(ids, k, backend.manifest.draft_position_offset)
                num_compared, difference = _compare_draft(backend.last_draft(k)[0], rows, near_tie)
                num_rounds, num_drafts = num_rounds + 1, num_drafts + num_compared
                different += [f"prompt {number}, text of {len(ids)} tokens, {difference}"] if difference else []
    return DraftCheck(num_rounds, num_drafts, tuple(different))


def _compare_draft(draft: Sequence[int], rows: Sequence[Array], near_tie: float) -> tuple[int, str]:
    """How many tokens of a draft were compared, and what is wrong with the last of them.

    rows: logits [V] of each step; steps after a token that differs started from another one.
    """
    for position, (token, row) in enumerate(zip(draft, rows, strict=True)):
        margin = float(row.max() - row[token])
        if token != int(row.argmax()):
            found = f"draft {position}: {token} instead of {int(row.argmax())}, margin {margin:.2e}"
            return position + 1, found if margin >= near_tie else ""
    return len(draft), ""


def _check_greedy(
    pair: Pair,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    num_tokens: int,
    num_draft_tokens: int,
    near_tie: float,
) -> GreedyCheck:
    mismatches: list[Mismatch] = []
    differs, acceptance = [], Acceptance()
    acceptance.grow(num_draft_tokens)
    with closing(pair.new_backend()) as backend:
        scheduler = new_scheduler(backend)
        for number, prompt in enumerate(prompts):
            drafted = generate(scheduler, pair, prompt, Request(num_draft_tokens, num_tokens, (), ()))
            acceptance.add(drafted.acceptance)
            if num_draft_tokens:
                request = Request(num_draft_tokens, num_tokens, (), (), rejects_drafts=True)
                if generate(scheduler, pair, prompt, request).token_ids != drafted.token_ids:
                    differs.append(number)
            if (text := drafted.token_ids) != list(expected[number]):
                rows = reference.logits([*prompt, *text])[len(prompt) - 1 : -1]
                mismatches += [
                    Mismatch(number, position, num_draft_tokens, found, wanted, margin, margin < near_tie)
                    for position, found, wanted, margin in _differing(rows, text, expected[number])
                ]
    found = tuple(mismatches), tuple(differs), tuple(acceptance.by_position)
    return GreedyCheck(num_draft_tokens, len(prompts), len(prompts) * num_tokens, *found)


def _differing(rows: Array, text: Sequence[int], expected: Sequence[int]) -> Iterator[tuple[int, int, int, float]]:
    """Where text first leaves ``expected``, and teacher-forced from there every row [V] with another argmax.

    Position, token found, token wanted, and the margin between their logits.
    """
    first = next(i for i, (found, wanted) in enumerate(zip(text, expected, strict=True)) if found != wanted)
    for position in range(first, len(text)):
        row, found = rows[position], text[position]
        wanted = expected[first] if position == first else int(row.argmax())
        if wanted != found:
            yield position, found, wanted, float(abs(row[wanted] - row[found]))
