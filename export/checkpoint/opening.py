"""Opens a target and its assistant and checks that they belong together, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.errors import CheckpointError, RequestError
from slipstream.runtime.text.chat import ChatTemplate

from .config import (
    AssistantConfig,
    TextConfig,
    assistant_config_from_hf,
    check_pair,
    media_token_ids,
    target_config_from_hf,
)
from .quantized import fold_quantized
from .tensors import Checkpoint, open_checkpoint, read_json, read_text

_DEFAULT_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class CheckpointPair:
    """A target and its assistant, opened and checked against each other; no weight read yet.

    chat_template: its source, None where the target has none.
    """

    target: Checkpoint
    assistant: Checkpoint
    target_config: TextConfig
    assistant_config: AssistantConfig
    generation: contract.Generation
    chat_template: str | None
    suppress_tokens: tuple[int, ...]


def open_pair(target: Path, assistant: Path) -> CheckpointPair:
    """Open and check a pair. Raises CheckpointError with the first thing that does not fit."""
    configs = read_json(target / "config.json"), read_json(assistant / "config.json")
    target_config = target_config_from_hf(configs[0], str(target))
    assistant_config = assistant_config_from_hf(configs[1], str(assistant))
    check_pair(target_config, assistant_config)
    _check_tokenizers(target, assistant, target_config.vocab_size)
    generation, suppress_tokens = _generation(target, assistant, configs[0], target_config.vocab_size)
    return CheckpointPair(
        fold_quantized(open_checkpoint(target)),
        fold_quantized(open_checkpoint(assistant)),
        target_config,
        assistant_config,
        generation,
        _chat_template(target),
        suppress_tokens,
    )


def _chat_template(target: Path) -> str | None:
    """From the file of its own, or from tokenizer_config.json as older checkpoints have it."""
    path = target / contract.CHAT_TEMPLATE
    source = read_text(path, required=False)
    if source is None:
        path = target / "tokenizer_config.json"
        source = read_json(path, required=False).get("chat_template")
        if isinstance(source, list):  # several by name, in older checkpoints
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    try:
        ChatTemplate(source, {})
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}. Correct it, or download it again") from error
    return source


def _check_tokenizers(target: Path, assistant: Path, vocab_size: int) -> None:
    tokenizer = read_json(target / contract.TOKENIZER)
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise CheckpointError(f"{target / contract.TOKENIZER} has no model.vocab: it is not a BPE tokenizer.json")
    largest = max([*vocab.values(), *(token.get("id", 0) for token in tokenizer.get("added_tokens") or [])])
    if largest >= vocab_size:
        raise CheckpointError(
            f"{target / contract.TOKENIZER} has ids up to {largest}, the model embeds {vocab_size} tokens"
        )
    other = read_json(assistant / contract.TOKENIZER, required=False)
    if other and any(other.get(part) != tokenizer.get(part) for part in ("model", "added_tokens")):
        raise CheckpointError(f"the tokenizers of {target} and {assistant} differ: this is not the target's assistant")


def _generation(
    target: Path, assistant: Path, config: Mapping[str, Any], vocab_size: int
) -> tuple[contract.Generation, tuple[int, ...]]:
    wanted = read_json(target / "generation_config.json")
    if wanted.get("eos_token_id") is None or wanted.get("bos_token_id") is None:
        raise CheckpointError(
            f"{target / 'generation_config.json'} lacks eos_token_id or bos_token_id: "
            "the stop tokens of a chat model are read from there"
        )
    stops = wanted["eos_token_id"] if isinstance(wanted["eos_token_id"], list) else [wanted["eos_token_id"]]
    suppress_tokens = wanted.get("suppress_tokens") or []
    if not isinstance(suppress_tokens, list):
        raise CheckpointError(
            f"{target / 'generation_config.json'}: suppress_tokens is {suppress_tokens!r}, not a list"
        )
    ids = [wanted["bos_token_id"], *stops, *suppress_tokens]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise CheckpointError(f"{target / 'generation_config.json'} has token ids outside 0..{vocab_size - 1}: {ids}")
    drafting = read_json(assistant / "generation_config.json", required=False)
    num_draft_tokens = drafting.get("num_assistant_tokens")
    if num_draft_tokens is None:
        num_draft_tokens = _DEFAULT_DRAFT_TOKENS
    if type(num_draft_tokens) is not int or num_draft_tokens < 1:
        raise CheckpointError(
            f"{assistant / 'generation_config.json'}: num_assistant_tokens is {num_draft_tokens!r}; "
            "a whole number of at least 1 is expected"
        )
    generation = contract.Generation(
        bos_token_id=wanted["bos_token_id"],
        stop_token_ids=sorted(stops),
        num_draft_tokens=num_draft_tokens,
        special_tokens=_special_tokens(target, config),
    )
    return generation, tuple(suppress_tokens)


def _special_tokens(target: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like: what chat templates may name; and the tokens that stand for media."""
    added = read_json(target / contract.TOKENIZER).get("added_tokens") or []
    texts = {token.get("id"): token.get("content") for token in added}
    media = {name: texts[token] for name, token in media_token_ids(config).items() if token in texts}
    named = {}
    for name, token in read_json(target / "tokenizer_config.json", required=False).items():
        content = token.get("content") if isinstance(token, dict) else token  # older files hold an object
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return {**media, **named}
