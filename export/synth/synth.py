"""Writes random checkpoint pairs of true shape and layout, so that any size can be tried without its weights.

Tensor names, shapes, dtype and index are those of published checkpoints, in shards of 5 GB. Towers of other modalities
are left out, and their configs set to null. Values are random; their spreads keep activations near 1 and rounding from
growing with depth or draft steps, so that runtimes can be compared. Nothing is trained: drafts are hit by chance only.

A tensor of more than ``BLOCK_VALUES`` values repeats one block of that many. The number is prime, so no two rows
of a matrix start at the same place of the block, but the values are not independent: good for time, memory and
comparing runtimes, not for statistics of weights. No more than one block is in memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.export.checkpoint.config import AssistantConfig, Experts, Layer, TextConfig
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.manifest import CHAT_TEMPLATE, TOKENIZER
from slipstream.runtime.bundle.staging import staged
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.machine.plan import check_disk

from .presets import Config, PairConfigs, tiny

if TYPE_CHECKING:
    from slipstream.runtime.machine.progress import Progress

Scale = Literal["full", "tiny"]

BLOCK_VALUES = 4_194_301  # the largest prime below 2^22
SHARD_BYTES = 5_000_000_000
_DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16"), "float32": (torch.float32, "F32")}
_POST_NORM = 0.25  # what a layer adds to the residual stream
_TEXT_BYTES = 32 << 20  # tokenizers and configs, generously


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of a checkpoint.

    kind: "normal" values around ``mean``; "uniform" within ``spread`` of it; a "permutation" of int64.
    spread: standard deviation or half width.
    """

    name: str
    shape: tuple[int, ...]
    spread: float
    mean: float = 0.0
    kind: Literal["normal", "uniform", "permutation"] = "normal"

    def num_bytes(self, item_bytes: int) -> int:
        return prod(self.shape) * (8 if self.kind == "permutation" else item_bytes)


def synthesize(
    configs: PairConfigs, out: Path, scale: Scale, progress: Progress, *, seed: int = 0, dtype: DType = "bfloat16"
) -> None:
    """Write the folders target and assistant under ``out``.

    configs: from ``presets.configs_of``. Tokenizer, chat template and generation_config that lie beside configs
        which were read from a folder are copied at full scale; otherwise they are made.
    seed: values follow from it and the tensor's name.
    Raises CheckpointError before anything is written when ``out`` exists or the configs do not make a pair,
    RequestError when the disk is too small, or refuses later; nothing is left behind then.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already: choose another folder, or remove it")
    if scale == "tiny":
        configs = tiny(configs)
    target, assistant = configs.resolved()
    prefix = "model.language_model." if "text_config" in configs.target else "model."
    item_bytes = _DTYPES[dtype][0].itemsize
    parts = [
        ("target", configs.target, target_tensors(target, prefix)),
        ("assistant", configs.assistant, assistant_tensors(assistant)),
    ]
    sizes = [sum(plan.num_bytes(item_bytes) for plan in plans) for _, _, plans in parts]
    otherwise = f"write to another disk{'' if scale == 'tiny' else ', or take --scale tiny'}"
    check_disk(out, sum(sizes) + _TEXT_BYTES, "writing the pair", otherwise)
    with staged(out) as folder, ExitStack() as stack:
        # writing is limited by the disk, and on busy cores threads wait for each other
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        progress.start("writing tokenizer and settings", 0)
        _write_texts(folder, configs, target)
        for (part, config, plans), num_bytes in zip(parts, sizes, strict=True):
            progress.start(f"writing the {part}", num_bytes)
            # two shards at least of a tiny target: what reads it should meet an index
            limit = num_bytes * 2 // 3 if scale == "tiny" and part == "target" else SHARD_BYTES
            _write_shards(folder / part, plans, limit, dtype, seed, progress)
            _write_json(folder / part / "config.json", _as_written(config, dtype))


# which tensors a checkpoint has


def target_tensors(text: TextConfig, prefix: str) -> list[TensorPlan]:
    """Every tensor of a target whose text model's names start with ``prefix``."""
    plans = [_matrix("embed_tokens", text.vocab_size, text.hidden_size)]
    if text.ple_dim:
        packed = len(text.layers) * text.ple_dim
        # embeddings are multiplied by the root of their width, which here is that of one layer
        plans += [
            TensorPlan("embed_tokens_per_layer.weight", (text.vocab_size, packed), text.ple_dim**-0.5),
            _matrix("per_layer_model_projection", packed, text.hidden_size),
            _norm("per_layer_projection_norm", text.ple_dim),
        ]
    for layer in text.layers:
        plans += _layer_tensors(text, layer)
    # around 0: with positive weights a tied head finds the token that was just read, and text would repeat it
    plans.append(TensorPlan("norm.weight", (text.hidden_size,), 1.0))
    return [replace(plan, name=prefix + plan.name) for plan in plans] + _untied_head(text)


def assistant_tensors(config: AssistantConfig) -> list[TensorPlan]:
    text, head = config.text, config.centroid_head
    plans = [_matrix("embed_tokens", text.vocab_size, text.hidden_size), _norm("norm", text.hidden_size)]
    for layer in text.layers:
        plans += _layer_tensors(text, layer)
    plans = [
        *(replace(plan, name=f"model.{plan.name}") for plan in plans),
        _matrix("pre_projection", text.hidden_size, 2 * config.backbone_hidden_size),
        _matrix("post_projection", config.backbone_hidden_size, text.hidden_size),
        *_untied_head(text),
    ]
    if head:
        plans += [
            _matrix("masked_embedding.centroids", head.num_centroids, text.hidden_size),
            TensorPlan("masked_embedding.token_ordering", (text.vocab_size,), 0.0, kind="permutation"),
        ]
    return plans


def _layer_tensors(text: TextConfig, layer: Layer) -> list[TensorPlan]:
    width, inner = text.hidden_size, layer.intermediate_size
    plans = _attention_tensors(text, layer)
    plans += [
        _matrix("mlp.gate_proj", inner, width),
        _matrix("mlp.up_proj", inner, width),
        _matrix("mlp.down_proj", width, inner),
        _norm("input_layernorm", width),
        _norm("post_attention_layernorm", width, _POST_NORM),
        _norm("pre_feedforward_layernorm", width),
        _norm("post_feedforward_layernorm", width, _POST_NORM),
        TensorPlan("layer_scalar", (1,), 0.05, 0.95, "uniform"),
    ]
    if text.ple_dim:
        plans += [
            _matrix("per_layer_input_gate", text.ple_dim, width),
            _matrix("per_layer_projection", width, text.ple_dim),
            _norm("post_per_layer_input_norm", width, _POST_NORM),
        ]
    if text.experts:
        plans += _expert_tensors(width, text.experts)
    return [replace(plan, name=f"layers.{layer.index}.{plan.name}") for plan in plans]


def _attention_tensors(text: TextConfig, layer: Layer) -> list[TensorPlan]:
    query_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    plans = [
        _matrix("self_attn.q_proj", query_size, text.hidden_size),
        # the attention scale is 1: the norm of the queries keeps the scores' spread near 1, whatever the head size
        _norm("self_attn.q_norm", layer.head_dim, layer.head_dim**-0.5),
        _matrix("self_attn.o_proj", text.hidden_size, query_size),
    ]
    if layer.owns_kv:
        plans += [_matrix("self_attn.k_proj", kv_size, text.hidden_size), _norm("self_attn.k_norm", layer.head_dim)]
        if not layer.value_is_key:
            plans.append(_matrix("self_attn.v_proj", kv_size, text.hidden_size))
    return plans


def _expert_tensors(width: int, experts: Experts) -> list[TensorPlan]:
    count, inner = experts.num_experts, experts.intermediate_size
    return [
        TensorPlan("experts.gate_up_proj", (count, 2 * inner, width), width**-0.5),
        TensorPlan("experts.down_proj", (count, width, inner), inner**-0.5),
        # its input is divided by the root of the width: a spread of 1 tells the experts apart
        TensorPlan("router.proj.weight", (count, width), 1.0),
        TensorPlan("router.scale", (width,), 0.1, 1.0),
        TensorPlan("router.per_expert_scale", (count,), 0.1, 1.0),
        _norm("post_feedforward_layernorm_1", width),
        _norm("post_feedforward_layernorm_2", width),
        _norm("pre_feedforward_layernorm_2", width),
    ]


def _untied_head(text: TextConfig) -> list[TensorPlan]:
    return [] if text.has_tied_head else [_matrix("lm_head", text.vocab_size, text.hidden_size)]


def _matrix(name: str, out_features: int, in_features: int) -> TensorPlan:
    return TensorPlan(f"{name}.weight", (out_features, in_features), in_features**-0.5)


def _norm(name: str, size: int, mean: float = 1.0) -> TensorPlan:
    return TensorPlan(f"{name}.weight", (size,), 0.1 * mean, mean)


# writing them


def _write_shards(
    folder: Path, plans: Sequence[TensorPlan], limit_bytes: int, dtype: DType, seed: int, progress: Progress
) -> None:
    """model.safetensors, or shards of at most limit_bytes (or one tensor) each with their index."""
    item_bytes = _DTYPES[dtype][0].itemsize
    shards: list[list[TensorPlan]] = [[]]
    filled = 0
    for plan in plans:
        if shards[-1] and filled + plan.num_bytes(item_bytes) > limit_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(plan)
        filled += plan.num_bytes(item_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        total = sum(plan.num_bytes(item_bytes) for plan in plans)
        weight_map = {plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, dtype, seed, progress)


def _write_shard(file: BinaryIO, shard: Sequence[TensorPlan], dtype: DType, seed: int, progress: Progress) -> None:
    """The safetensors format: length and JSON of the header, then the tensors without gaps."""
    torch_dtype, header_dtype = _DTYPES[dtype]
    ordered = sorted(shard, key=lambda plan: plan.kind != "permutation")  # 8-byte values first: all stay aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in ordered:
        start, end = end, end + plan.num_bytes(torch_dtype.itemsize)
        kind = "I64" if plan.kind == "permutation" else header_dtype
        header[plan.name] = {"dtype": kind, "shape": list(plan.shape), "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    file.write(len(content).to_bytes(8, "little") + content)
    for plan in ordered:
        block = _block(plan, torch_dtype, seed).view(torch.uint8).numpy().data
        left = plan.num_bytes(torch_dtype.itemsize)
        while left:
            written = file.write(block[:left])
            left -= written
            progress.advance(written)


def _block(plan: TensorPlan, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The tensor's values, flat, or the block it repeats."""
    digest = hashlib.sha256(f"{seed} {plan.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    num_values = prod(plan.shape)
    if plan.kind == "permutation":
        return torch.randperm(num_values, generator=generator)
    num_values = min(num_values, BLOCK_VALUES)
    if plan.kind == "uniform":
        values = torch.rand(num_values, generator=generator).mul_(2).sub_(1)
    else:
        values = torch.randn(num_values, generator=generator)
    return values.mul_(plan.spread).add_(plan.mean).to(dtype)


# the folder


def _as_written(config: Config, dtype: DType) -> dict[str, Any]:
    """The config with its dtype, and without towers: their tensors are not written."""
    written = {**config, "dtype": dtype}
    written |= {name: None for name in ("vision_config", "audio_config") if name in config}
    if "text_config" in config:
        written["text_config"] = {**config["text_config"], "dtype": dtype}
    return written


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# tokenizer, chat template and generation settings

_SPECIAL_TOKENS = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 50: "<|tool_response>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
_FIRST_BYTE = 238
_MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "n"), ("e", "r")]
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' + ('model' if message['role'] == 'assistant' else "
    "message['role']) + '\\n' + message['content'] | trim + '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def _write_texts(folder: Path, configs: PairConfigs, target: TextConfig) -> None:
    """Write the files beside config.json of both: copies where the configs' folder has them, made up where not."""
    generation: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": [1, 106, 50], "pad_token_id": 0}
    generation |= {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    if configs.suppress_tokens:
        generation["suppress_tokens"] = list(configs.suppress_tokens)
    names = {"pad_token": 0, "eos_token": 1, "bos_token": 2, "unk_token": 3}
    tokenizer_config = {name: _SPECIAL_TOKENS[token] for name, token in names.items()}
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for part, settings in (("target", generation), ("assistant", {"num_assistant_tokens": 6})):
        (folder / part).mkdir()
        _write_json(folder / part / "generation_config.json", settings)
        _write_json(folder / part / "tokenizer_config.json", tokenizer_config)
        (folder / part / CHAT_TEMPLATE).write_text(_CHAT_TEMPLATE, encoding="utf-8")
        for name in ("generation_config.json", "tokenizer_config.json", CHAT_TEMPLATE, TOKENIZER):
            if configs.folder and (given := configs.folder / part / name).exists():
                shutil.copyfile(given, folder / part / name)
    tokenizers = [folder / part / TOKENIZER for part in ("target", "assistant")]
    if not tokenizers[0].exists():
        _make_tokenizer(target.vocab_size).save(str(tokenizers[0]), pretty=False)
    if not tokenizers[1].exists():
        shutil.copyfile(*tokenizers)


def _make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-fallback BPE in Gemma's form that writes any text; most of its vocabulary is filler."""
    names = dict(_SPECIAL_TOKENS) | {107: "\n"}
    names |= {_FIRST_BYTE + byte: f"<0x{byte:02X}>" for byte in range(256)}
    words = ["▁", *map(chr, range(ord("!"), ord("~") + 1)), *(left + right for left, right in _MERGES)]
    names |= dict(enumerate(words, _FIRST_BYTE + 256))
    if vocab_size <= max(names):
        raise CheckpointError(
            f"a vocabulary of {vocab_size} is too small for the tokenizer that is made for it, which has "
            f"{max(names) + 1} tokens: put a tokenizer.json beside the target's config.json"
        )
    vocab = {names.get(token, f"<unused{token}>"): token for token in range(vocab_size)}
    tokenizer = byte_fallback_tokenizer(vocab, _MERGES)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS.values()))
    return tokenizer


def byte_fallback_tokenizer(*vocab_and_merges: Any) -> Tokenizer:
    """BPE in the form Gemma ships: spaces as ▁, and bytes for what has no token. Untrained where nothing is given."""
    tokenizer = Tokenizer(models.BPE(*vocab_and_merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
