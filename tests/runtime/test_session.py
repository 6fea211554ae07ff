"""The public runtime on a real bundle: pairs, sessions, streams, threads and memory."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from slipstream import GenerationSettings, Pair, Session, SlipstreamError, load
from slipstream.runtime.backend.tensors import Memory
from slipstream.runtime.bundle.manifest import CHAT_TEMPLATE, MANIFEST
from slipstream.runtime.errors import BackendError, BusyError, ContextFullError, RequestError
from slipstream.runtime.ort.backend import OnnxRuntimeBackend, OnnxRuntimeEngine
from tests.support.pairs import BOS
from tests.support.results import RESULT_KEYS, TIMING_KEYS

MAX_LENGTH = 160
PROMPT = "the fox and the lantern"
OTHER = "z" * 40  # unrelated, and past the sliding window of 16
PLAIN = GenerationSettings(num_draft_tokens=0, max_new_tokens=24)
DRAFTED = GenerationSettings(num_draft_tokens=3, max_new_tokens=24)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def folder(bundle_folder: Callable[[str], Path]) -> Path:
    return bundle_folder("edge")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load(folder)


@pytest.fixture
def session(pair: Pair) -> Session:
    return pair.session()


@pytest.fixture
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that take long enough to be met in the middle of a generation."""
    run = OnnxRuntimeBackend.round

    def slow(self: OnnxRuntimeBackend, *arguments: Any) -> Any:
        sleep(0.01)
        return run(self, *arguments)

    monkeypatch.setattr(OnnxRuntimeBackend, "round", slow)


def fed_at_once(pair: Pair, token_ids: list[int]) -> Session:
    """A session that holds these ids as its prompt: an answer's text alone may encode to other ids."""
    session = pair.session()
    session._tokens = list(token_ids)
    return session


def fill(session: Session, settings: GenerationSettings) -> None:
    """Generate until the context ends, going on after stop tokens and caps."""
    while session.generate(settings).finish_reason != "context":
        pass


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# Results


def test_a_result_says_what_was_generated(pair: Pair) -> None:
    result = pair.generate(PROMPT, DRAFTED)
    prompt_ids = pair.codec.encode_prompt(PROMPT)
    assert prompt_ids[0] == BOS
    assert result.num_prompt_tokens == len(prompt_ids)
    assert (len(result.token_ids), result.finish_reason) == (24, "length")
    assert result.text == pair.codec.decode(result.token_ids)
    assert result.num_draft_tokens == 3
    assert len(result.acceptance.by_position) == 3
    assert len(result.token_ids) == 1 + result.acceptance.num_rounds + sum(result.acceptance.accepted)
    assert result.timings.prefill > 0
    assert 0 < result.timings.draft + result.timings.verify <= result.timings.decode


def test_k_is_chosen_when_none_is_asked_for(pair: Pair) -> None:
    result = pair.generate(PROMPT, GenerationSettings(max_new_tokens=40))
    assert result.num_draft_tokens is None
    assert len(result.acceptance.by_position) <= 3, "the bundle's K is the largest"
    assert result.token_ids == pair.generate(PROMPT, GenerationSettings(0, 40)).token_ids


def test_the_json_form_has_exactly_the_documented_keys(pair: Pair) -> None:
    content: dict[str, Any] = json.loads(json.dumps(pair.generate(PROMPT, DRAFTED).to_dict()))
    assert set(content) == set(RESULT_KEYS)
    assert set(content["timings"]) == set(TIMING_KEYS)


def test_what_a_result_says_of_its_sampling_draws_it_again(pair: Pair) -> None:
    drawn = pair.generate(PROMPT, GenerationSettings(3, 24, temperature=1.0, top_p=0.95))
    assert drawn.sampling.top_k == 64
    assert drawn.to_dict()["sampling"]["seed"] == drawn.sampling.seed
    again = GenerationSettings(0, 24, temperature=1, top_k=64, top_p=0.95, seed=drawn.sampling.seed)
    assert pair.generate(PROMPT, again).token_ids == drawn.token_ids
    assert pair.generate(PROMPT, GenerationSettings(0, 24, temperature=1.0)).sampling.seed != drawn.sampling.seed
    greedy = pair.generate(PROMPT, PLAIN)
    assert greedy.to_dict()["sampling"] is None
    assert greedy.token_ids != drawn.token_ids


def test_generating_twice_gives_the_same(pair: Pair) -> None:
    first, second = pair.generate(PROMPT, DRAFTED), pair.generate(PROMPT, DRAFTED)
    assert (first.token_ids, first.text) == (second.token_ids, second.text)


@pytest.mark.parametrize("num_draft_tokens", range(8))
def test_drafted_equals_plain(pair: Pair, num_draft_tokens: int) -> None:
    settings = GenerationSettings(num_draft_tokens=num_draft_tokens, max_new_tokens=60)
    plain = pair.generate(PROMPT, GenerationSettings(num_draft_tokens=0, max_new_tokens=60))
    assert pair.generate(PROMPT, settings).token_ids == plain.token_ids


@pytest.mark.parametrize("num_draft_tokens", range(8))
def test_the_context_can_be_filled_at_every_k(pair: Pair, num_draft_tokens: int) -> None:
    session, plain = pair.session(), pair.session()
    for each, k in ((session, num_draft_tokens), (plain, 0)):
        each.append("z" * 120)
        fill(each, GenerationSettings(num_draft_tokens=k))
    assert len(session.token_ids) == MAX_LENGTH
    assert session.token_ids == plain.token_ids


def test_a_stop_string_cuts_the_text(pair: Pair) -> None:
    text = pair.generate(PROMPT, PLAIN).text
    stop = text[len(text) // 2 :][:2]
    result = pair.generate(PROMPT, GenerationSettings(num_draft_tokens=3, max_new_tokens=24, stop=(stop,)))
    assert (result.text, result.finish_reason) == (text[: text.index(stop)], "stop_string")


# Streams


def test_a_stream_joins_to_the_result(pair: Pair) -> None:
    with pair.stream(PROMPT, DRAFTED) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == stream.result.token_ids


def test_a_running_stream_has_no_result(session: Session, slow_rounds: None) -> None:
    session.append(PROMPT)
    with session.stream(DRAFTED) as stream:
        next(stream)
        with pytest.raises(RequestError, match="the generation has no result: it has not ended"):
            _ = stream.result


def test_a_stream_closed_midway_frees_the_session(session: Session, pair: Pair, slow_rounds: None) -> None:
    """What was committed counts, read or not."""
    session.append(PROMPT)
    with session.stream(DRAFTED) as stream:
        first = next(stream)
    kept = stream.result.token_ids
    assert (stream.result.finish_reason, kept[:1]) == ("cancelled", first.token_ids)
    assert session.token_ids[-len(kept) :] == kept
    rest = session.generate(GenerationSettings(num_draft_tokens=3, max_new_tokens=24 - len(kept)))
    assert kept + rest.token_ids == pair.generate(PROMPT, DRAFTED).token_ids


def test_a_stream_dropped_midway_frees_the_session(session: Session, slow_rounds: None) -> None:
    session.append(PROMPT)
    stream = session.stream(GenerationSettings(num_draft_tokens=3, max_new_tokens=100))
    next(stream)
    del stream
    for _ in range(1000):  # the engine ends it by its next turn
        try:
            session.generate(DRAFTED)
            return
        except BusyError:
            sleep(0.005)
    raise AssertionError("the session is still busy")


def test_a_stream_closed_midway_frees_the_pair(pair: Pair) -> None:
    expected = pair.generate(OTHER, DRAFTED).token_ids
    with pair.stream(PROMPT, DRAFTED) as stream:
        next(stream)
    assert pair.generate(OTHER, DRAFTED).token_ids == expected


def test_a_stream_closed_at_once_has_a_result(session: Session) -> None:
    session.append(PROMPT)
    session.generate(DRAFTED)
    stream = session.stream(GenerationSettings(max_new_tokens=100))
    stream.close()
    assert stream.result.finish_reason in {"cancelled", "length", "context"}


def test_a_stream_closed_at_once_leaves_a_chat_that_goes_on(session: Session, pair: Pair) -> None:
    session.append([user("hi")])
    answer = session.generate(DRAFTED).text
    with session.stream(DRAFTED) as stream:
        pass
    session.append([user("more")])
    assert session.token_ids == chat_ids(pair, [user("hi"), assistant(answer + stream.result.text), user("more")])


def test_a_stream_cancelled_from_another_thread_ends_after_its_call(session: Session, slow_rounds: None) -> None:
    session.append(PROMPT)
    with session.stream(GenerationSettings(num_draft_tokens=3, max_new_tokens=100)) as stream:
        first = next(stream)
        in_thread(stream.cancel).join()
        rest = list(stream)
    assert len(rest) <= 3
    assert stream.result.finish_reason == "cancelled"
    assert [token for chunk in [first, *rest] for token in chunk.token_ids] == stream.result.token_ids
    assert "".join(chunk.text for chunk in [first, *rest]) == stream.result.text


def test_the_engine_does_not_wait_for_who_reads(pair: Pair) -> None:
    expected = pair.generate(PROMPT, DRAFTED).token_ids
    stream = pair.stream(PROMPT, DRAFTED)
    assert pair.generate(OTHER, DRAFTED).token_ids, "there is one slot, and it is free again"
    assert [token for chunk in stream for token in chunk.token_ids] == stream.result.token_ids == expected


# Turns


def test_generating_on_without_a_prompt_equals_one_longer_generation(session: Session, pair: Pair) -> None:
    session.append(PROMPT)
    parts = [session.generate(GenerationSettings(num_draft_tokens=3, max_new_tokens=n)).token_ids for n in (1, 9, 14)]
    assert list(chain.from_iterable(parts)) == pair.generate(PROMPT, DRAFTED).token_ids


def test_text_in_parts_equals_the_whole_text(session: Session, pair: Pair) -> None:
    session.append("the fox")
    session.append(" and the lantern")
    assert session.token_ids == pair.codec.encode_prompt(PROMPT)
    assert session.generate(DRAFTED).token_ids == pair.generate(PROMPT, DRAFTED).token_ids


def test_text_turns_equal_one_session_fed_everything_at_once(session: Session, pair: Pair) -> None:
    for text in (PROMPT, " the sea", " a kite"):
        session.append(text)
        before = session.token_ids
        answer = session.generate(DRAFTED).token_ids
        assert session.token_ids == before + answer
        assert fed_at_once(pair, before).generate(PLAIN).token_ids == answer
    assert session.token_ids.count(BOS) == 1


def test_chat_turns_equal_the_conversation_rendered_at_once(session: Session, pair: Pair) -> None:
    conversation: list[dict[str, str]] = []
    for text in ("hi", "the sea", "more"):
        session.append([user(text)])
        conversation.append(user(text))
        assert session.token_ids == chat_ids(pair, conversation)
        result = session.generate(GenerationSettings(num_draft_tokens=3, max_new_tokens=6))
        plain = pair.generate(conversation, GenerationSettings(num_draft_tokens=0, max_new_tokens=6))
        assert plain.token_ids == result.token_ids
        conversation.append(assistant(result.text))


def test_a_chat_answer_generated_in_two_parts_is_one_answer(session: Session, pair: Pair) -> None:
    session.append([user("hi")])
    answer = session.generate(DRAFTED).text + session.generate(DRAFTED).text
    session.append([user("more")])
    assert session.token_ids == chat_ids(pair, [user("hi"), assistant(answer), user("more")])


def test_chat_messages_after_text_are_refused(session: Session) -> None:
    session.append(PROMPT)
    with pytest.raises(RequestError, match="this session continues a text prompt: reset it before sending chat"):
        session.append([user("hi")])


def test_text_after_chat_messages_is_refused(session: Session) -> None:
    """The next messages would be rendered without it: it would vanish from the sequence."""
    session.append([user("hi")])
    with pytest.raises(RequestError, match="chat"):
        session.append(" the sea")


def test_bad_messages_leave_the_chat_as_it_was(session: Session, pair: Pair) -> None:
    session.append([user("hi")])
    with pytest.raises(RequestError, match="each needs a role and a content"):
        session.append([{"role": "user"}])
    session.append([user("more")])
    assert session.token_ids == chat_ids(pair, [user("hi"), user("more")])


def test_reset_forgets_the_conversation(session: Session, pair: Pair) -> None:
    session.append([user("hi")])
    session.generate(DRAFTED)
    session.reset()
    assert session.token_ids == []
    session.append(PROMPT)
    assert session.generate(DRAFTED).token_ids == pair.generate(PROMPT, DRAFTED).token_ids


def test_nothing_of_a_conversation_leaks_into_an_unrelated_one(folder: Path, session: Session) -> None:
    fresh = load(folder).generate(OTHER, DRAFTED)
    used = load(folder)
    for prompt in (PROMPT, "a" * 120, [user("hi"), assistant("x"), user("the sea")]):
        used.generate(prompt, GenerationSettings(num_draft_tokens=5, max_new_tokens=30))
    assert used.generate(OTHER, DRAFTED).token_ids == fresh.token_ids
    session.append(PROMPT)
    session.generate(DRAFTED)
    session.reset()
    session.append(OTHER)
    assert session.generate(DRAFTED).token_ids == fresh.token_ids


def test_sessions_do_not_see_each_other(pair: Pair) -> None:
    one, two = pair.session(), pair.session()
    one.append(PROMPT)
    two.append(OTHER)
    parts: dict[Session, list[int]] = {one: [], two: []}
    for _ in range(3):
        for session in parts:
            parts[session] += session.generate(GenerationSettings(num_draft_tokens=2, max_new_tokens=8)).token_ids
    assert parts[one] == pair.generate(PROMPT, PLAIN).token_ids
    assert parts[two] == pair.generate(OTHER, PLAIN).token_ids


# Threads


def test_a_busy_session_refuses_another_thread_at_once(session: Session) -> None:
    session.append(PROMPT)
    refused: list[str] = []

    def work() -> None:
        for call in (session.generate, session.reset, lambda: session.append("x")):
            try:
                call()
            except BusyError as error:
                refused.append(str(error))

    with session.stream(DRAFTED) as stream:
        next(stream)
        in_thread(work).join(10)
    message = "this session has a generation running: use one session for each, or wait for its end"
    assert refused == [message] * 3
    assert session.generate(DRAFTED).token_ids


def test_two_threads_on_a_session_are_answered_or_refused(session: Session) -> None:
    session.append(PROMPT)
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        try:
            outcomes.append(session.generate(GenerationSettings(num_draft_tokens=1, max_new_tokens=60)).finish_reason)
        except BusyError:
            outcomes.append("busy")

    threads = [in_thread(work) for _ in range(2)]
    for thread in threads:
        thread.join(10)
    assert sorted(outcomes) == ["busy", "length"]


def test_threads_on_a_pair_queue_and_are_all_answered_right(pair: Pair) -> None:
    prompts = [PROMPT, OTHER, "the sea", "a kite"]
    expected = [pair.generate(prompt, PLAIN).token_ids for prompt in prompts]
    answers: dict[int, list[list[int]]] = {index: [] for index in range(len(prompts))}

    def work(index: int) -> None:
        for _ in range(3):
            answers[index].append(pair.generate(prompts[index], DRAFTED).token_ids)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {index: [tokens] * 3 for index, tokens in enumerate(expected)}


def test_a_pair_in_use_lets_another_thread_wait(pair: Pair, slow_rounds: None) -> None:
    answers: list[list[int]] = []
    with pair.stream(PROMPT, PLAIN) as stream:
        next(stream)
        thread = in_thread(lambda: answers.append(pair.generate(OTHER, DRAFTED).token_ids))
        thread.join(0.05)
        assert thread.is_alive()
        list(stream)
    thread.join(10)
    assert stream.result.token_ids == pair.generate(PROMPT, PLAIN).token_ids
    assert answers == [pair.generate(OTHER, PLAIN).token_ids]


def test_a_wait_for_the_pair_ends_with_its_time_limit(pair: Pair, slow_rounds: None) -> None:
    with pair.stream(PROMPT, PLAIN) as stream:
        next(stream)
        with pytest.raises(BusyError, match=r"^other generations did not end within 0\.05 s"):
            pair.generate(OTHER, DRAFTED, timeout=0.05)
    assert pair.generate(OTHER, DRAFTED, timeout=1).token_ids


def test_a_wait_for_the_pair_can_be_cancelled(pair: Pair, slow_rounds: None) -> None:
    reasons, cancelled = list[str](), threading.Event()
    with pair.stream(PROMPT, PLAIN) as stream:
        next(stream)
        thread = in_thread(lambda: reasons.append(pair.generate(OTHER, PLAIN, cancelled=cancelled).finish_reason))
        thread.join(0.05)
        assert thread.is_alive()
        cancelled.set()
        thread.join(10)
        assert reasons == ["cancelled"]
        assert stream.generation.result is None, "the one that runs goes on"


def test_a_generation_can_be_cancelled_from_another_thread(pair: Pair, slow_rounds: None) -> None:
    cancelled = threading.Event()
    with pair.stream(PROMPT, PLAIN, cancelled=cancelled) as stream:
        next(stream)
        cancelled.set()
        list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert 0 < len(stream.result.token_ids) < PLAIN.max_new_tokens


def test_an_event_for_cancelling_is_left_as_it_is(pair: Pair) -> None:
    cancelled = threading.Event()
    for _ in range(2):
        assert len(pair.generate(PROMPT, DRAFTED, cancelled=cancelled).token_ids) == DRAFTED.max_new_tokens
    assert not cancelled.is_set()


def test_who_waits_for_a_pair_learns_that_it_was_closed(folder: Path, slow_rounds: None) -> None:
    pair, errors = load(folder), list[str]()

    def work() -> None:
        try:
            pair.generate(OTHER, DRAFTED)
        except RequestError as error:
            errors.append(str(error))

    stream = pair.stream(PROMPT, PLAIN)
    next(stream)
    thread = in_thread(work)
    thread.join(0.05)
    assert thread.is_alive()
    pair.close()
    thread.join(10)
    assert errors == ["the pair is closed: load the bundle again"]
    with pytest.raises(RequestError, match="the pair is closed"):
        list(stream)
    assert stream.result.finish_reason == "error"


def test_a_pair_that_drains_ends_what_there_is_first(folder: Path, slow_rounds: None) -> None:
    pair = load(folder)
    streams = [pair.stream(prompt, DRAFTED) for prompt in (PROMPT, OTHER)]
    pair.close(drain=True)
    assert [stream.finish().finish_reason for stream in streams] == ["length", "length"]
    with pytest.raises(RequestError, match="the pair is closed"):
        pair.generate(PROMPT, DRAFTED)


def test_sessions_on_several_threads_run_at_once(pair: Pair) -> None:
    prompts = [PROMPT, OTHER]
    answers: dict[str, list[int]] = {}

    def work(prompt: str) -> None:
        session = pair.session()
        session.append(prompt)
        answers[prompt] = session.generate(DRAFTED).token_ids

    threads = [threading.Thread(target=work, args=(prompt,), daemon=True) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {prompt: pair.generate(prompt, PLAIN).token_ids for prompt in prompts}


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GenerationSettings(num_draft_tokens=-1), "^num_draft_tokens is -1; it can be 0 to 15$"),
        (GenerationSettings(num_draft_tokens=16), "^num_draft_tokens is 16; it can be 0 to 15$"),
        (GenerationSettings(temperature=-1), "^temperature is -1; a number from 0 to 100 is expected$"),
        (GenerationSettings(temperature=float("nan")), "^temperature is nan; a number from 0 to 100 is expected$"),
        (GenerationSettings(temperature=10**400), "^temperature is 10{400}; a number from 0 to 100 is expected$"),
        (GenerationSettings(temperature=True), "^temperature is True; a number from 0 to 100 is expected$"),
        (GenerationSettings(temperature=1, top_k=-1), "^top_k is -1; 0, for all, to 384 is expected"),
        (GenerationSettings(temperature=1, top_k=385), "^top_k is 385; 0, for all, to 384 is expected"),
        (GenerationSettings(repetition_penalty=0), "^repetition_penalty is 0; a number from 0.01 to 100 is expected$"),
        (GenerationSettings(presence_penalty=3), "^presence_penalty is 3; a number from -2 to 2 is expected$"),
        (GenerationSettings(logit_bias={384: 1}), "^logit_bias has token 384; the vocabulary has 0 to 383$"),
        (GenerationSettings(logit_bias={1: 101}), "^logit_bias is 101; a number from -100 to 100 is expected$"),
        (GenerationSettings(logprobs=21), "^logprobs is 21; 0 to 20 is expected$"),
        (GenerationSettings(temperature=1, top_p=0), "^top_p is 0, which leaves no token to draw"),
        (GenerationSettings(temperature=1, top_p=1.1), r"^top_p is 1\.1; a number from 0 to 1 is expected$"),
        (GenerationSettings(temperature=1, min_p=-0.1), r"^min_p is -0\.1; a number from 0 to 1 is expected$"),
        (GenerationSettings(temperature=1, seed=-1), f"^seed is -1; 0 to {2**62 - 1} is expected$"),
        (GenerationSettings(seed=3), "^top_k, top_p, min_p and seed are for drawn tokens: give a .* above 0 too$"),
        (GenerationSettings(temperature=0, top_p=1), "are for drawn tokens: give a temperature above 0, or none$"),
        (GenerationSettings(max_seconds=-1), "^max_seconds is -1; a number from 0 to 1e\\+09 is expected$"),
        (GenerationSettings(max_new_tokens=0), "^max_new_tokens is 0; it must be at least 1$"),
        (GenerationSettings(stop=("",)), r"^stop is \(''\,\); a sequence of non-empty strings is expected$"),
        (GenerationSettings(stop=("a", "")), "a sequence of non-empty strings is expected$"),
        (GenerationSettings(stop="end"), "^stop is 'end'; a sequence of non-empty strings is expected$"),  # type: ignore[arg-type]
        (GenerationSettings(stop=(5,)), r"^stop is \(5,\); a sequence of non-empty strings"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(pair: Pair, settings: GenerationSettings, message: str) -> None:
    session = pair.session()
    session.append(PROMPT)
    with pytest.raises(RequestError, match=message):
        session.generate(settings)
    with pytest.raises(RequestError, match=message):
        pair.generate(PROMPT, settings)
    assert session.generate(DRAFTED).token_ids == pair.generate(PROMPT, DRAFTED).token_ids  # both are free again


@pytest.mark.parametrize("num_prompt_tokens", [MAX_LENGTH, MAX_LENGTH + 1, 2 * MAX_LENGTH])
def test_a_prompt_that_fills_the_context_is_refused(pair: Pair, num_prompt_tokens: int) -> None:
    message = f"^the sequence has {num_prompt_tokens} tokens and the context holds {MAX_LENGTH}, one of them new: "
    with pytest.raises(ContextFullError, match=message):
        pair.generate("z" * (num_prompt_tokens - 1), DRAFTED)
    assert len(pair.generate(PROMPT, DRAFTED).token_ids) == 24


def test_a_prompt_one_short_of_the_context_gets_one_token(pair: Pair) -> None:
    result = pair.generate("z" * (MAX_LENGTH - 2), DRAFTED)
    assert (result.num_prompt_tokens, len(result.token_ids)) == (MAX_LENGTH - 1, 1)
    assert result.finish_reason == "context"


def test_a_full_session_is_refused_and_usable_after_reset(session: Session) -> None:
    session.append("z" * 150)
    fill(session, DRAFTED)
    with pytest.raises(ContextFullError):
        session.generate()
    session.reset()
    session.append(PROMPT)
    assert session.generate(DRAFTED).finish_reason == "length"


def test_an_empty_session_is_refused(session: Session) -> None:
    with pytest.raises(RequestError, match=r"^the sequence is empty: append a prompt first$"):
        session.generate()


def test_a_refused_prompt_frees_the_pair(pair: Pair) -> None:
    for prompt in ("\ud800", [], [{"role": "user"}]):
        with pytest.raises(RequestError):
            pair.generate(prompt, DRAFTED)
    assert pair.generate(PROMPT, DRAFTED).token_ids


def test_messages_without_a_chat_template_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["files"][CHAT_TEMPLATE]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    pair = load(copy)
    with pytest.raises(RequestError, match="this bundle has no chat template: give a text prompt instead of messages"):
        pair.generate([user("hi")], DRAFTED)
    assert pair.generate(PROMPT, DRAFTED).token_ids


@pytest.mark.parametrize("num_threads", [-1, 0, 10**6])
def test_a_thread_count_that_makes_no_sense_is_refused(folder: Path, num_threads: int) -> None:
    with pytest.raises(RequestError, match=f"^num_threads is {num_threads}; this machine has {os.cpu_count()} cores$"):
        load(folder, num_threads=num_threads)


def test_every_refusal_is_a_slipstream_error() -> None:
    assert issubclass(BusyError, SlipstreamError)
    assert issubclass(ContextFullError, RequestError)
    assert issubclass(RequestError, SlipstreamError)


# Footprint


def test_memory_stays_flat_over_prompts_of_every_length(folder: Path) -> None:
    """In a process of its own: what other tests left behind moves the heap by MiB."""
    code = (
        "import gc, sys, psutil, slipstream\n"
        "pair = slipstream.load(sys.argv[1])\n"
        "def generate(count):\n"
        "    for index in range(count):\n"
        "        settings = slipstream.GenerationSettings(num_draft_tokens=index % 6, max_new_tokens=12)\n"
        "        pair.generate('z' * (1 + index * 37 % 140), settings)\n"
        "    gc.collect()\n"
        "    return psutil.Process().memory_info().rss\n"
        "before = generate(60)  # every bucket, row count and capacity once\n"
        "print(generate(200) - before)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    grown = int(subprocess.run(command, check=True, timeout=240, capture_output=True, text=True).stdout)
    assert grown < 4 * 2**20


def test_loading_and_generating_imports_nothing_that_exports(folder: Path) -> None:
    code = (
        "import sys, slipstream\n"
        "pair = slipstream.load(sys.argv[1])\n"
        "settings = slipstream.GenerationSettings(max_new_tokens=4)\n"
        "pair.generate('the sea', settings)\n"
        "pair.generate([{'role': 'user', 'content': 'hi'}], settings)\n"
        "names = 'torch transformers onnx onnx_ir onnxscript safetensors polygraphy'.split()\n"
        "found = [name for name in names if name in sys.modules]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def chat_ids(pair: Pair, messages: list[dict[str, str]]) -> list[int]:
    return pair.codec.encode_prompt(pair.chat_text(messages))


def test_a_growth_that_fails_leaves_the_pair_usable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two buffers, the first longer than the second."""
    long, settings = "the cat sat on the mat " * 6, GenerationSettings(max_new_tokens=8)
    copy_rows = Memory.copy_rows

    def fail(*arguments: Any) -> None:
        copy_rows(*arguments)
        raise BackendError("there is no memory")

    with load(folder) as pair:
        session = pair.session()
        session.append("the cat")
        session.generate(PLAIN)
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "copy_rows", fail)
            with pytest.raises(BackendError, match="no memory"):
                pair.generate(long, settings)
            session.append(long)
            with pytest.raises(BackendError, match="no memory"):
                session.generate(settings)
        with load(folder) as fresh:
            assert pair.generate(long, settings).token_ids == fresh.generate(long, settings).token_ids
            again = fresh.session()
            again._tokens = list(session._tokens)
            assert session.generate(settings).token_ids == again.generate(settings).token_ids


def test_a_closed_pair_holds_neither_graphs_nor_buffers(folder: Path) -> None:
    pair = load(folder)
    pair.generate(PROMPT, DRAFTED)
    backend = pair.new_backend()
    assert isinstance(pair.engine, OnnxRuntimeEngine)
    assert isinstance(backend, OnnxRuntimeBackend)
    tensors = [weakref.ref(tensor) for tensor in backend.cache.tensors.values()]
    graphs = [weakref.ref(graph) for graph in (pair.engine.target, *pair.engine.drafts.values())]
    assert all(reference() is not None for reference in (*tensors, *graphs))
    pair.close()
    gc.collect()
    assert all(reference() is None for reference in (*tensors, *graphs))
