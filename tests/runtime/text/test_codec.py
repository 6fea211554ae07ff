"""Prompts to ids with one BOS; ids to a stream that never steps back and never shows a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.runtime.errors import BundleError, RequestError
from slipstream.runtime.text.codec import TextCodec, TextStream
from tests.support.fakes import make_codec
from tests.support.pairs import BOS, SPECIAL_TOKENS, VOCAB_SIZE, make_tokenizer

CODEC = make_codec()
NUM_TOKENS: int = make_tokenizer().get_vocab_size()
FIRST_BYTE = len(SPECIAL_TOKENS)
LETTERS = CODEC.encode_more("abc")


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def release(ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What push returns for each id until a stop string, then finish; and whether one was found."""
    stream, texts = TextStream(CODEC, stops), []
    for token in ids:
        texts.append(stream.push(token))
        if stream.stopped:
            break
    texts.append(stream.finish())
    return texts, stream.stopped


# Prompts


@pytest.mark.parametrize("prefix", ["", "<bos>", "<bos><bos>", "<bos><bos><bos>"])
def test_a_prompt_starts_with_exactly_one_bos(prefix: str) -> None:
    ids = CODEC.encode_prompt(f"{prefix}the sea")
    assert ids == [BOS, *CODEC.encode_more("the sea")]
    assert ids.count(BOS) == 1


@pytest.mark.parametrize("prompt", ["", "<bos>", "<bos><bos>"])
def test_an_empty_prompt_is_one_bos(prompt: str) -> None:
    assert CODEC.encode_prompt(prompt) == [BOS]


def test_a_prompt_is_encoded_as_the_tokenizer_does() -> None:
    text = "the é and €\n"
    assert CODEC.encode_prompt(text) == make_tokenizer().encode(text).ids


def test_encode_more_adds_no_bos() -> None:
    assert BOS not in CODEC.encode_more("the sea")
    assert CODEC.encode_more("") == []


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80\ud800"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="the prompt is not valid Unicode"):
        CODEC.encode_prompt(text)
    with pytest.raises(RequestError, match="the prompt is not valid Unicode"):
        CODEC.encode_more(text)


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_valid_text_survives_the_round_trip(text: str) -> None:
    if "▁" not in text and not any(token in text for token in SPECIAL_TOKENS):
        assert CODEC.decode(CODEC.encode_prompt(text)) == text


# Streams

RUNS = st.one_of(
    st.integers(0, NUM_TOKENS - 1).map(lambda token: [token]),
    st.sampled_from(["é", "€", "😀", "日本"]).map(lambda text: byte_ids(text.encode())),  # complete runs
    st.binary(min_size=1, max_size=6).map(byte_ids),  # mostly invalid ones
    st.sampled_from(range(len(SPECIAL_TOKENS))).map(lambda token: [token]),
)
IDS = st.lists(RUNS, max_size=12).map(lambda runs: [token for run in runs for token in run])


@settings(deadline=None, max_examples=400)
@given(IDS)
@example([*byte_ids(b"\xe2"), SPECIAL_TOKENS.index("<turn|>"), *byte_ids(b"\x82\xac"), *LETTERS])
@example([*byte_ids("€".encode()), *byte_ids(b"\xff"), *LETTERS])
def test_the_stream_joins_to_the_decode_of_all_ids(ids: list[int]) -> None:
    texts, _ = release(ids)
    assert "".join(texts) == CODEC.decode(ids)


@settings(deadline=None, max_examples=200)
@given(IDS)
def test_the_stream_never_steps_back(ids: list[int]) -> None:
    """What came out so far begins the decode of all ids, whatever is still to come."""
    texts, _ = release(ids)
    full, emitted = CODEC.decode(ids), ""
    for text in texts:
        emitted += text
        assert full.startswith(emitted)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(RUNS, st.integers(NUM_TOKENS, VOCAB_SIZE - 1).map(lambda token: [token])), max_size=8))
@example([byte_ids(b"\xe2"), [NUM_TOKENS], byte_ids(b"\x82\xac")])
def test_ids_that_the_tokenizer_lacks_leave_no_text_and_split_none(runs: list[list[int]]) -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    ids = [token for run in runs for token in run]
    texts, _ = release(ids)
    assert "".join(texts) == CODEC.decode(ids)


def test_incomplete_utf8_is_held_back() -> None:
    stream = TextStream(CODEC)
    assert [stream.push(token) for token in byte_ids("€".encode())] == ["", "", ""]
    assert stream.push(LETTERS[0]) == "€a"


def test_a_special_token_in_a_run_of_bytes_does_not_cut_it() -> None:
    first, *rest = byte_ids("€".encode())
    texts, _ = release([first, BOS, *rest, LETTERS[0]])
    assert texts == ["", "", "", "", "€a", ""]


def test_an_invalid_run_is_decoded_at_the_end() -> None:
    ids = byte_ids("€".encode())[:2]
    texts, _ = release(ids)
    assert texts == ["", "", CODEC.decode(ids)]
    assert "�" in texts[-1]


# Stop strings

STOP_TEXT = st.text(alphabet="ab the€\n", max_size=24)
STOPS = st.lists(st.text(alphabet="abthe€\n ", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def cut_at_first_stop(ids: list[int], stops: tuple[str, ...]) -> tuple[str, bool]:
    """The decoded text, grown piece by piece and cut before the stop string that is complete first."""
    for size in range(1, len(ids) + 1):
        if size == len(ids) or CODEC.splits_text(ids[size - 1]):
            text = CODEC.decode(ids[:size])
            starts = [text.index(stop) for stop in stops if stop in text]
            if starts:
                return text[: min(starts)], True
    return CODEC.decode(ids), False


@settings(deadline=None, max_examples=400)
@given(STOP_TEXT, STOPS)
@example("aab", ("ab",))
@example("abab", ("abb", "aba"))
@example("the", ("he", "the"))
@example("a€a", ("€a",))
def test_text_is_cut_before_the_first_stop_string(text: str, stops: tuple[str, ...]) -> None:
    ids = CODEC.encode_more(text)
    texts, stopped = release(ids, stops)
    assert ("".join(texts), stopped) == cut_at_first_stop(ids, stops)


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="abc", max_size=20), st.text(alphabet="abc", min_size=1, max_size=4))
def test_one_stop_string_cuts_where_find_finds_it(text: str, stop: str) -> None:
    texts, stopped = release(CODEC.encode_more(text), (stop,))
    assert "".join(texts) == text.partition(stop)[0]
    assert stopped == (stop in text)


@settings(deadline=None, max_examples=300)
@given(STOP_TEXT, STOPS)
def test_held_back_is_exactly_what_may_begin_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    """So no start of one is emitted early, and nothing else waits."""
    stream, emitted, decoded = TextStream(CODEC, stops), "", ""
    ids = CODEC.encode_more(text)
    for index, token in enumerate(ids):
        emitted += stream.push(token)
        if stream.stopped:
            break
        if CODEC.splits_text(token):
            decoded = CODEC.decode(ids[: index + 1])
        starts = [stop[:size] for stop in stops for size in range(1, len(stop)) if decoded.endswith(stop[:size])]
        assert decoded == emitted + max(starts, key=len, default="")


def test_text_that_only_looked_like_a_stop_string_comes_late_but_whole() -> None:
    texts, stopped = release(CODEC.encode_more("xabx"), ("abc",))
    assert texts == ["x", "", "", "abx", ""]
    assert not stopped


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(CODEC, ("b",))
    assert [stream.push(token) for token in CODEC.encode_more("ab")] == ["a", ""]
    assert stream.stopped
    assert stream.finish() == ""


# Tokenizer files


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json can't be loaded by tokenizers: "):
        TextCodec(path, BOS)


def test_a_missing_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json can't be loaded by tokenizers: "):
        TextCodec(tmp_path / "tokenizer.json", BOS)


def test_a_tokenizer_without_the_bos_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    make_tokenizer().save(str(path))
    with pytest.raises(BundleError, match=rf"tokenizer\.json has no token {NUM_TOKENS}, which bos_token_id names"):
        TextCodec(path, NUM_TOKENS)


def test_the_bos_token_is_named_by_the_tokenizer() -> None:
    assert (CODEC.bos_token, CODEC.bos_token_id) == ("<bos>", BOS)


def test_truncation_and_padding_of_the_file_do_not_reach_prompts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    text = "the cat and the dog " * 5
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.enable_truncation(12)
    tokenizer.save(str(tmp_path / "short.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=512)
    tokenizer.save(str(tmp_path / "long.json"))
    for name in ("short.json", "long.json"):
        assert TextCodec(tmp_path / name, BOS).encode_more(text) == expected, name
