"""The one place where accepted tokens become output, in order, until something ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slipstream.runtime.text.codec import TextStream

from .results import Chunk, FinishReason


class Commit:
    """Walks tokens one by one: stop token, stop string, token cap, context end.

    token_ids, text: everything kept so far, text without thoughts. finish_reason: None while the generation may go on.
    """

    def __init__(
        self, stream: TextStream, *, stop_token_ids: Collection[int], max_new_tokens: int, context_room: int
    ) -> None:
        """context_room: tokens that still fit into the sequence."""
        self._stream = stream
        self._thought_start = self._thought_end = len(stream.thought)  # what an earlier generation thought is its own
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_new_tokens = max_new_tokens
        self._most_tokens = min(max_new_tokens, context_room)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self._most_tokens - len(self.token_ids)

    def take(self, tokens: Sequence[int]) -> Chunk:
        """Commit tokens until one of them ends the generation; those after it are not kept."""
        stream, kept, most = self._stream, self.token_ids, self._most_tokens
        start, text = len(kept), ""
        for token in tokens:
            kept.append(token)
            if token in self._stop_token_ids:
                self.finish_reason = "stop_token"
                text += stream.finish()
                break
            text += stream.push(token)
            if len(kept) >= most and not stream.stopped:
                self.finish_reason = "length" if len(kept) >= self._max_new_tokens else "context"
                text += stream.finish()
            if stream.stopped:
                self.finish_reason = "stop_string"
            if self.finish_reason is not None:
                break
        return self._chunk(text, kept[start:])

    def end(self, reason: FinishReason) -> Chunk:
        """End here for a reason outside the text; gives the text that was held back."""
        self.finish_reason = reason
        return self._chunk(self._stream.finish(), [])

    @property
    def thought(self) -> str:
        """Everything thought so far."""
        return self._stream.thought[self._thought_start :]

    def _chunk(self, text: str, token_ids: list[int]) -> Chunk:
        self.text += text
        thought = self._stream.thought[self._thought_end :]
        self._thought_end += len(thought)
        return Chunk(text, token_ids, thought)
