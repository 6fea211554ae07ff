"""What a result's JSON form has."""

from __future__ import annotations

# In this order.
RESULT_KEYS = [
    "text",
    "thought",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_reused_tokens",
    "num_draft_tokens",
    "acceptance",
    "tokens_per_round",
    "timings",
    "sampling",
    "logprobs",
    "engine",
    "notes",
]
TIMING_KEYS = ["queued", "prefill", "draft", "verify", "decode", "tokens_per_second"]
