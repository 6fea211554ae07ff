"""Chat templates against transformers' apply_chat_template, and what is refused before or while rendering."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.errors import RequestError
from slipstream.runtime.text.chat import ChatTemplate, check_no_media
from tests.support.pairs import CHAT_TEMPLATE, make_tokenizer

Message = dict[str, Any]

SPECIAL = {"bos_token": "<bos>"}

# Lines of blocks only, indented ones, and text beside them: what trim_blocks and lstrip_blocks are about.
LAYOUT = """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'system' %}
  [{{ message['content'] }}]
    {% elif message['role'] == 'user' %}

User: {{ message['content'] | trim }}
    {% else %}
\t{{ message['content'] }} {% if not loop.last %}

{% endif %}
    {% endif %}
{% endfor %}
{#- a comment -#}
{% if add_generation_prompt %}
  Model:
{%- endif %}
"""

CONTROLS = """{%- set ns = namespace(num_shown=0, last='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if ns.num_shown >= 3 -%}{%- break -%}{%- endif -%}
    {%- set ns.num_shown = ns.num_shown + 1 -%}
    {%- set ns.last = message['role'] -%}
    {{- loop.index0 }}:{{ message['content'] | tojson }};
{%- endfor -%}
{{ ns.num_shown }} {{ ns.last }}{{ ' ...' if add_generation_prompt }}"""

JSON = """{{ messages | tojson(indent=2) }}
{{ messages[0] | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages[0]['content'] | tojson(ensure_ascii=true) }}"""

GENERATION = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{% generation %}
  {{ message['content'] }}<end>
{% endgeneration %}
{% else %}
{{ message['content'] }}
{%- generation -%} x {%- endgeneration %}
{% endif %}
{% endfor %}"""

GENERATION_SCOPE = """{% set who = 'out' %}{% generation %}{% set who = 'in' %}{{ who }}{% endgeneration %} {{ who }}"""

VARIABLES = """{{ tools is none }} {{ documents is none }} {{ custom is defined }} {{ strftime_now('%Y-%m') }}
{%- macro shown(message) %}<{{ message.role }}|{{ message['content'] | upper }}>{% endmacro %}
{% for message in messages | selectattr('role', 'ne', 'system') %}{{ shown(message) }}{% endfor %}
{% set first = messages[0] %}{{ first.get('name', 'no name') }} {{ first['content'][:3] }} {{ messages[1:] | length }}
{{ dict(a=1).a }} {{ range(3) | list }} {{ 'a' is string }}
"""

TEMPLATES = {
    "pairs": CHAT_TEMPLATE,
    "layout": LAYOUT,
    "controls": CONTROLS,
    "json": JSON,
    "generation": GENERATION,
    "generation_scope": GENERATION_SCOPE,
    "variables": VARIABLES,
}


@cache
def tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), bos_token="<bos>")


def golden(source: str, messages: list[Message], add_generation_prompt: bool) -> str:
    text: str = tokenizer().apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return text


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


CONTENTS = st.one_of(
    st.text(max_size=20),
    st.text(alphabet=" \t\n\r\x0b\u00a0\u2028a", max_size=8),
    st.sampled_from(["{{ bos_token }}", "{% if %}", "{# #}", "<bos>", "<turn|>\n", "\"'\\/<>&", "日本 é 😀", "é"]),
)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS}),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=60)
@given(messages=CONVERSATIONS)
def test_rendered_text_is_what_transformers_renders(
    name: str, add_generation_prompt: bool, messages: list[Message]
) -> None:
    source = TEMPLATES[name]
    text = compiled(source).render(messages, add_generation_prompt=add_generation_prompt)
    assert text == golden(source, messages, add_generation_prompt)


def test_a_generation_prompt_is_the_default() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert compiled(CHAT_TEMPLATE).render(messages) == golden(CHAT_TEMPLATE, messages, True)


def test_text_parts_reach_the_template_as_they_are() -> None:
    source = "{% for part in messages[0]['content'] %}{{ part['type'] }}={{ part['text'] }};{% endfor %}"
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert compiled(source).render(messages) == golden(source, messages, True) == "text=a;text=b;"


def test_fields_beside_role_and_content_reach_the_template() -> None:
    source = "{{ messages[0]['name'] }}"
    messages = [{"role": "user", "content": "x", "name": "Ann"}]
    assert compiled(source).render(messages) == golden(source, messages, True) == "Ann"


def test_a_field_that_is_none_is_as_if_it_were_absent() -> None:
    """Some clients send content None beside tool calls; a prompt that says "None" would be wrong."""
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": None},
    ]
    source = CHAT_TEMPLATE + "{{ messages[1].tool_calls is defined }}"
    assert compiled(source).render(messages) == golden(source, messages, True)


def test_special_tokens_reach_the_template_by_name() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ eos_token }}", {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render([{"role": "user", "content": ""}]) == "<s>|</s>"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": " x "}]}]
    compiled(JSON).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": " x "}]}]


# Refusals


def render_one(source: str, content: Any = "x") -> str:
    return ChatTemplate(source, SPECIAL).render([{"role": "user", "content": content}])


def test_raise_exception_is_a_request_error_with_its_message() -> None:
    with pytest.raises(RequestError, match="the chat template refused the messages: roles must alternate"):
        render_one("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 'x' %}{{ ns }}",
    ],
)
def test_an_unsafe_template_is_refused_or_shows_nothing(source: str) -> None:
    """As in transformers: an unsafe attribute is undefined, which prints nothing until it is used."""
    try:
        expected = golden(source, [{"role": "user", "content": "x"}], True)
    except Exception:  # noqa: BLE001 (which of jinja2's errors it is does not matter)
        with pytest.raises(RequestError, match="the chat template refused the messages: "):
            render_one(source)
    else:
        assert render_one(source) == expected == ""


def test_calling_an_unsafe_attribute_is_refused() -> None:
    with pytest.raises(RequestError, match="access to attribute '__class__' of 'str' object is unsafe"):
        render_one("{{ ''.__class__.mro() }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{{ x | no_such_filter }}", "{% generation %}"])
def test_a_template_with_a_syntax_error_is_refused_at_once(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template does not parse, at line "):
        ChatTemplate(source, SPECIAL)


@pytest.mark.parametrize("media", ["image", "image_url", "audio", "input_audio", "video", "video_url", "file"])
def test_media_content_is_refused(media: str) -> None:
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": media, media: "file"}]},
    ]
    with pytest.raises(RequestError, match=f"^chat message 1 has {media} content; slipstream runs text only$"):
        compiled(CHAT_TEMPLATE).render(messages)


@pytest.mark.parametrize("content", [{"type": "image", "url": "x"}, ({"type": "image", "url": "x"},)], ids=repr)
def test_media_content_is_refused_however_it_is_given(content: Any) -> None:
    with pytest.raises(RequestError, match=r"^chat message 0 has image content; slipstream runs text only$"):
        render_one(CHAT_TEMPLATE, content)


MEDIA_TOKENS = {
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


@pytest.mark.parametrize("token", MEDIA_TOKENS.values())
def test_token_that_stands_for_media_is_refused_in_text(token: str) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, SPECIAL | MEDIA_TOKENS)
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": f"What is in {token}?"}])
    reason = "which stands for an image, audio or video: slipstream runs text only, so take it out"
    assert str(caught.value) == f"the prompt holds {token}, {reason}"


def test_token_that_a_template_puts_in_for_media_is_refused() -> None:
    template = ChatTemplate("{{ image_token }}{{ messages[0]['content'] }}", MEDIA_TOKENS)
    with pytest.raises(RequestError, match=r"the prompt holds <\|image\|>"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", ["<image>", "< |image|>", "<|turn>", "<|IMAGE|>", "an image"])
def test_text_that_only_looks_like_media_is_accepted(text: str) -> None:
    check_no_media(text, MEDIA_TOKENS)


def test_bundle_that_names_no_media_tokens_takes_their_spelling_as_text() -> None:
    assert render_one("{{ messages[0]['content'] }}", "<|image|>") == "<|image|>"


def test_no_messages_are_refused() -> None:
    message = "^there are no chat messages: give at least one with a role and a content$"
    with pytest.raises(RequestError, match=message):
        compiled(CHAT_TEMPLATE).render([])


@pytest.mark.parametrize(
    "bad", [{"role": "user"}, {"content": "x"}, {"role": None, "content": "x"}, {"role": 1, "content": "x"}, "x", None]
)
def test_a_malformed_message_is_refused_by_its_number(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"^chat message 1 is .*; each needs a role and a content$"):
        compiled(CHAT_TEMPLATE).render([{"role": "user", "content": "x"}, bad])


@pytest.mark.parametrize("content", [3, ["text"], [{"type": "text", "text": "x"}], {"text": "x"}])
def test_content_that_the_template_cannot_use_is_a_request_error(content: Any) -> None:
    """A template that joins text fails with TypeError on anything else: a bad message, not a bug."""
    with pytest.raises(RequestError):
        render_one("{{ 'user: ' + messages[0]['content'] }}", content)


@pytest.mark.parametrize("source", ["{{ 1 // 0 }}", "{{ range(10 ** 9) }}", "{{ strftime_now | tojson }}"])
def test_any_error_of_a_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused the messages: "):
        render_one(source)
