"""One reader for every JSON that a user can hand in: it answers with a value or with JsonError, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.runtime.bundle.json_reader import JsonError, parse_json, read_object


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"{", "is not JSON: Expecting property name", id="cut off"),
        pytest.param(b"", "is not JSON: Expecting value", id="empty"),
        pytest.param(b"1" * 5000, "a number has 5000 digits", id="a number of 5000 digits"),
        pytest.param(b'{"a": -' + b"1" * 4301 + b"}", "a number has 4302 digits", id="a long number further in"),
        pytest.param(b"1e400", "1e400 is beyond what a float64 holds", id="a number that overflows"),
        pytest.param(b"[NaN]", "NaN is no JSON number", id="NaN"),
        pytest.param(b'{"a": -Infinity}', "-Infinity is no JSON number", id="infinity"),
        pytest.param(b"[" * 100_000, "nested too deeply", id="deep nesting"),
        pytest.param(b'{"a":' * 100_000, "nested too deeply", id="deep objects"),
        pytest.param(b'{"a": 1, "a": 2}', "names 'a' twice", id="a name twice"),
        pytest.param(b'"\xff"', "is not UTF-8 text", id="other bytes than UTF-8"),
        pytest.param('{"a": 1}'.encode("utf-16"), "is not UTF-8 text", id="UTF-16"),
        pytest.param(rb'["\ud800"]', "half of a character", id="a lone surrogate"),
        pytest.param(b'"a\nb"', "is not JSON: Invalid control character", id="a line break in a string"),
    ],
)
def test_what_is_not_json_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(JsonError, match=message):
        parse_json(content)


def test_a_byte_order_mark_is_passed_over() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert parse_json('\ufeff"x"') == "x"


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_json(rb'"\ud83d\ude00"') == "\U0001f600"


@pytest.mark.parametrize("content", ["[]", "1", "null", '"{}"'])
def test_an_object_is_told_from_other_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(JsonError, match="a JSON object is expected"):
        read_object(tmp_path / "x.json")


def test_an_object_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none.json")


def test_a_link_that_leads_nowhere_is_not_an_absent_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("gone.json")
    with pytest.raises(JsonError, match=r"is a link that leads nowhere, to gone.json"):
        read_object(tmp_path / "x.json")


def test_a_folder_is_no_json_file(tmp_path: Path) -> None:
    with pytest.raises(JsonError, match="can't be read: Is a directory"):
        read_object(tmp_path)
