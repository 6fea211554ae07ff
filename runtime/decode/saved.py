"""Sessions on disk: tokens and messages, which are fed again when they are resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.json_reader import JsonError, read_object
from slipstream.runtime.bundle.manifest import MANIFEST, Bundle
from slipstream.runtime.bundle.staging import write_whole
from slipstream.runtime.errors import RequestError

_FORMAT = 1


class _Saved(BaseModel):
    """bundle_sha256: of the manifest. has_answer: whether the last message is an answer that may go on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    session_format: int
    bundle_sha256: str
    token_ids: list[int]
    messages: list[dict[str, Any]]
    has_answer: bool


def write_saved(
    path: str | Path,
    bundle: Bundle,
    token_ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    *,
    has_answer: bool,
) -> None:
    """Raises RequestError where the file can't be written."""
    saved = _Saved(
        session_format=_FORMAT,
        bundle_sha256=_hash(bundle),
        token_ids=list(token_ids),
        messages=[dict(message) for message in messages],
        has_answer=has_answer,
    )
    try:
        write_whole(Path(path), saved.model_dump_json(indent=1).encode())
    except OSError as error:
        raise RequestError(f"the session can't be saved to {path}: {error.strerror or error}") from error


def read_saved(path: str | Path, bundle: Bundle) -> tuple[list[int], list[Mapping[str, Any]], bool]:
    """Token ids, messages, has_answer. Raises RequestError for what is no session of this bundle."""
    try:
        content = read_object(Path(path))
        saved = _Saved.model_validate(content)
    except (OSError, JsonError, ValueError) as error:
        raise RequestError(f"{path} is not a saved session: {error}") from error
    if saved.session_format != _FORMAT:
        raise RequestError(f"{path} is a session of format {saved.session_format}; this slipstream reads {_FORMAT}")
    if saved.bundle_sha256 != _hash(bundle):
        raise RequestError(
            f"{path} is a session of another bundle than {bundle.folder}: its tokens mean other text here"
        )
    if any(not 0 <= token < bundle.manifest.vocab_size for token in saved.token_ids):
        raise RequestError(f"{path} has tokens outside the vocabulary of {bundle.manifest.vocab_size}")
    return saved.token_ids, list(saved.messages), saved.has_answer


def _hash(bundle: Bundle) -> str:
    return file_sha256(bundle.folder / MANIFEST)
