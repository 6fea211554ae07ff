"""Memory a bundle takes at a given context length and batch, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from .bundle import ITEM_BYTES, KVBuffer, Manifest
from .kv_cache import capacity_bucket, full_limit, sliding_limit


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on ONNX Runtime's CPU provider.

    weights: as on disk, memory-mapped. embedding: the part of it that both graphs share.
    packed: at most what ONNX Runtime copies of them for its matrix products, for the target and
        for each assistant graph.
    kv_sliding, kv_full: buffers at the capacity that length needs.
    growth: the largest new buffer while the old ones are still held.
    """

    length: int
    batch: int
    weights: int
    embedding: int
    packed: int
    kv_sliding: int
    kv_full: int
    growth: int

    @property
    def total(self) -> int:
        return self.weights + self.packed + self.kv_sliding + self.kv_full + self.growth


def memory_plan(manifest: Manifest, length: int, batch: int, prefill_chunk: int, max_draft_tokens: int) -> MemoryPlan:
    """Plan for sequences of length tokens."""
    rows = length + max(prefill_chunk, max_draft_tokens + 1)  # the last prefill call may be padded to a chunk
    limits = {
        "sliding": sliding_limit(manifest.sliding_window, prefill_chunk, max_draft_tokens),
        "full": full_limit(manifest.max_length, prefill_chunk, max_draft_tokens),
    }

    def tensor_bytes(buffer: KVBuffer) -> int:
        capacity = capacity_bucket(rows, limits[buffer.type])
        return batch * buffer.num_kv_heads * capacity * buffer.head_dim * ITEM_BYTES[buffer.dtype]

    total = {kind: sum(2 * tensor_bytes(buffer) for buffer in manifest.kv if buffer.type == kind) for kind in limits}
    weights = {name: record.size_bytes for name, record in manifest.files.items() if name.endswith(".bin")}
    embedding = weights[manifest.embedding_file]
    target, assistant = weights[manifest.target_file], weights[manifest.assistant_file]
    return MemoryPlan(
        length=length,
        batch=batch,
        weights=sum(weights.values()),
        embedding=embedding,
        packed=embedding + target + assistant * len(manifest.draft_graphs),
        kv_sliding=total["sliding"],
        kv_full=total["full"],
        growth=max(tensor_bytes(buffer) for buffer in manifest.kv),
    )
