"""The shipped pair: transformers' greedy text, acceptance, and text that is worth showing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from slipstream import GenerationSettings, Result, load
from slipstream.demo import PROMPTS
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.verify import verify
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.results import total_acceptance
from slipstream.runtime.session import Pair
from tests.demo_pair import corpus
from tests.support.progress import SilentProgress

LENGTHS = (12, 20, 31, 32, 33, 40, 65, 100, 200, 960)  # round the window of 32, and up to the context end of 1024


@pytest.fixture(scope="module")
def pair(bundle_folder: Callable[[str], Path]) -> Pair:
    return load(bundle_folder("demo"))


def held_out_prompts(count: int) -> list[list[dict[str, str]]]:
    random = Random(11)
    return [corpus.conversation(random, held_out=True)[:1] for _ in range(count)]


def conversations_cut_to(pair: Pair, lengths: tuple[int, ...], count: int) -> list[list[int]]:
    """Prompts of real text: chained conversations, cut to each length in turn."""
    random = Random(12)
    prompts = []
    for number in range(count):
        length = lengths[number % len(lengths)]
        ids: list[int] = []
        while len(ids) < length:
            text = pair.chat_text(corpus.conversation(random))
            ids += pair.codec.encode_more(text.removeprefix("<bos>")) if ids else pair.codec.encode_prompt(text)
        prompts.append(ids[:length])
    return prompts


@pytest.mark.slow
def test_prompts_round_the_window_and_up_to_the_end_equal_transformers_for_every_k(
    pair: Pair, pair_folder: Callable[[str], tuple[Path, Path]], bundle_folder: Callable[[str], Path]
) -> None:
    """``slipstream verify`` takes as many prompts as one likes."""
    prompts = conversations_cut_to(pair, LENGTHS, len(LENGTHS))
    bundle = open_bundle(bundle_folder("demo"))
    report = verify(bundle, Reference(*pair_folder("demo"), "float32"), prompts, 64, [0, 1, 2, 4, 7], SilentProgress())
    assert report.failures == []
    assert max(map(len, prompts)) + 64 == bundle.manifest.max_length
    assert [check.num_tokens for check in report.greedy] == [len(prompts) * 64] * 5
    assert max(check.relative for check in report.logits) <= 1e-4


@pytest.fixture(scope="module")
def answers(pair: Pair) -> list[Result]:
    """With a fixed K: chosen ones offer the deep positions to sequences that accept well only."""
    return [pair.generate(messages, GenerationSettings(num_draft_tokens=4)) for messages in held_out_prompts(24)]


def test_first_draft_position_is_accepted_at_least_seven_times_in_ten(answers: list[Result]) -> None:
    shares = total_acceptance(answers).by_position
    assert shares[0] >= 0.7, shares
    assert shares == sorted(shares, reverse=True)


def test_answers_end_by_themselves_and_do_not_loop(answers: list[Result]) -> None:
    for result in answers:
        assert result.finish_reason == "stop_token", result.text
        sentences = [s.strip() for s in result.text.split(".") if s.strip()]
        assert len(sentences) >= 4, result.text
        assert len(set(sentences)) == len(sentences), result.text
        words = result.text.split()
        assert max(Counter(zip(words, words[1:], words[2:], words[3:], strict=False)).values()) <= 2, result.text
        assert all(first != second for first, second in pairwise(words)), result.text


def test_a_story_keeps_to_what_was_asked(pair: Pair) -> None:
    """The asked-for hero and thing come back beyond the sliding window."""
    for prompt, words in zip(PROMPTS, (("fox", "lantern"), ("bear", "rabbit", "kite"), ("lighthouse",)), strict=True):
        text = pair.generate([{"role": "user", "content": prompt}]).text
        assert all(word in text for word in words), text


def test_drafting_changes_no_answer(pair: Pair, answers: list[Result]) -> None:
    for messages, drafted in zip(held_out_prompts(24), answers, strict=True):
        for k in (0, 1, 7):
            plain = pair.generate(messages, GenerationSettings(num_draft_tokens=k))
            assert plain.token_ids == drafted.token_ids
            assert plain.text == drafted.text
