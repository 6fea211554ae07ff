"""Sampled text on ONNX Runtime: drafted text is plain text of the same seed, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.runtime.backend.contract import GREEDY, Sampling
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.ort.backend import OnnxRuntimeBackend, OnnxRuntimeEngine
from tests.support.pairs import random_prompt

WARM = Sampling(temperature=1.0, top_k=64, top_p=0.95, min_p=0.0, seed=7)
MILD = Sampling(temperature=0.5, top_k=20, top_p=1.0, min_p=0.05, seed=2**61 + 3)
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=["edge", "dense", "dense, position N - 1"])
def engine(request: pytest.FixtureRequest, bundle_folder: Callable[..., Path]) -> OnnxRuntimeEngine:
    """Noise goes by the place of the token that is drawn, wherever the assistant's query stands."""
    name, _, is_last = request.param.partition(",")
    folder = bundle_folder(name, **({"draft_position": "last"} if is_last else {}))
    return OnnxRuntimeEngine(open_bundle(folder), num_threads=1)


class Text:
    """A sequence that goes on in pieces. tokens: so far."""

    def __init__(self, engine: OnnxRuntimeEngine, prompt: list[int]) -> None:
        self._backend = OnnxRuntimeBackend(engine, prefill_chunk=8)
        self.tokens = list(prompt)

    def more(self, num_draft_tokens: int, num_tokens: int, sampling: Sampling) -> list[int]:
        """What a generation adds, which feeds the last token again."""
        backend, before = self._backend, len(self.tokens)
        backend.set_sampling(0, sampling)
        if backend.length[0] >= before:
            backend.rewind(0, before - 1)
        pieces = [self.tokens[start : min(start + 8, before)] for start in range(backend.length[0], before, 8)]
        added = [backend.prefill(0, ids) for ids in pieces][-1:]
        while True:
            self.tokens += added
            room = num_tokens - (len(self.tokens) - before)
            if room == 0:
                return self.tokens[before:]
            added = backend.round(num_draft_tokens, [min(room, num_draft_tokens + 1)]).tokens[0]

    def replace(self, tokens: list[int]) -> None:
        """Go on from other tokens, that begin as these do."""
        self.tokens = list(tokens)


def together(engine: OnnxRuntimeEngine, prompts: list[list[int]], samplings: list[Sampling], limits: list[int]) -> Any:
    """At least NUM_TOKENS tokens of every sequence, in rounds of one batch."""
    backend = OnnxRuntimeBackend(engine, num_slots=len(prompts))
    for slot, sampling in enumerate(samplings):
        backend.set_sampling(slot, sampling)
    tokens = [[backend.prefill(slot, ids)] for slot, ids in enumerate(prompts)]
    while min(map(len, tokens)) < NUM_TOKENS:
        for ids, added in zip(tokens, backend.round(max(limits) - 1, limits).tokens, strict=True):
            ids.extend(added)
    return [ids[:NUM_TOKENS] for ids in tokens]


def text(engine: OnnxRuntimeEngine, prompt: list[int], num_draft_tokens: int, sampling: Sampling) -> list[int]:
    return Text(engine, prompt).more(num_draft_tokens, NUM_TOKENS, sampling)


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
    tokens = together(engine, prompts, [GREEDY, WARM], [4, 4])
    assert tokens == [text(engine, prompts[0], 0, GREEDY), text(engine, prompts[1], 0, WARM)]


def test_a_text_goes_on_as_if_it_had_never_stopped(engine: OnnxRuntimeEngine) -> None:
    """Stops, rewinds, another K and a session that was read anew draw the same tokens at the same positions."""
    prompt = random_prompt(10, 3)
    whole = text(engine, prompt, 4, WARM)
    going, found = Text(engine, prompt), list[int]()
    for num_draft_tokens, num_tokens in (4, 7), (0, 5), (2, 1), (7, 9):
        found += going.more(num_draft_tokens, num_tokens, WARM)
    assert found == whole[:22]
    going.replace(prompt + whole[:13])
    assert going.more(3, 10, WARM) == whole[13:23]
    assert Text(engine, prompt + whole[:13]).more(1, 10, WARM) == whole[13:23]


def test_a_generation_leaves_no_sampling_to_the_next(engine: OnnxRuntimeEngine) -> None:
    prompt = random_prompt(10, 4)
    going = Text(engine, prompt)
    going.more(4, 10, WARM)
    going.replace(prompt)
    assert going.more(4, NUM_TOKENS, GREEDY) == text(engine, prompt, 0, GREEDY)


def test_a_batch_draws_what_each_sequence_draws_alone(engine: OnnxRuntimeEngine) -> None:
    prompts, samplings = [random_prompt(9, 5)] * 3, [replace(WARM, seed=seed) for seed in (1, 2, 1)]
    tokens = together(engine, prompts, samplings, [3, 1, 3])
    solo = [text(engine, prompts[0], 0, sampling) for sampling in samplings]
    assert tokens == solo
    assert solo[0] == solo[2] != solo[1]
