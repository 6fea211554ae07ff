"""Random Gemma 4 pairs of every structure, written as Hugging Face checkpoints by transformers itself.

Weights are random but not tiny, so that logits differ clearly; nothing here is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 384
PAD, EOS, BOS = 0, 1, 2
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' + message['role'] + '\\n' + message['content'] | trim + "
    "'<turn|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "max_position_embeddings": 160,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "initializer_range": 0.2,
}
_S, _F = "sliding_attention", "full_attention"

# name -> (target class, target fields, assistant fields, extra assistant config, max shard size)
PAIRS: dict[str, dict[str, Any]] = {
    # E2B, E4B: PLE, KV-shared layers with the double-wide MLP, centroid head
    "edge": {
        "target": {
            "num_hidden_layers": 6,
            "layer_types": [_S, _S, _F, _S, _S, _F],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
        },
        "assistant": {"layer_types": [_S, _F]},
        "head": {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3},
    },
    # 31B: K=V on full layers, several KV heads that differ by type, dense head, four assistant layers; an untied head
    "dense": {
        "target": {
            "num_hidden_layers": 4,
            "layer_types": [_S, _S, _S, _F],
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "tie_word_embeddings": False,
        },
        "assistant": {"layer_types": [_S, _S, _S, _F], "num_attention_heads": 8},
    },
    # text part of a multimodal checkpoint, many shards, KV-shared without PLE, no softcap
    "wrapped": {
        "class": "Gemma4ForConditionalGeneration",
        "target": {
            "num_hidden_layers": 5,
            "layer_types": [_F, _S, _F, _S, _F],
            "num_kv_shared_layers": 2,
            "num_key_value_heads": 2,
            "final_logit_softcapping": None,
            "sliding_window": 9,
        },
        "assistant": {"layer_types": [_S, _F], "hidden_size": 24},
        "shard_size": "60KB",
    },
    # 26B-A4B: experts beside the shared MLP, K=V on full layers
    "experts": {
        "target": {
            "num_hidden_layers": 3,
            "layer_types": [_S, _S, _F],
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 12,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
        },
        "assistant": {"layer_types": [_S, _F], "enable_moe_block": False},
    },
    # 12B: the unified classes, suppressed tokens, one global KV head
    "unified": {
        "class": "Gemma4UnifiedForConditionalGeneration",
        "target": {
            "num_hidden_layers": 3,
            "layer_types": [_S, _S, _F],
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        "assistant": {"layer_types": [_S, _F]},
        "suppress_tokens": [7, 300, 301],
    },
    # matrices that blocks of 32, 64 and 128 divide, whose rounding shows in the text within a few tokens
    "blocks": {
        "target": {
            "num_hidden_layers": 2,
            "layer_types": [_S, _F],
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "head_dim": 32,
        },
        "assistant": {"layer_types": [_S, _F], "hidden_size": 128},
    },
    # head sizes of the released models, K=V on full layers, KV heads that differ by type, dense head
    "wide": {
        "target": {
            "num_hidden_layers": 2,
            "layer_types": [_S, _F],
            "head_dim": 256,
            "global_head_dim": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        "assistant": {"layer_types": [_S, _F]},
    },
}


def random_prompt(length: int, seed: int) -> list[int]:
    """BOS and tokens that are not special ones."""
    return [BOS, *np.random.default_rng(seed).integers(8, VOCAB_SIZE, length - 1).tolist()]


def make_tokenizer() -> Tokenizer:
    """Byte-fallback BPE in Gemma's form, with a few letters and words of its own."""
    names = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n"]
    names += [chr(code) for code in range(ord("a"), ord("z") + 1)] + ["th", "the", "▁the", "▁a", "é"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    tokenizer = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def make_pair(folder: Path, name: str) -> None:
    """Write PAIRS[name] to folder/target and folder/assistant."""
    spec = PAIRS[name]
    torch.manual_seed(sum(name.encode()))
    target_fields = _TEXT | spec["target"]
    kind = spec.get("class", "Gemma4ForCausalLM")
    family = "Gemma4Unified" if "Unified" in kind else "Gemma4"
    text_class = getattr(transformers, f"{family}TextConfig")
    text = text_class(**_known(target_fields, family))
    if kind.endswith("CausalLM"):
        target = getattr(transformers, kind)(text)
    else:
        config_class = getattr(transformers, f"{family}Config")
        target = getattr(transformers, kind)(config_class(text_config=text, vision_config=None, audio_config=None))
    assistant_fields = target_fields | {
        "hidden_size": 32,
        "num_kv_shared_layers": len(spec["assistant"]["layer_types"]),
        "num_hidden_layers": len(spec["assistant"]["layer_types"]),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
    }
    assistant_config = getattr(transformers, f"{family}AssistantConfig")(
        text_config=text_class(**_known(assistant_fields | spec["assistant"], family)),
        backbone_hidden_size=target_fields["hidden_size"],
        **spec.get("head", {}),
    )
    assistant = getattr(transformers, f"{family}AssistantForCausalLM")(assistant_config)
    _randomize(target)
    _randomize(assistant)
    if assistant_config.use_ordered_embeddings:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    target.save_pretrained(folder / "target", max_shard_size=spec.get("shard_size", "5GB"))
    assistant.save_pretrained(folder / "assistant")
    _write_texts(folder, spec)


def _known(fields: dict[str, Any], family: str) -> dict[str, Any]:
    if family == "Gemma4Unified":  # its config has no per-layer embeddings
        return {key: value for key, value in fields.items() if "per_layer_input" not in key}
    return fields


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Norm weights and layer scalars that are not one, so that a forgotten one shows."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name and parameter.is_floating_point():
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        elif name.endswith(("router.scale", "per_expert_scale")):
            parameter.copy_(0.5 + torch.rand_like(parameter))
        elif "layer_scalar" in name:
            parameter.fill_(0.5 + torch.rand(()).item())


def _write_texts(folder: Path, spec: dict[str, Any]) -> None:
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, 5], "pad_token_id": PAD}
    if "suppress_tokens" in spec:
        generation["suppress_tokens"] = spec["suppress_tokens"]
    for name in ("target", "assistant"):
        make_tokenizer().save(str(folder / name / "tokenizer.json"))
    drafting = {"num_assistant_tokens": 3}
    (folder / "target" / "generation_config.json").write_text(json.dumps(generation))
    (folder / "assistant" / "generation_config.json").write_text(json.dumps(drafting))
    (folder / "target" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
