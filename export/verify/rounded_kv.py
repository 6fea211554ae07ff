"""transformers' attention over keys and values rounded as an int8 bundle stores them: a reference for such a bundle.

It computes the graph's own function, so a comparison finds wrong scales and bindings that a tolerance for int8 itself
would hide. Rows are rounded each by itself, so neither caches nor chunks matter. Not a measure of what int8 costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.runtime.bundle.manifest import KVBuffer

_ATTENTION = "slipstream_int8_kv"


def rounded(values: Tensor, scale: float) -> Tensor:
    """What QuantizeLinear and DequantizeLinear make of values: int8 steps of scale, saturated."""
    return torch.clamp(torch.round(values / scale), -128, 127) * scale


def round_kv(target: Any, kv: Sequence[KVBuffer]) -> None:
    """Let every layer of a transformers target attend to keys and values as ``kv`` stores them: int8 or float."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    scales = {layer: buffer for buffer in kv for layer in (buffer.layer, *buffer.target_readers)}
    for module in target.modules():
        if type(module).__name__.endswith("TextAttention"):
            module.kv_scales = scales[module.layer_idx].key_scale, scales[module.layer_idx].value_scale
    if any(buffer.dtype == "int8" for buffer in kv):
        AttentionInterface.register(_ATTENTION, _attend)
        AttentionMaskInterface.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        target.set_attn_implementation(_ATTENTION)
    elif target.config._attn_implementation == _ATTENTION:
        target.set_attn_implementation("sdpa")


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    key_scale, value_scale = module.kv_scales
    usual: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return usual(module, query, rounded(key, key_scale), rounded(value, value_scale), *args, **more)
