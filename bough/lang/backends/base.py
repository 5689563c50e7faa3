"""The interface between the interpreter and a backend that generates text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.lang.chat_template import ChatTemplate, get_chat_template
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod, TokenLengthNormalized
from bough.lang.errors import Unsupported
from bough.lang.loop import run_sync
from bough.lang.reasoning import REASONING_FORMATS
from bough.lang.sampling import SamplingParams
from bough.lang.transcript import JoinedContext, Message, Prompt, content_of, text_prompt
from bough.lang.typed_output import choices_object_schema, read_answer


@dataclass(slots=True)
class Generation:
    """Generated text (a list where n > 1 was asked for) and the backend's meta information about it."""

    text: str | list[str]
    meta_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The joined KV; without a context, `why` is the reason that the join fell back to text."""

    context: JoinedContext | None
    why: str = ""
    info: dict[str, Any] = field(default_factory=dict)


class Backend(ABC):
    """Generates for programs. Its coroutines may be awaited on any event loop, many at a time."""

    is_chat: bool = False
    """Whether it takes the messages of a conversation instead of one text."""
    has_prefix_cache: bool = False
    """`async_cache_prefix` makes later prompts with that prefix cheaper."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name in error messages."""

    @abstractmethod
    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> Generation:
        """Generate to the end."""

    @abstractmethod
    def async_stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Generation]:
        """Generate; each item holds all the text so far."""

    async def async_select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """Choose one of `choices` to follow the prompt."""
        raise self.unsupported("select", "it reports no log-probabilities and follows no schema")

    async def async_chat_template(self) -> ChatTemplate:
        """The chat template with which roles are written into the text of a state; cached after the first call."""
        template = self.known_chat_template()
        assert template is not None
        return template

    def known_chat_template(self) -> ChatTemplate | None:
        """The chat template, or None while it takes a request to know it."""
        return get_chat_template("default")

    async def async_cache_prefix(self, prompt: Prompt) -> None:
        """Compute the prompt's KV ahead of the prompts that begin with it; does nothing without a prefix cache."""
        return

    async def async_shares_in_flight(self) -> bool:
        """Whether the server computes a common prefix of concurrent prompts only once."""
        return False

    async def async_flush_cache(self) -> None:
        raise self.unsupported("flush_cache", "its cache is not ours to empty")

    async def async_server_info(self) -> dict[str, Any]:
        raise self.unsupported("get_server_info", "it has no such information")

    async def async_separate_reasoning(self, text: str, model_type: str) -> tuple[str, str]:
        """(reasoning, answer) of a generated text, for formats that the language does not parse itself."""
        raise self.unsupported(
            f"separate_reasoning(model_type={model_type!r})",
            f"model types known without a server are {', '.join(REASONING_FORMATS)}",
        )

    async def async_concatenate_and_append(
        self, parent: Prompt, branches: Sequence[Prompt], position_ids_offset: Sequence[int] | None
    ) -> JoinResult:
        """Append the KV of the branches to the parent's, without computing it again."""
        return JoinResult(None, f"{self.name} has no KV join")

    # The same for callers without an event loop.

    def cache_prefix(self, prefix: str) -> None:
        run_sync(self.async_cache_prefix(text_prompt(prefix)))

    def flush_cache(self) -> None:
        run_sync(self.async_flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        return run_sync(self.async_server_info())

    def get_chat_template(self) -> ChatTemplate:
        return self.known_chat_template() or run_sync(self.async_chat_template())

    def shutdown(self) -> None:
        """Release the backend's resources: connections, a server it started."""
        return

    def unsupported(self, construct: str, why: str, fix: str = "") -> Unsupported:
        """The error for a construct that this backend can't do."""
        return Unsupported(
            what=f"{self.name} can't do {construct}",
            why=why,
            fix=fix or "run the program on a bough server (RuntimeEndpoint, Runtime) or Engine",
        )


def conversation(prompt: Prompt, backend: Backend, *, prefill: bool) -> list[Message]:
    """The messages for a chat API. Raises for what such an API can't express.

    A program without roles becomes one user message. `prefill`: the API continues an assistant message it is given.
    """
    if not prompt.messages and prompt.role is None:
        if not prompt.text:
            raise backend.unsupported("gen on an empty state", "a conversation has at least one message")
        return [{"role": "user", "content": content_of(prompt.text, prompt.media)}]
    if prompt.loose_text:
        raise backend.unsupported(
            "text outside roles next to roles",
            "a chat API sees only messages",
            "put all text inside system(...), user(...) or assistant(...)",
        )
    if prompt.role != "assistant":
        raise backend.unsupported(
            f"gen inside {prompt.role or 'no role'}",
            "a chat API only writes assistant messages",
            "generate inside assistant(...)",
        )
    messages = list(prompt.messages)
    if prompt.partial.strip():
        if not prefill:
            raise backend.unsupported(
                "gen after text inside assistant(...)",
                "the API can't continue a message that has begun",
                "put gen right after assistant_begin(), or use num_api_spec_tokens=",
            )
        messages.append({"role": "assistant", "content": prompt.partial.rstrip()})
    return messages


async def select_by_schema(
    backend: Backend, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
) -> ChoicesDecision:
    """Choose through structured output, for chat APIs, which report no likelihoods of given texts."""
    if not isinstance(method, TokenLengthNormalized):
        raise backend.unsupported(
            f"select with {type(method).__name__}", "a chat API reports no log-probabilities of choices"
        )
    schema = json.dumps(choices_object_schema(choices))
    params = SamplingParams(temperature=temperature, max_new_tokens=256, json_schema=schema)
    generation = await backend.async_generate(prompt, params)
    meta = generation.meta_info if isinstance(generation.meta_info, dict) else {}
    return ChoicesDecision(str(read_answer(str(generation.text))), meta | {"choices_method": "structured output"})
