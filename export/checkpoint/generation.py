"""What generation_config.json of both checkpoints asks for, and the tokenizer's special tokens by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tokenizers import Tokenizer

from slipstream.runtime.bundle.manifest import SamplingDefaults
from slipstream.runtime.errors import CheckpointError

from .chat_template import TOKENIZER_CONFIG
from .config import media_token_ids
from .folder import CONFIG, CheckpointFolder

_FILE = "generation_config.json"
_DEFAULT_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class GenerationConfig:
    """Of a target. stop_token_ids: at least one, ascending. suppress_tokens: ids that are never chosen."""

    bos_token_id: int
    stop_token_ids: tuple[int, ...]
    suppress_tokens: tuple[int, ...]
    sampling: SamplingDefaults


def read_generation_config(target: CheckpointFolder, vocab_size: int) -> GenerationConfig:
    """Raises CheckpointError when tokens are missing, or are none of the vocabulary's."""
    path, wanted = target.path / _FILE, target.object(_FILE)
    bos, stops, suppressed = (wanted.get(name) for name in ("bos_token_id", "eos_token_id", "suppress_tokens"))
    if stops is None or stops == [] or bos is None:
        raise CheckpointError(
            f"{path} lacks eos_token_id or bos_token_id: the stop tokens of a chat model are read from there"
        )
    if suppressed is not None and not isinstance(suppressed, list):
        raise CheckpointError(f"{path}: suppress_tokens is {suppressed!r}, not a list")
    stops, suppressed = stops if isinstance(stops, list) else [stops], suppressed or []
    ids = [bos, *stops, *suppressed]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise CheckpointError(f"{path} has token ids outside 0..{vocab_size - 1}: {ids}")
    return GenerationConfig(bos, tuple(sorted(set(stops))), tuple(suppressed), _sampling_defaults(path, wanted))


def _sampling_defaults(path: Path, wanted: Mapping[str, Any]) -> SamplingDefaults:
    """As transformers reads them, but that top_k is no limit where it is missing or 0. Raises CheckpointError."""
    found = {name: wanted.get(name) for name in ("do_sample", "temperature", "top_k", "top_p")}
    values = {
        "do_sample": False if found["do_sample"] is None else found["do_sample"],
        "temperature": _as_float(found["temperature"]),
        "top_k": found["top_k"] or None,
        "top_p": _as_float(found["top_p"]),
    }
    try:
        return SamplingDefaults.model_validate(values)
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise CheckpointError(f"{path}: {field} is {found[str(field)]!r}: {error.errors()[0]['msg']}") from error


def _as_float(value: Any) -> Any:
    """1.0 for what is missing; whole numbers as floats."""
    return 1.0 if value is None else float(value) if type(value) is int else value


def read_num_draft_tokens(assistant: CheckpointFolder) -> int:
    """Tokens that an assistant drafts per round; a default where it doesn't say. Raises CheckpointError."""
    found = assistant.object(_FILE, required=False).get("num_assistant_tokens")
    if found is None:
        return _DEFAULT_DRAFT_TOKENS
    if type(found) is not int or found < 1:
        raise CheckpointError(
            f"{assistant.path / _FILE}: num_assistant_tokens is {found!r}; a whole number of at least 1 is expected"
        )
    return found


def read_special_tokens(target: CheckpointFolder, tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token and the like: what chat templates may name; and the tokens that stand for media."""
    added = tokenizer.get_added_tokens_decoder()
    ids = media_token_ids(target.object(CONFIG))
    named = {name: added[token].content for name, token in ids.items() if token in added}
    for name, token in target.object(TOKENIZER_CONFIG, required=False).items():
        content = token.get("content") if isinstance(token, dict) else token  # older files hold an object
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named
