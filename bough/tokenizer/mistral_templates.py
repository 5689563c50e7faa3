"""Chat formats of Mistral's tekken.json, by the version it states: such checkpoints leave them to Mistral's own library."""

from __future__ import annotations

from typing import Final

_TOOLS: Final = "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
_ARGUMENTS: Final = (
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
)
_CALLS_AS_LIST: Final = (
    "[TOOL_CALLS][{% for call in message.tool_calls %}"
    '{"name": {{ call.function.name | tojson }}, "arguments": ' + _ARGUMENTS + ', "id": {{ call.id | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
_CALLS_WITH_IDS: Final = (
    "{% for call in message.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]" + _ARGUMENTS + "{% endfor %}"
)
_CALLS: Final = (
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]" + _ARGUMENTS + "{% endfor %}"
)
_RESULT_AS_OBJECT: Final = (
    '[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": {{ message.tool_call_id | tojson }}}'
    "[/TOOL_RESULTS]"
)
_RESULT_WITH_ID: Final = "[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}[/TOOL_RESULTS]"
_RESULT: Final = "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
_THOUGHTS: Final = "{% if message.reasoning_content %}[THINK]{{ message.reasoning_content }}[/THINK]{% endif %}"


def _format(
    *, calls: str, result: str, system_apart: bool = True, tools_first: bool = False, thinks: bool = False
) -> str:
    """A template. `system_apart`: a system message has a place of its own, otherwise it is put before the last message of
    the user. `tools_first`: tools are named before the user's first message, otherwise before the last."""
    system = "[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]" if system_apart else ""
    prefix = "" if system_apart else "{% if loop.index0 == at.last %}{{ at.system }}{% endif %}"
    return (
        "{{ bos_token }}"
        "{% set at = namespace(first=-1, last=-1, system='') %}"
        "{% for message in messages %}"
        "{% if message.role == 'user' %}"
        "{% set at.last = loop.index0 %}{% if at.first < 0 %}{% set at.first = loop.index0 %}{% endif %}"
        "{% elif message.role == 'system' %}{% set at.system = at.system ~ message.content ~ '\n\n' %}"
        "{% endif %}{% endfor %}"
        "{% for message in messages %}"
        "{% if message.role == 'system' %}" + system + "{% elif message.role == 'user' %}"
        "{% if tools and loop.index0 == at." + ("first" if tools_first else "last") + " %}" + _TOOLS + "{% endif %}"
        "[INST]" + prefix + "{{ message.content }}[/INST]"
        "{% elif message.role == 'assistant' %}" + (_THOUGHTS if thinks else "") + "{{ message.content or '' }}"
        "{% if message.tool_calls %}" + calls + "{% endif %}{{ eos_token }}"
        "{% elif message.role == 'tool' %}" + result + "{% else %}"
        "{{ raise_exception('messages are of system, user, assistant or tool') }}{% endif %}"
        "{% endfor %}"
    )


MISTRAL_TEMPLATES: Final[dict[str, str]] = {
    "mistral-v3": _format(calls=_CALLS_AS_LIST, result=_RESULT_AS_OBJECT, system_apart=False),
    "mistral-v7": _format(calls=_CALLS_AS_LIST, result=_RESULT_WITH_ID),
    "mistral-v11": _format(calls=_CALLS_WITH_IDS, result=_RESULT_WITH_ID),
    "mistral-v13": _format(calls=_CALLS, result=_RESULT, tools_first=True, thinks=True),
}
"""By name and version; versions between them are as the one before."""


def mistral_template(version: str) -> str:
    """The format of a version, "v7" or "v7m1": that of the last one that is not newer."""
    digits = version.removeprefix("v").partition("m")[0]
    number = int(digits) if digits.isdigit() else 3
    known = {int(name.removeprefix("mistral-v")): text for name, text in MISTRAL_TEMPLATES.items()}
    return known[max((each for each in known if each <= number), default=3)]
