"""Drafted text is plain text, token for token: many prompts, every K, greedy and drawn, in slots beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from slipstream import GenerationSettings, Pair, load
from slipstream.runtime.decode.streams import Stream
from tests.demo_pair import corpus

DRAFT_COUNTS = (1, 2, 4, 7, None)
TEMPERATURES = (0.0, 0.5, 1.0)


def texts(pair: Pair, prompts: list[list[int]], settings: GenerationSettings, k: int | None) -> list[list[int]]:
    """All at once, as far as there are slots; each prompt with its number as seed where tokens are drawn."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), 50):  # the queue holds 64
        streams = []
        for number, ids in enumerate(prompts[start : start + 50], start):
            seed = number if settings.temperature else None
            request = pair.request(replace(settings, num_draft_tokens=k, seed=seed))
            streams.append(Stream(partial(pair.submit, ids, request)))
        found += [stream.finish().token_ids for stream in streams]
    return found


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_two_hundred_prompts_at_every_k(temperature: float, bundle_folder: Callable[[str], Path]) -> None:
    with load(bundle_folder("demo"), num_slots=8) as pair:
        dice = Random(0)
        conversations = [pair.chat_text(corpus.conversation(dice)) for _ in range(200)]
        prompts = [pair.codec.encode_prompt(text)[: dice.randint(4, 60)] for text in conversations]
        settings = GenerationSettings(max_new_tokens=64, temperature=temperature)
        plain = texts(pair, prompts, settings, 0)
        for k in DRAFT_COUNTS:
            drafted = texts(pair, prompts, settings, k)
            assert [number for number in range(200) if drafted[number] != plain[number]] == [], f"K = {k}"
    assert len({tuple(ids) for ids in plain}) > 150, "texts must differ"


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_int4_of_every_block_size(block_size: int, bundle_folder: Callable[..., Path]) -> None:
    """Rows run in numbers that this CPU computes alike, batches included."""
    with load(bundle_folder("blocks", weights="int4", block_size=block_size), num_slots=4) as pair:
        dice = Random(1)
        prompts = [[2, *(dice.randint(8, 383) for _ in range(dice.randint(3, 40)))] for _ in range(20)]
        for temperature in TEMPERATURES:
            settings = GenerationSettings(max_new_tokens=24, temperature=temperature)
            plain = texts(pair, prompts, settings, 0)
            for k in DRAFT_COUNTS:
                drafted = texts(pair, prompts, settings, k)
                assert [number for number in range(20) if drafted[number] != plain[number]] == [], f"K = {k}"
