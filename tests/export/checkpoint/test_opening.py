"""A pair as it is opened: heads that should be tied and aren't, and fields of config.json that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.export.checkpoint.opening import open_pair
from slipstream.runtime.errors import CheckpointError

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def add_head(folder: Path, factor: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {_HEAD: tensors[_EMBEDDING] * factor}, path, {"format": "pt"})


@pytest.mark.parametrize("part", [0, 1], ids=["target", "assistant"])
def test_a_head_that_differs_from_the_embedding_is_used_as_in_transformers(
    part: int, copied: tuple[Path, Path]
) -> None:
    add_head(copied[part], 1.5)
    pair = open_pair(*copied)
    texts = pair.target_config, pair.assistant_config.text
    assert [text.has_tied_head for text in texts] == [part != 0, part != 1]
    assert len(pair.notes) == 1
    assert "lm_head.weight that differs from its embedding" in pair.notes[0]
    if part == 0:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(copied[0]).lm_head.weight
        assert torch.equal(theirs, pair.target.read(_HEAD))


def test_a_head_that_equals_the_embedding_is_tied(copied: tuple[Path, Path]) -> None:
    add_head(copied[0], 1)
    pair = open_pair(*copied)
    assert pair.target_config.has_tied_head
    assert pair.notes == ()


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_fields_that_tools_leave_are_passed_over_in_a_note(copied: tuple[Path, Path]) -> None:
    before = open_pair(*copied)
    edit_config(copied[0], unsloth_version="2026.1", unsloth_fixed=True, model_name="x", tokenizer_class="Gemma")
    pair = open_pair(*copied)
    assert pair.target_config == before.target_config
    names = "model_name, tokenizer_class, unsloth_fixed, unsloth_version"
    assert pair.notes == (f"{copied[0] / 'config.json'}: passed over {names}, which change nothing",)


@pytest.mark.parametrize(
    "field", ["transformers_weights", "attention_chunk_size", "configuration_files", "rope_scaling", "quantization"]
)
def test_a_field_that_may_change_the_computation_is_refused(field: str, copied: tuple[Path, Path]) -> None:
    edit_config(copied[0], **{field: {"x": 1}})
    with pytest.raises(CheckpointError, match=rf"does not know and that may change the computation: {field}\."):
        open_pair(*copied)
