"""Sampled text on ONNX Runtime: drafted text is plain text of the same seed, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.runtime.backend.contract import GREEDY, Sampling
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.loop import Loop, Request
from slipstream.runtime.ort.backend import OnnxRuntimeBackend, OnnxRuntimeEngine
from tests.support.fakes import make_codec
from tests.support.pairs import random_prompt

WARM = Sampling(temperature=1.0, top_k=64, top_p=0.95, min_p=0.0, seed=7)
MILD = Sampling(temperature=0.5, top_k=20, top_p=1.0, min_p=0.05, seed=2**61 + 3)
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=["edge", "dense"])
def engine(request: pytest.FixtureRequest, bundle_folder: Callable[[str], Path]) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(open_bundle(bundle_folder(request.param)), num_threads=1)


def loop_of(engine: OnnxRuntimeEngine, prompt: list[int]) -> Loop:
    loop = Loop(OnnxRuntimeBackend(engine, prefill_chunk=8), make_codec())
    loop.tokens += prompt
    return loop


def more(loop: Loop, num_draft_tokens: int, num_tokens: int, sampling: Sampling) -> list[int]:
    """What a generation adds."""
    before = len(loop.tokens)
    for _ in loop.run(Request(num_draft_tokens, num_tokens, (), (), sampling=sampling), lambda: False):
        pass
    return loop.tokens[before:]


def text(engine: OnnxRuntimeEngine, prompt: list[int], num_draft_tokens: int, sampling: Sampling) -> list[int]:
    return more(loop_of(engine, prompt), num_draft_tokens, NUM_TOKENS, sampling)


@pytest.mark.parametrize("sampling", [WARM, MILD, GREEDY], ids=["warm", "mild", "greedy"])
def test_drafted_text_is_plain_text(engine: OnnxRuntimeEngine, sampling: Sampling) -> None:
    for seed in range(4):
        drawn, prompt = replace(sampling, seed=sampling.seed + seed), random_prompt(5 + 9 * seed, seed)
        plain = text(engine, prompt, 0, drawn)
        assert [text(engine, prompt, k, drawn) for k in (1, 2, 4, 7)] == [plain] * 4


def test_text_depends_on_the_seed_and_temperature(engine: OnnxRuntimeEngine) -> None:
    prompt = random_prompt(12, 0)
    texts = [text(engine, prompt, 0, s) for s in (WARM, replace(WARM, seed=8), replace(WARM, temperature=0.3), GREEDY)]
    assert len({tuple(tokens) for tokens in texts}) == 4


def test_without_temperature_the_graph_that_draws_gives_greedy_text(engine: OnnxRuntimeEngine) -> None:
    """A greedy sequence beside one that draws goes the same way as alone."""
    prompts = [random_prompt(8, 1), random_prompt(8, 2)]
    backend = OnnxRuntimeBackend(engine, batch=2)
    backend.set_sampling(1, WARM)
    tokens = [list(ids) for ids in backend.prefill(prompts).tokens]
    while min(map(len, tokens)) < NUM_TOKENS:
        for ids, added in zip(tokens, backend.round(3, [3, 3]).tokens, strict=True):
            ids.extend(added)
    assert tokens[0][:NUM_TOKENS] == text(engine, prompts[0], 0, GREEDY)
    assert tokens[1][:NUM_TOKENS] == text(engine, prompts[1], 0, WARM)


def test_a_text_goes_on_as_if_it_had_never_stopped(engine: OnnxRuntimeEngine) -> None:
    """Stops, rewinds, another K and a session that was read anew draw the same tokens at the same positions."""
    prompt = random_prompt(10, 3)
    whole = text(engine, prompt, 4, WARM)
    loop, found = loop_of(engine, prompt), list[int]()
    for num_draft_tokens, num_tokens in (4, 7), (0, 5), (2, 1), (7, 9):
        found += more(loop, num_draft_tokens, num_tokens, WARM)
    assert found == whole[:22]
    loop.replace(prompt + whole[:13])
    assert more(loop, 3, 10, WARM) == whole[13:23]
    assert more(loop_of(engine, prompt + whole[:13]), 1, 10, WARM) == whole[13:23]


def test_a_generation_leaves_no_sampling_to_the_next(engine: OnnxRuntimeEngine) -> None:
    prompt = random_prompt(10, 4)
    loop = loop_of(engine, prompt)
    more(loop, 4, 10, WARM)
    loop.replace(prompt)
    assert more(loop, 4, NUM_TOKENS, GREEDY) == text(engine, prompt, 0, GREEDY)


def test_a_batch_draws_what_each_sequence_draws_alone(engine: OnnxRuntimeEngine) -> None:
    prompts, samplings = [random_prompt(9, 5)] * 3, [replace(WARM, seed=seed) for seed in (1, 2, 1)]
    backend = OnnxRuntimeBackend(engine, batch=3)
    for sequence, sampling in enumerate(samplings):
        backend.set_sampling(sequence, sampling)
    tokens = [list(ids) for ids in backend.prefill(prompts).tokens]
    while min(map(len, tokens)) < NUM_TOKENS:
        for ids, added in zip(tokens, backend.round(2, [2, 0, 2]).tokens, strict=True):
            ids.extend(added)
    solo = [text(engine, prompts[0], 0, sampling) for sampling in samplings]
    assert [ids[:NUM_TOKENS] for ids in tokens] == solo
    assert solo[0] == solo[2] != solo[1]
