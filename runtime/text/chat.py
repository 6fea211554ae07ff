"""Chat messages to prompt text: the checkpoint's own template, in a sandbox.

Environment and options are those of transformers' ``apply_chat_template``; the golden tests
compare with it. Text in messages can't forge a control token: what is spelled like one is cut in two before it is
encoded, so that the model reads it as the text that it is.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.runtime.bundle.manifest import CHAT_TEMPLATE, Bundle
from slipstream.runtime.errors import RequestError

from .codec import TURN_TOKENS, TextCodec

_CUT = str(secrets.randbits(128))  # digits pass through whatever a template does with text

# What stands for, or frames, an image, audio or a video in a prompt: names of special tokens, as tokenizers give them.
_MEDIA_TOKENS = (
    "image_token", "audio_token", "video_token", "boi_token", "eoi_token", "boa_token", "eoa_token",
)  # fmt: skip


def check_no_media(text: str, special_tokens: Mapping[str, str]) -> None:
    """Refuse prompt text with a token that stands for media. Raises RequestError.

    The tokenizer finds such a token wherever it is written, and the model then expects features in its place,
    which no text prompt has.
    """
    for name in _MEDIA_TOKENS:
        token = special_tokens.get(name)
        if token and token in text:
            raise RequestError(
                f"the prompt holds {token}, which stands for an image, audio or video: slipstream runs text only, "
                "so take it out"
            )


class _Generation(Extension):
    """``{% generation %}`` blocks mark assistant text for training; for a prompt they are their content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], control_tokens: Collection[str] = ()) -> None:
        """special_tokens: names such as bos_token for the template. control_tokens: what messages may not forge.

        Raises RequestError on a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.globals["namespace"] = _Namespace
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._special_tokens = dict(special_tokens)
        media = {special_tokens.get(name) for name in _MEDIA_TOKENS}  # refused, not taken for text
        self._forgeries = _Forgeries([token for token in control_tokens if token not in media])
        self._forgeries_of_model = _Forgeries(
            [token for token in control_tokens if token not in (*media, *TURN_TOKENS)]
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(f"the chat template does not parse, at line {error.lineno}: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Prompt text of chat messages. Raises RequestError on media, bad messages or a template error."""
        return "".join(self.render_parts(messages, add_generation_prompt=add_generation_prompt))

    def render_parts(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[str]:
        """As ``render``, cut wherever a message spells a control token: for TextCodec.encode_prompt."""
        check_messages(messages)
        try:
            text = self._template.render(
                messages=[self._cut(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:
            reason = str(error).replace(_CUT, "")
            raise RequestError(f"the chat template refused the messages: {reason}") from error
        check_no_media(text.replace(_CUT, ""), self._special_tokens)
        return text.split(_CUT)

    def _cut(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template gets it. What the model said keeps the tokens that templates strip from it."""
        cut = {key: self._forgeries.cut(value) for key, value in message.items() if value is not None}
        if message["role"] in ("assistant", "model") and isinstance(message.get("content"), str):
            cut["content"] = self._forgeries_of_model.cut(message["content"])
        return cut


class _Forgeries:
    """Cuts text after the first character of whatever it holds that is, or may begin, one of some tokens."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._sizes = sorted({len(token) for token in tokens})
        self._beginnings = {token[:size] for token in tokens for size in range(1, len(token) + 1)}
        self._tokens = frozenset(tokens)
        firsts = "".join(sorted({token[:1] for token in tokens}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")

    def cut(self, value: Any) -> Any:
        """The value with every text in it cut; the same where there is nothing to cut."""
        if isinstance(value, str):
            end = len(value.rstrip())  # templates trim, and join what follows
            return self._first.sub(lambda found: found[0] + _CUT * self._is_one(value, found.start(), end), value)
        if isinstance(value, Mapping):
            return {self.cut(key): self.cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.cut, value))
        return value

    def _is_one(self, text: str, start: int, end: int) -> bool:
        if any(text[start : start + size] in self._tokens for size in self._sizes):
            return True
        return end - start < self._sizes[-1] and text[start:end] in self._beginnings


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is no list of text messages. Raises RequestError, with the number of the first bad one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"the prompt is {messages!r}; text or a list of chat messages is expected")
    if not messages:
        raise RequestError("there are no chat messages: give at least one with a role and a content")
    for number, message in enumerate(messages):
        has_role = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not has_role or not ("content" in message or message.get("tool_calls") or message.get("tool_responses")):
            raise RequestError(f"chat message {number} is {message!r}; each needs a role and a content")
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else [content]:
            if isinstance(part, Mapping) and part.get("type", "text") != "text":  # templates drop what they don't know
                raise RequestError(f"chat message {number} has {part['type']} content; slipstream runs text only")


class _Namespace(jinja2.utils.Namespace):
    """As in transformers: a template can't reach Python's underscore names through a namespace."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def open_template(bundle: Bundle, codec: TextCodec) -> ChatTemplate | None:
    """A bundle's own; None where it has none."""
    if CHAT_TEMPLATE not in bundle.manifest.files:
        return None
    special_tokens = {"bos_token": codec.bos_token, **bundle.manifest.generation.special_tokens}
    source = bundle.path(CHAT_TEMPLATE).read_text(encoding="utf-8")
    return ChatTemplate(source, special_tokens, codec.special_tokens)
