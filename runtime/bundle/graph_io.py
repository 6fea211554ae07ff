"""Names of every graph input and output: the contract between export, engines and runtime.

B batch, K draft tokens, Q = 1 + K rows of a call, R scored rows, N target hidden size,
T top logits, S KV capacity, H KV heads, D head size. Integers are int64. All KV tensors
of one layer type have the same capacity; they have the bundle's dtype or are int8, with the
manifest's scales as constants of every graph that reads them.

Target inputs
    token [B, 1], draft [B, K]  joined in the graph; K may be 0. Prefill puts the chunk's
                                first token in ``token`` and the rest in ``draft``.
    past_length [B]             rows whose KV is valid; the new rows get positions from here on
    base [B]                    absolute position of row 0 of the sliding buffers
    scored_rows [B, R]          rows to score, ascending; drafts up to scored_rows[:, 0] are taken as given
    draft_length [B]            how many drafts after scored_rows[:, 0] may be accepted, at most R - 1
    per_layer_rows [B, Q, W]    rows of the per-layer table (PLE) for the call's tokens, where it is outside the graph
    kv.{layer}.key|value [B, H, S, D]
Target outputs
    own_token [B, R]            the target's own greedy token after each scored row
    top_logits, top_tokens [B, R, T]  float32 (softcapped) and ids, descending
    hidden [B, Q, N]            after the final norm
    num_accepted [B], next_token [B, 1], next_hidden [B, 1, N], next_past_length [B],
    next_position [B]           the next round's inputs, as they are fed to both graphs
    is_finite [B]               bool; false when any row of the sequence has a NaN or infinity
    next_kv.{layer}.key|value   the same buffers, updated in place
Assistant inputs
    token [B, 1], draft [B, J]  the pending token and the draft so far; J may be 0
    hidden [B, 1, N], position [B], past_length [B], base [B]
    kv.{layer}.key|value        of the two donor layers
Assistant outputs (n = steps of the graph)
    next_draft [B, J + n]       the draft with n tokens appended
    draft_top_logits, draft_top_tokens [B, n, T]
    next_hidden [B, 1, N]
Engines have a static KV capacity and get three inputs more (see engines/tensorrt/passes)
    sliding_rows, full_rows [bucket]  0, 1, 2, ...: attention reads that many rows of the buffers
    embedding_table [V, N]      the target's embedding table, one device buffer for both engines
"""

TARGET_INPUTS = ("token", "draft", "past_length", "base", "scored_rows", "draft_length")
TARGET_OUTPUTS = (
    "own_token",
    "top_logits",
    "top_tokens",
    "hidden",
    "num_accepted",
    "next_token",
    "next_hidden",
    "next_past_length",
    "next_position",
    "is_finite",
)
ASSISTANT_INPUTS = ("token", "draft", "hidden", "position", "past_length", "base")
ASSISTANT_OUTPUTS = ("next_draft", "draft_top_logits", "draft_top_tokens", "next_hidden")
ROWS_INPUT = {"sliding": "sliding_rows", "full": "full_rows"}
PER_LAYER_INPUT = "per_layer_rows"
EMBEDDING_INPUT = "embedding_table"
BUCKET_SUFFIX = ".bucket"  # of a buffer's first rows, inside an engine


def kv_name(layer: int, part: str) -> str:
    """Name of a KV input; ``part`` is "key" or "value"."""
    return f"kv.{layer}.{part}"


def kv_output_name(layer: int, part: str) -> str:
    """Name of the output that updates ``kv_name(layer, part)`` in place."""
    return f"next_{kv_name(layer, part)}"
