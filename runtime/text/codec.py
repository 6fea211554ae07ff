"""Text in, text out: prompts to ids with exactly one BOS, ids to a stream that never steps back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE

from slipstream.runtime.errors import BundleError, RequestError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_THOUGHT_EDGES = {"<|channel>": True, "<channel|>": False, "<|tool_call>": False}  # whether a thought follows

# What Gemma 4 writes inside its own turn, and its chat template finds and strips there.
TURN_TOKENS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


class TextCodec:
    """A tokenizer.json with its BOS token. What the file says of truncation, padding and templates is left out.

    special_tokens: ids of the special tokens by their text. thought_edges: tokens that begin (True) or end a thought.
    pieces: text of the tokens that were asked for so far and ``splits_text``, whatever stands around them.
    """

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
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self.thought_edges = {i: _THOUGHT_EDGES[t] for t, i in self.special_tokens.items() if t in _THOUGHT_EDGES}
        self._turn_tokens = {self.special_tokens[t]: t for t in TURN_TOKENS if t in self.special_tokens}
        self.pieces: dict[int, str] = {}
        special_ids = set(self.special_tokens.values())
        self._splitting_ids = frozenset(self.tokenizer.get_vocab().values()) - byte_ids - special_ids

    def encode_prompt(self, *parts: str) -> list[int]:
        """Ids with exactly one BOS, whatever BOS the text starts with. Raises RequestError on lone surrogates.

        parts: the text; tokens are looked for within each part and never across two.
        """
        ids = [token for part in parts for token in self.encode_more(part)]
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

    def decode_turn(self, ids: Sequence[int], answer: str, before: Sequence[int] = ()) -> str:
        """As ``decode``, with the tokens that set thoughts and tool calls apart (TURN_TOKENS) written out.

        answer: the text of ids outside thoughts, or its beginning where a stop string cut it. before: ids before them.
        """
        stream = TextStream(self, before=before)
        num_cut = sum(len(stream.push(token)) for token in ids) + len(stream.finish()) - len(answer)
        text, start = "", 0
        for index, token in enumerate(ids):
            if token in self._turn_tokens:
                text += self.decode(ids[start:index]) + self._turn_tokens[token]
                start = index + 1
        text += self.decode(ids[start:])
        return text[: len(text) - num_cut]

    def open_thought(self, ids: Sequence[int]) -> Sequence[int]:
        """The end of ids from the token on that began a thought which has not ended; nothing where none is open."""
        edges = self.thought_edges
        last = next((index for index in reversed(range(len(ids))) if ids[index] in edges), None) if edges else None
        return [] if last is None or not edges[ids[last]] else ids[last:]

    def piece(self, token: int) -> str:
        """Text of a token that ``splits_text``; remembered."""
        if token not in self.pieces:
            self.pieces[token] = self.decode([token])
        return self.pieces[token]

    def splits_text(self, token: int) -> bool:
        """Whether text may be cut after this token: a run of byte tokens decodes as one piece.

        Special tokens leave no text, so they do not end a run.
        """
        return token in self._splitting_ids


class TextStream:
    """Decodes committed tokens incrementally, thoughts apart from the answer.

    The concatenation of what ``push`` and ``finish`` return equals ``TextCodec.decode`` of all tokens but those of
    thoughts. Text is held back while a run of byte tokens may still go on (UTF-8 is only decoded when the run is
    complete), and while it may be the start of a stop string. Stop strings are looked for in the answer alone.

    thought: text between ``<|channel>`` and ``<channel|>`` so far, without the channel's name (its first line). It
        only grows.
    """

    def __init__(self, codec: TextCodec, stop_strings: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """before: the tokens that these ones continue, perhaps in the middle of a thought."""
        self._codec = codec
        self._stop_strings = tuple(stop_strings)
        self._pending_ids: list[int] = []
        self._pending_thought_ids: list[int] = []
        self._held_text = ""
        self._thinks = self._in_name = False
        self.thought = ""
        self.stopped = False
        for token in codec.open_thought(before):
            self.push(token)

    def push(self, token: int) -> str:
        """Answer text that became certain with this token. Sets ``stopped`` when a stop string is complete."""
        piece = self._codec.pieces.get(token)
        if piece is not None and not (self._thinks or self._pending_ids or self._stop_strings):
            return piece  # the common case: nothing is held back
        if token in self._codec.thought_edges:
            self._end_thought()
            self._thinks = self._in_name = self._codec.thought_edges[token]
        elif self._thinks:
            self._think(self._decoded(token, self._pending_thought_ids))
        else:
            text = self._decoded(token, self._pending_ids)
            return self._release(text, final=False) if text else ""
        return ""

    def finish(self) -> str:
        """The rest of the text, at the end of a generation."""
        self._end_thought()
        return "" if self.stopped else self._release(self._codec.decode(self._pending_ids), final=True)

    def _decoded(self, token: int, pending_ids: list[int]) -> str:
        """Text of the pending ids and this one, or none while they wait for more."""
        if not self._codec.splits_text(token):
            pending_ids.append(token)
            return ""
        text = self._codec.decode(pending_ids) if pending_ids else ""
        pending_ids.clear()
        return text + self._codec.piece(token)

    def _think(self, text: str) -> None:
        if self._in_name:
            _, newline, text = text.partition("\n")
            self._in_name = not newline
        self.thought += text

    def _end_thought(self) -> None:
        if self._pending_thought_ids:
            self._think(self._codec.decode(self._pending_thought_ids))
            self._pending_thought_ids.clear()

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
