"""Random pairs of every released shape: configs and tensors are those of transformers, files those of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from tokenizers import Tokenizer

from slipstream.demo import PAIR as DEMO_PAIR
from slipstream.export.checkpoint.config import (
    Layer,
    LayerType,
    TextConfig,
    assistant_config_from_hf,
    target_config_from_hf,
)
from slipstream.export.checkpoint.folder import CheckpointFolder
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.checkpoint.tensors import open_checkpoint
from slipstream.export.model.assistant import Assistant
from slipstream.export.model.layers import Recipe, recipes_of
from slipstream.export.model.target import Target
from slipstream.export.synth import synth
from slipstream.export.synth.presets import PRESETS, PairConfigs, configs_of, tiny
from slipstream.export.weights.recipes import check_leftovers, check_recipes
from slipstream.runtime.errors import CheckpointError, RequestError
from slipstream.runtime.text.chat import ChatTemplate
from tests.support.configs import SMALL, SMALL_ASSISTANT, Fields, structures
from tests.support.progress import SilentProgress

PARTS = ("target", "assistant")
LAYER_TYPES: tuple[LayerType, ...] = ("sliding", "full")
Folder = Callable[[str], Path]

all_presets = pytest.mark.parametrize("name", list(PRESETS))
both_scales = pytest.mark.parametrize("scale", ["full", "tiny"])
both_parts = pytest.mark.parametrize("part", PARTS)


def configs(name: str, scale: str = "tiny") -> PairConfigs:
    return tiny(configs_of(name)) if scale == "tiny" else configs_of(name)


def resolved(pair: PairConfigs) -> TextConfig:
    return target_config_from_hf(pair.target, "T")


def plans_of(pair: PairConfigs, part: str) -> list[synth.TensorPlan]:
    if part == "assistant":
        return synth.assistant_tensors(assistant_config_from_hf(pair.assistant, "A"))
    prefix = "model.language_model." if "text_config" in pair.target else "model."
    return synth.target_tensors(resolved(pair), prefix)


def hf_config(fields: Any) -> Any:
    return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads gain nothing on tiny models, and wait long for each other where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of a preset's tiny pair. Tests must not change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("synth") / name
            synth.synthesize(configs_of(name), made[name], "tiny", SilentProgress())
        return made[name]

    return get


# configs


@both_parts
@both_scales
@all_presets
def test_config_is_spelled_as_transformers_writes_it(name: str, scale: str, part: str) -> None:
    fields = getattr(configs(name, scale), part)
    written = json.loads(hf_config(fields).to_json_string(use_diff=True))
    written.pop("transformers_version")
    assert written == fields


@both_scales
@all_presets
def test_configs_make_a_pair(name: str, scale: str) -> None:
    configs(name, scale).resolved()


def _kinds(text: TextConfig) -> set[Any]:
    return {_kind(layer) for layer in text.layers}


def _kind(layer: Layer) -> Any:
    return layer.type, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_is_key, layer.owns_kv


@all_presets
def test_tiny_keeps_the_structure(name: str) -> None:
    full, small = configs(name, "full"), configs(name)
    texts = resolved(full), resolved(small)
    assert _kinds(texts[0]) == _kinds(texts[1])
    for field in ("sliding_window", "rope", "logit_softcap", "rms_norm_eps", "max_positions", "has_tied_head"):
        assert getattr(texts[0], field) == getattr(texts[1], field)
    assert bool(texts[0].ple_dim) == bool(texts[1].ple_dim)
    period = [layer.type for layer in texts[0].layers].index("full") + 1
    assert [layer.type for layer in texts[1].layers[:period]] == ["sliding"] * (period - 1) + ["full"]
    experts = [text.experts for text in texts]
    assert [found.top_k < found.num_experts for found in experts if found] == [True] * 2 * (name == "26b-a4b")
    assert {found.top_k for found in experts if found} <= {8}
    assistants = [assistant_config_from_hf(pair.assistant, "A") for pair in (full, small)]
    assert [_kind(layer) for layer in assistants[0].text.layers] == [
        _kind(layer) for layer in assistants[1].text.layers
    ]
    assert [head.top_k < head.num_centroids for config in assistants if (head := config.centroid_head)] == (
        [True, True] if name in ("e2b", "e4b") else []
    )


def test_tiny_keeps_what_only_some_layers_have() -> None:
    layers = resolved(configs("e2b")).layers
    assert [layer.kv_owner for layer in layers] == [0, 1, 2, 3, 4, 3, 3, 3, 3, 4]
    assert {layer.intermediate_size for layer in layers[5:]} == {2 * layers[0].intermediate_size}
    cut_short = [layer.type for layer in resolved(configs("mid")).layers]
    assert cut_short == ["sliding"] * 5 + ["full"] + ["sliding"] * 3 + ["full"]


@settings(max_examples=60, deadline=None, database=None)
@given(structures())
def test_tiny_of_any_structure_keeps_its_kinds_of_layers(fields: Fields) -> None:
    for spelling in (fields, json.loads(hf_config(fields).to_json_string(use_diff=True))):
        pair = PairConfigs(spelling, SMALL_ASSISTANT)
        small = tiny(pair)
        text = resolved(small)
        assert len(text.layers) <= fields["num_hidden_layers"]
        for kind in LAYER_TYPES:
            assert _kind(text.donor(kind)) == _kind(resolved(pair).donor(kind))
        assert _kinds(text) == _kinds(resolved(pair))


@pytest.mark.parametrize(
    ("vocab_size", "num_centroids", "tiny_vocab_size", "tiny_centroids"),
    [(262144, 2048, 1024, 64), (1536, 48, 1024, 16), (96, 12, 96, 4)],
)
def test_tiny_centroids_divide_the_tiny_vocabulary(
    vocab_size: int, num_centroids: int, tiny_vocab_size: int, tiny_centroids: int
) -> None:
    text = SMALL | {"vocab_size": vocab_size}
    assistant = SMALL_ASSISTANT | {"num_centroids": num_centroids, "text_config": SMALL_ASSISTANT["text_config"] | text}
    small = tiny(PairConfigs(text, assistant))
    config = assistant_config_from_hf(small.assistant, "A")
    assert config.text.vocab_size == resolved(small).vocab_size == tiny_vocab_size
    assert config.centroid_head is not None
    assert config.centroid_head.num_centroids == tiny_centroids


# tensors


@both_parts
@both_scales
@all_presets
def test_tensors_are_those_of_transformers(name: str, scale: str, part: str) -> None:
    pair = configs(name, scale)
    fields = getattr(pair, part)
    with torch.device("meta"):
        model = getattr(transformers, fields["architectures"][0])(hf_config(fields))
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    del expected["lm_head.weight"]  # tied, and left out by save_pretrained
    plans = plans_of(pair, part)
    assert {plan.name: plan.shape for plan in plans} == expected
    assert len(plans) == len(expected)


@pytest.mark.parametrize(
    ("name", "target_millions", "assistant_millions"),
    [
        ("e2b", 4629, 79),
        ("e4b", 7463, 80),
        ("12b", 11907, 423),
        ("26b-a4b", 25233, 420),
        ("31b", 30697, 470),
        ("mid", 335, 15),
    ],
)
def test_sizes_of_presets(name: str, target_millions: int, assistant_millions: int) -> None:
    sizes = [sum(plan.num_bytes(2) for plan in plans_of(configs_of(name), part)) / 2e6 for part in PARTS]
    assert [round(size) for size in sizes] == [target_millions, assistant_millions]
    small = [sum(plan.num_bytes(4) for plan in plans_of(configs(name), part)) for part in PARTS]
    assert sum(small) < 40e6


def test_untied_heads_and_other_prefixes_are_written() -> None:
    pair = configs("mid")
    untied = replace(pair, target={**pair.target, "tie_word_embeddings": False})
    names = [plan.name for plan in plans_of(untied, "target")]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"


@both_parts
@all_presets
def test_tiny_pair_loads_in_transformers_to_the_last_tensor(name: str, part: str, tiny_pair: Folder) -> None:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_pair(name) / part, dtype="auto", output_loading_info=True
    )
    assert {key: found for key, found in info.items() if found} == {}
    assert type(model).__name__ == getattr(configs(name), part)["architectures"][0]
    assert model.dtype == torch.bfloat16


@all_presets
def test_tiny_pair_computes_sane_numbers(name: str, tiny_pair: Folder) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, assistant = (load(tiny_pair(name) / part, dtype=torch.float32).eval() for part in PARTS)
    ids = torch.arange(200, 232).unsqueeze(0)
    with torch.no_grad():
        logits = target(input_ids=ids, use_cache=False, output_hidden_states=True).logits
        out = target.get_decoder()(
            input_ids=ids, use_cache=False, return_shared_kv_states=True, output_hidden_states=True
        )
        embedded = target.get_input_embeddings()(ids[:, -1:])
        drafted = assistant(
            inputs_embeds=torch.cat([embedded, out.last_hidden_state[:, -1:]], dim=-1),
            position_ids=torch.tensor([[32]]),
            shared_kv_states=dict(out.shared_kv_states),
        )
    sizes = [state.pow(2).mean().sqrt().item() for state in (*out.hidden_states, drafted.last_hidden_state)]
    assert all(0.3 < size < 4 for size in sizes)
    for scores in (logits, drafted.logits):
        assert scores.isfinite().all()
        assert scores.std() > 0.2  # one can tell tokens apart


@torch.no_grad()
def _hidden_after_steps(folder: Path, dtype: torch.dtype, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target logits of a text, and the assistant's hidden row after draft steps at its end."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, assistant = (load(folder / part, dtype=dtype).eval() for part in PARTS)
    ids = torch.arange(200, 264).unsqueeze(0)
    out = target.get_decoder()(input_ids=ids, use_cache=False, return_shared_kv_states=True, output_hidden_states=True)
    token, hidden = ids[:, -1:], out.last_hidden_state[:, -1:]
    for _ in range(num_steps):
        step = assistant(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token), hidden], dim=-1),
            position_ids=torch.tensor([[64]]),
            shared_kv_states=dict(out.shared_kv_states),
        )
        token, hidden = step.logits[:, 0].argmax(-1, keepdim=True), step.last_hidden_state
    return target.lm_head(out.last_hidden_state), hidden


@pytest.mark.parametrize("name", ["e2b", "31b"])
def test_rounding_does_not_grow_and_text_does_not_repeat(name: str, tiny_pair: Folder) -> None:
    found = _hidden_after_steps(tiny_pair(name), torch.float32, 6)
    exact = _hidden_after_steps(tiny_pair(name), torch.float64, 6)
    for single, double in zip(found, exact, strict=True):
        assert (single - double).abs().max() < 1e-5 * double.abs().max()
    repeated = exact[0][0].argmax(-1) == torch.arange(200, 264)
    assert repeated.float().mean() < 0.1


@all_presets
def test_tiny_pair_can_be_exported(name: str, tiny_pair: Folder) -> None:
    pair = open_pair(*(tiny_pair(name) / part for part in PARTS))
    assert pair.generation.stop_token_ids == [1, 50, 106]
    assert pair.generation.num_draft_tokens == 6
    assert pair.generation.special_tokens["bos_token"] == "<bos>"
    assert pair.suppress_tokens == ((1022, 1023) if name == "12b" else ())
    target = Target(pair.target_config, torch.float32, has_per_layer_table=True)
    recipes = list(recipes_of(target).values())
    check_recipes(recipes, pair.target)
    check_leftovers(recipes, pair.target, pair.target_config)
    module = Assistant(pair.assistant_config, pair.target_config, torch.float32, num_steps=1, num_top_logits=8)
    recipes = [recipe for key, recipe in recipes_of(module).items() if key != "embed.weight"]
    check_recipes(recipes, pair.assistant)
    check_leftovers(
        [*recipes, Recipe(("embed_tokens.weight",), "as_is", ())], pair.assistant, pair.assistant_config.text
    )


# files


def test_tiny_target_is_sharded_with_an_index_of_every_tensor(tiny_pair: Folder) -> None:
    folder = tiny_pair("e2b") / "target"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    headers = open_checkpoint(CheckpointFolder(folder)).headers.values()
    assert {header.key: header.file.name for header in headers} == index["weight_map"]
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert index["metadata"]["total_size"] == sum(plan.num_bytes(2) for plan in plans_of(configs("e2b"), "target"))
    assert sorted(path.name for path in (tiny_pair("e2b") / "assistant").glob("*.safetensors*")) == [
        "model.safetensors"
    ]


def test_shards_hold_no_more_than_the_limit_or_one_tensor(tmp_path: Path) -> None:
    plans = [synth.TensorPlan(name, (size,), 1.0) for name, size in zip("abcde", (10, 10, 50, 1, 9), strict=True)]
    synth._write_shards(tmp_path, plans, 40, "bfloat16", 0, SilentProgress())
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: file[6:11] for name, file in weight_map.items()} == {
        "a": "00001", "b": "00001", "c": "00002", "d": "00003", "e": "00003",
    }  # fmt: skip


def test_same_seed_gives_the_same_files_and_another_seed_other_values(tiny_pair: Folder, tmp_path: Path) -> None:
    first = tiny_pair("e2b")
    synth.synthesize(configs_of("e2b"), tmp_path / "same", "tiny", SilentProgress())
    synth.synthesize(configs_of("e2b"), tmp_path / "other", "tiny", SilentProgress(), seed=1)

    def contents(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert contents(tmp_path / "same") == contents(first)
    same, other = contents(first), contents(tmp_path / "other")
    changed = {name for name in same if same[name] != other[name]}
    assert changed == {name for name in same if name.endswith(".safetensors")}


def test_values_are_those_of_their_kind(tiny_pair: Folder) -> None:
    target, assistant = (open_checkpoint(CheckpointFolder(tiny_pair("e2b") / part)) for part in PARTS)
    scalars = torch.cat([target.read(f"layers.{index}.layer_scalar") for index in range(10)])
    assert scalars.min() >= 0.5
    assert scalars.max() <= 1
    assert scalars.unique().numel() > 5
    ordering = assistant.read("masked_embedding.token_ordering")
    assert ordering.dtype == torch.int64
    assert torch.equal(ordering.sort().values, torch.arange(1024))
    assert not torch.equal(ordering, torch.arange(1024))
    norm = target.read("layers.0.input_layernorm.weight").float()
    assert norm.mean() == pytest.approx(1, abs=0.1)
    matrix = target.read("layers.0.mlp.down_proj.weight").float()
    assert matrix.std() == pytest.approx(128**-0.5, rel=0.05)
    assert not torch.equal(matrix, target.read("layers.1.mlp.down_proj.weight").float())


@pytest.mark.parametrize(("dtype", "header"), [("float32", "F32"), ("float16", "F16")])
def test_dtype_is_that_of_tensors_and_configs(dtype: Any, header: str, tmp_path: Path) -> None:
    synth.synthesize(configs_of("e2b"), tmp_path / "pair", "tiny", SilentProgress(), dtype=dtype)
    for part in PARTS:
        checkpoint = open_checkpoint(CheckpointFolder(tmp_path / "pair" / part))
        assert {found.dtype for found in checkpoint.headers.values()} - {"I64"} == {header}
        assert checkpoint.config["dtype"] == checkpoint.config["text_config"]["dtype"] == dtype


def test_large_tensor_repeats_a_block_and_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    randn = torch.randn

    def counted(num_values: int, **options: Any) -> torch.Tensor:
        asked.append(num_values)
        return randn(num_values, **options)

    monkeypatch.setattr(synth, "BLOCK_VALUES", 1009)
    monkeypatch.setattr(torch, "randn", counted)
    written: list[int] = []
    progress: Any = SimpleNamespace(advance=written.append)
    synth._write_shards(tmp_path, [synth.TensorPlan("w", (640, 48), 1.0)], 1 << 30, "bfloat16", 0, progress)
    assert asked == [1009]
    assert max(written) == 2 * 1009
    assert sum(written) == 2 * 640 * 48
    tensor = transformers.modeling_utils.safe_open(tmp_path / "model.safetensors", framework="pt").get_tensor("w")
    flat = tensor.flatten()
    assert torch.equal(flat[1009:], flat[:-1009])
    assert tensor.unique(dim=0).shape == (640, 48)


@pytest.mark.parametrize("error", [OSError("disk is full"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_nothing_is_left_of_a_pair_that_failed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard = synth._write_shard

    def failing(*arguments: Any) -> None:
        if any(tmp_path.rglob("model-00002*")):
            raise error
        write_shard(*arguments)

    monkeypatch.setattr(synth, "_write_shard", failing)
    expected = RequestError if isinstance(error, OSError) else KeyboardInterrupt
    torch.set_num_threads(2)
    with pytest.raises(expected) as caught:
        synth.synthesize(configs_of("e2b"), tmp_path / "pair", "tiny", SilentProgress())
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    if expected is RequestError:
        assert str(caught.value) == f"{tmp_path / 'pair'} can't be written: disk is full. Nothing was left behind"


def test_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already: choose another folder, or remove it"):
        synth.synthesize(configs_of("e2b"), tmp_path, "tiny", SilentProgress())


def test_disk_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=50 << 30))
    with pytest.raises(RequestError, match=r"the pair: 58\.1 GiB of disk are needed, .* has 50\.0 GiB free: make room"):
        synth.synthesize(configs_of("31b"), tmp_path / "sub" / "pair", "full", SilentProgress())
    assert list(tmp_path.iterdir()) == []


def test_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file, so"):
        synth.synthesize(configs_of("mid"), tmp_path / "file" / "pair", "tiny", SilentProgress())


# texts


def test_tokenizer_writes_any_text_and_fills_the_vocabulary(tiny_pair: Folder) -> None:
    path = tiny_pair("12b") / "target" / "tokenizer.json"
    assert path.read_bytes() == (tiny_pair("12b") / "assistant" / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_file(str(path))
    text = "The other end: 3.14 – naïve 🙂\n  then"
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<bos>") == 2
    assert 3 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 1024
    stops = [tokenizer.id_to_token(token) for token in (1, 50, 106)]
    assert stops == ["<eos>", "<|tool_response>", "<turn|>"]


def test_tokenizer_of_a_released_size_has_every_token() -> None:
    tokenizer = synth._make_tokenizer(262_144)
    assert tokenizer.get_vocab_size() == 262_144
    assert tokenizer.id_to_token(262_143) == "<unused262143>"


def test_chat_template_makes_turns_of_the_tokenizers_own_tokens(tiny_pair: Folder) -> None:
    folder = tiny_pair("mid") / "target"
    template = ChatTemplate((folder / "chat_template.jinja").read_text(), {"bos_token": "<bos>"})
    prompt = template.render([{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}])
    assert prompt == "<bos><|turn>user\nhi<turn|>\n<|turn>model\nho<turn|>\n<|turn>model\n"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt, add_special_tokens=False).ids
    assert (ids.count(2), ids.count(105), ids.count(106), ids[-1]) == (1, 3, 2, 107)


# configs from elsewhere


@pytest.mark.parametrize("form", ["folder", "file"])
def test_given_configs_are_written_as_they_are(form: str, tmp_path: Path) -> None:
    pair = configs("e4b")
    target = {**pair.target, "vision_config": {"model_type": "gemma4_vision"}, "image_token_id": 7}
    both = {"target": target, "assistant": pair.assistant}
    source = tmp_path / "source"
    if form == "file":
        source.write_text(json.dumps(both))
    for part in PARTS if form == "folder" else ():
        (source / part).mkdir(parents=True)
        (source / part / "config.json").write_text(json.dumps(both[part]))
    synth.synthesize(configs_of(str(source)), tmp_path / "pair", "full", SilentProgress())
    written = {part: json.loads((tmp_path / "pair" / part / "config.json").read_text()) for part in PARTS}
    assert written == {"target": {**target, "vision_config": None}, "assistant": pair.assistant}
    assert len(open_pair(*(tmp_path / "pair" / part for part in PARTS)).target.headers) == 191


def test_texts_beside_given_configs_are_copied_and_the_shipped_pair_can_be_synthesized(tmp_path: Path) -> None:
    synth.synthesize(configs_of(str(DEMO_PAIR)), tmp_path / "pair", "full", SilentProgress())
    for part in PARTS:
        for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
            assert (tmp_path / "pair" / part / name).read_bytes() == (DEMO_PAIR / part / name).read_bytes()
        headers = [
            open_checkpoint(CheckpointFolder(folder / part)).headers for folder in (DEMO_PAIR, tmp_path / "pair")
        ]
        shapes = [{(h.key, h.shape, h.dtype) for h in found.values()} for found in headers]
        assert shapes[0] == shapes[1]


def test_vocabulary_below_the_made_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    pair = PairConfigs(SMALL, SMALL_ASSISTANT)
    with pytest.raises(CheckpointError, match=r"a vocabulary of 96 is too small .* put a tokenizer.json beside"):
        synth.synthesize(pair, tmp_path / "pair", "full", SilentProgress())
    assert list(tmp_path.iterdir()) == []


def test_configs_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    pair = replace(configs_of("e2b"), assistant=configs_of("e4b").assistant)
    with pytest.raises(CheckpointError, match="this is not the target's assistant"):
        synth.synthesize(pair, tmp_path / "pair", "full", SilentProgress())


def test_preset_names_may_be_in_capitals() -> None:
    assert configs_of("E2B") == configs_of("e2b")


def test_unknown_source_lists_the_presets() -> None:
    message = "'7b' is no preset, folder or file: take one of the presets e2b, e4b, 12b, 26b-a4b, 31b, mid, a folder"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        configs_of("7b")


def test_folder_or_file_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks target/config.json or assistant/config.json: put each config"):
        configs_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(CheckpointError, match=re.escape('is not of the form {"target": {...}, "assistant": {...}}')):
        configs_of(str(tmp_path / "config.json"))
