"""tokenizer.json: what it says of prompts' lengths is left out, and two of them are one if they give one text's ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from slipstream.export.checkpoint.opening import open_pair
from slipstream.runtime.errors import CheckpointError

Content = dict[str, Any]
_TEXT = "The ferry crosses the lake with letters, bread and two or three travellers. " * 3
_TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
_LENGTHS: dict[str, Any] = {
    "truncation": {"max_length": 12, "strategy": "LongestFirst", "direction": "Right", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 512},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    },
    "post_processor": {"type": "TemplateProcessing", "single": _TWICE, "pair": _TWICE, "special_tokens": {}},
}


def change(folder: Path, edit: Callable[[Content], object]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("part", _LENGTHS)
def test_nothing_in_the_file_changes_the_length_of_a_prompt(part: str, copied: tuple[Path, Path]) -> None:
    expected = open_pair(*copied).codec.encode_prompt(_TEXT)
    change(copied[0], lambda content: content.update({part: _LENGTHS[part]}))
    assert open_pair(*copied).codec.encode_prompt(_TEXT) == expected
    if part != "post_processor":  # which transformers obeys
        theirs = transformers.AutoTokenizer.from_pretrained(copied[0]).encode(_TEXT, add_special_tokens=False)
        assert theirs == expected[1:]


def test_merges_are_never_dropped_at_random(copied: tuple[Path, Path]) -> None:
    expected = open_pair(*copied).codec.encode_prompt(_TEXT)
    change(copied[0], lambda content: content["model"].update(dropout=0.9))
    assert open_pair(*copied).codec.encode_prompt(_TEXT) == expected


def as_strings(content: Content) -> None:
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


def in_a_sequence(content: Content) -> None:
    content["normalizer"] = {"type": "Sequence", "normalizers": [content["normalizer"]]}


def without_defaults(content: Content) -> None:
    for name, value in list(content["model"].items()):
        if value in (None, False):
            del content["model"][name]


def in_another_order(content: Content) -> None:
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))


def with_lengths(content: Content) -> None:
    content.update(_LENGTHS)


@pytest.mark.parametrize("edit", [as_strings, in_a_sequence, without_defaults, in_another_order, with_lengths])
def test_another_spelling_is_the_same_tokenizer(edit: Callable[[Content], None], copied: tuple[Path, Path]) -> None:
    change(copied[1], edit)
    assert open_pair(*copied).codec.encode_prompt(_TEXT)


def swapped_ids(content: Content) -> None:
    vocab = content["model"]["vocab"]
    vocab["e"], vocab["a"] = vocab["a"], vocab["e"]


def fewer_merges(content: Content) -> None:
    content["model"]["merges"].pop()


def other_byte_fallback(content: Content) -> None:
    content["model"]["byte_fallback"] = not content["model"]["byte_fallback"]


def stripped_token(content: Content) -> None:
    content["added_tokens"][-1]["lstrip"] = True


def no_normalizer(content: Content) -> None:
    content["normalizer"] = None


def other_pre_tokenizer(content: Content) -> None:
    content["pre_tokenizer"] = {"type": "Whitespace"}


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (swapped_ids, "vocabulary"),
        (fewer_merges, "merges"),
        (other_byte_fallback, "model"),
        (stripped_token, "added tokens"),
        (no_normalizer, "normalizer"),
        (other_pre_tokenizer, "pre-tokenizer"),
    ],
)
def test_a_tokenizer_that_gives_other_ids_is_refused(
    edit: Callable[[Content], None], part: str, copied: tuple[Path, Path]
) -> None:
    change(copied[1], edit)
    with pytest.raises(CheckpointError, match=rf"differ in {part}: this is not the target's assistant"):
        open_pair(*copied)


@pytest.mark.parametrize("name", ["target", "assistant"])
def test_a_tokenizer_that_can_not_be_loaded_is_named(name: str, copied: tuple[Path, Path]) -> None:
    path = copied[0].parent / name / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{name}/tokenizer.json can't be loaded by tokenizers"):
        open_pair(*copied)
