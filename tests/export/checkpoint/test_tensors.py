"""Checkpoint folders and weights: damaged files, canonical names, recipes, and the bytes that are written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from slipstream.export.checkpoint.config import TextConfig, assistant_config_from_hf, target_config_from_hf
from slipstream.export.checkpoint.folder import CheckpointFolder
from slipstream.export.checkpoint.opening import CheckpointPair, open_pair
from slipstream.export.checkpoint.tensors import Checkpoint, TensorHeader, open_checkpoint
from slipstream.export.model.assistant import Assistant
from slipstream.export.model.layers import Recipe
from slipstream.export.model.target import Target
from slipstream.export.weights.recipes import ALIGNMENT_BYTES, ExternalData, check_leftovers, check_recipes, make
from slipstream.runtime.errors import CheckpointError
from tests.support.configs import RELEASED, Fields, hf_config
from tests.support.pairs import PAIRS

Tensors = dict[str, torch.Tensor]
_INDEX = "model.safetensors.index.json"
_EMBEDDING = Recipe(("embed_tokens.weight",), "as_is", ())


def write_checkpoint(folder: Path, *shards: Tensors) -> Path:
    """A checkpoint of these tensors, in one file or in a shard each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def text_tensors() -> Tensors:
    return {"model.embed_tokens.weight": torch.rand(6, 2), "model.norm.weight": torch.rand(2)}


def opened(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    """A checkpoint whose canonical names are ``embed_tokens.weight`` and these, "__" read as a dot."""
    named = {f"model.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    return open_checkpoint(
        CheckpointFolder(write_checkpoint(folder, {"model.embed_tokens.weight": torch.rand(6, 2)} | named))
    )


def target_recipes(config: TextConfig) -> list[Recipe]:
    module = Target(config, torch.float32, has_per_layer_table=True)
    return [parameter.recipe for parameter in module.parameters()]  # type: ignore[attr-defined]


def assistant_recipes(pair: CheckpointPair) -> list[Recipe]:
    module = Assistant(pair.assistant_config, pair.target_config, torch.float32, num_steps=1, num_top_logits=2)
    named = dict(module.named_parameters())
    own = [parameter for name, parameter in named.items() if name != "embed.weight"]
    return [parameter.recipe for parameter in own]  # type: ignore[attr-defined]


# folders


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path} is an empty folder")):
        open_checkpoint(CheckpointFolder(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": ', "config.json is not JSON: Expecting value"),
        (b"", "config.json is not JSON"),
        (b'{"a": "\xff"}', "config.json is not UTF-8 text: 'utf-8' codec can't decode"),
        (b"[1]", "config.json holds a list; a JSON object is expected"),
    ],
)
def test_broken_config_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(CheckpointFolder(tmp_path))


def test_optional_json_is_empty_when_it_is_missing_but_not_when_it_is_broken(tmp_path: Path) -> None:
    folder = CheckpointFolder(write_checkpoint(tmp_path, text_tensors()))
    assert folder.object("absent.json", required=False) == {}
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"broken.json is not JSON"):
        folder.object("broken.json", required=False)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"has neither model.safetensors nor {_INDEX}"):
        open_checkpoint(CheckpointFolder(tmp_path))


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, text_tensors(), {"a": torch.ones(1)}, {"b": torch.ones(1)})
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 shards: 1.safetensors. Download it again"):
        open_checkpoint(CheckpointFolder(tmp_path))


@pytest.mark.parametrize("kept", [0, 4, 60, -1], ids=lambda kept: f"{kept} bytes")
def test_truncated_shard_is_named(tmp_path: Path, kept: int) -> None:
    write_checkpoint(tmp_path, text_tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a readable .* file .*download it again$"):
        open_checkpoint(CheckpointFolder(tmp_path))


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, text_tensors(), {"model.norm.weight": torch.ones(2), "other": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"^tensor model.norm.weight is in 0.safetensors and in 1.safetensors$"):
        open_checkpoint(CheckpointFolder(tmp_path))


def test_index_that_names_absent_tensors_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, text_tensors(), {"other": torch.ones(1)})
    index = json.loads((tmp_path / _INDEX).read_text())
    index["weight_map"] |= {"ghost.b": "0.safetensors", "ghost.a": "1.safetensors"}
    (tmp_path / _INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"2 tensors of the index are in no shard, first ghost.a: download it again$"
    ):
        open_checkpoint(CheckpointFolder(tmp_path))


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": ["0.safetensors"]}, {"weight_map": {"a": 1}}], ids=json.dumps
)
def test_index_without_weight_map_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / _INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no weight_map: the file is damaged, download it again"):
        open_checkpoint(CheckpointFolder(tmp_path))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.norm.weight", "model.embed_tokens_per_layer.weight"], 0),
        (["model.embed_tokens.weight", "draft.embed_tokens.weight"], 2),
    ],
)
def test_checkpoint_has_one_text_model(tmp_path: Path, names: list[str], found: int) -> None:
    write_checkpoint(tmp_path, {name: torch.ones(1) for name in names})
    message = f"has {found} tensors ending in embed_tokens.weight; a text model has one"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(CheckpointFolder(tmp_path))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_canonical_names_lack_the_text_models_prefix(tmp_path: Path, prefix: str, head: str) -> None:
    tensors = {f"{prefix}{name}": torch.rand(6, 2) for name in ("embed_tokens.weight", "layers.0.mlp.up_proj.weight")}
    tensors |= {"vision_tower.embed_tokens.weight": torch.rand(1), head: torch.rand(6, 2)}
    checkpoint = open_checkpoint(CheckpointFolder(write_checkpoint(tmp_path, tensors)))
    assert set(checkpoint.headers) == {
        "embed_tokens.weight",
        "layers.0.mlp.up_proj.weight",
        "vision_tower.embed_tokens.weight",
        "lm_head.weight",
    }
    up = tensors[f"{prefix}layers.0.mlp.up_proj.weight"]
    assert torch.equal(checkpoint.read("layers.0.mlp.up_proj.weight"), up)
    assert torch.equal(checkpoint.read("lm_head.weight"), tensors[head])


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, text_tensors() | {"norm.weight": torch.ones(2)})
    message = r"has (model\.)?norm.weight and (model\.)?norm.weight, which are one tensor of the text model"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(CheckpointFolder(tmp_path))


def test_headers_stand_as_the_tensors_lie_on_disk(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.rand(6, 2), "z": torch.rand(8).double(), "a": torch.ones(3).half()}
    checkpoint = open_checkpoint(CheckpointFolder(write_checkpoint(tmp_path, tensors)))
    file = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    offsets = [header[tensor.key]["data_offsets"] for tensor in checkpoint.headers.values()]
    assert offsets == sorted(offsets)
    assert [tensor.num_bytes for tensor in checkpoint.headers.values()] == [end - start for start, end in offsets]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("BOOL", 6), ("I8", 6), ("F8_E4M3", 6), ("BF16", 12), ("F32", 24), ("I64", 48), ("F4", 3)]
)
def test_bytes_of_a_tensor_follow_from_its_header(dtype: str, num_bytes: int) -> None:
    assert TensorHeader((2, 3), dtype, Path("-"), "-").num_bytes == num_bytes


def test_headers_tell_shape_dtype_and_file_and_reading_follows_them(tmp_path: Path) -> None:
    ordering = torch.tensor([2, 0, 1])
    checkpoint = open_checkpoint(
        CheckpointFolder(write_checkpoint(tmp_path, text_tensors(), {"model.order": ordering}))
    )
    header = checkpoint.headers["order"]
    assert header == TensorHeader((3,), "I64", tmp_path / "1.safetensors", "model.order")
    assert torch.equal(checkpoint.read("order"), ordering)


@pytest.mark.parametrize("part", ["target", "assistant"])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_every_class_of_checkpoint_fits_its_recipes(
    name: str, part: str, pair_folder: Callable[[str], tuple[Path, Path]]
) -> None:
    pair = open_pair(*pair_folder(name))
    checkpoint, config = pair.target, pair.target_config
    recipes = target_recipes(config)
    if part == "assistant":
        checkpoint, config = pair.assistant, pair.assistant_config.text
        recipes = [*assistant_recipes(pair), _EMBEDDING]
    check_recipes([recipe for recipe in recipes if recipe.shape], checkpoint)
    check_leftovers(recipes, checkpoint, config)
    used = {source for recipe in recipes for source in recipe.sources}
    prefix = "model.language_model." if part == "target" and name in ("wrapped", "unified") else "model."
    own = ("pre_projection.", "post_projection.", "masked_embedding.", "lm_head.")
    assert {checkpoint.headers[source].key for source in used} == {
        source if source.startswith(own) else prefix + source for source in used
    }


def test_many_shards_are_read_as_one(pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    checkpoint = open_pair(*pair_folder("wrapped")).target
    assert len({header.file for header in checkpoint.headers.values()}) > 3


def test_tokens_that_stand_for_media_reach_the_bundle(
    tmp_path: Path, pair_folder: Callable[[str], tuple[Path, Path]]
) -> None:
    """By the ids in config.json: a tokenizer_config.json does not always name them."""
    shutil.copytree(pair_folder("wrapped")[0].parent, tmp_path / "pair")
    target, assistant = tmp_path / "pair" / "target", tmp_path / "pair" / "assistant"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|image|>", "<audio|>"])
    for folder in (target, assistant):
        tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((target / "config.json").read_text()) | {"image_token_id": first, "eoa_token_index": first + 1}
    (target / "config.json").write_text(json.dumps(config | {"audio_token_id": 258881, "video_token_id": None}))
    special_tokens = open_pair(target, assistant).generation.special_tokens
    assert special_tokens == {"image_token": "<|image|>", "eoa_token": "<audio|>"}


# released shapes


def _on_meta(model_class: Any, config: Any) -> Checkpoint:
    """What open_checkpoint would find of a model of this size."""
    with torch.device("meta"):
        tensors = model_class(config).state_dict()
    headers = {
        name.removeprefix("model."): TensorHeader(tuple(tensor.shape), "BF16", Path("-"), name)
        for name, tensor in tensors.items()
    }
    return Checkpoint(Path("-"), {}, headers)


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_released_target_is_used_to_the_last_tensor(name: str) -> None:
    unified = name == "12B"
    model_class = transformers.Gemma4UnifiedForCausalLM if unified else transformers.Gemma4ForCausalLM
    checkpoint = _on_meta(model_class, hf_config(RELEASED[name]))
    config = target_config_from_hf(RELEASED[name], name)
    recipes = target_recipes(config)
    check_recipes(recipes, checkpoint)
    check_leftovers(recipes, checkpoint, config)
    assert len(checkpoint.headers) > 10 * len(config.layers)


def _assistant_fields(target: Fields, hidden_size: int, intermediate_size: int, num_heads: int) -> Fields:
    return target | {
        "model_type": "gemma4_text",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }


@pytest.mark.parametrize(
    ("name", "sizes", "ordered"),
    [("E2B", (256, 2048, 4), True), ("E4B", (256, 2048, 4), True), ("31B", (1024, 8192, 32), False)],
)
def test_released_assistant_is_used_to_the_last_tensor(name: str, sizes: tuple[int, int, int], ordered: bool) -> None:
    target = target_config_from_hf(RELEASED[name], name)
    config = transformers.Gemma4AssistantConfig(
        text_config=hf_config(_assistant_fields(RELEASED[name], *sizes)),
        backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=ordered,
    )
    checkpoint = _on_meta(transformers.Gemma4AssistantForCausalLM, config)
    resolved = assistant_config_from_hf(config.to_dict(), name)
    module = Assistant(resolved, target, torch.float32, num_steps=1, num_top_logits=8)
    named = {key: parameter for key, parameter in module.named_parameters() if key != "embed.weight"}
    recipes = [parameter.recipe for parameter in named.values()]  # type: ignore[attr-defined]
    check_recipes(recipes, checkpoint)
    check_leftovers([*recipes, _EMBEDDING], checkpoint, resolved.text)
    assert (resolved.centroid_head is not None) == ordered


# recipes against headers


def _checkpoint_with(folder: Path) -> Checkpoint:
    return opened(
        folder,
        norm__weight=torch.rand(2),
        gate__weight=torch.rand(3, 2),
        up__weight=torch.rand(3, 2),
        masked_embedding__token_ordering=torch.tensor([5, 3, 1, 0, 2, 4]),
        mask=torch.ones(2, dtype=torch.bool),
        packed=torch.ones(2, dtype=torch.int8),
    )


_ORDERING = "masked_embedding.token_ordering"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(("norm.weight",), "as_is", (2,)),
        Recipe(("embed_tokens.weight",), "as_is", (6, 2)),
        Recipe(("gate.weight",), "transposed", (2, 3)),
        Recipe(("gate.weight", "up.weight"), "transposed", (2, 6)),
        Recipe(("embed_tokens.weight", _ORDERING), "centroid_order", (3, 2, 2)),
        Recipe((_ORDERING,), "as_is", (3, 2)),
    ],
)
def test_fitting_recipe_is_accepted_and_made_in_its_shape(tmp_path: Path, recipe: Recipe) -> None:
    checkpoint = _checkpoint_with(tmp_path)
    check_recipes([recipe], checkpoint)
    assert make(recipe, checkpoint, torch.float32).shape == recipe.shape


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(("ghost.weight",), "as_is", (2,)), "ghost.weight is missing"),
        (Recipe(("gate.weight", "ghost"), "transposed", (2, 6)), "ghost is missing"),
        (Recipe(("norm.weight",), "as_is", (3,)), "norm.weight has shape (2,), (3,) is expected"),
        (Recipe(("gate.weight",), "transposed", (3, 2)), "gate.weight has shape (3, 2), (2, 3) is expected"),
        (Recipe(("norm.weight",), "transposed", (2, 1)), "norm.weight has shape (2,), (1, 2) is expected"),
        (
            Recipe(("gate.weight", "up.weight"), "transposed", (2, 5)),
            "gate.weight + up.weight has shape (3, 2) + (3, 2), (5, 2) is expected",
        ),
        (
            Recipe(("embed_tokens.weight", _ORDERING), "centroid_order", (2, 3, 3)),
            "has shape (6, 2) + (6,), (6, 3) + (6,) is expected",
        ),
        (Recipe(("embed_tokens.weight",), "as_is", (2, 6)), "(2, 6) is expected"),  # a table of V rows, not N
        (Recipe(("packed",), "as_is", (2,)), "packed has dtype I8; float tensors are expected"),
        (Recipe(("mask",), "as_is", (2,)), "mask has dtype BOOL; float tensors are expected"),
    ],
)
def test_recipe_that_does_not_fit_is_refused(tmp_path: Path, recipe: Recipe, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_recipes([recipe], _checkpoint_with(tmp_path))


def test_three_problems_are_named_and_the_others_counted(tmp_path: Path) -> None:
    recipes = [Recipe((f"ghost{number}",), "as_is", (1,)) for number in range(5)]
    with pytest.raises(CheckpointError, match=r": ghost0 is missing; ghost1 .*; ghost2 is missing \(and 2 more\)$"):
        check_recipes(recipes, _checkpoint_with(tmp_path))


# leftovers


def _target_checkpoint(
    pair_folder: Callable[[str], tuple[Path, Path]], name: str, extra: Iterable[str]
) -> tuple[list[Recipe], Checkpoint, TextConfig]:
    pair = open_pair(*pair_folder(name))
    header = TensorHeader((1,), "F32", Path("-"), "-")
    checkpoint = replace(pair.target, headers={**pair.target.headers, **dict.fromkeys(extra, header)})
    return target_recipes(pair.target_config), checkpoint, pair.target_config


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("edge", "layers.0.self_attn.q_proj.bias"),
        ("edge", "layers.0.mlp.experts.0.weight"),
        ("edge", "layers.6.self_attn.k_proj.weight"),  # there is no layer 6
        ("edge", "layers.2.self_attn.v_norm.weight"),  # V is normed without a scale
        ("dense", "layers.0.self_attn.v_norm.weight"),
        ("edge", "altup.weight"),
        ("edge", "vision_tower_adapter.weight"),
    ],
)
def test_tensor_without_use_is_refused(name: str, extra: str, pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    with pytest.raises(CheckpointError, match=rf"has 1 tensors that no part of the text model uses, first {extra}:"):
        check_leftovers(*_target_checkpoint(pair_folder, name, [extra]))


@pytest.mark.parametrize(
    ("name", "idle"),
    [
        ("edge", "model.vision_tower.encoder.0.weight"),
        ("edge", "audio_tower.conv.weight"),
        ("edge", "embed_vision.embedding_projection.weight"),
        ("edge", "rotary_emb.inv_freq"),
        ("edge", "lm_head.weight"),
        ("edge", "layers.3.self_attn.k_proj.weight"),  # layers 3 to 5 read the KV of 1 and 2
        ("edge", "layers.5.self_attn.v_proj.weight"),
        ("edge", "layers.4.self_attn.k_norm.weight"),
        ("dense", "layers.3.self_attn.v_proj.weight"),  # its value is the key
    ],
)
def test_idle_tensor_is_left_out(name: str, idle: str, pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    recipes, checkpoint, config = _target_checkpoint(pair_folder, name, [idle])
    check_leftovers(recipes, checkpoint, config)
    assert idle in checkpoint.headers
    assert all(idle not in recipe.sources for recipe in recipes)


def test_extra_file_in_the_folder_is_not_read(tmp_path: Path, pair_folder: Callable[[str], tuple[Path, Path]]) -> None:
    folder = tmp_path / "target"
    shutil.copytree(pair_folder("edge")[0], folder)
    (folder / "training_state.safetensors").write_bytes(b"not one")
    assert (
        open_checkpoint(CheckpointFolder(folder)).headers.keys()
        == open_pair(*pair_folder("edge")).target.headers.keys()
    )


# values


def test_transposed_recipe_stores_inputs_by_outputs(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, up__weight=torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    made = make(Recipe(("up.weight",), "transposed", (2, 3)), checkpoint, torch.float32)
    assert made.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert made.is_contiguous()


def test_merged_recipe_joins_outputs_in_order(tmp_path: Path) -> None:
    up = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    checkpoint = opened(tmp_path, gate__weight=torch.tensor([[1.0, 2.0]]), up__weight=up)
    made = make(Recipe(("gate.weight", "up.weight"), "transposed", (2, 3)), checkpoint, torch.float32)
    assert made.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]


def test_centroid_order_groups_each_centroids_rows(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(6, 2)
    ordering = torch.tensor([5, 3, 1, 0, 2, 4], dtype=torch.int32)
    folder = write_checkpoint(tmp_path, {"embed_tokens.weight": table, "order": ordering})
    made = make(
        Recipe(("embed_tokens.weight", "order"), "centroid_order", (3, 2, 2)),
        open_checkpoint(CheckpointFolder(folder)),
        torch.float32,
    )
    assert made.tolist() == [[[10, 6], [11, 7]], [[2, 0], [3, 1]], [[4, 8], [5, 9]]], "a column for each token"
    tokens = make(Recipe(("order",), "as_is", (3, 2)), open_checkpoint(CheckpointFolder(folder)), torch.float32)
    assert tokens.tolist() == [[5, 3], [1, 0], [2, 4]]
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_cast_once(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.tensor([0.1, -3.0, 1e-3], dtype=torch.float64)
    made = make(Recipe(("norm.weight",), "as_is", (3,)), opened(tmp_path, norm__weight=weight), dtype)
    assert torch.equal(made, weight.to(dtype))


def test_weight_beyond_float16_is_fine_in_bfloat16(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, norm__weight=torch.tensor([1e6]))
    made = make(Recipe(("norm.weight",), "as_is", (1,)), checkpoint, torch.bfloat16)
    assert made.item() == pytest.approx(1e6, rel=0.01)


# external data


def test_external_data_starts_each_tensor_on_a_page_and_keeps_its_bytes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.rand(5, 3),
        "half": torch.rand(2050).half(),
        "brain": torch.rand(3, 7).bfloat16(),
        "ids": torch.tensor([[3, 1], [2, 0]]),
        "page": torch.rand(ALIGNMENT_BYTES // 4),
        "scalar": torch.tensor(2.5),
    }
    data = ExternalData(tmp_path / "weights.bin")
    refs = {name: data.add(name, tensor) for name, tensor in tensors.items()}
    data.close()
    content = (tmp_path / "weights.bin").read_bytes()
    end = 0
    for name, tensor in tensors.items():
        ref = refs[name]
        assert ref.offset is not None
        assert ref.length == tensor.numel() * tensor.element_size()
        assert ref.offset == -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert content[end : ref.offset] == b"\0" * (ref.offset - end)
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[ref.offset : ref.offset + ref.length] == raw
        end = ref.offset + ref.length
    assert len(content) == end


def test_external_tensor_tells_name_file_shape_and_dtype(tmp_path: Path) -> None:
    data = ExternalData(tmp_path / "weights.bin")
    tensor = torch.rand(2, 3)
    ref = data.add("up.weight", tensor)
    data.close()
    assert (ref.name, str(ref.location), ref.dtype.name) == ("up.weight", "weights.bin", "FLOAT")
    assert ref.shape.numpy() == (2, 3)
    assert ref.numpy().tolist() == tensor.tolist()
