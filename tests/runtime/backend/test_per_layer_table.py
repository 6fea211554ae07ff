"""The per-layer table on the host: what is stored, what is gathered, and that bundles with and without it agree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.backend.per_layer_table import PerLayerTable, open_per_layer_table
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.decode.settings import GenerationSettings
from slipstream.runtime.errors import BundleError
from slipstream.runtime.session import Pair
from tests.support.progress import SilentProgress

TABLE = "model.embed_tokens_per_layer.weight"
TOKENS = np.array([[3, 380, 3], [0, 7, 41]])


def checkpoint_rows(target: Path) -> torch.Tensor:
    return load_file(target / "model.safetensors")[TABLE][torch.from_numpy(TOKENS)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_those_of_the_checkpoint_in_the_bundles_dtype(
    dtype: DType, bundle_folder: Callable[..., Path], pair_folder: Callable[[str], tuple[Path, Path]]
) -> None:
    table = PerLayerTable(open_bundle(bundle_folder("edge", dtype=dtype, num_draft_tokens=1)))
    expected = checkpoint_rows(pair_folder("edge")[0]).to(getattr(torch, dtype))
    bits = expected.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else expected.numpy()
    np.testing.assert_array_equal(table.rows(TOKENS), bits)


@pytest.fixture
def narrow(pair_folder: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Path:
    """A float32 bundle of a checkpoint in bfloat16, as published ones are."""
    target = shutil.copytree(pair_folder("edge")[0], tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    halves = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}
    save_file(halves, target / "model.safetensors")
    pair = open_pair(target, pair_folder("edge")[1])
    export_pair(pair, tmp_path / "bundle", ExportSettings(), SilentProgress())
    return tmp_path / "bundle"


def test_a_bfloat16_table_stays_so_on_disk_and_is_widened_exactly(narrow: Path) -> None:
    bundle = open_bundle(narrow)
    record = bundle.manifest.per_layer_table
    assert record is not None
    assert (record.dtype, bundle.manifest.dtype) == ("bfloat16", "float32")
    assert bundle.path(record.file).stat().st_size == 2 * record.width * bundle.manifest.vocab_size
    table, rows = PerLayerTable(bundle), np.zeros((2, 3, record.width), np.float32)
    lookup = table.lookup(rows)
    lookup(TOKENS[:, ::-1])
    lookup(TOKENS)
    np.testing.assert_array_equal(rows, checkpoint_rows(narrow.parent / "target").float().numpy())


def test_a_file_of_another_size_is_refused(narrow: Path) -> None:
    bundle = open_bundle(narrow)
    record = bundle.manifest.per_layer_table
    assert record is not None
    path = bundle.path(record.file)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BundleError, match=r"per_layer_embedding\.bin can't be mapped: .* Export the pair again"):
        PerLayerTable(bundle)


def test_text_is_that_of_the_table_in_the_graph(bundle_folder: Callable[..., Path]) -> None:
    settings = [GenerationSettings(num_draft_tokens=k, max_new_tokens=40) for k in (0, 2, 3, 5)]
    texts = []
    for ple in ("host", "device"):
        bundle = open_bundle(bundle_folder("edge", ple=ple))
        assert (open_per_layer_table(bundle) is not None) == (ple == "host")
        with Pair(bundle) as pair:
            texts.append([pair.generate("the sea and the hills", each).token_ids for each in settings])
    assert texts[0] == texts[1]
    assert all(ids == texts[0][0] for ids in texts[0]), "drafted text is plain text"


def test_a_pair_without_per_layer_embeddings_has_no_table(bundle_folder: Callable[..., Path]) -> None:
    bundle = open_bundle(bundle_folder("dense"))
    assert open_per_layer_table(bundle) is None
    assert not any("per_layer" in name for name in bundle.manifest.files)
