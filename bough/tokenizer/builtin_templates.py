"""Chat templates for models that bring none, by name (`--chat-template NAME`)."""

from __future__ import annotations

from typing import Final

from bough.tokenizer.deepseek_templates import DEEPSEEK_V32
from bough.tokenizer.mistral_templates import MISTRAL_TEMPLATES

_CHATML: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_LLAMA_2: Final = (
    "{% set first = messages[0] if messages else {} %}"
    "{% set system = first['content'] if first['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% for message in turns %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token }}[INST] {% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
    "{{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }} {{ eos_token }}"
    "{% else %}{{ raise_exception('after the system message, only user and assistant may speak') }}{% endif %}"
    "{% endfor %}"
)

_LLAMA_3: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_GEMMA: Final = (
    "{{ bos_token }}"
    "{% set first = messages[0] if messages else {} %}"
    "{% set system = first['content'] ~ '\n\n' if first['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if loop.first %}{{ system }}{% endif %}{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_MISTRAL: Final = (
    "{{ bos_token }}"
    "{% set first = messages[0] if messages else {} %}"
    "{% set system = first['content'] ~ '\n\n' if first['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "{% if message['role'] == 'user' %}[INST] {% if loop.first %}{{ system }}{% endif %}{{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] | trim }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)

_VICUNA: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }} "
    "{% elif message['role'] == 'user' %}USER: {{ message['content'] }} "
    "{% else %}ASSISTANT: {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

_PHI_3: Final = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_ZEPHYR: Final = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_PLAIN: Final = (
    "{% for message in messages %}"
    "{{ message['role'] | upper }}: {{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

BUILTIN_TEMPLATES: Final[dict[str, str]] = {
    "chatml": _CHATML,
    "qwen": _CHATML,
    "llama-2": _LLAMA_2,
    "llama-2-chat": _LLAMA_2,
    "llama-3": _LLAMA_3,
    "llama-3-instruct": _LLAMA_3,
    "gemma": _GEMMA,
    "gemma-it": _GEMMA,
    "deepseek-v3.2": DEEPSEEK_V32,
    "mistral": _MISTRAL,
    **MISTRAL_TEMPLATES,
    "vicuna": _VICUNA,
    "vicuna_v1.1": _VICUNA,
    "phi-3": _PHI_3,
    "zephyr": _ZEPHYR,
    "plain": _PLAIN,
}
