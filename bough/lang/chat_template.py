"""How each role of a conversation is written as text, for backends that see one text.

A bough server reports the affixes of its model's template (`from_role_affixes`); the registry below is for other
servers, by name or by model path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from bough.lang.errors import LangError

Affixes = tuple[str, str]
ROLES = ("system", "user", "assistant")


class ChatTemplateStyle(Enum):
    PLAIN = "plain"
    """Every message is prefix + content + suffix."""
    LLAMA2 = "llama2"
    """A system message is written inside the first user message."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Affixes of each role; `stop_str` ends a message, `image_token` is the placeholder of an image in the text."""

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, Affixes]
    stop_str: tuple[str, ...] = ()
    image_token: str = "<image>"
    video_token: str = "<video>"
    audio_token: str = "<audio>"
    begin_text: str = ""
    """Text before the first message, where the tokenizer doesn't add it by itself."""
    style: ChatTemplateStyle = field(default=ChatTemplateStyle.PLAIN)

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Mapping[str, Any]]) -> Affixes:
        """The text around a message of `role` that follows `hist_messages`."""
        if role not in self.role_prefix_and_suffix:
            raise LangError(
                what=f"the chat template {self.name!r} has no role {role!r}",
                why=f"it knows {', '.join(self.role_prefix_and_suffix)}",
                fix="use one of those roles, or register a template with register_chat_template",
            )
        prefix, suffix = self.role_prefix_and_suffix[role]
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                prefix = self.role_prefix_and_suffix["user"][0] + prefix
            elif role == "user" and len(hist_messages) == 1 and hist_messages[0]["role"] == "system":
                prefix = ""
        return (self.begin_text + prefix if not hist_messages else prefix), suffix

    def get_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A whole conversation as text; the default system prompt comes first where none is given."""
        written: list[Mapping[str, Any]] = []
        text = ""
        start = list(messages)
        if self.default_system_prompt is not None and (not start or start[0]["role"] != "system"):
            start.insert(0, {"role": "system", "content": self.default_system_prompt})
        for message in start:
            prefix, suffix = self.get_prefix_and_suffix(message["role"], written)
            text += f"{prefix}{message['content']}{suffix}"
            written.append(message)
        return text


MatchingFunction = Callable[[str], str | None]
_templates: dict[str, ChatTemplate] = {}
_matchers: list[MatchingFunction] = []


def register_chat_template(template: ChatTemplate) -> None:
    """Register a template under its name; a later one with the same name replaces it."""
    _templates[template.name] = template


def register_chat_template_matching_function(function: MatchingFunction) -> MatchingFunction:
    """Decorator: `function(model_path)` returns a template's name or None. The latest registered is asked first."""
    _matchers.insert(0, function)
    return function


def get_chat_template(name: str) -> ChatTemplate:
    if name not in _templates:
        raise LangError(
            what=f"no chat template is called {name!r}",
            why=f"known are {', '.join(sorted(_templates))}",
            fix="use one of those, or register_chat_template(ChatTemplate(...)) first",
        )
    return _templates[name]


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of the first matching function that knows the path, else `default`."""
    for matcher in _matchers:
        name = matcher(model_path)
        if name is not None:
            return get_chat_template(name)
    return get_chat_template("default")


def from_role_affixes(model_path: str, info: Mapping[str, Any]) -> ChatTemplate | None:
    """The template a server describes in its model info, or None where it describes none."""
    affixes = info.get("role_affixes")
    if not affixes:
        return None
    known = get_chat_template_by_model_path(model_path)
    pairs = {role: (str(pair[0]), str(pair[1])) for role, pair in affixes.items() if pair is not None}
    end_of_turn = pairs.get("assistant", ("", ""))[1].strip()
    return replace(
        known,
        name=f"{model_path} (own template)",
        default_system_prompt=info.get("default_system_prompt"),
        role_prefix_and_suffix=pairs,
        stop_str=(end_of_turn,) if end_of_turn else (),
        image_token=info.get("image_token") or known.image_token,
        video_token=info.get("video_token") or known.video_token,
        begin_text=info.get("bos") or "",
        style=ChatTemplateStyle.PLAIN,
    )


def _around(pattern: str, suffix: str, names: Mapping[str, str] | None = None) -> dict[str, Affixes]:
    """Affixes of templates that write every role alike: `pattern` with the role's name, then `suffix`."""
    written = names or {}
    return {role: (pattern.format(written.get(role, role)), suffix) for role in ROLES}


_CHATML = _around("<|im_start|>{}\n", "<|im_end|>\n")
_LLAMA3 = _around("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>")
_HELPFUL = "You are a helpful assistant."
_DEEPSEEK: dict[str, Affixes] = {
    "system": ("", ""),
    "user": ("<｜User｜>", ""),
    "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
}
_MINICPM: dict[str, Affixes] = {
    "system": ("", " "),
    "user": ("user:", " "),
    "assistant": ("assistant:", "</s>"),
}
_IM_END = ("<|im_end|>",)

for _template in (
    ChatTemplate("default", None, {role: (f"{role.upper()}:", "\n") for role in ROLES}),
    ChatTemplate(
        "claude", None, {"system": ("", ""), "user": ("\n\nHuman: ", ""), "assistant": ("\n\nAssistant:", "")}
    ),
    ChatTemplate("chatml", None, _CHATML, _IM_END),
    ChatTemplate("chatml-llava", _HELPFUL, _CHATML, _IM_END, image_token="<image>\n"),
    ChatTemplate("qwen", _HELPFUL, _CHATML, _IM_END),
    ChatTemplate(
        "qwen2-vl",
        _HELPFUL,
        _CHATML,
        _IM_END,
        image_token="<|vision_start|><|image_pad|><|vision_end|>",
        video_token="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    ChatTemplate(
        "vicuna_v1.1",
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        {"system": ("", " "), "user": ("USER:", " "), "assistant": ("ASSISTANT:", "</s>")},
        image_token=" <image>\n",
    ),
    ChatTemplate(
        "llama-2-chat",
        None,
        {
            "system": ("<<SYS>>\n", "\n<</SYS>>\n\n"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        },
        style=ChatTemplateStyle.LLAMA2,
    ),
    ChatTemplate(
        "mistral",
        None,
        {
            "system": ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        },
        ("</s>",),
        image_token="[IMG]",
    ),
    ChatTemplate("llama-3-instruct", None, _LLAMA3, ("<|eot_id|>",), image_token="<|image|>"),
    ChatTemplate("llama-3-instruct-llava", None, _LLAMA3, ("<|eot_id|>",), image_token="<image>\n"),
    ChatTemplate(
        "llama-4",
        None,
        _around("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
        ("<|eot|>",),
        image_token="<|image|>",
    ),
    ChatTemplate("minicpmv", None, _MINICPM, ("<|im_end|>", "<|endoftext|>"), image_token="(<image>./</image>)"),
    ChatTemplate(
        "minicpmo",
        None,
        _MINICPM,
        ("<|im_end|>", "<|endoftext|>"),
        image_token="(<image>./</image>)",
        audio_token="(<audio>./</audio>)",
    ),
    ChatTemplate("janus", None, _DEEPSEEK, ("<｜end▁of▁sentence｜>",), image_token="<image_placeholder>\n"),
    ChatTemplate("janus-pro", None, _DEEPSEEK, ("<｜end▁of▁sentence｜>",), image_token="<image_placeholder>\n"),
    ChatTemplate("deepseek-v3", None, _DEEPSEEK, ("<｜end▁of▁sentence｜>",)),
    ChatTemplate(
        "yi-1.5",
        None,
        {
            "system": ("", ""),
            "user": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            "assistant": ("", "<|im_end|>\n"),
        },
        _IM_END,
    ),
    ChatTemplate(
        "yi-vl",
        None,
        {"system": ("", "\n\n"), "user": ("### Human:", "\n"), "assistant": ("### Assistant:", "\n")},
        ("###",),
        image_token=" <image_placeholder>\n",
    ),
    ChatTemplate(
        "gemma-it",
        None,
        {
            "system": ("", ""),
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        },
        ("<end_of_turn>",),
        image_token="<start_of_image>",
    ),
    ChatTemplate(
        "gemma-4-it",
        None,
        _around("<|turn>{}\n", "<turn|>\n", {"assistant": "model"}),
        ("<turn|>",),
        image_token="<|image|>",
        video_token="<|video|>",
        audio_token="<|audio|>",
    ),
    ChatTemplate("dbrx-instruct", None, _around("<|im_start|>{}\n", "<|im_end|>\n"), _IM_END),
    ChatTemplate(
        "c4ai-command-r",
        None,
        {
            "system": ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            "user": ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            "assistant": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        },
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    ChatTemplate("internvl-2-5", None, _CHATML, ("<|im_end|>", "<|action_end|>")),
    ChatTemplate("interns1", None, _CHATML, ("<|im_end|>", "<|action_end|>")),
    ChatTemplate(
        "granite-3-instruct",
        None,
        _around("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|end_of_text|>",),
    ),
    ChatTemplate(
        "glm-4v",
        None,
        _around("<|{}|>\n", "\n"),
        ("<|user|>", "<|endoftext|>", "<|observation|>"),
        image_token="<|begin_of_image|><|image|><|end_of_image|>",
        video_token="<|begin_of_video|><|video|><|end_of_video|>",
    ),
):
    register_chat_template(_template)

# First match wins: special families before the general names they contain.
_PATHS: tuple[tuple[str, str], ...] = (
    (r"vicuna|llava-v1\.5|llava-next-video-7b", "vicuna_v1.1"),
    (r"deepseek-(v3|r1)", "deepseek-v3"),
    (r"janus-pro", "janus-pro"),
    (r"janus", "janus"),
    (r"llama-2.*chat|codellama.*instruct", "llama-2-chat"),
    (r"llava.*llama-3|llama-?3.*llava", "llama-3-instruct-llava"),
    (r"llama-3.*instruct", "llama-3-instruct"),
    (r"llama-4.*instruct", "llama-4"),
    (r"pixtral|(mistral|mixtral|ministral).*(instruct|it)", "mistral"),
    (r"yi-1\.5.*chat", "yi-1.5"),
    (r"yi-vl", "yi-vl"),
    (r"llava.*(qwen|onevision|v1\.6-34b)|nanollava", "chatml-llava"),
    (r"qwen.*vl|qwen.*omni|qvq", "qwen2-vl"),
    (r"qwen.*(chat|instruct)|^qwen3|/qwen3|qwq", "qwen"),
    (r"minicpm-?o", "minicpmo"),
    (r"minicpm-?v", "minicpmv"),
    (r"gemma-?4.*it", "gemma-4-it"),
    (r"gemma.*it", "gemma-it"),
    (r"dbrx.*instruct", "dbrx-instruct"),
    (r"c4ai-command-r", "c4ai-command-r"),
    (r"intern-?s1", "interns1"),
    (r"internvl", "internvl-2-5"),
    (r"granite-3.*instruct", "granite-3-instruct"),
    (r"glm-?4.*v", "glm-4v"),
    (r"smollm.*instruct|tulu|tiny.?llama.*chatml|nous-hermes-2|openhermes", "chatml"),
    (r"claude", "claude"),
)


@register_chat_template_matching_function
def _match_known_paths(model_path: str) -> str | None:
    lowered = model_path.lower()
    for pattern, name in _PATHS:
        if re.search(pattern, lowered):
            return name
    return None
