"""Sizes that engines are built with and the runtime keeps to: rows of calls, capacities of KV buffers."""

from __future__ import annotations

from .manifest import Manifest

MAX_DRAFT_TOKENS = 15  # the largest K that may be asked for: buffers leave room for it
PREFILL_BUCKETS = (16, 64, 256)  # row counts of prefill calls, beside one row
PREFILL_CHUNK = PREFILL_BUCKETS[-1]  # rows of a prefill call at most
SMALLEST_CAPACITY = 128


def kv_limits(
    window: int, max_length: int, prefill_chunk: int, max_draft_tokens: int, base_step: int = 1
) -> dict[str, int]:
    """Rows that buffers grow to, by layer type. base_step: of KVCache.

    full: every token, and the padding of the last call. sliding: twice what a compaction keeps (a window, room for a
    rewind, and what rounding the base down adds), and one call's rows. A call that does not fit thus finds
    held + call > 2 * kept + call: the kept rows move without overlap, and kept + call rows fit.
    """
    call, kept = max(prefill_chunk, max_draft_tokens + 1), window + max_draft_tokens + base_step
    return {"sliding": round_up(2 * kept + call, 16), "full": round_up(max_length + call, 16)}


def cpu_base_step(manifest: Manifest) -> int:
    """What ONNX Runtime's CPU provider needs ``base`` to be a multiple of, for text that does not depend on K.

    Its Attention adds values up in blocks of buffer rows: 128, doubled for heads of up to 64, 32 and 16 values (seen
    with 1.32). Rows that move by whole blocks keep their last bits, which show where weights or KV are rounded.
    """
    if not manifest.weights.is_integer and not manifest.has_int8_kv:
        return 1
    smallest = min(buffer.head_dim for buffer in manifest.kv if buffer.type == "sliding")
    return 128 << sum(smallest <= size for size in (64, 32, 16))


def capacity_bucket(num_rows: int, limit: int) -> int:
    """The smallest power-of-two capacity (from 128) that holds num_rows, capped by limit."""
    capacity = SMALLEST_CAPACITY
    while capacity < num_rows:
        capacity *= 2
    return min(capacity, limit)


def row_bucket(num_rows: int, prefill_chunk: int) -> int:
    """Rows of the prefill call that num_rows tokens go through: few sizes, so that nothing grows with prompts."""
    if num_rows == 1:
        return 1
    return next((rows for rows in PREFILL_BUCKETS if num_rows <= rows <= prefill_chunk), prefill_chunk)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
