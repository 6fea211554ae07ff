"""Chat messages to prompt text: the checkpoint's own template, in a sandbox.

Environment and options are those of transformers' ``apply_chat_template``; the golden tests
compare with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.runtime.errors import RequestError

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
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: names such as bos_token for the template. Raises RequestError on a syntax error."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.globals["namespace"] = _Namespace
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(f"the chat template does not parse, at line {error.lineno}: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Prompt text of chat messages. Raises RequestError on media, bad messages or a template error."""
        _check_messages(messages)
        try:
            text = self._template.render(
                messages=[{key: value for key, value in m.items() if value is not None} for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error
        check_no_media(text, self._special_tokens)
        return text


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise RequestError("there are no chat messages: give at least one with a role and a content")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"chat message {number} is {message!r}; each needs a role and a content")
        content = message["content"]
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
