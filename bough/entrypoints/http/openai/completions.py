"""POST /v1/completions."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.messages import LogprobSpec
from bough.engine_client import Request
from bough.engine_client.gate import num_tokens
from bough.engine_client.names import random_name
from bough.engine_client.request import priority_of
from bough.engine_client.sampling import settled
from bough.entrypoints.fim import fill_in
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.completion_answer import CompletionBody, CompletionChunks, CompletionForm
from bough.entrypoints.http.openai.fields import (
    adapter_of,
    check_sizes,
    hidden_states_of,
    namespace_of,
    served_name,
)
from bough.entrypoints.http.openai.relaxed import relax_answer
from bough.entrypoints.http.openai.sampling import native_sampling, with_origin
from bough.entrypoints.http.openai.schema import CompletionRequest
from bough.entrypoints.http.openai.shapes import bytes_of
from bough.entrypoints.http.replies import EventReply, client_of, json_reply, placed
from bough.entrypoints.reasoning import budget_of, with_reasoning
from bough.entrypoints.service import Service
from bough.entrypoints.stream import Events

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


def completions(service: Service) -> Handler:
    """The route's handler."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, CompletionRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        model = served_name(service.served, asked.model)
        headers = body.headers(*relax_answer(asked))
        jobs = [placed(job, request, deadline_ms=asked.deadline_ms) for job in make_requests(asked, service)]
        form = make_form(asked, jobs, service, model)
        if asked.stream:
            return EventReply(_events(service, jobs, form), headers)
        answer = await client_of(request).wait_for(_answer(service, jobs, form))
        return json_reply(answer, headers=headers)

    return handle


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms of `prompt` as a list of texts or of token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _bad_prompt("prompt is empty", "there is nothing to complete")
    kinds = set(map(type, prompt))  # of a million ids in a few milliseconds
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds == {str}:
        return [each for each in prompt if isinstance(each, str)]
    if kinds == {list}:
        lists = [each for each in prompt if isinstance(each, list)]
        if not all(lists):
            raise _bad_prompt("one of the prompts is empty", "there is nothing to complete")
        return [*lists]
    raise _bad_prompt("prompt mixes texts, token ids and lists", "its elements must be of one kind")


def make_requests(asked: CompletionRequest, service: Service) -> list[Request]:
    """The body as requests, one per prompt. Raises `InvalidRequest`."""
    check_sizes(asked)
    _refuse_tools(asked)
    n = asked.n or 1
    candidates = _candidates(asked, n)
    prompts = prompts_of(asked.prompt)
    bounds.batch(map(num_tokens, prompts), "prompt")
    if asked.suffix:
        prompts = [_filled(prompt, asked, service) for prompt in prompts]
    bounds.batch((size for size in map(num_tokens, prompts) for _ in range(candidates)), "n")
    max_new = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    if max_new < 0 or (max_new == 0 and not asked.echo):
        raise InvalidRequest(
            what=f"max_tokens is {max_new}",
            why="a completion has at least one token (none only with echo)",
            fix="send a positive number",
            param="max_tokens",
        )
    given = msgspec.structs.replace(native_sampling(asked, max_new), n=candidates)
    sampling = settled(given, service.served.sampling_defaults)
    common: dict[str, Any] = {
        "sampling": with_origin(sampling.params, asked, tools=False),
        "bad_words": sampling.bad_words,
        "room": "at_most" if asked.max_tokens is None else "exact",
        "stream": bool(asked.stream),
        "add_special_tokens": asked.add_special_tokens is not False,
        "every": service.config.scheduler.stream_interval if sampling.every is None else sampling.every,
        "logprobs": _logprobs(asked, scored=candidates > n),
        "logprob_text": asked.logprobs is not None,
        "hidden_states": hidden_states_of(asked),
        "rid": asked.rid or "",
        "namespace": namespace_of(asked),
        "adapter": adapter_of(service.served, asked),
        "priority": priority_of(asked.priority),
        "speculate": asked.speculate is not False,
    }
    budget = budget_of(asked.thinking_budget, asked.thinking_token_budget)
    return [with_reasoning(Request(prompt=prompt, **common), service.served, budget) for prompt in prompts]


def _refuse_tools(asked: CompletionRequest) -> None:
    if asked.tools or asked.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest(
            what="completions take no tools",
            why="no template shows them to the model: the prompt is taken as it is",
            fix="use /v1/chat/completions, or describe a call by a response_format of type structural_tag",
            param="tools",
        )


def _filled(prompt: str | list[int], asked: CompletionRequest, service: Service) -> str:
    """A prompt for the text between the prefix and the suffix."""
    if asked.echo or not isinstance(prompt, str):
        raise InvalidRequest(
            what="suffix goes with neither echo nor token ids",
            why="it is put between the prompt's text and the model's marks",
            fix="send the prompt as text, without echo",
            param="suffix",
        )
    return fill_in(service.served.fim, prompt, asked.suffix or "")


def _candidates(asked: CompletionRequest, n: int) -> int:
    best_of = n if asked.best_of is None else asked.best_of
    bounds.at_most("best_of", best_of, "n" if asked.best_of is None else "best_of")
    if best_of < n:
        raise InvalidRequest(
            what=f"best_of is {best_of}, n is {n}",
            why="the n best are chosen from best_of",
            fix=f"send best_of of at least {n}",
            param="best_of",
        )
    if best_of > n and asked.stream:
        raise InvalidRequest(
            what="best_of can't be streamed",
            why="the best is known only at the end",
            fix="send stream: false, or leave best_of out",
            param="best_of",
        )
    return best_of


def _logprobs(asked: CompletionRequest, *, scored: bool) -> LogprobSpec | None:
    if asked.logprobs is None:
        return LogprobSpec() if scored else None
    if asked.logprobs < 0:
        raise InvalidRequest(
            what=f"logprobs is {asked.logprobs}", why="it counts alternatives", fix="send 0 to 20", param="logprobs"
        )
    bounds.at_most("top_logprobs", asked.logprobs, "logprobs")
    processed = bool(asked.processed_logprobs)
    return LogprobSpec(start=0 if asked.echo else -1, top=asked.logprobs, processed=processed)


def make_form(asked: CompletionRequest, requests: list[Request], service: Service, model: str) -> CompletionForm:
    """The format of the answers."""
    options = asked.stream_options
    return CompletionForm(
        id=f"cmpl-{random_name()}",
        model=model,
        num_prompts=len(requests),
        n=asked.n or 1,
        best_of=requests[0].sampling.n,
        echo=_echoes(service, requests) if asked.echo else None,
        top_logprobs=asked.logprobs,
        known=bytes_of(service.served.tokenizer),
        token_ids=bool(asked.return_token_ids),
        prompt_ids=bool(asked.return_prompt_token_ids),
        report_cache=service.config.server.enable_cache_report,
        include_usage=service.config.server.stream_usage or bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
        meta_info=bool(asked.return_meta_info),
    )


def _echoes(service: Service, requests: list[Request]) -> tuple[str, ...]:
    """The prompts as text."""
    texts: list[str] = []
    for request in requests:
        if isinstance(request.prompt, str):
            texts.append(request.prompt)
        elif service.served.tokenizer is not None:
            texts.append(service.served.tokenizer.decode([*map(int, request.prompt)], skip_special_tokens=False))
        else:
            raise InvalidRequest(
                what="token ids can't be echoed",
                why="the server was started with --skip-tokenizer-init",
                fix="leave echo out",
                param="echo",
            )
    return tuple(texts)


async def _answer(service: Service, requests: list[Request], form: CompletionForm) -> dict[str, Any]:
    body = CompletionBody(form)
    for each in await service.collect(requests):
        body.add(each)
    return body.render()


async def _events(service: Service, requests: list[Request], form: CompletionForm) -> Events:
    chunks = CompletionChunks(form)
    async with contextlib.aclosing(service.run(requests)) as news:
        async for each in news:
            chunk = chunks.add(each)
            if chunk:
                yield chunk
    yield chunks.last()


def _bad_prompt(what: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        what=what, why=why, fix="send a text, a list of texts, a list of token ids, or a list of those", param="prompt"
    )
