"""Text in, text out: prompts to ids with exactly one BOS, ids to a stream that never steps back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE

from slipstream.runtime.errors import BundleError, RequestError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextCodec:
    """A tokenizer.json with its BOS token. What the file says of truncation, padding and templates is left out."""

    def __init__(self, path: Path, bos_token_id: int) -> None:
        """Raises BundleError when the file is not a tokenizer or lacks the BOS token."""
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path} can't be loaded by tokenizers: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.post_processor = None
        if isinstance(self.tokenizer.model, BPE):
            self.tokenizer.model.dropout = None
        token = self.tokenizer.id_to_token(bos_token_id)
        if token is None:
            raise BundleError(f"{path} has no token {bos_token_id}, which bos_token_id names")
        self.bos_token_id = bos_token_id
        self.bos_token: str = token
        vocab = self.tokenizer.get_vocab(with_added_tokens=False)
        byte_ids = {index for name, index in vocab.items() if _BYTE_TOKEN.fullmatch(name)}
        special_ids = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self._pieces: dict[int, str] = {}
        self._splitting_ids = frozenset(self.tokenizer.get_vocab().values()) - byte_ids - special_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids with exactly one BOS, whatever BOS the text starts with. Raises RequestError on lone surrogates."""
        ids = self.encode_more(text)
        while ids and ids[0] == self.bos_token_id:
            ids = ids[1:]
        return [self.bos_token_id, *ids]

    def encode_more(self, text: str) -> list[int]:
        """Ids of text that continues a sequence: no BOS is added."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error}") from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def piece(self, token: int) -> str:
        """Text of a token that ``splits_text``, whatever stands around it; remembered."""
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = self.decode([token])
        return text

    def splits_text(self, token: int) -> bool:
        """Whether text may be cut after this token: a run of byte tokens decodes as one piece.

        Special tokens leave no text, so they do not end a run.
        """
        return token in self._splitting_ids


class TextStream:
    """Decodes committed tokens incrementally.

    The concatenation of what ``push`` and ``finish`` return equals ``TextCodec.decode`` of all
    tokens. Text is held back while a run of byte tokens may still go on (UTF-8 is only
    decoded when the run is complete), and while it may be the start of a stop string.
    """

    def __init__(self, codec: TextCodec, stop_strings: Sequence[str] = ()) -> None:
        self._codec = codec
        self._stop_strings = tuple(stop_strings)
        self._pending_ids: list[int] = []
        self._held_text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that became certain with this token. Sets ``stopped`` when a stop string is complete."""
        if not self._codec.splits_text(token):
            self._pending_ids.append(token)
            return ""
        text = self._codec.decode(self._pending_ids) if self._pending_ids else ""
        self._pending_ids.clear()
        return self._release(text + self._codec.piece(token), final=False)

    def finish(self) -> str:
        """The rest of the text, at the end of a generation."""
        return "" if self.stopped else self._release(self._codec.decode(self._pending_ids), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if not self._stop_strings:
            return text
        text = self._held_text + text
        found = [index for index in (text.find(stop) for stop in self._stop_strings) if index >= 0]
        if found:
            self.stopped = True
            self._held_text = ""
            return text[: min(found)]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held_text = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
