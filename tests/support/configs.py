"""Configs of targets and assistants as config.json has them: published ones, small ones, any structure."""

from __future__ import annotations

import json
from typing import Any

import transformers
from hypothesis import strategies as st

S, F = "sliding_attention", "full_attention"
Fields = dict[str, Any]

_COMMON: Fields = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": 30.0,
}
_NO_PLE: Fields = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_K_EQ_V: Fields = {"attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144}
_EDGE: Fields = {
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}

# text configs of the published models, in the older spelling
RELEASED: dict[str, Fields] = {
    "E2B": _COMMON | _EDGE | {
        "hidden_size": 1536, "num_hidden_layers": 35, "layer_types": ([S] * 4 + [F]) * 7, "intermediate_size": 6144,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    },
    "E4B": _COMMON | _EDGE | {
        "hidden_size": 2560, "num_hidden_layers": 42, "layer_types": ([S] * 5 + [F]) * 7, "intermediate_size": 10240,
        "num_key_value_heads": 2, "num_kv_shared_layers": 18,
    },
    "12B": _COMMON | _K_EQ_V | {
        "model_type": "gemma4_unified_text", "hidden_size": 3840, "num_hidden_layers": 48, "intermediate_size": 15360,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1,
    },
    "31B": _COMMON | _NO_PLE | _K_EQ_V | {
        "hidden_size": 5376, "num_hidden_layers": 60, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    },
}  # fmt: skip

_BOILERPLATE: Fields = {
    "_name_or_path": "", "architectures": None, "chunk_size_feed_forward": 0, "dtype": "bfloat16",
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "output_attentions": False, "output_hidden_states": False,
    "problem_type": None, "return_dict": True,
}  # fmt: skip
_PUBLISHED_TEXT: Fields = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "enable_moe_block": False,
    "eos_token_id": 1, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "moe_intermediate_size": None, "num_experts": None,
    "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "top_k_experts": None, "use_cache": True, "use_double_wide_mlp": False,
    "vocab_size": 262144,
}  # fmt: skip
_PUBLISHED_MEDIA: Fields = {
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoi_token_id": 258882,
    "image_token_id": 258880,
}  # fmt: skip

# config.json of google/gemma-4-12B and of google/gemma-4-E2B-it-assistant as they were published in mid-2026
PUBLISHED_12B: Fields = _PUBLISHED_MEDIA | {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640, "output_proj_dims": 640},
    "dtype": "bfloat16",
    "eoa_token_index": 258883,
    "initializer_range": 0.02,
    "model_type": "gemma4_unified",
    "text_config": _PUBLISHED_TEXT | {
        "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_size": 3840, "intermediate_size": 15360,
        "layer_types": ([S] * 5 + [F]) * 8, "max_position_embeddings": 262144, "model_type": "gemma4_unified_text",
        "num_attention_heads": 16, "num_global_key_value_heads": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.10.0.dev0",
    "video_token_id": 258884,
    "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 3840, "num_soft_tokens": 280},
}  # fmt: skip
PUBLISHED_E2B_ASSISTANT: Fields = _PUBLISHED_MEDIA | {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 1536,
    "centroid_intermediate_top_k": 32,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "model_type": "gemma4_assistant",
    "num_centroids": 2048,
    "text_config": _BOILERPLATE | _PUBLISHED_TEXT | {
        "attention_k_eq_v": False, "final_logit_softcapping": None, "hidden_size": 256, "intermediate_size": 2048,
        "layer_types": [S, S, S, F], "max_position_embeddings": 131072, "model_type": "gemma4_text",
        "num_attention_heads": 4, "num_global_key_value_heads": None, "num_hidden_layers": 4, "num_key_value_heads": 1,
        "num_kv_shared_layers": 4, "sliding_window": 512, "use_bidirectional_attention": None,
        "vocab_size_per_layer_input": 0,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.7.0.dev0",
    "use_ordered_embeddings": True,
}  # fmt: skip

SMALL: Fields = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": [S, F, S, F],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "max_position_embeddings": 64,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
SMALL_ASSISTANT: Fields = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 24,
    "use_ordered_embeddings": True,
    "num_centroids": 12,
    "centroid_intermediate_top_k": 3,
    "text_config": SMALL | {"hidden_size": 16, "num_hidden_layers": 2, "layer_types": [S, F]},
}


def hf_config(fields: Fields) -> Any:
    """transformers' own config of these fields."""
    unified = "unified" in fields["model_type"]
    kind = transformers.Gemma4UnifiedTextConfig if unified else transformers.Gemma4TextConfig
    return kind(**{name: value for name, value in fields.items() if name != "model_type"})


def newer(fields: Fields) -> Fields:
    """The same config as transformers 5 writes it."""
    written: Fields = json.loads(hf_config(fields).to_json_string(use_diff=True))
    assert "per_layer_config" in written
    assert "global_head_dim" not in written
    return written


@st.composite
def structures(draw: st.DrawFn) -> Fields:
    num_layers = draw(st.integers(3, 14))
    kinds = [*draw(st.lists(st.sampled_from([S, F]), min_size=num_layers - 1, max_size=num_layers - 1)), F]
    num_shared = draw(st.integers(0, num_layers - 2))
    owners = kinds[: num_layers - num_shared]
    if set(owners) != {S, F}:
        kinds[:2] = [S, F]
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    return SMALL | {
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "num_kv_shared_layers": num_shared,
        "num_key_value_heads": num_kv_heads,
        "num_global_key_value_heads": draw(st.sampled_from([None, 1, 2])),
        "attention_k_eq_v": draw(st.booleans()),
        "use_double_wide_mlp": draw(st.booleans()),
        "global_head_dim": draw(st.sampled_from([8, 16])),
    }
