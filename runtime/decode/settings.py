"""What a caller asks of one generation, and how it is checked and resolved to a Request."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from slipstream.runtime.errors import RequestError

from .loop import Request


@dataclass(frozen=True)
class GenerationSettings:
    """Checked where a generation begins, against the pair that runs it.

    num_draft_tokens: K per round; None takes the bundle's, 0 is plain decoding.
    max_new_tokens: cap on committed tokens, thoughts included.
    stop: texts that end the answer, which is cut before them; they are not looked for in thoughts. One that is a
        special token by itself, such as "<channel|>", ends it at the token too, in a thought or not. One that holds
        a special token among other text is refused: text never holds one.
    """

    num_draft_tokens: int | None = None
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()

    def checked(self) -> GenerationSettings:
        """The same in plain types. Raises RequestError that names the field, as far as no pair has to be asked."""
        num_draft_tokens = self.num_draft_tokens
        if num_draft_tokens is not None:
            num_draft_tokens = whole_number("num_draft_tokens", num_draft_tokens)
        max_new_tokens = whole_number("max_new_tokens", self.max_new_tokens)
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        return GenerationSettings(num_draft_tokens, max_new_tokens, _stop_strings(self.stop))

    def resolve(
        self,
        draft_counts: Sequence[int],
        default_draft_count: int,
        stop_token_ids: Collection[int],
        special_tokens: Mapping[str, int],
    ) -> Request:
        """The request that these settings make.

        draft_counts: K that the engine runs, in order. stop_token_ids: of the bundle. special_tokens: ids by text.
        Raises RequestError that names the field.
        """
        asked = self.checked()
        num_draft_tokens = default_draft_count if asked.num_draft_tokens is None else asked.num_draft_tokens
        if num_draft_tokens not in draft_counts:
            raise RequestError(f"num_draft_tokens is {num_draft_tokens}; it can be {_counts_text(draft_counts)}")
        stops = asked.stop
        stop_ids = [special_tokens[stop] for stop in stops if stop in special_tokens]
        for stop in stops:
            held = next((token for token in special_tokens if token in stop and stop not in special_tokens), None)
            if held is not None:
                raise RequestError(
                    f"stop is {stop!r}, which holds the special token {held}: text never holds one, so give the token "
                    "or the text by itself"
                )
        return Request(num_draft_tokens, asked.max_new_tokens, (*stop_token_ids, *stop_ids), stops)


def whole_number(field: str, value: SupportsIndex) -> int:
    """The value as int; NumPy's integers are taken, bool, float and text are not. Raises RequestError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise RequestError(f"{field} is {value!r}; a whole number is expected") from error


def _stop_strings(stop: Any) -> tuple[str, ...]:
    is_collection = isinstance(stop, Collection) and not isinstance(stop, str)
    if not is_collection or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(f"stop is {stop!r}; a sequence of non-empty strings is expected")
    return tuple(stop)


def _counts_text(counts: Sequence[int]) -> str:
    if len(counts) > 2:
        return f"{counts[0]} to {counts[-1]}"
    return f"{' or '.join(map(str, counts))} with these engines: build others with slipstream build -k"
