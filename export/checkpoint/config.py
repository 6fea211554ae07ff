"""The one door for checkpoint spelling: config.json in, frozen and fully resolved config out.

Nothing but this and ``config_fields.py`` knows a Hugging Face field name. Older and newer spellings
(``global_head_dim`` or ``per_layer_config``) end up in the same dataclasses; what would
change the computation and is not implemented is refused here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.runtime.errors import CheckpointError

from .config_fields import ASSISTANT_FIELDS, TEXT_FIELDS, WRAPPER_FIELDS, count, positive, refuse_unknown, required

LayerType = Literal["sliding", "full"]

TARGET_MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")

_LAYER_TYPES: dict[str, LayerType] = {"sliding_attention": "sliding", "full_attention": "full"}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer type.

    theta: base wavelength.
    rotary_fraction: share of the head that rotates; the rest gets frequency zero
        ("proportional" RoPE: exponents are still divided by the whole head size).
    """

    theta: float
    rotary_fraction: float


@dataclass(frozen=True)
class Layer:
    """One decoder layer, with every per-layer choice made.

    kv_owner: index of the layer whose key and value buffers this layer reads; its own
        index when it writes them, None in an assistant (its KV belongs to the target).
    """

    index: int
    type: LayerType
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_owner: int | None
    value_is_key: bool

    @property
    def owns_kv(self) -> bool:
        return self.kv_owner == self.index


@dataclass(frozen=True)
class Experts:
    """Experts beside the shared MLP of every layer. intermediate_size: of one expert."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True)
class TextConfig:
    """A Gemma 4 text stack. ``ple_dim`` is 0 without per-layer embeddings; ``experts`` is None in a dense model."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    rms_norm_eps: float
    sliding_window: int
    rope: Mapping[LayerType, Rope]
    logit_softcap: float | None
    ple_dim: int
    max_positions: int
    has_tied_head: bool
    experts: Experts | None = None

    @property
    def kv_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.owns_kv)

    def donor(self, layer_type: LayerType) -> Layer:
        """The last KV-owning layer of a type: the one an assistant's layers read."""
        return [layer for layer in self.kv_layers if layer.type == layer_type][-1]


@dataclass(frozen=True)
class CentroidHead:
    """Ordered-embedding head: only the tokens of the ``top_k`` nearest centroids are scored."""

    num_centroids: int
    top_k: int


@dataclass(frozen=True)
class AssistantConfig:
    text: TextConfig
    backbone_hidden_size: int
    centroid_head: CentroidHead | None


def target_config_from_hf(config: Mapping[str, Any], where: str) -> TextConfig:
    """Resolve a target's config.json.

    config: the parsed file; the text part may sit under ``text_config``.
    where: how to call the checkpoint in messages.
    Raises CheckpointError when it is not a Gemma 4 target or needs what is not implemented.
    """
    model_type = config.get("model_type")
    if model_type in ASSISTANT_MODEL_TYPES:
        raise CheckpointError(
            f"{where} is an assistant (model_type {model_type!r}), not a target: "
            "pass the target first and its assistant second"
        )
    if model_type not in TARGET_MODEL_TYPES:
        raise CheckpointError(
            f"{where} has model_type {model_type!r}; a Gemma 4 target has one of {', '.join(TARGET_MODEL_TYPES)}"
        )
    if "text_config" in config:
        refuse_unknown(config, WRAPPER_FIELDS, where)
    return _text_config(_text_part(config, where), where, is_assistant=False)


def assistant_config_from_hf(config: Mapping[str, Any], where: str) -> AssistantConfig:
    """Resolve an assistant's config.json. Raises CheckpointError as target_config_from_hf does."""
    model_type = config.get("model_type")
    if model_type not in ASSISTANT_MODEL_TYPES:
        raise CheckpointError(
            f"{where} has model_type {model_type!r}; a Gemma 4 assistant has one of "
            f"{', '.join(ASSISTANT_MODEL_TYPES)} (the pair is the target first, the assistant second)"
        )
    required(config, "text_config", where)
    refuse_unknown(config, ASSISTANT_FIELDS, where)
    text = _text_config(_text_part(config, where), where, is_assistant=True)
    if text.ple_dim or text.experts:
        raise CheckpointError(f"{where} has per-layer embeddings or experts, which no Gemma 4 assistant has")
    head = None
    if config.get("use_ordered_embeddings"):
        num_centroids = count(config, "num_centroids", where, 2048)
        head = CentroidHead(num_centroids, count(config, "centroid_intermediate_top_k", where, 32))
        if text.vocab_size % head.num_centroids:
            raise CheckpointError(
                f"{where} has {head.num_centroids} centroids, which does not divide its vocabulary of {text.vocab_size}"
            )
        if head.top_k > head.num_centroids:
            raise CheckpointError(f"{where} scores {head.top_k} centroids but has only {head.num_centroids}")
    return AssistantConfig(text, count(config, "backbone_hidden_size", where), head)


def media_token_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Ids of a target that stand for images, audio and video in text, by the names that tokenizers give them."""
    fields = {f"{name}_token": f"{name}_token_id" for name in ("image", "audio", "video", "boi", "eoi", "boa", "eoa")}
    spelled = {"eoa_token_id": config.get("eoa_token_index"), **config}  # either, or both
    return {name: spelled[field] for name, field in fields.items() if isinstance(spelled.get(field), int)}


def check_pair(target: TextConfig, assistant: AssistantConfig) -> None:
    """Refuse an assistant that was not made for this target. Raises CheckpointError."""
    found_expected = [
        ("backbone_hidden_size", assistant.backbone_hidden_size, target.hidden_size),
        ("vocab_size", assistant.text.vocab_size, target.vocab_size),
        ("sliding_window", assistant.text.sliding_window, target.sliding_window),
    ]
    for layer in assistant.text.layers:
        donor = target.donor(layer.type)
        found_expected += [
            (f"head_dim of {layer.type} layers", layer.head_dim, donor.head_dim),
            (f"num_key_value_heads of {layer.type} layers", layer.num_kv_heads, donor.num_kv_heads),
        ]
        if layer.num_heads % donor.num_kv_heads:
            raise CheckpointError(
                f"assistant layer {layer.index} has {layer.num_heads} query heads, which the {donor.num_kv_heads} "
                f"KV heads of target layer {donor.index} do not divide: this is not the target's assistant"
            )
        if target.rope[layer.type] != assistant.text.rope[layer.type]:
            raise CheckpointError(
                f"{layer.type} layers rotate differently: target {target.rope[layer.type]}, assistant "
                f"{assistant.text.rope[layer.type]}: this is not the target's assistant"
            )
    for name, found, expected in found_expected:
        if found != expected:
            raise CheckpointError(
                f"the assistant's {name} is {found}, the target needs {expected}: this is not the target's assistant"
            )


def _text_part(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The text stack's fields; the wrapper decides whether the head is tied."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict) or text.get("model_type", "gemma4_text") not in TARGET_MODEL_TYPES:
        raise CheckpointError(f"{where}: text_config is not that of a Gemma 4 text model")
    return {**text, "tie_word_embeddings": config.get("tie_word_embeddings")}


def _text_config(config: Mapping[str, Any], where: str, *, is_assistant: bool) -> TextConfig:
    _refuse_unsupported(config, where)
    layer_types = _layer_types(config, where)
    num_layers = len(layer_types)
    num_shared = count(config, "num_kv_shared_layers", where, 0, minimum=0)
    if is_assistant:
        if num_shared not in (0, num_layers):  # transformers reads 0 as all, and refuses anything between
            raise CheckpointError(f"{where}: {num_shared} of {num_layers} layers share KV; all of an assistant's do")
        num_shared = num_layers
    if not is_assistant and num_shared >= num_layers:
        raise CheckpointError(
            f"{where}: num_kv_shared_layers is {num_shared} of {num_layers} layers; "
            "a target has layers that own their KV"
        )
    overrides, first_shared = _layer_overrides(config, where), num_layers - num_shared
    layers = tuple(
        _layer(config, index, layer_types, overrides.get(index, {}), first_shared=first_shared, where=where)
        for index in range(num_layers)
    )
    used_types, softcap = set(layer_types), config.get("final_logit_softcapping")
    if not is_assistant and used_types != {"sliding", "full"}:
        raise CheckpointError(f"{where} has only {used_types.pop()} layers; a target needs sliding and full ones")
    return TextConfig(
        vocab_size=count(config, "vocab_size", where),
        hidden_size=count(config, "hidden_size", where),
        layers=layers,
        rms_norm_eps=positive(config, "rms_norm_eps", where, 1e-6),
        sliding_window=count(config, "sliding_window", where),
        rope={layer_type: _rope(config, layer_type, where) for layer_type in used_types},
        logit_softcap=None if softcap is None else positive(config, "final_logit_softcapping", where),
        ple_dim=count(config, "hidden_size_per_layer_input", where, 0, minimum=0),
        max_positions=count(config, "max_position_embeddings", where),
        has_tied_head=config.get("tie_word_embeddings") is not False,  # absent and null: tied
        experts=_experts(config, where) if config.get("enable_moe_block") else None,
    )


def _experts(config: Mapping[str, Any], where: str) -> Experts:
    num_experts, top_k = count(config, "num_experts", where), count(config, "top_k_experts", where)
    if top_k > num_experts:
        raise CheckpointError(f"{where} picks {top_k} experts of {num_experts}")
    return Experts(num_experts, top_k, count(config, "moe_intermediate_size", where))


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    refuse_unknown(config, TEXT_FIELDS, where)
    reasons = {}
    if config.get("attention_bias"):
        reasons["attention_bias"] = "attention biases are not supported"
    if config.get("use_bidirectional_attention") == "all":
        reasons["use_bidirectional_attention"] = "bidirectional text attention can't be decoded token by token"
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        reasons["hidden_activation"] = "only gelu_pytorch_tanh is supported"
    for name, reason in reasons.items():
        raise CheckpointError(f"{where} has {name} = {config.get(name)!r}: {reason}")


def _layer_types(config: Mapping[str, Any], where: str) -> list[LayerType]:
    num_layers = count(config, "num_hidden_layers", where)
    names = config.get("layer_types")
    if not names:
        period = count(config, "sliding_window_pattern", where, 6)
        if period != 6:
            raise CheckpointError(
                f"{where} has sliding_window_pattern = {period} and no layer_types, where transformers takes 6: "
                "write layer_types to config.json"
            )
        names = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    if not isinstance(names, list):
        raise CheckpointError(f"{where}: layer_types is {names!r}; a list of layer kinds is expected")
    unknown = sorted(set(map(str, names)) - set(_LAYER_TYPES))
    if unknown:
        raise CheckpointError(f"{where} has layers of unsupported kind: {', '.join(unknown)}")
    if len(names) != num_layers:
        raise CheckpointError(f"{where} names {len(names)} layer types for {num_layers} layers")
    # transformers forces the last layer to full attention; a checkpoint that says otherwise was trained so.
    return [_LAYER_TYPES[name] for name in [*names[:-1], "full_attention"]]


def _layer(
    config: Mapping[str, Any],
    index: int,
    layer_types: list[LayerType],
    overrides: Mapping[str, int],
    *,
    first_shared: int,
    where: str,
) -> Layer:
    layer_type = layer_types[index]
    is_shared = index >= first_shared
    owner: int | None = index
    if is_shared:
        owners = [i for i in range(first_shared) if layer_types[i] == layer_type]
        if first_shared and not owners:
            raise CheckpointError(f"{where}: no layer before {first_shared} owns the KV of shared {layer_type} layers")
        owner = owners[-1] if owners else None
    num_kv_heads = count(config, "num_key_value_heads", where)
    head_dim = count(config, "head_dim", where, 256)
    k_eq_v = bool(config.get("attention_k_eq_v"))
    if layer_type == "full" and config.get("per_layer_config") is None:
        head_dim = count(config, "global_head_dim", where, 512)
        if k_eq_v:
            num_kv_heads = count(config, "num_global_key_value_heads", where, num_kv_heads)
    num_heads = count(config, "num_attention_heads", where)
    num_kv_heads = count(overrides, "num_key_value_heads", where, num_kv_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{where}: {num_heads} query heads of layer {index} over {num_kv_heads} KV heads")
    is_double_wide = bool(config.get("use_double_wide_mlp")) and is_shared
    return Layer(
        index=index,
        type=layer_type,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=count(overrides, "head_dim", where, head_dim),
        intermediate_size=count(config, "intermediate_size", where) * (2 if is_double_wide else 1),
        kv_owner=owner,
        value_is_key=k_eq_v and layer_type == "full",
    )


def _layer_overrides(config: Mapping[str, Any], where: str) -> dict[int, Mapping[str, int]]:
    """What newer transformers' ``per_layer_config`` says, by layer; its keys are zero-padded ("03")."""
    by_layer = config.get("per_layer_config") or {}
    if not isinstance(by_layer, dict) or not all(isinstance(values, dict) for values in by_layer.values()):
        raise CheckpointError(f"{where}: per_layer_config is {by_layer!r}; fields by layer number are expected")
    for key, values in by_layer.items():
        if not str(key).isdigit():
            raise CheckpointError(f"{where}: per_layer_config has the key {key!r}; layer numbers are expected")
        unknown = sorted(set(values) - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise CheckpointError(f"{where}: per_layer_config of layer {key} sets {', '.join(unknown)}, not supported")
    return {int(key): values for key, values in by_layer.items()}


DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _rope(config: Mapping[str, Any], layer_type: LayerType, where: str) -> Rope:
    by_type = config.get("rope_parameters") or DEFAULT_ROPE
    parameters = by_type.get(f"{layer_type}_attention") if isinstance(by_type, dict) else None
    if not isinstance(parameters, dict) or not parameters:
        raise CheckpointError(f"{where} has no rope_parameters for {layer_type} layers")
    rope_type = parameters.get("rope_type", "default")
    unknown = sorted(set(parameters) - {"rope_type", "rope_theta", "partial_rotary_factor"})
    if rope_type not in ("default", "proportional") or unknown:
        raise CheckpointError(
            f"{where}: rope of {layer_type} layers is {dict(parameters)}; supported are rope_type default and "
            "proportional with rope_theta and partial_rotary_factor"
        )
    fraction = positive(parameters, "partial_rotary_factor", where, 1.0) if rope_type == "proportional" else 1.0
    if fraction > 1:
        raise CheckpointError(f"{where}: partial_rotary_factor of {layer_type} layers is {fraction}; at most 1 rotates")
    theta = positive(parameters, "rope_theta", where)
    flat = "rope_theta" if layer_type == "full" else "rope_local_base_freq"  # as Gemma 3 spelled it
    if positive(config, flat, where, theta) != theta:
        raise CheckpointError(
            f"{where} has {flat} = {config[flat]}, its rope_parameters of {layer_type} layers say {theta:g}, which is "
            "what transformers computes with: make them agree in config.json"
        )
    return Rope(theta, fraction)
