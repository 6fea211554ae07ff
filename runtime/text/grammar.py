"""Text that follows a JSON schema: which tokens may come next, from llguidance; this module alone imports it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.errors import MissingExtraError, RequestError

# As models mostly write JSON, on one line. Where white space is free, a model may write nothing else up to its limit.
_SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Grammars over a bundle's vocabulary; made at the first use, as large tokenizers take seconds."""

    def __init__(self, tokenizer: Path, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        """stop_token_ids: all of them end a text, where the grammar allows an end.

        Raises MissingExtraError without llguidance.
        """
        if find_spec("llguidance") is None:
            raise MissingExtraError("a JSON schema needs llguidance: install with pip install 'slipstream[grammar]'")
        import llguidance

        self._llguidance, self._vocab_size = llguidance, vocab_size
        text = tokenizer.read_text(encoding="utf-8")
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(stop_token_ids))
        self._executor, self._stop_token_ids = llguidance.LLExecutor(1), frozenset(stop_token_ids)

    def json_schema(self, schema: Mapping[str, Any]) -> Matcher:
        """A text of this schema begins. Raises RequestError for a schema that can't be followed."""
        matcher = self._llguidance.LLMatcher
        try:
            grammar = matcher.grammar_from_json_schema(json.dumps(schema), overrides=_SPACES)
        except (TypeError, ValueError) as error:
            raise RequestError(f"json_schema can't be read: {error}") from error
        is_wrong, messages = matcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if is_wrong:
            raise RequestError(f"json_schema can't be followed: {'; '.join(messages)}")
        made = matcher(self._tokenizer, grammar, log_level=0)
        return Matcher(made, self._executor, self._vocab_size, self._stop_token_ids)


class Matcher:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: Any, executor: Any, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        self._matcher, self._executor, self._vocab_size = matcher, executor, vocab_size
        self._stop_token_ids = stop_token_ids

    def allowed(self, draft: Sequence[int]) -> Array:
        """Which tokens may come next, and next after each token of a draft: bool [len(draft) + 1, V].

        After a token that the grammar refuses every one may: it can't be accepted. The matcher stays where it is.
        """
        from llguidance import numpy as masks

        words = masks.allocate_token_bitmask(len(draft) + 1, self._vocab_size)
        if draft:
            given = [(self._matcher, 0, list(draft))]
            masks.fill_next_token_bitmask_par_with_draft_tokens(self._executor, given, words)
            words[self._matcher.validate_tokens(list(draft)) + 1 :] = -1
        else:
            masks.fill_next_token_bitmask(self._matcher, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        allowed: Array = bits[:, : self._vocab_size].astype(bool)
        return allowed

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens, which were allowed; a stop token ends it and is none of the grammar."""
        going_on = [token for token in tokens if token not in self._stop_token_ids]
        count = self._matcher.try_consume_tokens(going_on)
        assert count == len(going_on), f"the grammar refuses token {count} of {going_on}: {self._matcher.get_error()}"
