"""Thoughts apart from the answer while tokens are decoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.decode.commit import Commit
from slipstream.runtime.text.codec import TextCodec, TextStream
from tests.support.fakes import make_codec
from tests.support.pairs import BOS, make_tokenizer

TOKENS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(TOKENS)
    path = tmp_path_factory.mktemp("thoughts") / "tokenizer.json"
    tokenizer.save(str(path))
    return TextCodec(Path(path), BOS)


def release(codec: TextCodec, text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """Answer pieces and thought of a text's tokens."""
    stream = TextStream(codec, stops)
    pieces = [stream.push(token) for token in codec.encode_more(text)]
    return [*pieces, stream.finish()], stream.thought


@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("plain", "plain", ""),
        ("<|channel>thought\nab<channel|>cd", "cd", "ab"),
        ("<|channel>thought\n<channel|>cd", "cd", ""),
        ("a<|channel>thought\nb<channel|>c<|channel>thought\nd<channel|>e", "ace", "bd"),
        ("<|channel>thought\nab", "", "ab"),
        ("<|channel>tho", "", ""),
        ("<|channel>other\nab\ncd<channel|>", "", "ab\ncd"),
        ("a<channel|>b", "ab", ""),
        ("<|channel>thought\nab<|tool_call>call:f{}<tool_call|>", "call:f{}", "ab"),
        ("<|channel>thought\né€<channel|>😀", "😀", "é€"),
    ],
)
def test_a_thought_is_told_from_the_answer(codec: TextCodec, text: str, answer: str, thought: str) -> None:
    pieces, found = release(codec, text)
    assert ("".join(pieces), found) == (answer, thought)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["<|channel>", "<channel|>", "thought\n", "the é", "€", "a"]), max_size=10))
def test_streamed_pieces_join_to_the_decode_of_what_is_no_thought(codec: TextCodec, pieces: list[str]) -> None:
    ids = codec.encode_more("".join(pieces))
    is_answer, thinks = [], False
    for token in ids:
        thinks = codec.thought_edges.get(token, thinks)
        is_answer.append(not thinks)
    expected = codec.decode([token for token, kept in zip(ids, is_answer, strict=True) if kept])
    assert "".join(release(codec, "".join(pieces))[0]) == expected


def test_a_stop_string_is_looked_for_in_the_answer_alone(codec: TextCodec) -> None:
    pieces, thought = release(codec, "<|channel>thought\nxyx<channel|>aby", ("y",))
    assert ("".join(pieces), thought) == ("ab", "xyx")


def test_chunks_join_to_thought_and_text(codec: TextCodec) -> None:
    commit = Commit(TextStream(codec), stop_token_ids=(), max_new_tokens=100, context_room=100)
    ids = codec.encode_more("<|channel>thought\nab<channel|>cd")
    chunks = [commit.take([token]) for token in ids] + [commit.end("cancelled")]
    assert "".join(chunk.thought for chunk in chunks) == "ab"
    assert "".join(chunk.text for chunk in chunks) == "cd" == commit.text


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("ab", ""),
        ("a<|channel>b", "<|channel>b"),
        ("<|channel>a<channel|>b", ""),
        ("a<channel|><|channel>", "<|channel>"),
    ],
)
def test_a_thought_that_is_open_is_found(codec: TextCodec, text: str, tail: str) -> None:
    assert list(codec.open_thought(codec.encode_more(text))) == codec.encode_more(tail)


def test_a_turn_keeps_the_tokens_that_a_template_strips(codec: TextCodec) -> None:
    ids = [BOS, *codec.encode_more("<|channel>thought\na<channel|>b<|tool_call>c<tool_call|>")]
    assert codec.decode_turn(ids, "bc") == "<|channel>thought\na<channel|>b<|tool_call>c<tool_call|>"


def test_a_turn_is_cut_as_its_answer_is(codec: TextCodec) -> None:
    ids = codec.encode_more("<|channel>thought\na<channel|>bcd")
    assert codec.decode_turn(ids, "b") == "<|channel>thought\na<channel|>b"


def test_a_tokenizer_without_channels_has_no_thoughts() -> None:
    pieces, thought = release(make_codec(), "<|channel>thought\nab<channel|>cd")
    assert ("".join(pieces), thought) == ("<|channel>thought\nab<channel|>cd", "")
