"""The bundle: a folder with two ONNX graphs, weights, tokenizer and the manifest that binds them.

Export writes it, engines add to it, the runtime reads it. The manifest is the contract:
which KV buffer belongs to which target layer, which assistant layers read it, what the
graphs expect and which files belong together. This file knows no ONNX.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slipstream.runtime.errors import BundleError

from .dtypes import DType
from .files import SMALL_FILE_BYTES, FileName, file_sha256, no_permission
from .json_reader import JsonError, read_object

FORMAT_VERSION = 4  # 3: targets chose their tokens themselves
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
_EXPORT_AGAIN = "Export the pair again"

WeightFormat = Literal["float", "int8", "int4"]  # what an export makes
StoredFormat = Literal[WeightFormat, "fp8", "nvfp4"]  # and what quantized checkpoints bring along
_Positive = Annotated[int, Field(gt=0)]


class Record(BaseModel):
    """Base of what is kept as JSON: frozen, and strict about fields and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file. Raises FileNotFoundError, or JsonError with what is wrong with it."""
        return cls.checked(read_object(path))

    @classmethod
    def checked(cls, content: Mapping[str, Any]) -> Self:
        """The record that a parsed file holds. Raises JsonError with the first field that is wrong."""
        try:
            return cls.model_validate_json(json.dumps(content))  # keys are text and tuples are lists there
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "contents"
            raise JsonError(f"is not as expected: {where}: {first['msg']}") from error

    def to_json(self) -> bytes:
        """What its file holds."""
        return (json.dumps(self.model_dump(), indent=2) + "\n").encode()


class KVBuffer(Record):
    """One layer's pair of KV tensors, each [batch, num_kv_heads, capacity, head_dim].

    layer: index of the owning target layer; its tensors are ``kv.{layer}.key`` and ``.value``.
    target_readers: other target layers that attend to it.
    assistant_readers: assistant layers that attend to it; not empty for the two donors.
    key_scale, value_scale: factors from stored to true values (1.0 for float KV).
    """

    layer: int
    type: Literal["sliding", "full"]
    num_kv_heads: _Positive
    head_dim: _Positive
    dtype: DType | Literal["int8"]
    key_scale: float
    value_scale: float
    target_readers: list[int]
    assistant_readers: list[int]


class Weights(Record):
    """How matrices are stored. Embedding tables, norms and what ``float_matrices`` names are always float.

    block_size: values along a matrix's input that share a scale; None where nothing is quantized, or whole matrices
        share one (fp8).
    """

    format: StoredFormat
    block_size: _Positive | None
    float_matrices: list[str]

    @property
    def is_integer(self) -> bool:
        """Whether they are int4 or int8, which ONNX Runtime's CPU provider multiplies with rounded activations."""
        return self.format in ("int4", "int8")


class PerLayerTableFile(Record):
    """The per-layer embedding table (PLE) that stays outside the graphs: [vocab_size, width], a file of the bundle.

    dtype: as stored; rows are converted to the bundle's when they are gathered.
    """

    file: FileName
    dtype: DType
    width: _Positive


class DraftGraph(Record):
    """An assistant graph with ``num_steps`` draft steps unrolled."""

    file: FileName
    num_steps: _Positive


class FileRecord(Record):
    size_bytes: int
    sha256: str


class SamplingDefaults(Record):
    """How the target's generation_config.json draws tokens. top_k: None where it sets no limit."""

    do_sample: bool
    temperature: Annotated[float, Field(ge=0)]
    top_k: _Positive | None
    top_p: Annotated[float, Field(gt=0, le=1)]


class Generation(Record):
    """What the checkpoints' generation_config.json asks for, and the tokenizer's special tokens by name."""

    bos_token_id: int
    stop_token_ids: list[int]
    num_draft_tokens: int
    sampling: SamplingDefaults
    special_tokens: dict[str, str]


class Source(Record):
    """Where the bundle came from: folder names, architectures and config hashes."""

    target: str
    assistant: str
    target_config_sha256: str
    assistant_config_sha256: str


class Manifest(Record):
    """Everything the runtime has to know; see ``runtime/bundle/graph_io.py`` for the graphs' interface.

    max_length: tokens a sequence may hold, prompt included.
    logit_softcap: of the target's final logits, None where it has none.
    num_draft_top_logits: candidates that the assistant gives for each draft.
    draft_position_offset: 0 when the assistant runs at position N (the pending token's),
        -1 when it runs at N - 1.
    per_layer_table: None when the target has no PLE, or has it in its graph.
    files: every file of the bundle but the manifest.
    """

    format_version: int
    slipstream_version: str
    versions: dict[str, str]
    source: Source
    dtype: DType
    weights: Weights
    vocab_size: _Positive
    hidden_size: _Positive
    sliding_window: _Positive
    max_length: _Positive
    logit_softcap: Annotated[float, Field(gt=0)] | None
    num_draft_top_logits: _Positive
    draft_position_offset: Literal[0, -1]
    num_target_layers: _Positive
    target_graph: FileName
    draft_graphs: list[DraftGraph]
    embedding_file: FileName
    target_file: FileName
    assistant_file: FileName
    per_layer_table: PerLayerTableFile | None
    kv: list[KVBuffer]
    generation: Generation
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Manifest:
        weights = [self.embedding_file, self.target_file, self.assistant_file]
        if self.per_layer_table is not None:
            weights.append(self.per_layer_table.file)
        named = [self.target_graph, *weights, TOKENIZER, *(graph.file for graph in self.draft_graphs)]
        absent = [name for name in named if name not in self.files]
        if absent:
            raise ValueError(f"{', '.join(absent)} is not among the files")
        if 1 not in [graph.num_steps for graph in self.draft_graphs]:
            raise ValueError("there is no assistant graph of one step")
        for layer_type in ("sliding", "full"):
            read = [b.layer for b in self.kv if b.type == layer_type and b.assistant_readers]
            last = [b.layer for b in self.kv if b.type == layer_type][-1:]
            if not last:
                raise ValueError(f"there is no {layer_type} KV buffer")
            if read and read != last:
                raise ValueError(f"the assistant reads {layer_type} layers {read}; the donor is the last, {last[0]}")
        if any(buffer.dtype not in (self.dtype, "int8") for buffer in self.kv):
            raise ValueError(f"a KV buffer is neither {self.dtype} as the graphs are nor int8")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that shapes of the graphs' inputs and outputs name, as far as the bundle fixes them."""
        return {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_draft_top_logits": self.num_draft_top_logits,
            "per_layer_width": 0 if self.per_layer_table is None else self.per_layer_table.width,
        }

    @property
    def donors(self) -> list[KVBuffer]:
        """The assistant's buffers: the last KV-owning sliding layer, then the last full one."""
        return [[b for b in self.kv if b.type == layer_type][-1] for layer_type in ("sliding", "full")]

    @property
    def has_int8_kv(self) -> bool:
        return any(buffer.dtype == "int8" for buffer in self.kv)

    @property
    def precision(self) -> str:
        """dtype, weights and KV in words."""
        stored = self.weights
        parts: list[str] = [self.dtype]
        if stored.format != "float":
            blocks = f" in blocks of {stored.block_size}" if stored.block_size else ""
            left = f" ({len(stored.float_matrices)} matrices left float)" if stored.float_matrices else ""
            parts.append(f"{stored.format} weights{blocks}{left}")
        if self.has_int8_kv:
            parts.append("int8 KV")
        return " with ".join(parts[:2]) + "".join(f" and {part}" for part in parts[2:])


@dataclass
class Bundle:
    """An opened bundle: folder and checked manifest."""

    folder: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        return self.folder / name


def open_bundle(folder: str | Path) -> Bundle:
    """Read and check a bundle: manifest, presence and size of every file, hash of the small ones.

    Raises BundleError with what differs and what to do. ``check_hashes`` reads the weights too.
    """
    folder = Path(folder)
    try:
        content = read_object(folder / MANIFEST)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(
                f"{folder} has bundle format {version}; this slipstream reads {FORMAT_VERSION}",
                f"{_EXPORT_AGAIN}: slipstream export TARGET ASSISTANT -o {folder} --overwrite",
            )
        manifest = Manifest.checked(content)
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST}",
            "Make one with: slipstream export TARGET ASSISTANT -o BUNDLE",
        ) from error
    except JsonError as error:
        raise BundleError(f"{folder / MANIFEST} {error}", _EXPORT_AGAIN) from error
    bundle = Bundle(folder, manifest)
    _check_files(bundle)
    check_hashes(bundle, max_bytes=SMALL_FILE_BYTES)
    return bundle


def _check_files(bundle: Bundle) -> None:
    for name, record in bundle.manifest.files.items():
        path = bundle.path(name)
        if not path.is_file():
            raise BundleError(f"{bundle.folder} lacks {name}, which its manifest lists", "Copy the whole folder again")
        if not os.access(path, os.R_OK):
            raise BundleError(no_permission(path))
        size = path.stat().st_size
        if size != record.size_bytes:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {record.size_bytes}", "Copy or export the bundle again"
            )


def check_hashes(bundle: Bundle, max_bytes: int | None = None) -> None:
    """Compare the SHA-256 of every file (of at most max_bytes) with the manifest. Raises BundleError."""
    for name, record in bundle.manifest.files.items():
        if max_bytes is not None and record.size_bytes > max_bytes:
            continue
        if file_sha256(bundle.path(name)) != record.sha256:
            raise BundleError(f"{bundle.path(name)} was changed since export", _EXPORT_AGAIN)


def check_links(bundle: Bundle, *folders: Path) -> None:
    """Refuse weights, or other folders of them, that links lead out of the bundle. Raises BundleError."""
    manifest, inside = bundle.manifest, bundle.folder.resolve()
    weights = [bundle.path(file) for file in (manifest.target_file, manifest.assistant_file, manifest.embedding_file)]
    for path in (*weights, *folders):
        found = path.resolve()
        if not found.is_relative_to(inside):
            raise BundleError(
                f"{path} is a link that leads to {found}, and ONNX Runtime reads no weights outside a bundle",
                "Copy the bundle without links (cp -rL)",
            )
