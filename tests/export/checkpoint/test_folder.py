"""What a path is that holds no checkpoint, links that lead nowhere, and which weights of a folder are read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.export.checkpoint.folder import CheckpointFolder
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.checkpoint.tensors import open_checkpoint
from slipstream.runtime.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.gguf", b"GGUF\3\0\0\0", "x.gguf is a GGUF file of llama.cpp: export the checkpoint"),
        ("model", b"GGUF\3\0\0\0", "model is a GGUF file"),
        ("model.safetensors", b"\x08", "model.safetensors is a file of tensors: pass its folder"),
        ("model.onnx", b"\x08", "model.onnx is an ONNX graph"),
        ("x.zip", b"PK\x03\x04", "x.zip is a ZIP archive or a PyTorch file"),
        ("x.tar.gz", b"\x1f\x8b\x08", "x.tar.gz is a compressed archive: unpack it"),
        ("config.json", b"{}", "config.json is a JSON file: pass its folder"),
        ("empty", b"", "empty is a file; a folder as transformers saves checkpoints is expected"),
    ],
)
def test_a_file_is_named_for_what_it_is(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        CheckpointFolder(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is an empty folder; a folder as transformers saves checkpoints is expected"),
        ({"x.q4.gguf": ""}, "has no config.json; x.q4.gguf is a GGUF file of llama.cpp"),
        ({"onnx.json": "", "model.onnx": ""}, "has no config.json; model.onnx is an ONNX graph"),
        ({"params.json": "{}", "x.pth": ""}, "has no config.json: it holds params.json, x.pth"),
        ({"manifest.json": "{}"}, "is a bundle, which is exported already"),
        ({"snapshots/abc/config.json": "{}"}, "is the hub's cache of a model: pass one of the folders in"),
        ({"target/config.json": "{}", "assistant/config.json": "{}"}, "holds a pair: pass"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "google/gemma"}', "adapter_model.safetensors": ""},
            "holds a LoRA adapter (adapter_config.json) for google/gemma: merge it into that model",
        ),
        ({"config.json": "{}", "adapter_config.json": "{}"}, "holds a LoRA adapter"),
    ],
    ids=lambda value: next(iter(value), "empty") if isinstance(value, dict) else "",
)
def test_a_folder_without_a_checkpoint_is_named_for_what_it_is(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        CheckpointFolder(tmp_path)


@pytest.mark.parametrize("name", ["google/gemma-4-E2B-it", "https://huggingface.co/google/gemma-4-E2B-it"])
def test_a_name_of_the_hub_is_told_how_to_become_a_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"hf download google/gemma-4-E2B-it --local-dir FOLDER; a folder as"):
        CheckpointFolder(Path(name))


def test_a_path_that_does_not_exist_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; a folder as"):
        CheckpointFolder(tmp_path / "nowhere")


@pytest.mark.parametrize("part", [0, 1], ids=["target", "assistant"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "hf_quant_config.json",
        "adapter_config.json",
        "model.safetensors",
        _INDEX,
    ],
)
def test_a_link_that_leads_nowhere_is_refused_by_name(name: str, part: int, copied: tuple[Path, Path]) -> None:
    path = copied[part] / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))} is a link that leads nowhere, to ../../blobs"):
        open_pair(*copied)


def test_a_folder_that_is_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"target is a link that leads nowhere, to gone"):
        CheckpointFolder(tmp_path / "target")


def test_links_as_the_hubs_cache_has_them_are_followed(copied: tuple[Path, Path], tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    shutil.copytree(copied[0], blobs)
    for path in list(copied[0].iterdir()):
        path.unlink()
        path.symlink_to(blobs / path.name)
    assert open_pair(*copied).target.headers


# which weights


def split(folder: Path) -> None:
    """Shards and an index of what model.safetensors holds, as an earlier save left them."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / _INDEX).write_text(json.dumps(index))


def test_one_file_comes_before_the_shards_of_an_earlier_save_as_in_transformers(copied: tuple[Path, Path]) -> None:
    folder = copied[0]
    split(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[_NORM] = tensors[_NORM] * 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).model.norm.weight
    ours = open_checkpoint(CheckpointFolder(folder)).read("norm.weight")
    assert torch.equal(ours, tensors[_NORM])
    assert torch.equal(ours, theirs)


def test_shards_are_read_where_there_is_no_single_file(copied: tuple[Path, Path]) -> None:
    split(copied[0])
    tensors = load_file(copied[0] / "model.safetensors")
    (copied[0] / "model.safetensors").unlink()
    (copied[0] / "pytorch_model.bin").write_bytes(b"never read")
    checkpoint = open_checkpoint(CheckpointFolder(copied[0]))
    assert torch.equal(checkpoint.read("norm.weight"), tensors[_NORM])


@pytest.mark.parametrize("name", ["../a.safetensors", "/tmp/a.safetensors", "sub/a.safetensors", "..", ""])
def test_an_index_that_names_files_elsewhere_is_refused(name: str, copied: tuple[Path, Path]) -> None:
    (copied[0] / "model.safetensors").unlink()
    (copied[0] / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {_NORM: name}}))
    with pytest.raises(CheckpointError, match=rf"{_INDEX}: '{re.escape(name)}' is not the name of a file in this"):
        open_checkpoint(CheckpointFolder(copied[0]))


def test_weights_of_another_kind_are_named(copied: tuple[Path, Path]) -> None:
    (copied[0] / "model.safetensors").rename(copied[0] / "model.fp16.safetensors")
    (copied[0] / "pytorch_model.bin").write_bytes(b"")
    message = r"has neither model.safetensors nor .* \(it holds model.fp16.safetensors, pytorch_model.bin\)"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(CheckpointFolder(copied[0]))
