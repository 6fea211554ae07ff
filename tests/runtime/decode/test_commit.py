"""The commit routine: which token ends a generation, why, and what is kept of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.decode.commit import Commit
from slipstream.runtime.text.codec import TextStream
from tests.support.fakes import make_codec
from tests.support.pairs import EOS, SPECIAL_TOKENS

CODEC = make_codec()
TURN_END = SPECIAL_TOKENS.index("<turn|>")


def ids(text: str) -> list[int]:
    return CODEC.encode_more(text)


def commit(stop: tuple[str, ...] = (), cap: int = 100, room: int = 100) -> Commit:
    stream = TextStream(CODEC, stop)
    return Commit(stream, stop_token_ids=(EOS, TURN_END), max_new_tokens=cap, context_room=room)


def test_tokens_go_on_until_something_ends_them() -> None:
    c = commit()
    chunk = c.take(ids("xyz"))
    assert (chunk.text, chunk.token_ids, c.finish_reason) == ("xyz", ids("xyz"), None)
    assert c.take(ids("w")).text == "w"
    assert (c.text, c.token_ids) == ("xyzw", ids("xyzw"))


@pytest.mark.parametrize("stop_token", [EOS, TURN_END])
def test_any_stop_token_ends_and_is_kept_last(stop_token: int) -> None:
    c = commit()
    chunk = c.take([*ids("xy"), stop_token, *ids("zw")])
    assert c.finish_reason == "stop_token"
    assert chunk.token_ids == c.token_ids == [*ids("xy"), stop_token]
    assert chunk.text == c.text == "xy"


def test_a_special_token_that_is_no_stop_token_does_not_end() -> None:
    c = commit()
    c.take([SPECIAL_TOKENS.index("<|turn>"), *ids("x")])
    assert (c.finish_reason, c.text) == (None, "x")


def test_a_stop_string_ends_at_the_token_that_completes_it() -> None:
    c = commit(stop=("yz",))
    chunk = c.take(ids("xyzw"))
    assert c.finish_reason == "stop_string"
    assert (chunk.text, chunk.token_ids) == ("x", ids("xyz"))
    assert (c.text, c.token_ids) == ("x", ids("xyz"))


def test_a_stop_string_over_two_calls_is_found_and_its_start_never_emitted() -> None:
    c = commit(stop=("yz",))
    assert c.take(ids("xy")).text == "x"
    assert c.take(ids("zw")).text == ""
    assert (c.text, c.token_ids, c.finish_reason) == ("x", ids("xyz"), "stop_string")


def test_a_stop_string_inside_one_token_ends_there() -> None:
    c = commit(stop=("h",))
    c.take(ids("xthex"))
    assert (c.text, c.token_ids, c.finish_reason) == ("xt", ids("xthe"), "stop_string")


def test_the_cap_ends_at_the_last_token_it_allows() -> None:
    c = commit(cap=2)
    chunk = c.take(ids("xyz"))
    assert (c.finish_reason, chunk.text, chunk.token_ids) == ("length", "xy", ids("xy"))


def test_the_context_end_ends_at_the_last_token_that_fits() -> None:
    c = commit(room=2)
    chunk = c.take(ids("xyz"))
    assert (c.finish_reason, chunk.text, chunk.token_ids) == ("context", "xy", ids("xy"))


def test_cap_and_context_end_together_are_reported_as_length() -> None:
    c = commit(cap=2, room=2)
    c.take(ids("xyz"))
    assert c.finish_reason == "length"


def test_a_stop_token_at_the_cap_is_a_stop_token() -> None:
    c = commit(cap=3, room=3)
    c.take([*ids("xy"), EOS])
    assert c.finish_reason == "stop_token"


def test_a_stop_string_at_the_cap_is_a_stop_string() -> None:
    c = commit(stop=("yz",), cap=3, room=3)
    c.take(ids("xyz"))
    assert (c.finish_reason, c.text) == ("stop_string", "x")


def test_a_stop_string_that_only_the_end_makes_visible_is_a_stop_string() -> None:
    """Byte tokens at the cap: their text is decoded, and searched, when the cap ends the run."""
    c = commit(stop=("€",), cap=4)
    c.take(ids("x€"))
    assert (c.finish_reason, c.text, c.token_ids) == ("stop_string", "x", ids("x€"))


def test_a_stop_token_wins_over_a_stop_string_that_ends_with_it() -> None:
    c = commit(stop=("€",))
    c.take([*ids("x€"), EOS])
    assert (c.finish_reason, c.text) == ("stop_token", "x")


def test_text_held_back_for_a_stop_string_comes_at_a_stop_token() -> None:
    c = commit(stop=("yzw",))
    assert c.take(ids("xyz")).text == "x"
    assert c.take([EOS]).text == "yz"
    assert (c.text, c.finish_reason) == ("xyz", "stop_token")


def test_text_held_back_for_a_stop_string_comes_at_the_cap() -> None:
    c = commit(stop=("yzw",), cap=3)
    assert c.take(ids("xyz")).text == "xyz"
    assert c.finish_reason == "length"


def test_incomplete_utf8_comes_at_the_end_as_the_full_decode_has_it() -> None:
    c = commit(cap=3)
    cut = ids("x€")[:3]
    assert c.take(cut).text == CODEC.decode(cut)


def test_cancel_gives_what_was_held_back_and_keeps_every_token() -> None:
    c = commit(stop=("yzw",))
    c.take(ids("xyz"))
    chunk = c.end("cancelled")
    assert (chunk.text, chunk.token_ids) == ("yz", [])
    assert (c.text, c.token_ids, c.finish_reason) == ("xyz", ids("xyz"), "cancelled")


def test_cancel_before_any_token_is_empty() -> None:
    c = commit()
    chunk = c.end("cancelled")
    assert (chunk.text, chunk.token_ids, c.text, c.token_ids) == ("", [], "", [])


def test_room_is_the_smaller_of_cap_and_context() -> None:
    c = commit(cap=5, room=4)
    assert c.room == 4
    c.take(ids("x"))
    assert c.room == 3
    assert commit(cap=3, room=4).room == 3


LETTERS = st.lists(st.sampled_from([*ids("abcde"), *ids("the"), EOS]), max_size=12)


@settings(deadline=None, max_examples=200)
@given(LETTERS, st.lists(st.integers(1, 5), max_size=12), st.integers(1, 12), st.integers(1, 12))
def test_how_tokens_are_grouped_into_calls_changes_nothing(
    tokens: list[int], sizes: list[int], cap: int, room: int
) -> None:
    whole, parts = commit(("ab", "c"), cap, room), commit(("ab", "c"), cap, room)
    chunk = whole.take(tokens)
    chunks, start = [], 0
    for size in [*sizes, len(tokens)]:
        if parts.finish_reason is None and tokens[start : start + size]:
            chunks.append(parts.take(tokens[start : start + size]))
            start += size
    assert (parts.token_ids, parts.text, parts.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
    assert "".join(c.text for c in chunks) == chunk.text == whole.text
    assert [token for c in chunks for token in c.token_ids] == chunk.token_ids == whole.token_ids


@settings(deadline=None, max_examples=200)
@given(LETTERS, st.integers(1, 12), st.integers(1, 12))
def test_nothing_after_the_end_is_kept(tokens: list[int], cap: int, room: int) -> None:
    c = commit((), cap, room)
    c.take(tokens)
    num_until_stop = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    expected = tokens[: min(num_until_stop, cap, room)]
    assert c.token_ids == expected
    assert c.text == CODEC.decode(expected)
    assert len(c.token_ids) + c.room == min(cap, room)
