"""config.json field by field: which names are known, and numbers that are checked as they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.runtime.errors import CheckpointError

# Fields that change nothing in the text computation, or that other code reads (token ids, quantization_config.py).
_IGNORED_FIELDS = frozenset(
    """_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward dtype
    eos_token_id id2label initializer_range is_encoder_decoder label2id model_type
    output_attentions output_hidden_states pad_token_id problem_type quantization_config return_dict torch_dtype
    transformers_version use_cache vocab_size_per_layer_input""".split()
)
# Provenance, which transformers stores and nothing acts on: listed in a note, so that nobody wonders.
_METADATA_FIELDS = frozenset(
    """_attn_implementation_autoset _commit_hash base_model base_model_name_or_path datasets finetuned_from
    finetuning_task language library_name license license_name model_name name_or_path pipeline_tag processor_class
    tags task_specific_params tokenizer_class""".split()
)
_TOOL_FIELD = re.compile(
    r"(unsloth|trl|peft|axolotl|llama_?factory|mergekit|autotrain|torchtune|optimum|ms_swift|swift|lightning|wandb)_\w+"
    r"|transformers[._]js_config"
)
TEXT_FIELDS = frozenset(
    """attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim head_dim
    hidden_activation hidden_size hidden_size_per_layer_input intermediate_size layer_types
    max_position_embeddings moe_intermediate_size num_attention_heads num_experts num_global_key_value_heads
    num_hidden_layers num_key_value_heads num_kv_shared_layers per_layer_config rms_norm_eps rope_local_base_freq
    rope_parameters rope_theta sliding_window sliding_window_pattern tie_word_embeddings top_k_experts
    use_bidirectional_attention use_double_wide_mlp vocab_size""".split()
)

# Fields around the text part: token ids of other modalities, and their towers, which are left out.
_MEDIA_FIELDS = frozenset(
    """audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
    image_token_id video_token_id vision_config vision_soft_tokens_per_image""".split()
)
WRAPPER_FIELDS = _MEDIA_FIELDS | {"text_config", "tie_word_embeddings"}
ASSISTANT_FIELDS = WRAPPER_FIELDS | {  # published assistants repeat the token ids of their target's wrapper
    "backbone_hidden_size",
    "centroid_intermediate_top_k",
    "num_centroids",
    "use_ordered_embeddings",
}


def is_metadata(name: str) -> bool:
    """Whether a field of config.json says where a model comes from, and nothing of how it computes."""
    return name in _METADATA_FIELDS or _TOOL_FIELD.fullmatch(name) is not None


def refuse_unknown(config: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    passed = known | _IGNORED_FIELDS
    unknown = sorted(
        name
        for name, value in config.items()
        if name not in passed and not is_metadata(name) and value not in (None, False)
    )
    if unknown:
        raise CheckpointError(
            f"{where} has config fields that slipstream does not know and that may change the computation: "
            f"{', '.join(unknown)}. Use a slipstream that supports them, or remove them from config.json "
            "if you know that they change nothing"
        )


def required(config: Mapping[str, Any], name: str, where: str, default: Any = None) -> Any:
    """A field's value; default when it is absent or null. Raises CheckpointError where there is neither."""
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise CheckpointError(f"{where}: config.json lacks {name}")
    return value


def count(config: Mapping[str, Any], name: str, where: str, default: int | None = None, minimum: int = 1) -> int:
    """A whole number of at least minimum; default when the field is absent or null."""
    value = required(config, name, where, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise CheckpointError(f"{where}: {name} is {value!r}; a whole number of at least {minimum} is expected")
    return value


def positive(config: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    """A number above zero; default when the field is absent or null."""
    value = required(config, name, where, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{where}: {name} is {value!r}; a number above zero is expected")
    return float(value)
