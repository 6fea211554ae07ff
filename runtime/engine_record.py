"""The record beside TensorRT engines: what they were built for, and from what.

``engines/build.py`` writes it, the runtime will read it before it loads an engine.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

RECORD = "record.json"
ENGINE_FOLDER = "engines"  # inside the bundle
Flavour = Literal["tensorrt", "tensorrt-rtx"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AttentionShape(_Record):
    """Attention of one shape, and whether TensorRT has one kernel for it or takes it apart."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    is_fused: bool


class EngineFile(_Record):
    """profiles: smallest, likeliest and largest size by dimension, one entry per optimization profile."""

    file: str
    graph: str
    size_bytes: int
    sha256: str
    build_seconds: float
    profiles: dict[str, dict[str, tuple[int, int, int]]]


class EngineSettings(_Record):
    """max_length: tokens per sequence. workspace_mib: scratch memory a build may plan with."""

    flavour: Flavour
    device: str
    max_length: int
    max_batch: int
    num_draft_tokens: int
    workspace_mib: int


class EngineRecord(_Record):
    """bundle_sha256: of the manifest the engines were built from.
    capacity: rows of the KV buffers by layer type; static in the engines.
    parity: "unstamped" until the engines' tokens were compared with ONNX Runtime's on their device.
    """

    bundle_sha256: str
    slipstream_version: str
    engine_version: str
    settings: EngineSettings
    dtype: str
    capacity: dict[str, int]
    attention: list[AttentionShape]
    target: EngineFile
    assistant: EngineFile
    peak_memory_mib: int
    parity: Literal["unstamped"]
