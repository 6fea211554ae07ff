"""What verify says of drawn text: nothing missed where it is right, and each way to be wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import load
from slipstream.export.verify import sampled
from slipstream.export.verify.reference import Reference
from slipstream.export.verify.report import DraftCheck, Report
from slipstream.export.verify.sampled import check_first_drafts, check_sampled
from slipstream.runtime.ort.backend import OnnxRuntimeBackend
from tests.support.pairs import random_prompt

DEMO = Path(__file__).parents[3] / "export" / "demo_pair"


def report_of(*checks: Any) -> Report:
    return Report(1e-4, (), DraftCheck(1, 1, ()), (), tuple(checks))


def test_drafted_drawn_text_is_plain_drawn_text(bundle_folder: Callable[[str], Path]) -> None:
    with load(bundle_folder("edge")) as pair:
        prompts = [random_prompt(length, length) for length in (5, 20, 40)]
        checks = [check_sampled(pair, prompts, 20, k) for k in (1, 2, 4, 7)]
    assert [check.differs_from_plain for check in checks] == [()] * 4
    assert (checks[0].num_prompts, checks[0].num_tokens) == (3, 60)
    assert report_of(*checks).failures == []


def test_drafts_that_change_the_text_are_a_miss(
    bundle_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if drafts were accepted whatever the target draws."""
    run = OnnxRuntimeBackend._run_round

    def accepting(self: OnnxRuntimeBackend, call: Any, choice: Any) -> None:
        run(self, call, choice)
        if call.inputs.arrays["commit_limit"][0] > 1:
            call.own_token[0, 0] = call.draft.array[0, 0]

    monkeypatch.setattr(OnnxRuntimeBackend, "_run_round", accepting)
    with load(bundle_folder("edge")) as pair:
        check = check_sampled(pair, [random_prompt(9, 1)], 20, 3)
    (line,) = report_of(check).failures
    assert line == "K=3: drawn text differs from the same rows with drafts rejected in prompts [0]"


def test_first_drafts_of_the_demo_pair_are_accepted_nearly_as_often_as_can_be(
    bundle_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "_DRAFTS_EACH", 24)
    reference = Reference(DEMO / "target", DEMO / "assistant", "float32")
    with load(bundle_folder("demo")) as pair:
        prompts = [
            [2, *pair.codec.encode_more(text)] for text in ("tell me about a fox", "a poem of the sea", "an owl")
        ]
        found = check_first_drafts(pair, reference, prompts)
    assert found.num_drafts == 72
    assert found.possible > 0.3
    sigma = np.sqrt(found.possible * (1 - found.possible) / found.num_drafts)
    assert found.accepted > 0.9 * found.possible - 2 * sigma


def test_the_most_there_could_be_is_1_where_both_draw_from_one_law(
    bundle_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "_DRAFTS_EACH", 4)
    reference = Reference(DEMO / "target", DEMO / "assistant", "float32")
    monkeypatch.setattr(reference, "draft", lambda ids, *_: [reference.logits(ids)[-1]])
    with load(bundle_folder("demo")) as pair:
        found = check_first_drafts(pair, reference, [[2, *pair.codec.encode_more("a fox")]])
    assert found.possible == pytest.approx(1)
