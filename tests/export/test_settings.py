"""Settings as an export works with them, and files that are parsed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipstream.export.checkpoint import folder
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.model.layers import Blocks
from slipstream.export.settings import ExportSettings, ResolvedSettings, resolve
from slipstream.runtime.bundle.json_reader import read_object
from slipstream.runtime.text import codec


def test_what_depends_on_the_pair_is_chosen_before_work_starts(pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    pair = open_pair(*pair_folder("edge"))
    assert resolve(ExportSettings(), pair) == ResolvedSettings(
        dtype="float32",
        max_length=160,
        num_draft_tokens=pair.generation.num_draft_tokens,
        draft_position_offset=0,
        blocks=None,
        stored=None,
        has_table_in_graph=False,
        kv="float",
    )


def test_what_is_asked_for_comes_before_the_pairs_own(pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    asked = ExportSettings("float16", 99, 7, "last", "int4", 64, "device", "int8")
    found = resolve(asked, open_pair(*pair_folder("edge")))
    assert found == ResolvedSettings("float16", 99, 7, -1, Blocks("int4", 64), None, True, "int8")
    assert found.is_calibrated


def test_each_json_file_of_a_checkpoint_is_parsed_once(
    pair_folder: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = Counter[Path]()

    def counted(path: Path) -> dict[str, Any]:
        parsed[path] += 1
        return read_object(path)

    class CountedTokenizer:
        @staticmethod
        def from_file(path: str) -> Tokenizer:
            parsed[Path(path)] += 1
            return Tokenizer.from_file(path)

    monkeypatch.setattr(folder, "read_object", counted)
    monkeypatch.setattr(codec, "Tokenizer", CountedTokenizer)
    target, _ = pair_folder("wrapped")
    open_pair(*pair_folder("wrapped"))
    assert set(parsed.values()) == {1}
    assert {target / name for name in ("config.json", "generation_config.json", "tokenizer.json")} <= set(parsed)
