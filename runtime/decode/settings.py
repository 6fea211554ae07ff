"""What a caller asks of one generation, and how it is checked and resolved to a Request."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, SupportsIndex

from slipstream.runtime.backend.contract import GREEDY, MAX_SEED, Sampling
from slipstream.runtime.bundle.graph_io import NUM_LOGPROBS
from slipstream.runtime.bundle.manifest import Generation, SamplingDefaults
from slipstream.runtime.errors import RequestError
from slipstream.runtime.sampling import NUM_CANDIDATES

from .generation import Request

_MOST_SECONDS = 1e9
MAX_TEMPERATURE = 100.0  # where a float32 still tells logits apart beside the noise


@dataclass(frozen=True)
class GenerationSettings:
    """Checked where a generation begins, against the pair that runs it.

    num_draft_tokens: K per round, 0 is plain decoding; None, the default, takes what is fastest by the measured costs
        of rounds and by what is accepted, up to the bundle's K.
    max_new_tokens: cap on committed tokens, thoughts included.
    stop: texts that end the answer, which is cut before them; they are not looked for in thoughts. One that is a
        special token by itself, such as "<channel|>", ends it at the token too, in a thought or not. One that holds
        a special token among other text is refused: text never holds one.
    temperature: 0 takes the most likely token; above it tokens are drawn, from what the next three leave in turn.
    top_k: the most likely tokens that may be drawn, 0 for all. top_p: the fewest of them whose probabilities reach
        this, above 0 to 1. min_p: those of at least this share of the first one's probability, 0 to 1.
    None of temperature, top_k and top_p is what the checkpoint's generation_config asks for.
    seed: of what is drawn, 0 to MAX_SEED; None takes one at random, which the result has. The same seed draws the same
        text again, whatever K.
    max_seconds: ends the generation so long after it was admitted; None sets no limit.
    repetition_penalty: divides positive logits of tokens that prompt or text have, and multiplies others; 1 is none.
    presence_penalty, frequency_penalty: taken from logits of tokens that the text has, once and for each time, -2 to 2.
    logit_bias: added to logits, by token id, -100 to 100.
    logprobs: log-probabilities of each token and of so many of the likeliest ones, 0 to 20, in ``Result.logprobs``.
    json_schema: the text is JSON that follows it, to its end if max_new_tokens lets it. Thoughts are none then.
    These six, and top_k of 0 or above 64, look at the whole vocabulary for each token, on ONNX Runtime only.
    """

    num_draft_tokens: int | None = None
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    seed: int | None = None
    max_seconds: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | None = None

    def checked(self) -> GenerationSettings:
        """The same in plain types. Raises RequestError that names the field, as far as no pair has to be asked."""
        num_draft_tokens = self.num_draft_tokens
        if num_draft_tokens is not None:
            num_draft_tokens = whole_number("num_draft_tokens", num_draft_tokens)
        max_new_tokens = whole_number("max_new_tokens", self.max_new_tokens)
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        temperature = None if self.temperature is None else _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        top_p = None if self.top_p is None else _number("top_p", self.top_p, 0, 1)
        min_p = _number("min_p", self.min_p, 0, 1)
        max_seconds = None if self.max_seconds is None else _number("max_seconds", self.max_seconds, 0, _MOST_SECONDS)
        if top_p == 0:
            raise RequestError("top_p is 0, which leaves no token to draw: give more, or temperature 0")
        seed = None if self.seed is None else whole_number("seed", self.seed)
        if seed is not None and not 0 <= seed <= MAX_SEED:
            raise RequestError(f"seed is {seed}; 0 to {MAX_SEED} is expected")
        top_k = None if self.top_k is None else whole_number("top_k", self.top_k)
        if temperature == 0 and (top_k, top_p, min_p, seed) != (None, None, 0, None):
            raise RequestError("top_k, top_p, min_p and seed are for drawn tokens: give a temperature above 0, or none")
        stops = _stop_strings(self.stop)
        return GenerationSettings(
            num_draft_tokens,
            max_new_tokens,
            stops,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            max_seconds,
            _number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            _number("presence_penalty", self.presence_penalty, -2, 2),
            _number("frequency_penalty", self.frequency_penalty, -2, 2),
            _biases(self.logit_bias),
            _count_of_logprobs(self.logprobs),
            _schema(self.json_schema),
        )

    def resolve(
        self,
        draft_counts: Sequence[int],
        generation: Generation,
        special_tokens: Mapping[str, int],
        vocab_size: int,
        *,
        has_whole_rows: bool,
    ) -> Request:
        """The request that these settings make.

        draft_counts: K that the engine runs, in order. generation: the manifest's. special_tokens: ids by text.
        has_whole_rows: of the engine.
        Raises RequestError that names the field.
        """
        asked = self.checked()
        if asked.num_draft_tokens not in (None, *draft_counts):
            raise RequestError(f"num_draft_tokens is {asked.num_draft_tokens}; it can be {_counts_text(draft_counts)}")
        stops = asked.stop
        stop_ids = [special_tokens[stop] for stop in stops if stop in special_tokens]
        for stop in stops:
            held = next((token for token in special_tokens if token in stop and stop not in special_tokens), None)
            if held is not None:
                raise RequestError(
                    f"stop is {stop!r}, which holds the special token {held}: text never holds one, so give the token "
                    "or the text by itself"
                )
        return Request(
            asked.num_draft_tokens,
            asked.max_new_tokens,
            (*generation.stop_token_ids, *stop_ids),
            stops,
            max_seconds=asked.max_seconds,
            sampling=asked._sampling(generation.sampling, vocab_size, has_whole_rows=has_whole_rows),
            json_schema=asked.json_schema,
        )

    def _sampling(self, defaults: SamplingDefaults, vocab_size: int, *, has_whole_rows: bool) -> Sampling:
        """Of checked settings. Raises RequestError."""
        temperature = self.temperature
        if temperature is None:
            temperature = defaults.temperature if defaults.do_sample else 0.0
        sampling = GREEDY
        if temperature > 0:
            top_p = defaults.top_p if self.top_p is None else self.top_p
            top_k = (defaults.top_k or NUM_CANDIDATES) if self.top_k is None else self.top_k
            if not 0 <= top_k <= vocab_size:
                raise RequestError(f"top_k is {top_k}; 0, for all, to {vocab_size} is expected, the vocabulary's size")
            seed = secrets.randbelow(MAX_SEED + 1) if self.seed is None else self.seed
            sampling = Sampling(temperature, top_k or vocab_size, top_p, self.min_p, seed)
        elif (self.top_k, self.top_p, self.min_p, self.seed) != (None, None, 0, None):
            raise RequestError("top_k, top_p, min_p and seed are for drawn tokens: give a temperature above 0 too")
        unknown = [token for token in self.logit_bias if not 0 <= token < vocab_size]
        if unknown:
            raise RequestError(f"logit_bias has token {unknown[0]}; the vocabulary has 0 to {vocab_size - 1}")
        sampling = replace(
            sampling,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            num_logprobs=self.logprobs,
            is_masked=self.json_schema is not None,
        )
        if sampling.needs_processing and not has_whole_rows:
            raise RequestError(
                f"penalties, logit_bias, logprobs, json_schema, and top_k of 0 or above {NUM_CANDIDATES} need the "
                "whole vocabulary for each token, which these engines don't look at: leave them out, or run the bundle "
                "with --engine onnxruntime"
            )
        return sampling


def whole_number(field: str, value: SupportsIndex) -> int:
    """The value as int; NumPy's integers are taken, bool, float and text are not. Raises RequestError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise RequestError(f"{field} is {value!r}; a whole number is expected") from error


def _number(field: str, value: Any, least: float, most: float) -> float:
    """The value as float; NumPy's numbers are taken, bool and text are not. Raises RequestError."""
    number: Any = value  # a whole number may be larger than a float holds
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= number <= most:
        raise RequestError(f"{field} is {value!r}; a number from {least:g} to {most:g} is expected")
    return float(value)


def _biases(given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias is {given!r}; numbers by token id are expected")
    tokens = [whole_number("logit_bias", token) for token in given]
    return dict(zip(tokens, [_number("logit_bias", added, -100, 100) for added in given.values()], strict=True))


def _schema(given: Any) -> Mapping[str, Any] | None:
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"json_schema is {given!r}; a JSON object is expected")
    return given


def _count_of_logprobs(count: Any) -> int | None:
    if count is None:
        return None
    number = whole_number("logprobs", count)
    if not 0 <= number <= NUM_LOGPROBS:
        raise RequestError(f"logprobs is {number}; 0 to {NUM_LOGPROBS} is expected")
    return number


def _stop_strings(stop: Any) -> tuple[str, ...]:
    is_collection = isinstance(stop, Collection) and not isinstance(stop, str)
    if not is_collection or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(f"stop is {stop!r}; a sequence of non-empty strings is expected")
    return tuple(stop)


def _counts_text(counts: Sequence[int]) -> str:
    if len(counts) > 2:
        return f"{counts[0]} to {counts[-1]}"
    return f"{' or '.join(map(str, counts))} with these engines: build others with slipstream build -k"
