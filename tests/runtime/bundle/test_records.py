"""Records come back from their files as they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.runtime.bundle.json_reader import JsonError
from slipstream.runtime.bundle.manifest import Record


class Sizes(Record):
    by_rows: dict[int, int]
    span: tuple[int, int]


def test_whole_numbers_as_keys_and_tuples_come_back(tmp_path: Path) -> None:
    sizes = Sizes(by_rows={4: 6}, span=(1, 2))
    (tmp_path / "sizes.json").write_text(sizes.model_dump_json(), encoding="utf-8")
    assert Sizes.read(tmp_path / "sizes.json") == sizes


def test_a_number_that_is_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('{"by_rows": {"4": "6"}, "span": [1, 2]}', encoding="utf-8")
    with pytest.raises(JsonError, match=r"by_rows\.4: Input should be a valid integer"):
        Sizes.read(tmp_path / "sizes.json")
