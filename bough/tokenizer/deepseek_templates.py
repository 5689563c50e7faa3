"""The chat format of DeepSeek V3.2, whose checkpoints bring a program in Python instead of a template.

It thinks if a request's `chat_template_kwargs` set `thinking` (or `enable_thinking`), as V3.1's template does. The words
that introduce tools are part of the format: the model was trained on them, and they are published with its weights (MIT).
"""

from __future__ import annotations

from typing import Final

_BREAK: Final = "{{ '\\n' }}"
"""Behind a block's tag a plain one would be trimmed."""
_TOOLS: Final = """{{ '\\n\\n' }}## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use \
JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here \
is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{% for tool in tools %}{{ (tool.function or tool) | tojson }}
{% endfor %}</functions>
"""
_PARAMETER: Final = (
    '<｜DSML｜parameter name="{{ key }}" string="{{ (value is string) | tojson }}">'
    "{{ value if value is string else value | tojson }}</｜DSML｜parameter>\n"
)
_CALLS: Final = (
    _BREAK + "\n<｜DSML｜function_calls>\n"
    "{% for call in message.tool_calls %}"
    '<｜DSML｜invoke name="{{ call.function.name }}">\n'
    "{% for key, value in call.function.arguments.items() %}" + _PARAMETER + "{% else %}" + _BREAK + "{% endfor %}"
    "</｜DSML｜invoke>\n"
    "{% endfor %}"
    "</｜DSML｜function_calls>"
)
_OPENS: Final = "{{ '<think>' if thinks and loop.index0 >= at.last else '</think>' }}"
"""Answers begin with a thought, or with the end of none. Those to the last message of a user alone keep theirs."""

DEEPSEEK_V32: Final = (
    "{{ bos_token }}"
    "{% set thinks = thinking or enable_thinking %}"
    "{% set at = namespace(last=-1) %}"
    "{% for message in messages %}"
    "{% if message.role in ('user', 'developer') %}{% set at.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% set introduced = tools and messages and messages[0].role == 'system' %}"
    "{% if tools and not introduced %}" + _TOOLS + "{% endif %}"
    "{% for message in messages %}"
    "{% set goes_on = not loop.last or add_generation_prompt %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% if introduced and loop.first %}" + _TOOLS + "{% endif %}"
    "{% elif message.role in ('user', 'developer') %}"
    "<｜User｜>{% if message.role == 'developer' %}"
    + _BREAK
    + "\n# The user's message is: {% endif %}{{ message.content }}"
    "{% if goes_on %}<｜Assistant｜>" + _OPENS + "{% endif %}"
    "{% elif message.role == 'assistant' %}"
    "{% if thinks and loop.index0 > at.last %}{{ message.reasoning_content or '' }}</think>{% endif %}"
    "{{ message.content or '' }}{% if message.tool_calls %}" + _CALLS + "{% endif %}{{ eos_token }}"
    "{% elif message.role == 'tool' %}"
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
    + _BREAK
    + "\n<function_results>{% endif %}"
    + _BREAK
    + "<result>{{ message.content }}</result>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}" + _BREAK + "</function_results>"
    "{% if goes_on %}" + _BREAK + "\n" + _OPENS + "{% endif %}{% endif %}"
    "{% else %}{{ raise_exception('messages are of system, developer, user, assistant or tool') }}{% endif %}"
    "{% endfor %}"
)

OWN_FORMATS: Final[dict[str, str]] = {"DeepseekV32ForCausalLM": DEEPSEEK_V32}
"""By architecture: the format of checkpoints that bring no template."""
