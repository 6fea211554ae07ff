"""Text that follows a JSON schema: always valid, drafted equals plain, alone or beside others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import GenerationSettings, Pair, load
from slipstream.runtime.bundle.manifest import TOKENIZER
from slipstream.runtime.errors import MissingExtraError, RequestError
from slipstream.runtime.text.grammar import GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "array": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    "choice": {"anyOf": [{"type": "boolean"}, {"enum": ["yes", "no"]}]},
}
PLAIN = GenerationSettings(num_draft_tokens=0, max_new_tokens=100)
PROMPT = "Who is there?"


@pytest.fixture(scope="module")
def pair(bundle_folder: Callable[[str], Path]) -> Pair:
    return load(bundle_folder("demo"), num_slots=4)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_json_that_follows_the_schema_at_every_k(name: str, temperature: float, pair: Pair) -> None:
    for number in range(2):
        seed = number if temperature else None
        asked = replace(PLAIN, json_schema=SCHEMAS[name], temperature=temperature, seed=seed)
        plain = pair.generate(f"{PROMPT} {number}", asked)
        assert plain.finish_reason == "stop_token"
        value = json.loads(plain.text)
        if name == "object":
            assert set(value) == {"name", "age"}
            assert isinstance(value["name"], str)
            assert 0 <= value["age"] <= 99
        elif name == "array":
            assert 2 <= len(value) <= 4
            assert set(value) <= {"red", "green", "blue"}
        else:
            assert value in (True, False, "yes", "no")
        for k in (1, 2, 4, 7, None):
            assert pair.generate(f"{PROMPT} {number}", replace(asked, num_draft_tokens=k)).token_ids == plain.token_ids


def test_neighbours_without_a_schema_are_as_alone(pair: Pair) -> None:
    drawn = GenerationSettings(num_draft_tokens=3, max_new_tokens=40, temperature=1.0, seed=2)
    asked = [replace(PLAIN, num_draft_tokens=3, json_schema=SCHEMAS[name]) for name in SCHEMAS]
    asked += [replace(PLAIN, num_draft_tokens=3, max_new_tokens=40), drawn, replace(drawn, presence_penalty=1.0)]
    alone = [pair.generate(PROMPT, each).token_ids for each in asked]
    streams = [pair.stream(PROMPT, each) for each in asked]
    assert [stream.finish().token_ids for stream in streams] == alone


def test_samples_of_a_schema_have_a_matcher_each(pair: Pair) -> None:
    asked = GenerationSettings(max_new_tokens=100, temperature=1.0, seed=3, json_schema=PERSON)
    samples = pair.samples(PROMPT, 4, asked)
    assert all(set(json.loads(sample.text)) == {"name", "age"} for sample in samples)
    assert len({sample.text for sample in samples}) > 1


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nope"}, "^json_schema can't be followed: Invalid type: nope"),
        ({"type": "object", "minLength": object()}, "^json_schema can't be read"),
        ([1], "a JSON object is expected"),
    ],
)
def test_a_schema_that_can_not_be_followed_is_refused(schema: Any, message: str, pair: Pair) -> None:
    with pytest.raises(RequestError, match=message):
        pair.generate(PROMPT, replace(PLAIN, json_schema=schema))
    assert pair.generate(PROMPT, replace(PLAIN, max_new_tokens=4)).token_ids


def test_without_the_library_it_says_what_to_install(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_compiler", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("slipstream.runtime.text.grammar.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'slipstream\[grammar\]'"):
        pair.generate(PROMPT, replace(PLAIN, json_schema=PERSON))


def test_masks_of_a_draft_are_those_of_its_tokens_one_by_one(pair: Pair) -> None:
    """And a draft with a token that is refused leaves the matcher as it was."""
    manifest = pair.manifest
    path, stops = pair.bundle.path(TOKENIZER), manifest.generation.stop_token_ids
    compiler = GrammarCompiler(path, manifest.vocab_size, stops)
    tokens = pair.codec.encode_more('{"name": "ab", "age": 7}')
    whole, stepped = compiler.json_schema(PERSON), compiler.json_schema(PERSON)
    masks = whole.allowed(tokens)
    assert masks.shape == (len(tokens) + 1, manifest.vocab_size)
    for position, token in enumerate(tokens):
        [mask] = stepped.allowed([])
        assert (mask == masks[position]).all()
        assert mask[token]
        stepped.commit([token])
    assert set(np.flatnonzero(masks[-1])) == set(stops), "after the end every stop token may come, and nothing else"
    refused = [*tokens[:3], tokens[0], *tokens[3:]]
    again = whole.allowed(refused)
    assert (again[:4] == masks[:4]).all()
    assert again[4:].all()
