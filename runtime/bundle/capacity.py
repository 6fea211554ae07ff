"""Sizes that engines are built with and the runtime keeps to: rows of calls, capacities of KV buffers."""

from __future__ import annotations

MAX_DRAFT_TOKENS = 15  # the largest K that may be asked for: buffers leave room for it
PREFILL_BUCKETS = (16, 64, 256)  # row counts of prefill calls, beside one row
PREFILL_CHUNK = PREFILL_BUCKETS[-1]  # rows of a prefill call at most
SMALLEST_CAPACITY = 128


def sliding_limit(window: int, prefill_chunk: int, max_draft_tokens: int) -> int:
    """Rows a sliding buffer grows to: two windows with room for a rewind each, and one call's rows."""
    return _round_up(2 * (window + max_draft_tokens + 1) + max(prefill_chunk, max_draft_tokens + 1), 16)


def full_limit(max_length: int, prefill_chunk: int, max_draft_tokens: int) -> int:
    """Rows a full buffer grows to: every token, and the padding of the last call."""
    return _round_up(max_length + max(prefill_chunk, max_draft_tokens + 1), 16)


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


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
