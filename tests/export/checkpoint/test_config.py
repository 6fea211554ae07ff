"""config.json to resolved layers: both spellings, the released shapes, and every refusal with its message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings

from slipstream.export.checkpoint.config import (
    AssistantConfig,
    CentroidHead,
    Layer,
    Rope,
    TextConfig,
    assistant_config_from_hf,
    check_pair,
    media_token_ids,
    target_config_from_hf,
)
from slipstream.runtime.errors import CheckpointError
from tests.support.configs import (
    PUBLISHED_12B,
    PUBLISHED_E2B_ASSISTANT,
    RELEASED,
    SMALL,
    SMALL_ASSISTANT,
    F,
    Fields,
    S,
    hf_config,
    newer,
    structures,
)


def layers_by_transformers(fields: Fields) -> list[Layer]:
    """Every per-layer choice, read from transformers' config the way its modeling code reads it."""
    config = hf_config(fields)
    layers = []
    for index, (layer_type, mode) in enumerate(zip(config.layer_types, config.kv_sharing_modes, strict=True)):
        per_layer = config.per_layer_config[index]
        stores = [
            i for i, m in enumerate(config.kv_sharing_modes) if m == "store" and config.layer_types[i] == layer_type
        ]
        is_double_wide = config.use_double_wide_mlp and mode == "reuse"
        layers.append(
            Layer(
                index=index,
                type="sliding" if layer_type == S else "full",
                num_heads=config.num_attention_heads,
                num_kv_heads=per_layer.num_key_value_heads,
                head_dim=per_layer.head_dim,
                intermediate_size=config.intermediate_size * (2 if is_double_wide else 1),
                kv_owner=stores[-1] if mode == "reuse" else index,
                value_is_key=config.attention_k_eq_v and layer_type == F,
            )
        )
    return layers


def target(**changes: Any) -> TextConfig:
    return target_config_from_hf(SMALL | changes, "T")


def assistant(**changes: Any) -> AssistantConfig:
    return assistant_config_from_hf(SMALL_ASSISTANT | changes, "A")


@pytest.mark.parametrize("spelling", [dict, newer], ids=["older", "newer"])
@pytest.mark.parametrize("name", sorted(RELEASED))
def test_layers_of_released_models_are_those_of_transformers(name: str, spelling: Callable[[Fields], Fields]) -> None:
    config = target_config_from_hf(spelling(RELEASED[name]), name)
    assert list(config.layers) == layers_by_transformers(RELEASED[name])
    assert (config.vocab_size, config.hidden_size, config.logit_softcap, config.rms_norm_eps) == (
        262144,
        RELEASED[name]["hidden_size"],
        30.0,
        1e-6,
    )
    assert config.rope == {"sliding": Rope(1e4, 1.0), "full": Rope(1e6, 0.25)}


@pytest.mark.parametrize(
    ("name", "sliding_donor", "full_donor", "kv_heads", "num_owners", "ple_dim", "window"),
    [
        ("E2B", 13, 14, (1, 1), 15, 256, 512),
        ("E4B", 22, 23, (2, 2), 24, 256, 512),
        ("12B", 46, 47, (8, 1), 48, 0, 1024),
        ("31B", 58, 59, (16, 4), 60, 0, 1024),
    ],
)
def test_donors_and_kv_heads_of_released_models(
    name: str,
    sliding_donor: int,
    full_donor: int,
    kv_heads: tuple[int, int],
    num_owners: int,
    ple_dim: int,
    window: int,
) -> None:
    config = target_config_from_hf(RELEASED[name], name)
    donors = config.donor("sliding"), config.donor("full")
    assert [donor.index for donor in donors] == [sliding_donor, full_donor]
    assert tuple(donor.num_kv_heads for donor in donors) == kv_heads
    assert [donor.head_dim for donor in donors] == [256, 512]
    assert [donor.value_is_key for donor in donors] == [False, name in ("12B", "31B")]
    assert [layer.index for layer in config.kv_layers] == list(range(num_owners))
    assert (config.ple_dim, config.sliding_window) == (ple_dim, window)


def test_published_config_of_12b_is_what_the_tests_call_12b() -> None:
    published = target_config_from_hf(PUBLISHED_12B, "12B")
    assert published == target_config_from_hf(RELEASED["12B"], "12B")
    assert media_token_ids(PUBLISHED_12B) == {
        "image_token": 258880,
        "audio_token": 258881,
        "video_token": 258884,
        "boi_token": 255999,
        "eoi_token": 258882,
        "boa_token": 256000,
        "eoa_token": 258883,
    }


def test_published_config_of_an_assistant_fits_its_target() -> None:
    """It repeats the token ids of its target's wrapper."""
    published = assistant_config_from_hf(PUBLISHED_E2B_ASSISTANT, "E2B assistant")
    check_pair(target_config_from_hf(RELEASED["E2B"], "E2B"), published)
    assert (published.backbone_hidden_size, published.centroid_head) == (1536, CentroidHead(2048, 32))
    assert [(layer.type, layer.head_dim) for layer in published.text.layers] == [("sliding", 256)] * 3 + [("full", 512)]


def test_published_assistant_of_another_size_is_refused() -> None:
    published = assistant_config_from_hf(PUBLISHED_E2B_ASSISTANT, "E2B assistant")
    with pytest.raises(CheckpointError, match="backbone_hidden_size is 1536, the target needs 2560"):
        check_pair(target_config_from_hf(RELEASED["E4B"], "E4B"), published)


@pytest.mark.parametrize("name", ["eoa_token_id", "eoa_token_index"])
def test_end_of_audio_has_two_spellings(name: str) -> None:
    assert media_token_ids({name: 7, "image_token_id": None}) == {"eoa_token": 7}


def test_only_kv_shared_layers_are_double_wide() -> None:
    config = target_config_from_hf(RELEASED["E2B"], "E2B")
    assert [layer.intermediate_size for layer in config.layers] == [6144] * 15 + [12288] * 20


@settings(max_examples=60, deadline=None, database=None)
@given(structures())
def test_both_spellings_of_any_structure_give_the_layers_of_transformers(fields: Fields) -> None:
    expected = layers_by_transformers(fields)
    assert list(target_config_from_hf(fields, "T").layers) == expected
    assert list(target_config_from_hf(newer(fields), "T").layers) == expected


def test_layer_types_default_to_five_sliding_and_one_full() -> None:
    without = {name: value for name, value in SMALL.items() if name != "layer_types"} | {"num_hidden_layers": 12}
    config = target_config_from_hf(without, "T")
    assert [layer.type for layer in config.layers] == (["sliding"] * 5 + ["full"]) * 2
    assert list(config.layers) == layers_by_transformers(without)


@pytest.mark.parametrize("layer_types", [None, []])
def test_layer_types_that_are_empty_are_as_if_they_were_absent(layer_types: Any) -> None:
    layers = target(layer_types=layer_types, num_hidden_layers=12, sliding_window_pattern=6).layers
    assert [layer.type for layer in layers] == (["sliding"] * 5 + ["full"]) * 2


@pytest.mark.parametrize(
    ("tied", "expected"), [({}, True), ({"tie_word_embeddings": None}, True), ({"tie_word_embeddings": False}, False)]
)
def test_head_is_tied_unless_the_config_says_no(tied: Fields, expected: bool) -> None:
    assert target(**tied).has_tied_head == expected
    wrapped = {"model_type": "gemma4", "text_config": SMALL | {"tie_word_embeddings": not expected}} | tied
    assert target_config_from_hf(wrapped, "T").has_tied_head == expected


def test_per_layer_config_keys_may_be_zero_padded() -> None:
    padded = {"03": {"head_dim": 16, "num_key_value_heads": 1}, "1": {"head_dim": 32}}
    config = target(per_layer_config=padded)
    assert [layer.head_dim for layer in config.layers] == [8, 32, 8, 16]
    assert [layer.num_kv_heads for layer in config.layers] == [2, 2, 2, 1]


def test_last_layer_is_full_whatever_layer_types_says() -> None:
    assert target(layer_types=[S, F, S, S]).layers[-1].type == "full"


def test_text_config_of_a_wrapper_is_used_and_the_wrapper_decides_about_the_head() -> None:
    wrapped = {"model_type": "gemma4", "vision_config": {"x": 1}, "tie_word_embeddings": False, "text_config": SMALL}
    assert target_config_from_hf(wrapped, "T") == replace(target(), has_tied_head=False)


@pytest.mark.parametrize(
    "idle",
    [
        {"use_bidirectional_attention": "vision"},
        {"attention_dropout": 0.1, "initializer_range": 0.5, "use_cache": True, "eos_token_id": [1, 2]},
        {"some_new_switch": False, "some_new_size": None},
        {"enable_moe_block": False, "num_experts": 8, "moe_intermediate_size": 12},
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "transformers_version": "5.5.0"},
        {"rope_theta": 1e6, "rope_local_base_freq": 10_000, "rope_scaling": None},
        {"sliding_window_pattern": 2},  # layer_types is there, and says it
    ],
)
def test_fields_without_effect_on_text_are_accepted(idle: Fields) -> None:
    assert target(**idle) == target()


def test_assistant_layers_read_the_targets_kv() -> None:
    config = assistant()
    assert [layer.kv_owner for layer in config.text.layers] == [None, None]
    assert config.text.kv_layers == ()
    assert (config.backbone_hidden_size, config.centroid_head) == (24, CentroidHead(12, 3))


def test_assistant_without_ordered_embeddings_has_no_centroids() -> None:
    assert assistant(use_ordered_embeddings=False).centroid_head is None


def test_centroid_numbers_default_to_those_of_transformers() -> None:
    fields = {name: value for name, value in SMALL_ASSISTANT.items() if "centroid" not in name}
    text = SMALL_ASSISTANT["text_config"] | {"vocab_size": 4096}
    defaults = transformers.Gemma4AssistantConfig
    assert assistant_config_from_hf(fields | {"text_config": text}, "A").centroid_head == CentroidHead(
        defaults.num_centroids, defaults.centroid_intermediate_top_k
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma4_assistant"}, "T is an assistant (model_type 'gemma4_assistant'), not a target"),
        ({"model_type": "gemma4_unified_assistant"}, "pass the target first and its assistant second"),
        ({"model_type": "llama"}, "T has model_type 'llama'; a Gemma 4 target has one of gemma4, gemma4_text"),
        ({"model_type": None}, "T has model_type None; a Gemma 4 target"),
        ({"enable_moe_block": True}, "T: config.json lacks num_experts"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "T picks 5 experts of 4",
        ),
        ({"attention_bias": True}, "T has attention_bias = True: attention biases are not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all': bidirectional text attention"),
        ({"hidden_activation": "silu"}, "T has hidden_activation = 'silu': only gelu_pytorch_tanh is supported"),
        ({"query_scale": 2, "attn_sinks": True}, "may change the computation: attn_sinks, query_scale. Use"),
        ({"layer_types": [S, "linear_attention", S, F]}, "T has layers of unsupported kind: linear_attention"),
        ({"layer_types": [S, F]}, "T names 2 layer types for 4 layers"),
        ({"layer_types": [F, F, F, F]}, "T has only full layers; a target needs sliding and full ones"),
        (
            {"layer_types": [F, F, S, F], "num_kv_shared_layers": 2},
            "T: no layer before 2 owns the KV of shared sliding layers",
        ),
        ({"num_key_value_heads": 3}, "T: 4 query heads of layer 0 over 3 KV heads"),
        ({"per_layer_config": {"full_attention": {"head_dim": 4}}}, "per_layer_config has the key 'full_attention'"),
        ({"per_layer_config": {"01": {"mlp": 1}}}, "per_layer_config of layer 01 sets mlp, not supported"),
        ({"rope_parameters": {S: {"rope_theta": 1e4}}}, "T has no rope_parameters for full layers"),
        (
            {"rope_parameters": {S: {"rope_theta": 1e4}, F: {"rope_type": "yarn", "rope_theta": 1e6}}},
            "T: rope of full layers is {'rope_type': 'yarn', 'rope_theta': 1000000.0}; supported are rope_type default",
        ),
        (
            {"rope_parameters": {S: {"rope_theta": 1e4, "factor": 8.0}, F: {"rope_theta": 1e6}}},
            "T: rope of sliding layers is {'rope_theta': 10000.0, 'factor': 8.0}; supported are",
        ),
        ({"rope_parameters": {S: {"rope_type": "default"}, F: {"rope_theta": 1e6}}}, "T: config.json lacks rope_theta"),
        ({"rope_parameters": [1e4, 1e6]}, "T has no rope_parameters for"),
        ({"rope_parameters": {S: 1e4, F: 1e6}}, "T has no rope_parameters for"),
        (
            {"rope_theta": 5e5},
            "T has rope_theta = 500000.0, its rope_parameters of full layers say 1e+06, which is what transformers",
        ),
        (
            {"rope_local_base_freq": 1e6, "rope_parameters": PUBLISHED_12B["text_config"]["rope_parameters"]},
            "T has rope_local_base_freq = 1000000.0, its rope_parameters of sliding layers say 10000",
        ),
        (
            {"layer_types": None, "sliding_window_pattern": 5},
            "T has sliding_window_pattern = 5 and no layer_types, where transformers takes 6: write layer_types to",
        ),
    ],
)
def test_unsupported_target_is_refused(changes: Fields, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        target(**changes)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "sliding_window",
        "max_position_embeddings",
    ],
)
def test_missing_field_is_named(name: str) -> None:
    fields = {key: value for key, value in SMALL.items() if key != name}
    with pytest.raises(CheckpointError, match=f"^T: config.json lacks {name}$"):
        target_config_from_hf(fields, "T")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_shared_layers": 4},  # no layer of the target would own KV
        {"num_kv_shared_layers": 5},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": "4"},
        {"hidden_size": [24]},
        {"rms_norm_eps": "tiny"},
    ],
    ids=json.dumps,
)
def test_damaged_number_is_a_checkpoint_error_that_names_the_field(changes: Fields) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        target(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma4_text"}, "A has model_type 'gemma4_text'; a Gemma 4 assistant has one of"),
        ({"model_type": "gemma3"}, "(the pair is the target first, the assistant second)"),
        ({"text_config": None}, "A: config.json lacks text_config"),
        ({"backbone_hidden_size": None}, "A: config.json lacks backbone_hidden_size"),
        ({"num_centroids": 7}, "A has 7 centroids, which does not divide its vocabulary of 96"),
        ({"centroid_intermediate_top_k": 13}, "A scores 13 centroids but has only 12"),
        (
            {"text_config": SMALL | {"hidden_size_per_layer_input": 4}},
            "A has per-layer embeddings or experts, which no",
        ),
        (
            {
                "text_config": SMALL
                | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
            },
            "A has per-layer embeddings or experts, which no Gemma 4 assistant has",
        ),
    ],
)
def test_unsupported_assistant_is_refused(changes: Fields, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        assistant(**changes)


def test_matching_pair_is_accepted() -> None:
    check_pair(target(), assistant())
    with pytest.raises(CheckpointError):  # and the check is not idle
        check_pair(target(hidden_size=32), assistant())


@pytest.mark.parametrize("num_assistant_heads", [4, 8])
def test_assistant_may_have_more_query_heads_than_the_target(num_assistant_heads: int) -> None:
    text = SMALL_ASSISTANT["text_config"] | {"num_attention_heads": num_assistant_heads}
    fitting = assistant(text_config=text)
    check_pair(target(), fitting)
    assert fitting.text.layers[0].num_heads == num_assistant_heads


_OTHER_ROPE = {S: {"rope_theta": 1e4}, F: {"rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("text_changes", "changes", "message"),
    [
        ({}, {"backbone_hidden_size": 32}, "the assistant's backbone_hidden_size is 32, the target needs 24"),
        ({"vocab_size": 108}, {}, "the assistant's vocab_size is 108, the target needs 96"),
        ({"sliding_window": 6}, {}, "the assistant's sliding_window is 6, the target needs 5"),
        ({"head_dim": 4}, {}, "the assistant's head_dim of sliding layers is 4, the target needs 8"),
        ({"global_head_dim": 8}, {}, "the assistant's head_dim of full layers is 8, the target needs 16"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            {},
            "assistant layer 0 has 3 query heads, which the 2 KV heads of target layer 2 do not divide",
        ),
        ({"rope_parameters": _OTHER_ROPE}, {}, "full layers rotate differently: target Rope(theta=1000000.0,"),
    ],
)
def test_assistant_of_another_target_is_refused(text_changes: Fields, changes: Fields, message: str) -> None:
    other = assistant(text_config=SMALL_ASSISTANT["text_config"] | text_changes, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        check_pair(target(), other)
    assert str(caught.value).endswith("this is not the target's assistant")
