"""tokenizer.json of a pair: loaded once, checked against the model, and compared by the ids that it gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from slipstream.runtime.bundle.manifest import TOKENIZER
from slipstream.runtime.errors import BundleError, CheckpointError
from slipstream.runtime.text.codec import TextCodec

from .folder import CheckpointFolder, stand_in


def open_tokenizer(folder: CheckpointFolder, bos_token_id: int, vocab_size: int) -> TextCodec:
    """The target's tokenizer. Raises CheckpointError when it can't be loaded or has ids that the model lacks."""
    path = folder.path / TOKENIZER
    if not path.exists():
        raise CheckpointError(f"{path} is missing: prompts become tokens by it. Download it again")
    try:
        codec = TextCodec(path, bos_token_id)
    except BundleError as error:
        raise CheckpointError(stand_in(path) or f"{error}. Download it again") from error
    ids = codec.tokenizer.get_vocab().values()
    if not codec.tokenizer.get_vocab_size(with_added_tokens=False):
        raise CheckpointError(f"{path} has no vocabulary: download it again")
    if max(ids) >= vocab_size:
        raise CheckpointError(f"{path} has ids up to {max(ids)}, the model embeds {vocab_size} tokens")
    return codec


def check_same_tokenizer(target: CheckpointFolder, assistant: CheckpointFolder, tokenizer: Tokenizer) -> None:
    """Refuse an assistant whose tokenizer.json gives some text other ids than the target's tokenizer does.

    An assistant needs none. Raises CheckpointError.
    """
    path = assistant.path / TOKENIZER
    if not path.exists() or path.read_bytes() == (target.path / TOKENIZER).read_bytes():
        return
    try:
        other = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(stand_in(path) or f"{path} can't be loaded by tokenizers: {error}") from error
    meanings = _meaning(tokenizer), _meaning(other)
    differing = [part for part in meanings[0] if meanings[0][part] != meanings[1][part]]
    if differing:
        raise CheckpointError(
            f"the tokenizers of {target.path} and {assistant.path} differ in {', '.join(differing)}: this is not the "
            "target's assistant"
        )


def _meaning(tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides which ids a text gets, by part; tokenizers has put it into one spelling already."""
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    return {
        "vocabulary": model.pop("vocab"),
        "merges": model.pop("merges", None),
        "model": {name: value or None for name, value in model.items() if name in affixes}
        | {name: value for name, value in model.items() if name not in (*affixes, "dropout")},
        "added tokens": {
            token["id"]: {name: value for name, value in token.items() if name != "special"}
            for token in content["added_tokens"]
        },
        "normalizer": _steps(content["normalizer"], "normalizers"),
        "pre-tokenizer": _steps(content["pre_tokenizer"], "pretokenizers"),
    }


def _steps(part: Mapping[str, Any] | None, children: str) -> list[Any]:
    """A normalizer or pre-tokenizer as its steps: sequences in sequences are one, nothing is none."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for child in part[children] for step in _steps(child, children)]
    return [part]
