"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.messages import LogprobSpec
from bough.engine_client import Request
from bough.engine_client.media_fields import processor_options
from bough.engine_client.names import random_name
from bough.engine_client.prepare import not_generative
from bough.engine_client.request import priority_of
from bough.engine_client.sampling import GivenSampling, settled
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat_answer import ChatBody, ChatChunks, ChatForm
from bough.entrypoints.http.openai.fields import (
    adapter_of,
    check_sizes,
    hidden_states_of,
    namespace_of,
    refuse_unserved_chat,
    served_name,
)
from bough.entrypoints.http.openai.messages import check_messages, with_tools
from bough.entrypoints.http.openai.relaxed import relax_answer
from bough.entrypoints.http.openai.sampling import native_sampling, with_origin
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.openai.shapes import bytes_of
from bough.entrypoints.http.openai.tools import RequestTools, adopt_functions, describe, offer
from bough.entrypoints.http.replies import EventReply, client_of, json_reply, placed
from bough.entrypoints.reasoning import after_reasoning, budget_of, chat_closed, chat_opens
from bough.entrypoints.served_model import ServedModel
from bough.entrypoints.service import Service
from bough.entrypoints.stream import Events
from bough.multimodal.desk import MediaInput
from bough.parsers import reasoning_format
from bough.tokenizer import ChatTemplate

Handler = Callable[[HttpRequest], Coroutine[Any, Any, Response]]
SWITCHES = ("enable_thinking", "thinking")
"""Names of the argument with which templates turn reasoning on and off."""


def chat_completions(service: Service) -> Handler:
    """The route's handler."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, ChatRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        model = served_name(service.served, asked.model)
        legacy = asked.functions is not None
        adopt_functions(asked)
        job, offered = make_request(asked, service)
        job = placed(job, request, deadline_ms=asked.deadline_ms)
        form = make_form(
            asked, job, offered, model,
            served=service.served, report_cache=server.enable_cache_report, always_usage=server.stream_usage,
            legacy=legacy,
        )  # fmt: skip
        headers = body.headers(*offered.ignored)
        if asked.stream:
            return EventReply(_events(service, job, form), headers)
        answer = await client_of(request).wait_for(_answer(service, job, form))
        return json_reply(answer, headers=headers)

    return handle


def make_request(asked: ChatRequest, service: Service, *, raw: bool = False) -> tuple[Request, RequestTools]:
    """The body as a request with its prompt rendered by the model's template, and its tools. `raw`: the prompt is given
    as token ids and not as a chat, so only its text decides whether a reasoning section is open. Raises
    `InvalidRequest`."""
    served = service.served
    refuse_unserved_chat(asked)
    check_sizes(asked)
    relaxed = relax_answer(asked)
    offered = offer(asked, served.tool_parser)
    prompt, media = (asked.input_ids, ()) if asked.input_ids is not None else render(asked, served, offered)
    given = native_sampling(asked, _max_new_tokens(asked))
    if offered.structural_tag:
        given, offered = _with_tool_constraint(given, offered)
    sampling = settled(given, served.sampling_defaults)
    by_tools = bool(offered.structural_tag) and given.constraints.get("structural_tag") == offered.structural_tag
    params = with_origin(sampling.params, asked, tools=by_tools)
    reasoning = served.reasoning_parser if asked.separate_reasoning is not False else None
    budget = budget_of(asked.thinking_budget, asked.thinking_token_budget)
    switched_off = raw or _switched_off(asked, served)
    continued = _continued(asked)
    opened = chat_opens(prompt, served, continued=continued, switched_off=switched_off)
    reasons = opened or (not raw and _will_reason(asked, prompt, continued, served, offered))
    request = Request(
        prompt=prompt,
        media=media,
        add_special_tokens=bool(asked.add_special_tokens),
        sampling=after_reasoning(params) if reasons else params,
        room="fill" if given.max_new_tokens is UNSET else "exact",
        bad_words=sampling.bad_words,
        rid=asked.rid or "",
        stream=bool(asked.stream),
        every=service.config.scheduler.stream_interval if sampling.every is None else sampling.every,
        logprobs=_logprobs(asked),
        logprob_text=bool(asked.logprobs),
        hidden_states=hidden_states_of(asked),
        namespace=namespace_of(asked),
        adapter=adapter_of(served, asked),
        priority=priority_of(asked.priority),
        reasoning_parser=reasoning,
        reasoning_forced=opened,
        stream_reasoning=asked.stream_reasoning is not False,
        reasoning_end=served.reasoning_end,
        thinking_budget=budget if reasons else -1,
        speculate=asked.speculate is not False,
        tool_parser=offered.parser,
        tools=offered.source,
        calls_only=offered.forced,
        drop_unknown_tools=service.config.server.drop_unknown_tools,
    )
    if relaxed and "response_format" not in offered.ignored:
        offered = dataclasses.replace(offered, ignored=(*relaxed, *offered.ignored))
    return request, offered


def _continued(asked: ChatRequest) -> str:
    """The beginning of the answer, if the client gave one."""
    last = asked.messages[-1].get("content") if asked.continue_final_message and asked.messages else None
    parts = last if isinstance(last, list) else [last]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _switched_off(asked: ChatRequest, served: ServedModel) -> bool:
    """Whether the client asked the model's template not to open a reasoning section."""
    if served.tokenizer is None or served.tokenizer.chat_template is None:
        return False
    template = served.tokenizer.chat_template
    kwargs = template_kwargs(asked, template, served)
    return any(kwargs.get(name) is False for name in SWITCHES if name in template.accepted_kwargs)


def _will_reason(
    asked: ChatRequest, prompt: str | list[int], continued: str, served: ServedModel, offered: RequestTools
) -> bool:
    """Whether a model that opens its reasoning section itself is going to: its template has a switch, it is on and the
    section not over, or its answers are messages of which the last is the answer proper (and calls among the others)."""
    if served.reasoning_parser is None or served.tokenizer is None or served.tokenizer.chat_template is None:
        return False
    if reasoning_format(served.reasoning_parser).answer_prefix:
        return not asked.continue_final_message and not offered.structural_tag
    if chat_closed(prompt, served, continued=continued):
        return False
    template = served.tokenizer.chat_template
    kwargs = template_kwargs(asked, template, served)
    return "enable_thinking" in template.accepted_kwargs and kwargs.get("enable_thinking", True) is not False


class Rendered(NamedTuple):
    """A chat as one text, with a marker for each medium."""

    text: str
    media: tuple[MediaInput, ...]


def render(asked: ChatRequest, served: ServedModel, offered: RequestTools) -> Rendered:
    """The prompt that the model's template renders from the messages."""
    template = template_of(served)
    options = processor_options(asked.mm_processor_kwargs)
    messages, media = check_messages(asked.messages, served.facts.get("media") or (), options)
    tools = offered.tools or None
    if tools and not template.takes_tools:
        messages, tools = with_tools(messages, describe(tools)), None
    text = template.render(
        messages,
        tools=tools,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        kwargs=template_kwargs(asked, template, served),
        markers=served.markers,
    )
    return Rendered(text, media)


def template_of(served: ServedModel) -> ChatTemplate:
    """The served model's chat template, or an error that says what to do without one."""
    if served.tokenizer is None:
        raise InvalidRequest(
            what="this server takes token ids only",
            why="it was started with --skip-tokenizer-init",
            fix="send input_ids",
            param="messages",
        )
    if served.tokenizer.chat_template is None:
        if served.facts.get("pooling"):
            raise not_generative()
        raise InvalidRequest(
            what="the served model has no chat template",
            why="it is a base model, or its template is missing",
            fix="use /v1/completions, or start the server with --chat-template",
            param="messages",
        )
    return served.tokenizer.chat_template


def template_kwargs(asked: ChatRequest, template: ChatTemplate, served: ServedModel) -> dict[str, Any]:
    """Arguments of the template: the client's own, `reasoning_effort` and `thinking` in the template's words, and the
    operator's for what the client does not set."""
    accepted = template.accepted_kwargs
    kwargs: dict[str, Any] = dict(served.template_defaults)
    thinking = asked.thinking
    if asked.reasoning_effort is not None:
        if "reasoning_effort" in accepted and asked.reasoning_effort != "none":
            kwargs["reasoning_effort"] = asked.reasoning_effort
        thinking = asked.reasoning_effort not in ("none", 0) if thinking is None else thinking
    if thinking is not None:
        kwargs.update({name: thinking for name in SWITCHES if name in accepted})
    return {**kwargs, **(asked.chat_template_kwargs or {})}


def _max_new_tokens(asked: ChatRequest) -> int | None:
    chosen = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    if chosen is not None and chosen < 1:
        raise InvalidRequest(
            what=f"max_tokens is {chosen}",
            why="an answer has at least one token",
            fix="send a positive number, or leave it out",
            param="max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens",
        )
    return chosen


def _logprobs(asked: ChatRequest) -> LogprobSpec | None:
    top = asked.top_logprobs or 0
    if top < 0:
        raise InvalidRequest(
            what=f"top_logprobs is {top}", why="it counts alternatives", fix="send 0 to 20", param="top_logprobs"
        )
    bounds.at_most("top_logprobs", top, "top_logprobs")
    if not asked.logprobs:
        if top:
            raise InvalidRequest(
                what="top_logprobs without logprobs",
                why="alternatives are listed beside the tokens' own log-probabilities",
                fix="send logprobs: true as well",
                param="top_logprobs",
            )
        return None
    return LogprobSpec(top=top, processed=bool(asked.processed_logprobs))


def _with_tool_constraint(given: GivenSampling, offered: RequestTools) -> tuple[GivenSampling, RequestTools]:
    """The parameters with the answer constrained to the offered calls. Another constraint takes precedence over calls that
    are only allowed; forced calls take precedence over it, as with OpenAI, and the returned offer says so."""
    if given.constraints and not offered.forced:
        return given, offered
    constrained = msgspec.structs.replace(given, constraints={"structural_tag": offered.structural_tag})
    if given.constraints:
        offered = dataclasses.replace(offered, ignored=("response_format", *offered.ignored))
    return constrained, offered


def make_form(
    asked: ChatRequest,
    request: Request,
    offered: RequestTools,
    model: str,
    *,
    served: ServedModel,
    report_cache: bool,
    always_usage: bool = False,
    legacy: bool = False,
) -> ChatForm:
    """The format of the answers. `always_usage`: streams report usage even if the client does not ask for it. `legacy`:
    calls are sent as `function_call`."""
    options = asked.stream_options
    return ChatForm(
        id=f"chatcmpl-{random_name()}",
        model=model,
        num_choices=request.sampling.n,
        parsed=bool(request.reasoning_parser or request.tool_parser),
        at_most_one_call=offered.at_most_one,
        logprobs=request.logprobs is not None,
        known=bytes_of(served.tokenizer),
        token_ids=bool(asked.return_token_ids),
        prompt_ids=bool(asked.return_prompt_token_ids),
        report_cache=report_cache,
        include_usage=always_usage or bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
        meta_info=bool(asked.return_meta_info),
        legacy=legacy,
    )


async def _answer(service: Service, request: Request, form: ChatForm) -> dict[str, Any]:
    body = ChatBody(form)
    for each in await service.collect([request]):
        body.add(each)
    return body.render()


async def _events(service: Service, request: Request, form: ChatForm) -> Events:
    chunks = ChatChunks(form)
    async with contextlib.aclosing(service.run([request])) as news:
        async for each in news:
            chunk = chunks.add(each)
            if chunk:
                yield chunk
    yield chunks.last()
