"""What is wrong with a checkpoint's files is one clear error before anything is written, up to the last weight."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import cli
from slipstream.export.checkpoint.folder import CheckpointFolder
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.checkpoint.quantized import QuantizedHeader
from slipstream.export.checkpoint.tensors import open_checkpoint
from slipstream.export.model.assistant import Assistant
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.layers import Recipe, recipes_of
from slipstream.export.model.target import Target
from slipstream.export.synth.presets import configs_of
from slipstream.export.trace import TracedPair
from slipstream.export.weights import check as weight_check
from slipstream.export.weights.check import Part, check_values
from slipstream.export.weights.per_layer_table import per_layer_recipe, table_record
from slipstream.runtime.errors import CheckpointError
from tests.support.progress import RecordedProgress

PairFolder = Callable[[str], tuple[Path, Path]]
Damage = Callable[[Path], object]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_UP = "model.layers.1.mlp.up_proj.weight"


# the whole way: from the command line to an empty folder


@dataclass
class Place:
    """pair: a copy of a pair, to be damaged. out: where a bundle would go, in a folder of its own."""

    pair: Path
    out: Path

    def refusal(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
        """What ``slipstream export`` says when it refuses; nothing may stand where it would write, hidden or not."""
        folders = self.pair / "target", self.pair / "assistant"
        arguments = ["slipstream", "export", *map(str, folders), "-o", str(self.out), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        assert list(self.out.parent.iterdir()) == []
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        return errors[0]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "out").mkdir()
    return Place(tmp_path / "pair", tmp_path / "out" / "bundle")


@pytest.fixture(scope="module")
def edge_graphs(pair_folder: PairFolder) -> Any:
    """What tracing gives, without the graphs, which nothing asks for before the first byte is written."""
    pair, dtype = open_pair(*pair_folder("edge")), torch.float32
    no_model: Any = None
    target = Target(pair.target_config, dtype)
    assistant = Assistant(pair.assistant_config, pair.target_config, dtype, num_steps=1, num_top_logits=2)
    recipe = per_layer_recipe(pair.target_config)
    return TracedPair(
        TracedGraph(no_model, recipes_of(target)),
        {1: TracedGraph(no_model, recipes_of(assistant))},
        per_layer_table=(table_record(recipe, pair.target, "float32"), recipe),
    )


@pytest.fixture
def edge(place: Place, pair_folder: PairFolder, edge_graphs: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The "edge" pair, which nothing traces."""
    shutil.copytree(pair_folder("edge")[0].parent, place.pair)
    monkeypatch.setattr("slipstream.export.trace.trace", lambda *_: edge_graphs)
    return place


def _changed(part: str, **changes: Any) -> Damage:
    """Tensors by name, "__" read as a dot: replaced, added, or removed when None."""

    def damage(pair: Path) -> None:
        file = pair / part / _WEIGHTS
        tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)

    return damage


def _with_value(part: str, name: str, value: float) -> Damage:
    """The last value of a tensor set."""

    def damage(pair: Path) -> None:
        file = pair / part / _WEIGHTS
        tensors = load_file(file)
        tensors[name].view(-1)[-1] = value
        save_file(tensors, file)

    return damage


def _written(part: str, name: str, content: bytes) -> Damage:
    return lambda pair: (pair / part / name).write_bytes(content)


def _truncated(pair: Path) -> None:
    file = pair / "target" / _WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


def _header_changed(old: bytes, new: bytes) -> Damage:
    """Bytes of the header replaced by as many others."""

    def damage(pair: Path) -> None:
        file = pair / "target" / _WEIGHTS
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length]
        assert old in header
        assert len(old) == len(new)
        file.write_bytes(content[:8] + header.replace(old, new, 1) + content[8 + length :])

    return damage


def _header_beyond_the_file(pair: Path) -> None:
    file = pair / "target" / _WEIGHTS
    content = file.read_bytes()
    file.write_bytes((len(content) * 2).to_bytes(8, "little") + content[8:])


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5123456789\n"
_PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
_DOWNLOAD = "download it again"

_CASES: list[tuple[str, Damage, str]] = [
    ("truncated", _truncated, rf"target/{_WEIGHTS} is not a readable safetensors file .*: {_DOWNLOAD}$"),
    ("damaged header", _header_changed(b'{"', b"\0\0"), rf"target/{_WEIGHTS} is not a readable .*: {_DOWNLOAD}$"),
    (
        "header with another shape",
        _header_changed(b'"shape":[384,48]', b'"shape":[384,49]'),
        rf"target/{_WEIGHTS} is not a readable .*: {_DOWNLOAD}$",
    ),
    ("header beyond the file", _header_beyond_the_file, rf"target/{_WEIGHTS} is not a readable .*: {_DOWNLOAD}$"),
    (
        "Git LFS pointer",
        _written("assistant", _WEIGHTS, _POINTER),
        rf"assistant/{_WEIGHTS} is a Git LFS pointer, not the file: run git lfs pull in .*assistant, or {_DOWNLOAD}$",
    ),
    (
        "Git LFS pointer for a tokenizer",
        _written("target", "tokenizer.json", _POINTER),
        r"target/tokenizer.json is a Git LFS pointer, not the file: run git lfs pull in ",
    ),
    (
        "web page",
        _written("target", _WEIGHTS, _PAGE),
        rf"target/{_WEIGHTS} is a web page, not the file: .* Log in where .* accept its terms, and {_DOWNLOAD}$",
    ),
    (
        "web page for a config",
        _written("target", "config.json", _PAGE),
        r"target/config.json is a web page, not the file",
    ),
    ("missing tensor", _changed("target", model__norm__weight=None), r"target: norm.weight is missing"),
    (
        "missing tensor of the assistant",
        _changed("assistant", masked_embedding__token_ordering=None),
        r"assistant: masked_embedding.token_ordering is missing",
    ),
    (
        "extra tensor",
        _changed("target", model__layers__0__mlp__adapter__weight=torch.ones(2)),
        r"target has 1 tensors that no part of the text model uses, first layers.0.mlp.adapter.weight",
    ),
    (
        "wrong dtype",
        _changed("target", model__norm__weight=torch.ones(48, dtype=torch.int8)),
        r"target: norm.weight has dtype I8; float tensors are expected",
    ),
    (
        "wrong shape",
        _changed("target", model__norm__weight=torch.ones(47)),
        r"target: norm.weight has shape \(47,\), \(48,\) is expected",
    ),
    (
        "NaN",
        _with_value("target", _UP, float("nan")),
        rf"target/{_WEIGHTS}: {_UP} holds NaN, which no trained weight is: download this file again, or ask who made",
    ),
    (
        "infinity",
        _with_value("assistant", "pre_projection.weight", float("-inf")),
        rf"assistant/{_WEIGHTS}: pre_projection.weight holds infinity, which no trained weight is: download this file",
    ),
    (
        "per-layer table",
        _with_value("target", "model.embed_tokens_per_layer.weight", float("nan")),
        rf"target/{_WEIGHTS}: model.embed_tokens_per_layer.weight holds NaN",
    ),
    (
        "ordering that is no permutation",
        _with_value("assistant", "masked_embedding.token_ordering", 0),
        rf"assistant/{_WEIGHTS}: masked_embedding.token_ordering does not name every token once, .*: download this",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in _CASES], ids=[case[0] for case in _CASES])
def test_damaged_checkpoint_is_refused_and_nothing_is_written(
    damage: Damage, message: str, edge: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(edge.pair)
    assert re.search(message, edge.refusal(monkeypatch, capsys))


def test_float16_overflow_is_refused_and_nothing_is_written(
    edge: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_value("target", _UP, -70_000.0)(edge.pair)
    message = (
        rf"target/{_WEIGHTS}: {_UP} reaches -70000, float16 ends at 65504: export with --dtype bfloat16 or float32$"
    )
    assert re.search(message, edge.refusal(monkeypatch, capsys, "--dtype", "float16"))


def test_shard_of_another_download_is_refused_and_nothing_is_written(
    place: Place, pair_folder: PairFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pair_folder("wrapped")[0].parent, place.pair)
    index = json.loads((place.pair / "target" / _INDEX).read_text())
    shards = list(index["weight_map"].values())
    moved, home = next((key, shard) for key, shard in index["weight_map"].items() if shards.count(shard) > 1)
    index["weight_map"][moved] = other = next(shard for shard in shards if shard != home)
    (place.pair / "target" / _INDEX).write_text(json.dumps(index))
    message = (
        rf"target: the index has {moved} in {other}, it is in {home} \(1 such tensors\): index and shards are of two "
        "downloads, download it again$"
    )
    assert re.search(message, place.refusal(monkeypatch, capsys))


def _configs_only(place: Place, target: Any, assistant: Any) -> None:
    for part, config in (("target", target), ("assistant", assistant)):
        (place.pair / part).mkdir(parents=True)
        (place.pair / part / "config.json").write_text(json.dumps(config))


def test_pair_of_two_sizes_is_refused_before_a_tensor_is_looked_at(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _configs_only(place, configs_of("e4b").target, configs_of("e2b").assistant)
    message = "backbone_hidden_size is 1536, the target needs 2560: this is not the target's assistant"
    assert message in place.refusal(monkeypatch, capsys)


def test_swapped_pair_is_refused_with_the_right_order(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _configs_only(place, configs_of("12b").assistant, configs_of("12b").target)
    assert "pass the target first and its assistant second" in place.refusal(monkeypatch, capsys)


def test_assistant_alone_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assistant = configs_of("e2b").assistant
    _configs_only(place, assistant, assistant)
    assert "is an assistant (model_type 'gemma4_assistant'), not a target" in place.refusal(monkeypatch, capsys)


# the check itself


def _part(folder: Path, *recipes: Recipe, **tensors: torch.Tensor) -> Part:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.ones(6, 2), **tensors}, folder / _WEIGHTS)
    return Part(open_checkpoint(CheckpointFolder(folder)), recipes)


def _used(*names: str) -> list[Recipe]:
    return [Recipe((name,), "as_is", ()) for name in names]


def test_every_used_byte_is_read_once_and_told(pair_folder: PairFolder, edge_graphs: Any) -> None:
    pair, progress = open_pair(*pair_folder("edge")), RecordedProgress()
    parts = [
        Part(pair.target, edge_graphs.target_recipes),
        Part(pair.assistant, edge_graphs.assistant_recipes.values()),
    ]
    check_values(parts, torch.float32, progress)
    assert progress.stages == ["checking weights"]
    files = sum((folder / _WEIGHTS).stat().st_size for folder in pair_folder("edge"))
    assert 0.5 * files < progress.total < files
    assert progress.done == progress.total


def test_value_at_each_end_of_each_block_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_check, "_BLOCK_VALUES", 4)
    for place in range(10):
        values = torch.ones(5, 2)
        values.view(-1)[place] = float("nan")
        part = _part(tmp_path / str(place), *_used("a"), a=values)
        with pytest.raises(CheckpointError, match="a holds NaN"):
            check_values([part], torch.float32, RecordedProgress())


def test_tensor_without_use_is_not_read(tmp_path: Path) -> None:
    part = _part(tmp_path / "c", *_used("a"), a=torch.ones(3), model__idle=torch.full((3,), float("nan")))
    progress = RecordedProgress()
    check_values([part], torch.float32, progress)
    assert progress.total == progress.done == 12


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_nan_is_seen_in_every_float_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    part = _part(tmp_path / "c", *_used("a"), a=torch.tensor([1.0, float("nan"), 2.0]).to(stored))
    with pytest.raises(CheckpointError, match="a holds NaN"):
        check_values([part], torch.float32, RecordedProgress())


@pytest.mark.parametrize(
    ("stored", "value", "dtype", "message"),
    [
        (torch.float32, 65_520.0, torch.float16, "a reaches 65520, float16 ends at 65504"),
        (torch.bfloat16, -(2.0**16), torch.float16, "a reaches -65536, float16 ends at 65504"),
        (torch.float64, 1e39, torch.float32, "a reaches 1e+39, float32 ends at 3.40282e+38"),
        (torch.float32, 3.4e38, torch.bfloat16, "a reaches 3.4e+38, bfloat16 ends at 3.38953e+38: export with --dtype"),
    ],
)  # fmt: skip
def test_value_beyond_the_bundles_dtype_is_refused(
    tmp_path: Path, stored: torch.dtype, value: float, dtype: torch.dtype, message: str
) -> None:
    part = _part(tmp_path / "c", *_used("a"), a=torch.tensor([1.0, value], dtype=stored))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_values([part], dtype, RecordedProgress())


@pytest.mark.parametrize(
    ("value", "dtype"), [(65_519.0, torch.float16), (1e6, torch.bfloat16), (-3.38e38, torch.float32)]
)
def test_value_that_rounds_into_the_bundles_dtype_is_accepted(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    part = _part(tmp_path / "c", *_used("a"), a=torch.tensor([1.0, value]))
    assert torch.tensor(value).to(dtype).isfinite()
    check_values([part], dtype, RecordedProgress())


def test_whole_numbers_are_values_all_of_them(tmp_path: Path) -> None:
    part = _part(tmp_path / "c", *_used("a", "b"), a=torch.tensor([-128, 127], dtype=torch.int8), b=torch.arange(9))
    check_values([part], torch.float16, RecordedProgress())


def test_scales_of_a_quantized_matrix_are_read_and_its_codes_are_not_multiplied_out(tmp_path: Path) -> None:
    codes, scales = torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, 1)
    scales[3] = float("nan")
    stored = _part(tmp_path / "c", codes=codes, scales=scales).checkpoint
    parts = {"weight_packed": stored.headers["codes"], "weight_scale": stored.headers["scales"]}
    matrix = QuantizedHeader((4, 32), "INT4", tmp_path, "q", parts)
    folded = replace(stored, headers={"q.weight": matrix})
    progress = RecordedProgress()
    with pytest.raises(CheckpointError, match=rf"c/{_WEIGHTS}: scales holds NaN"):
        check_values([Part(folded, _used("q.weight"))], torch.float32, progress)
    assert progress.total == codes.nbytes + scales.nbytes
    assert progress.done == codes.nbytes


def test_ordering_of_a_centroid_head_is_a_permutation(tmp_path: Path) -> None:
    recipe = Recipe(("embed_tokens.weight", "order"), "centroid_order", (3, 2, 2))
    check_values(
        [_part(tmp_path / "good", recipe, order=torch.tensor([5, 3, 1, 0, 2, 4], dtype=torch.int32))],
        torch.float32,
        RecordedProgress(),
    )
    with pytest.raises(CheckpointError, match="order does not name every token once"):
        check_values(
            [_part(tmp_path / "bad", recipe, order=torch.tensor([5, 3, 1, 0, 2, 2]))], torch.float32, RecordedProgress()
        )
