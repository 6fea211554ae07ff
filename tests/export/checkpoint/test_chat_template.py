"""Chat templates in every spelling that transformers takes, and what an export says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from slipstream.export.checkpoint.opening import open_pair
from slipstream.runtime.errors import CheckpointError
from tests.support.pairs import CHAT_TEMPLATE, EOS

_A, _B = "{{ bos_token }}a", "{{ bos_token }}b"


def write(folder: Path, files: dict[str, Any]) -> None:
    """The checkpoint's template, replaced: by text for .jinja files, a chat_template for .json ones."""
    (folder / "chat_template.jinja").unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            held = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(held | {"chat_template": content}))
        else:
            path.write_text(content)


def named(**templates: Any) -> list[dict[str, Any]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": _A}, _A),
        ({"chat_template.jinja": _A, "tokenizer_config.json": _B}, _A),
        ({"chat_template.jinja": _A, "additional_chat_templates/tool_use.jinja": _B}, _A),
        ({"chat_template.jinja": _B, "additional_chat_templates/default.jinja": _A}, _A),
        ({"tokenizer_config.json": _A}, _A),
        ({"tokenizer_config.json": {"default": _A}}, _A),
        ({"tokenizer_config.json": {"tool_use": _B, "default": _A}}, _A),
        ({"tokenizer_config.json": named(tool_use=_B, default=_A)}, _A),
        ({"tokenizer_config.json": [*named(default=_B), *named(default=_A)]}, _A),
    ],
    ids=json.dumps,
)
def test_a_template_is_found_where_transformers_finds_it(
    files: dict[str, Any], expected: str, copied: tuple[Path, Path]
) -> None:
    write(copied[0], files)
    assert open_pair(*copied).chat_template == expected
    assert transformers.AutoTokenizer.from_pretrained(copied[0]).get_chat_template() == expected


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_template_of_the_processor_is_taken_where_the_tokenizer_has_none(
    file: str, copied: tuple[Path, Path]
) -> None:
    write(copied[0], {file: _A})
    assert open_pair(*copied).chat_template == _A


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {}}, "has the chat templates (none), and none is called default"),
        ({"tokenizer_config.json": {"tool_use": _A}}, "has the chat templates tool_use, and none is called default"),
        ({"tokenizer_config.json": named(rag=_A, tool_use=_A)}, "has the chat templates rag, tool_use, and none"),
        ({"tokenizer_config.json": ["x"]}, "each entry needs a name and a template"),
        ({"tokenizer_config.json": [{"name": "default"}]}, "each entry needs a name and a template"),
        ({"tokenizer_config.json": 5}, "the chat template is 5; the source of a Jinja template is expected"),
        ({"tokenizer_config.json": {"default": None}}, "the chat template is None"),
        ({"chat_template.jinja": ""}, "the chat template is ''"),
        ({"additional_chat_templates/tool_use.jinja": _A, "tokenizer_config.json": _A}, "none is called default"),
        ({"chat_template.json": named(default=_A)}, "the source of a Jinja template is expected"),
        ({"tokenizer_config.json": {"default": "{% if %}"}}, "does not parse, at line 1"),
    ],
    ids=json.dumps,
)
def test_what_transformers_would_not_render_with_is_refused(
    files: dict[str, Any], message: str, copied: tuple[Path, Path]
) -> None:
    write(copied[0], files)
    with pytest.raises(CheckpointError) as caught:
        open_pair(*copied)
    assert message in str(caught.value)
    assert str(copied[0] / next(iter(files)).split("/", 1)[0]) in str(caught.value)


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": None}], ids=json.dumps)
def test_a_target_without_a_template_is_told(files: dict[str, Any], copied: tuple[Path, Path]) -> None:
    write(copied[0], files)
    pair = open_pair(*copied)
    assert pair.chat_template is None
    assert len(pair.notes) == 1
    assert "target has no chat template: prompts go in as they are" in pair.notes[0]


@pytest.mark.parametrize(
    ("template", "stop_ids", "is_told"),
    [
        (CHAT_TEMPLATE, [EOS], True),
        (CHAT_TEMPLATE, [EOS, 5], False),
        (CHAT_TEMPLATE.replace("<turn|>", "."), [EOS], False),
        ("{{ raise_exception('no') }}", [EOS], False),
    ],
    ids=["missing", "present", "no token ends a turn", "a template that refuses"],
)
def test_a_turns_end_that_stops_nothing_is_told(
    template: str, stop_ids: list[int], is_told: bool, copied: tuple[Path, Path]
) -> None:
    (copied[0] / "chat_template.jinja").write_text(template)
    path = copied[0] / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stop_ids}))
    notes = open_pair(*copied).notes
    assert len(notes) == is_told
    assert not is_told or "ends turns with <turn|> (5), which is not among the stop tokens 1: " in notes[0]


@pytest.mark.parametrize("stop_ids", [None, []])
def test_no_stop_token_is_refused(stop_ids: list[int] | None, copied: tuple[Path, Path]) -> None:
    path = copied[0] / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stop_ids}))
    with pytest.raises(CheckpointError, match="lacks eos_token_id or bos_token_id"):
        open_pair(*copied)
