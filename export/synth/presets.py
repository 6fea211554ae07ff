"""Configs of Gemma 4 pairs without weights: the released sizes, a timing size, and tiny forms of any pair.

The counterpart of ``config.py``: specs go in, config.json comes out, spelled as transformers writes it; ``synth.py``
makes checkpoints of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

from slipstream.export.checkpoint import config as hf
from slipstream.export.checkpoint.config import AssistantConfig, CentroidHead, TextConfig
from slipstream.export.checkpoint.folder import read_json
from slipstream.runtime.errors import CheckpointError

TargetClass = Literal["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"]
Config = Mapping[str, Any]  # a parsed config.json, or a part of one

_TINY_VOCAB_SIZE = 1024
_TINY_CENTROIDS = 64


@dataclass(frozen=True)
class PairSpec:
    """What sets a pair apart, in the fields of config.json; what all pairs share is added.

    period: every period-th layer of the target is full, and so is the last.
    text: of the target's text part. assistant: of the assistant's, which has three sliding layers and a full one.
    num_full_kv_heads: of full layers, which then use K as V (``attention_k_eq_v``); None: as sliding ones, with V.
    centroid_head: of the assistant; None for a dense head.
    """

    model_class: TargetClass
    period: int
    text: Config
    assistant: Config
    num_full_kv_heads: int | None = None
    centroid_head: CentroidHead | None = None
    suppress_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class PairConfigs:
    """config.json of a target and its assistant.

    suppress_tokens: for the target's generation_config.
    folder: where the configs were read from, with target/ and assistant/ in it; None when they were made.
    """

    target: Config
    assistant: Config
    suppress_tokens: tuple[int, ...] = ()
    folder: Path | None = None

    def resolved(self) -> tuple[TextConfig, AssistantConfig]:
        """Both as export sees them. Raises CheckpointError when they are not supported or not a pair."""
        target = hf.target_config_from_hf(self.target, "the target")
        assistant = hf.assistant_config_from_hf(self.assistant, "the assistant")
        hf.check_pair(target, assistant)
        return target, assistant


_WRAPPED: TargetClass = "Gemma4ForConditionalGeneration"
_UNIFIED: TargetClass = "Gemma4UnifiedForConditionalGeneration"
_EDGE_ASSISTANT = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
_EDGE_HEAD = CentroidHead(num_centroids=2048, top_k=32)
_WIDE_ASSISTANT = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16}

PRESETS: Mapping[str, PairSpec] = {
    "e2b": PairSpec(
        _WRAPPED, 5, {
            "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
            "num_key_value_heads": 1, "sliding_window": 512, "max_position_embeddings": 131_072,
            "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256,
        }, _EDGE_ASSISTANT, centroid_head=_EDGE_HEAD,
    ),
    "e4b": PairSpec(
        _WRAPPED, 6, {
            "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_attention_heads": 8,
            "num_key_value_heads": 2, "sliding_window": 512, "max_position_embeddings": 131_072,
            "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256,
        }, _EDGE_ASSISTANT, centroid_head=_EDGE_HEAD,
    ),
    "12b": PairSpec(
        _UNIFIED, 6, {
            "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 8, "sliding_window": 1024, "max_position_embeddings": 262_144,
        }, _WIDE_ASSISTANT, num_full_kv_heads=1, suppress_tokens=(258_882, 258_883),
    ),
    "26b-a4b": PairSpec(
        _WRAPPED, 6, {
            "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
            "num_key_value_heads": 8, "sliding_window": 1024, "max_position_embeddings": 262_144,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        }, _WIDE_ASSISTANT, num_full_kv_heads=2,
    ),
    "31b": PairSpec(
        _WRAPPED, 6, {
            "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 60, "num_attention_heads": 32,
            "num_key_value_heads": 16, "sliding_window": 1024, "max_position_embeddings": 262_144,
        }, {**_WIDE_ASSISTANT, "num_attention_heads": 32}, num_full_kv_heads=4,
    ),
    "mid": PairSpec(
        "Gemma4ForCausalLM", 6, {
            "hidden_size": 1024, "intermediate_size": 5120, "num_hidden_layers": 16, "num_attention_heads": 4,
            "num_key_value_heads": 1, "sliding_window": 512, "max_position_embeddings": 32_768, "vocab_size": 32_768,
        }, {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
    ),
}  # fmt: skip
_TEXT: Config = {  # of every text part
    "vocab_size": 262_144,
    "head_dim": 256,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "rope_parameters": hf.DEFAULT_ROPE,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "dtype": "bfloat16",
}
# Per-layer embeddings and experts, which a unified model has none of.
_NO_EXTRAS: Config = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size")) | {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
}


def configs_of(source: str) -> PairConfigs:
    """Configs by preset name, of a folder with target/config.json and assistant/config.json, or of a JSON file
    that holds both as {"target": ..., "assistant": ...}.

    Raises CheckpointError, which lists the presets, when it is none of them.
    """
    path = Path(source)
    if source.lower() in PRESETS:
        return preset_configs(PRESETS[source.lower()])
    if path.is_dir():
        parts = (path / "target" / "config.json", path / "assistant" / "config.json")
        if not all(part.exists() for part in parts):
            raise CheckpointError(
                f"{path} lacks target/config.json or assistant/config.json: put each config into a folder of its own"
            )
        return PairConfigs(read_json(parts[0]), read_json(parts[1]), folder=path)
    if path.is_file():
        both = read_json(path)
        if not all(isinstance(both.get(part), dict) for part in ("target", "assistant")):
            raise CheckpointError(
                f'{path} is not of the form {{"target": {{...}}, "assistant": {{...}}}}, each a whole config.json: '
                "join them, or pass a folder with target/config.json and assistant/config.json"
            )
        return PairConfigs(both["target"], both["assistant"])
    raise CheckpointError(
        f"{source!r} is no preset, folder or file: take one of the presets {', '.join(PRESETS)}, a folder with "
        "target/config.json and assistant/config.json, or a JSON file with both"
    )


def preset_configs(spec: PairSpec) -> PairConfigs:
    """config.json of both, as transformers writes them."""
    family = "gemma4_unified" if spec.model_class == _UNIFIED else "gemma4"
    config: Config = _text_config(spec, spec.text, spec.period)
    if spec.model_class != "Gemma4ForCausalLM":
        config = {
            "model_type": family,
            "text_config": config,
            "vision_config": None,
            "audio_config": None,
            "image_token_id": 258_880,
            "audio_token_id": 258_881,
            "video_token_id": 258_884,
            "boi_token_id": 255_999,
            "eoi_token_id": 258_882,
            "boa_token_id": 256_000,
            "eoa_token_index": 258_883,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
    config = {**config, "architectures": [spec.model_class]}
    shared = ("vocab_size", "num_key_value_heads", "sliding_window", "max_position_embeddings")
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 4, "final_logit_softcapping": None}
    fields = {name: spec.text[name] for name in shared if name in spec.text} | layers
    head = spec.centroid_head
    assistant = {
        "model_type": f"{family}_assistant",
        "architectures": [f"{'Gemma4Unified' if spec.model_class == _UNIFIED else 'Gemma4'}AssistantForCausalLM"],
        "text_config": _text_config(spec, {**fields, **spec.assistant}, 4),
        "backbone_hidden_size": spec.text["hidden_size"],
        "use_ordered_embeddings": head is not None,
        "num_centroids": head.num_centroids if head else 2048,
        "centroid_intermediate_top_k": head.top_k if head else 32,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    return PairConfigs(config, assistant, spec.suppress_tokens)


def _text_config(spec: PairSpec, fields: Config, period: int) -> dict[str, Any]:
    """The text part of a target or an assistant. fields: its own."""
    is_unified = spec.model_class == _UNIFIED
    text = {**_TEXT, **({} if is_unified else _NO_EXTRAS), **fields}
    num_layers = text["num_hidden_layers"]
    full = [index for index in range(num_layers) if (index + 1) % period == 0 or index + 1 == num_layers]
    override = {"head_dim": 512}
    if spec.num_full_kv_heads is not None:
        override["num_key_value_heads"] = spec.num_full_kv_heads
    text |= {
        "model_type": "gemma4_unified_text" if is_unified else "gemma4_text",
        "layer_types": ["full_attention" if index in full else "sliding_attention" for index in range(num_layers)],
        "per_layer_config": _by_layer(dict.fromkeys(full, override)),
        "attention_k_eq_v": spec.num_full_kv_heads is not None,
        "use_bidirectional_attention": "vision" if is_unified else None,
    }
    if not is_unified:
        text["vocab_size_per_layer_input"] = text["vocab_size"] if text["hidden_size_per_layer_input"] else 0
    return text


def _by_layer(overrides: Mapping[int, Config]) -> dict[str, Config]:
    """per_layer_config of layers by index; their numbers are padded with zeros to one width, as transformers does."""
    width = len(str(max(overrides, default=0)))
    return {str(index).zfill(width): override for index, override in overrides.items()}


def tiny(pair: PairConfigs) -> PairConfigs:
    """The same structure in a few MB.

    Kept: pattern, head sizes and counts of both kinds, K=V, KV sharing, PLE, top-k of the experts, kind of head,
    window, positions, class. Shrunk: widths, depth (a period, and one more where layers share KV), vocabulary,
    centroids, and the number of experts.
    """
    resolved = hf.target_config_from_hf(pair.target, "the target")
    # 32 heads of 256 and 512 already make layers of half a million values at a width of 32
    hidden_size = min(resolved.hidden_size, 64, max(32, 1024 // resolved.layers[0].num_heads))
    text = _shrunk(pair.target.get("text_config") or pair.target, hidden_size) | _fewer_layers(pair.target, resolved)
    target = {**pair.target, "text_config": text} if "text_config" in pair.target else text
    assistant = {
        **pair.assistant,
        "text_config": _shrunk(pair.assistant.get("text_config") or {}, 32),
        "backbone_hidden_size": hidden_size,
    }
    if num_centroids := assistant.get("num_centroids"):
        assistant["num_centroids"] = gcd(num_centroids, _TINY_CENTROIDS)  # divides the vocabulary whatever it is
        assistant["centroid_intermediate_top_k"] = min(
            assistant["num_centroids"], 8, assistant.get("centroid_intermediate_top_k", 8)
        )
    vocab_size = text["vocab_size"]
    suppressed = tuple(range(vocab_size - len(pair.suppress_tokens), vocab_size))
    return PairConfigs(target, assistant, suppressed)


def _shrunk(text: Config, hidden_size: int) -> dict[str, Any]:
    limits = {
        "vocab_size": _TINY_VOCAB_SIZE,
        "vocab_size_per_layer_input": _TINY_VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 128,
        "hidden_size_per_layer_input": 16,
        "num_experts": 16,
        "moe_intermediate_size": 32,
    }
    return {
        **text,
        **{name: min(text[name], limit) for name, limit in limits.items() if isinstance(text.get(name), int)},
    }


def _fewer_layers(target: Config, resolved: TextConfig) -> dict[str, Any]:
    """Config fields that keep one period of layers and the layers at the end: shared ones, or a period cut short."""
    types = [layer.type for layer in resolved.layers]
    num_layers = len(types)
    period = 1 + max(types.index("sliding"), types.index("full"))
    num_shared = num_last = sum(not layer.owns_kv for layer in resolved.layers)
    if num_shared:
        shared = set(types[-num_shared:])
        num_last = next(n for n in range(min(period, num_shared), num_shared + 1) if set(types[-n:]) == shared)
    kept = [*range(period), *range(num_layers - (num_last or num_layers % period), num_layers)]
    if types[kept[-1]] != "full":
        kept.append(num_layers - 1)
    text = target.get("text_config") or target
    fields: dict[str, Any] = {
        "num_hidden_layers": len(kept),
        "layer_types": [f"{types[index]}_attention" for index in kept],
        "num_kv_shared_layers": num_last,
    }
    if by_layer := text.get("per_layer_config"):
        overrides = {int(index): override for index, override in by_layer.items()}
        fields["per_layer_config"] = _by_layer({n: overrides[old] for n, old in enumerate(kept) if old in overrides})
    return fields
