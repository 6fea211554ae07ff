"""Requests that look at the whole vocabulary: drafted text is plain text, beside others or alone; logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import GenerationSettings, Pair, load
from slipstream.export.verify.reference import Reference
from slipstream.runtime.errors import RequestError

DEMO = Path(__file__).parents[2] / "export" / "demo_pair"
PROMPTS = ["the fox and the lantern", "z" * 20]
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {40: -100, 300: 3.5}},
    "all of the vocabulary": {"temperature": 1.0, "top_k": 0, "seed": 3},
    "drawn and penalized": {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2, "top_p": 0.9},
    "logprobs": {"logprobs": 5},
    "logprobs of drawn text": {"logprobs": 0, "temperature": 1.0, "seed": 5},
}
PLAIN = GenerationSettings(num_draft_tokens=0, max_new_tokens=30)


@pytest.fixture(scope="module", params=["edge", "dense"])
def pair(request: pytest.FixtureRequest, bundle_folder: Callable[[str], Path]) -> Pair:
    return load(bundle_folder(request.param), num_slots=4)


@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_text_is_plain_text(name: str, pair: Pair) -> None:
    for prompt in PROMPTS:
        plain = pair.generate(prompt, replace(PLAIN, **SETTINGS[name]))
        for k in (1, 2, 4, 7, None):
            drafted = pair.generate(prompt, replace(PLAIN, num_draft_tokens=k, **SETTINGS[name]))
            assert drafted.token_ids == plain.token_ids
            assert [each.token for each in drafted.logprobs] == (drafted.token_ids if "logprobs" in name else [])
            for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_settings_change_the_text(pair: Pair) -> None:
    texts = {tuple(pair.generate(PROMPTS[0], replace(PLAIN, **each)).token_ids) for each in SETTINGS.values()}
    assert len(texts) >= 5


def test_neighbours_go_the_way_they_go_alone(pair: Pair) -> None:
    """All kinds of requests at once, and each as it is by itself."""
    asked = [{}, {"temperature": 1.0, "seed": 9}, *SETTINGS.values()]
    requests = [(prompt, replace(PLAIN, num_draft_tokens=3, **each)) for each in asked for prompt in PROMPTS[:2]]
    alone = [pair.generate(prompt, each).token_ids for prompt, each in requests]
    streams = [pair.stream(prompt, each) for prompt, each in requests]
    assert [stream.finish().token_ids for stream in streams] == alone


def test_a_penalty_of_one_text_is_none_of_the_next(pair: Pair) -> None:
    before = pair.generate(PROMPTS[0], PLAIN).token_ids
    biased = replace(PLAIN, logit_bias={before[0]: -100}, presence_penalty=2)
    first = pair.generate(PROMPTS[0], biased)
    assert first.token_ids != before
    assert pair.generate(PROMPTS[0], biased).token_ids == first.token_ids, "counts begin anew"
    assert pair.generate(PROMPTS[0], PLAIN).token_ids == before
    assert pair.generate(PROMPTS[0], replace(PLAIN, logprobs=0)).token_ids == before


def test_chunks_have_the_logprobs_of_their_tokens(pair: Pair) -> None:
    with pair.stream(PROMPTS[0], replace(PLAIN, num_draft_tokens=3, logprobs=2)) as stream:
        chunks = list(stream)
    assert all([each.token for each in chunk.logprobs] == chunk.token_ids for chunk in chunks)
    assert all(len(each.top) == 2 for each in stream.result.logprobs)
    assert stream.result.to_dict()["logprobs"][0]["token"] == stream.result.token_ids[0]


def test_logprobs_are_those_of_transformers(bundle_folder: Callable[[str], Path]) -> None:
    reference = Reference(DEMO / "target", DEMO / "assistant", "float32")
    with load(bundle_folder("demo")) as demo:
        greedy = GenerationSettings(num_draft_tokens=4, max_new_tokens=40, logprobs=20)
        for asked in (greedy, replace(greedy, temperature=1.0, seed=1)):
            prompt = demo.codec.encode_prompt("Write a poem of the sea")
            result = demo.generate("Write a poem of the sea", asked)
            rows = reference.logits([*prompt, *result.token_ids])[len(prompt) - 1 : -1]
            expected = torch.log_softmax(torch.from_numpy(rows), -1).numpy()
            for row, found in zip(expected, result.logprobs, strict=True):
                assert found.logprob == pytest.approx(row[found.token], abs=1e-4)
                order = np.argsort(-row, kind="stable")[:20]
                np.testing.assert_allclose([value for _, value in found.top], row[order], atol=1e-4)
                assert len({token for token, _ in found.top} & set(order.tolist())) >= 19, "near-ties at the end aside"


def test_engines_that_have_candidates_only_say_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.engine, "has_whole_rows", False)
    for each in SETTINGS.values():
        with pytest.raises(RequestError, match="whole vocabulary for each token, which these engines don't"):
            pair.generate(PROMPTS[0], replace(PLAIN, **each))
    assert pair.generate(PROMPTS[0], replace(PLAIN, temperature=1.0, top_k=64)).token_ids
