"""A checkpoint's chat template, wherever transformers looks for one, in whatever spelling it takes."""

from __future__ import annotations

from typing import Any

from slipstream.runtime.bundle.manifest import CHAT_TEMPLATE
from slipstream.runtime.errors import CheckpointError, RequestError
from slipstream.runtime.text.chat import ChatTemplate
from slipstream.runtime.text.codec import TextCodec

from .folder import TEMPLATE_FOLDER, CheckpointFolder

TOKENIZER_CONFIG = "tokenizer_config.json"
_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
_MARK = "an-answer"


def read_chat_template(folder: CheckpointFolder) -> str | None:
    """The source of the template for text without tools; None when there is none.

    Files of their own come before tokenizer_config.json, and that before the processor's files, as in transformers.
    Raises CheckpointError for what transformers would not render with, and for templates that don't parse.
    """
    where, spelled = _spelled(folder)
    if spelled is None:
        return None
    source = _default(spelled, where)
    try:
        ChatTemplate(source, {})
    except RequestError as error:
        raise CheckpointError(f"{where}: {error}. Correct it, or download it again") from error
    return source


def _spelled(folder: CheckpointFolder) -> tuple[str, Any]:
    """The file, and what it says: a source, or sources by name."""
    main = folder.text(CHAT_TEMPLATE)
    named = {} if main is None else {"default": main}
    more = sorted((folder.path / TEMPLATE_FOLDER).glob("*.jinja"))
    named |= {file.stem: folder.text(f"{TEMPLATE_FOLDER}/{file.name}") or "" for file in more}
    if named:
        return str(folder.path / (CHAT_TEMPLATE if main is not None else TEMPLATE_FOLDER)), named
    for file in (TOKENIZER_CONFIG, *_PROCESSOR_FILES):
        where, spelled = str(folder.path / file), folder.object(file, required=False).get("chat_template")
        if isinstance(spelled, list) and file == TOKENIZER_CONFIG:
            return where, _by_name(spelled, where)
        if spelled is not None:
            return where, spelled
    return "", None


def _by_name(entries: list[Any], where: str) -> dict[str, Any]:
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) and "template" in each for each in entries):
        raise CheckpointError(f"{where}: chat_template is a list, of which each entry needs a name and a template")
    return {each["name"]: each["template"] for each in entries}


def _default(spelled: Any, where: str) -> str:
    if isinstance(spelled, dict):
        if "default" not in spelled:
            raise CheckpointError(
                f"{where} has the chat templates {', '.join(map(str, spelled)) or '(none)'}, and none is called "
                "default: name one so"
            )
        spelled = spelled["default"]
    if not isinstance(spelled, str) or not spelled:
        raise CheckpointError(f"{where}: the chat template is {spelled!r}; the source of a Jinja template is expected")
    return spelled


def end_of_turn(template: ChatTemplate, codec: TextCodec) -> int | None:
    """The token that the template writes after an answer; None when it writes no token of its own there."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except RequestError:
        return None  # a template may want other messages than these
    _, found, tail = text.rpartition(_MARK)
    added = codec.tokenizer.get_added_tokens_decoder()
    return next((token for token in codec.encode_more(tail) if token in added), None) if found else None
