"""Configs of Gemma 4 pairs without weights: the released sizes, a timing size, and tiny forms of any pair.

The counterpart of ``config.py``: specs go in, config.json comes out, spelled as transformers
writes it; ``synth.py`` makes checkpoints of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, Literal

from slipstream.export.checkpoint import config as hf
from slipstream.export.checkpoint.config import AssistantConfig, CentroidHead, Experts, TextConfig
from slipstream.export.checkpoint.folder import read_json
from slipstream.runtime.errors import CheckpointError

TargetClass = Literal["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"]
Config = Mapping[str, Any]  # a parsed config.json

_HEAD_DIM, _FULL_HEAD_DIM = 256, 512
_TINY_VOCAB_SIZE = 1024
_TINY_CENTROIDS = 64


@dataclass(frozen=True)
class TargetSpec:
    """period: every period-th layer is full, and so is the last.
    num_kv_heads: of sliding layers.
    num_full_kv_heads: of full layers, which then use K as V (``attention_k_eq_v``); None: as sliding ones, with V.
    num_shared_layers: how many layers at the end read another layer's KV.
    """

    model_class: TargetClass
    hidden_size: int
    intermediate_size: int
    num_layers: int
    period: int
    num_heads: int
    num_kv_heads: int
    window: int
    max_positions: int
    num_full_kv_heads: int | None = None
    num_shared_layers: int = 0
    has_double_wide_mlp: bool = False
    ple_dim: int = 0
    experts: Experts | None = None
    vocab_size: int = 262_144
    suppress_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class AssistantSpec:
    """Three sliding layers and a full one over the target's KV. centroid_head: None for a dense head."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    centroid_head: CentroidHead | None = None


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
_EDGE_ASSISTANT = AssistantSpec(256, 2048, 4, CentroidHead(num_centroids=2048, top_k=32))

PRESETS: Mapping[str, tuple[TargetSpec, AssistantSpec]] = {
    "e2b": (
        TargetSpec(
            _WRAPPED, 1536, 6144, num_layers=35, period=5, num_heads=8, num_kv_heads=1, window=512,
            max_positions=131_072, num_shared_layers=20, has_double_wide_mlp=True, ple_dim=256,
        ),
        _EDGE_ASSISTANT,
    ),
    "e4b": (
        TargetSpec(
            _WRAPPED, 2560, 10_240, num_layers=42, period=6, num_heads=8, num_kv_heads=2, window=512,
            max_positions=131_072, num_shared_layers=18, ple_dim=256,
        ),
        _EDGE_ASSISTANT,
    ),
    "12b": (
        TargetSpec(
            _UNIFIED, 3840, 15_360, num_layers=48, period=6, num_heads=16, num_kv_heads=8, num_full_kv_heads=1,
            window=1024, max_positions=262_144, suppress_tokens=(258_882, 258_883),
        ),
        AssistantSpec(1024, 8192, 16),
    ),
    "26b-a4b": (
        TargetSpec(
            _WRAPPED, 2816, 2112, num_layers=30, period=6, num_heads=16, num_kv_heads=8, num_full_kv_heads=2,
            window=1024, max_positions=262_144, experts=Experts(num_experts=128, top_k=8, intermediate_size=704),
        ),
        AssistantSpec(1024, 8192, 16),
    ),
    "31b": (
        TargetSpec(
            _WRAPPED, 5376, 21_504, num_layers=60, period=6, num_heads=32, num_kv_heads=16, num_full_kv_heads=4,
            window=1024, max_positions=262_144,
        ),
        AssistantSpec(1024, 8192, 32),
    ),
    "mid": (
        TargetSpec(
            "Gemma4ForCausalLM", 1024, 5120, num_layers=16, period=6, num_heads=4, num_kv_heads=1, window=512,
            max_positions=32_768, vocab_size=32_768,
        ),
        AssistantSpec(256, 1024, 4),
    ),
}  # fmt: skip


def configs_of(source: str) -> PairConfigs:
    """Configs by preset name, of a folder with target/config.json and assistant/config.json, or of a JSON file
    that holds both as {"target": ..., "assistant": ...}.

    Raises CheckpointError, which lists the presets, when it is none of them.
    """
    path = Path(source)
    if source.lower() in PRESETS:
        return preset_configs(*PRESETS[source.lower()])
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


def preset_configs(target: TargetSpec, assistant: AssistantSpec) -> PairConfigs:
    """config.json of both, as transformers writes them."""
    text = _text_config(target)
    config: Config = text
    if target.model_class != "Gemma4ForCausalLM":
        config = {
            "model_type": "gemma4_unified" if target.model_class == _UNIFIED else "gemma4",
            "text_config": text,
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
    config = {**config, "architectures": [target.model_class]}
    return PairConfigs(config, _assistant_config(target, assistant), target.suppress_tokens)


def _text_config(spec: TargetSpec) -> dict[str, Any]:
    is_unified = spec.model_class == _UNIFIED
    is_full = [(index + 1) % spec.period == 0 or index + 1 == spec.num_layers for index in range(spec.num_layers)]
    text: dict[str, Any] = {
        "model_type": "gemma4_unified_text" if is_unified else "gemma4_text",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": _HEAD_DIM,
        "per_layer_config": _per_layer_config(is_full, spec.num_full_kv_heads),
        "attention_k_eq_v": spec.num_full_kv_heads is not None,
        "num_kv_shared_layers": spec.num_shared_layers,
        "use_double_wide_mlp": spec.has_double_wide_mlp,
        "sliding_window": spec.window,
        "max_position_embeddings": spec.max_positions,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_bidirectional_attention": "vision" if is_unified else None,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "bfloat16",
    }
    if not is_unified:  # its config has neither per-layer embeddings nor experts
        experts = spec.experts
        text |= {
            "hidden_size_per_layer_input": spec.ple_dim,
            "vocab_size_per_layer_input": spec.vocab_size if spec.ple_dim else 0,
            "enable_moe_block": experts is not None,
            "num_experts": experts.num_experts if experts else None,
            "top_k_experts": experts.top_k if experts else None,
            "moe_intermediate_size": experts.intermediate_size if experts else None,
        }
    return text


def _per_layer_config(is_full: list[bool], num_full_kv_heads: int | None) -> dict[str, dict[str, int]]:
    """What full layers have of their own; layer numbers are padded with zeros to one width, as transformers does."""
    override = {"head_dim": _FULL_HEAD_DIM}
    if num_full_kv_heads is not None:
        override["num_key_value_heads"] = num_full_kv_heads
    indices = [index for index, full in enumerate(is_full) if full]
    width = len(str(indices[-1]))
    return {str(index).zfill(width): override for index in indices}


def _assistant_config(target: TargetSpec, spec: AssistantSpec) -> dict[str, Any]:
    is_unified = target.model_class == _UNIFIED
    layers = replace(
        target,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_layers=4,
        period=4,
        num_shared_layers=4,
        has_double_wide_mlp=False,
        ple_dim=0,
        experts=None,
    )
    text = {**_text_config(layers), "final_logit_softcapping": None}
    family = "Gemma4Unified" if is_unified else "Gemma4"
    head = spec.centroid_head
    return {
        "model_type": "gemma4_unified_assistant" if is_unified else "gemma4_assistant",
        "architectures": [f"{family}AssistantForCausalLM"],
        "text_config": text,
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": head is not None,
        "num_centroids": head.num_centroids if head else 2048,
        "centroid_intermediate_top_k": head.top_k if head else 32,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


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
        renumbered = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}
        width = len(str(max(renumbered, default=0)))
        fields["per_layer_config"] = {str(index).zfill(width): override for index, override in renumbered.items()}
    return fields
