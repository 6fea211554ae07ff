"""The files of a checkpoint folder, and what a path is that is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slipstream.runtime.bundle.files import no_permission
from slipstream.runtime.bundle.json_reader import JsonError, read_object
from slipstream.runtime.bundle.manifest import MANIFEST
from slipstream.runtime.errors import CheckpointError

CONFIG = "config.json"
TEMPLATE_FOLDER = "additional_chat_templates"
_ADAPTER = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_EXPECTED = (
    "a folder as transformers saves checkpoints is expected: config.json, generation_config.json, tokenizer.json and "
    ".safetensors files"
)
_FILE_STARTS = {
    b"GGUF": "a GGUF file of llama.cpp: export the checkpoint that it was converted from",
    b"PK\x03\x04": "a ZIP archive or a PyTorch file: unpack it, or save it with transformers",
    b"\x1f\x8b": "a compressed archive: unpack it",
    b"{": "a JSON file: pass its folder",
}
_FILE_ENDINGS = {
    ".gguf": _FILE_STARTS[b"GGUF"],
    ".onnx": "an ONNX graph: export the checkpoint that it was made from",
    ".safetensors": "a file of tensors: pass its folder",
}
_GIVEN = (".gguf", ".onnx")  # files that stand for a whole model


class CheckpointFolder:
    """A folder of a checkpoint. Its JSON files are parsed once, and no link in it leads nowhere."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when path is no such folder, with what it is instead."""
        self.path = path
        self._parsed: dict[str, dict[str, Any]] = {}
        try:
            _check_is_checkpoint(path)
            for entry in (*path.iterdir(), *path.glob(f"{TEMPLATE_FOLDER}/*")):
                _check_link(entry)
        except PermissionError as error:
            raise CheckpointError(no_permission(path)) from error
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from error

    def object(self, name: str, *, required: bool = True) -> dict[str, Any]:
        """The JSON object in a file; {} when it is absent and not required. Raises CheckpointError."""
        if name not in self._parsed:
            is_absent = not required and not (self.path / name).exists()
            self._parsed[name] = {} if is_absent else read_json(self.path / name)
        return self._parsed[name]

    def text(self, name: str) -> str | None:
        """A text file; None when it is absent. Raises CheckpointError when it can't be read."""
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8") if path.exists() else None
        except PermissionError as error:
            raise CheckpointError(no_permission(path)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(stand_in(path) or f"{path} is not readable as text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that has to be there. Raises CheckpointError."""
    try:
        return read_object(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: {_EXPECTED}") from error
    except JsonError as error:
        raise CheckpointError(stand_in(path) or f"{path} {error}") from error


def stand_in(file: Path) -> str | None:
    """What to do about a file that only stands for the wanted one, as failed downloads leave it; None for others."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError:
        return None
    if start.startswith(b"version https://git-lfs"):
        return f"{file} is a Git LFS pointer, not the file: run git lfs pull in {file.parent}, or download it again"
    if start.startswith(b"<"):
        return (
            f"{file} is a web page, not the file: the download got an error or a login page. Log in where the "
            "checkpoint is kept, accept its terms, and download it again"
        )
    return None


def _check_is_checkpoint(path: Path) -> None:
    _check_link(path)
    if path.is_dir():
        found = _kind_of_folder(path)
    elif path.exists():
        found = f"is {_kind_of_file(path)}"
    elif _HUB_NAME.fullmatch(str(path)) or str(path).startswith(("http", "hf:")):
        name = "/".join(path.parts[-2:])
        found = f"is no folder here. If it is on the Hugging Face hub, fetch it: hf download {name} --local-dir FOLDER"
    else:
        found = "does not exist"
    if found is not None:
        raise CheckpointError(f"{path} {found}; {_EXPECTED}")


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a link that leads nowhere, to {path.readlink()}: download the checkpoint again, or copy it "
            "with what its links lead to (cp -rL)"
        )


def _kind_of_file(path: Path) -> str:
    if path.suffix in _FILE_ENDINGS:
        return _FILE_ENDINGS[path.suffix]
    start = b""
    if path.is_file():  # a pipe would wait for ever
        with path.open("rb") as opened:
            start = opened.read(4)
    return next((kind for magic, kind in _FILE_STARTS.items() if start.startswith(magic)), "a file")


def _kind_of_folder(path: Path) -> str | None:
    """What a folder is that holds no checkpoint of its own; None for one that does."""
    names = sorted(entry.name for entry in path.iterdir())
    if _ADAPTER in names:  # beside whole weights too: transformers adds it to them where peft is installed
        base = read_json(path / _ADAPTER).get("base_model_name_or_path")
        return (
            f"holds a LoRA adapter ({_ADAPTER}) for {base}: merge it into that model (peft: merge_and_unload, then "
            "save_pretrained) and export the result"
        )
    if CONFIG in names:
        return None
    kinds = {
        MANIFEST: "is a bundle, which is exported already: run it, or pass the checkpoint that it was made from",
        "snapshots": f"is the hub's cache of a model: pass one of the folders in {path / 'snapshots'}",
        "assistant": f"holds a pair: pass {path / 'target'} and {path / 'assistant'}",
    }
    files = (
        f"has no {CONFIG}; {name} is {_FILE_ENDINGS[end]}" for name in names if (end := Path(name).suffix) in _GIVEN
    )
    held = f"has no {CONFIG}: it holds {', '.join(names[:5])}" if names else "is an empty folder"
    return next((kind for name, kind in kinds.items() if name in names), next(files, held))
