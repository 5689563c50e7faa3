"""The messages that ask the engine for a request's answers."""

from __future__ import annotations

from msgspec import structs

from bough.core.messages import Generate, Ids, TextSpec, owned_name, pack_ids
from bough.core.sampling import SamplingParams
from bough.engine_client.prompted import PromptMedia
from bough.engine_client.request import Request
from bough.tokenizer import Tokenizer

TAIL_IDS = 8
"""Number of last prompt tokens that the detokenizer gets as left context."""
_NEVER = 2**31 - 1
"""As `TextSpec.every`: only at the end."""


def compose(
    request: Request,
    prompt: Ids,
    sampling: SamplingParams,
    *,
    rid: str,
    namespace: str,
    eos_ids: tuple[int, ...],
    tokenizer: Tokenizer | None,
    adapter: int = 0,
    media: PromptMedia | None = None,
) -> Generate:
    """The fields that all answers of a request share; `for_answer` makes the message of each. `adapter`: the number of the
    request's adapter."""
    text = text_spec(request, prompt, sampling, tokenizer)
    return Generate(
        id=0,
        rid=rid,
        prompt=pack_ids(prompt),
        sampling=sampling,
        text=text,
        stream=request.stream or bool(text is not None and (sampling.stop or sampling.stop_regex)),
        logprobs=request.logprobs,
        hidden_states=request.hidden_states,
        tenant=request.caller.tenant,
        namespace=namespace,
        priority=request.priority,
        deadline_s=request.deadline_s,
        eos_ids=eos_ids if _heeds_eos(sampling) else (),
        follows=owned_name(request.caller.tenant, request.follows) if request.follows else "",
        pool=request.pool,
        second_at=request.second_at,
        items=request.items,
        reasoning_end=request.reasoning_end,
        reasoning_open=request.reasoning_forced,
        thinking_budget=request.thinking_budget,
        speculate=request.speculate,
        keep=bool(request.rid)
        and sampling.n == 1
        and sampling.max_new_tokens == 0
        and not request.pool
        and not request.items
        and not media,
        adapter=adapter or (media.adapter if media is not None else 0),
        media=media.items if media is not None else (),
        positions=media.positions(prompt) if media is not None else b"",
    )


def _heeds_eos(sampling: SamplingParams) -> bool:
    """Whether an ignored end token still completes a grammar; it is then not part of the answer."""
    grammar = sampling.grammar
    return not sampling.ignore_eos or (grammar is not None and not grammar.after_reasoning)


def for_answer(common: Generate, index: int, request_id: int, *, trace: bool) -> Generate:
    """The message for one of the `n` answers: a request of its own, with a seed of its own."""
    sampling = common.sampling
    if sampling.n > 1:
        seed = None if sampling.seed is None else (sampling.seed + index + 2**63) % 2**64 - 2**63
        sampling = structs.replace(sampling, n=1, seed=seed)
    return structs.replace(common, id=request_id, sampling=sampling, trace=trace)


def text_spec(request: Request, prompt: Ids, sampling: SamplingParams, tokenizer: Tokenizer | None) -> TextSpec | None:
    """The detokenizer's instructions; None: only token ids are wanted or available."""
    if tokenizer is None or request.pool:
        return None
    if not request.want_text and not (sampling.stop or sampling.stop_regex):
        return None
    tail = prompt[-TAIL_IDS:] if tokenizer.codebook.form == "other" else prompt[:0]
    return TextSpec(
        stop=sampling.stop,
        stop_regex=sampling.stop_regex,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        no_stop_trim=sampling.no_stop_trim,
        logprob_text=request.logprob_text,
        reasoning_parser=request.reasoning_parser,
        reasoning_forced=request.reasoning_forced,
        stream_reasoning=request.stream_reasoning,
        tool_parser=request.tool_parser,
        tools=request.tools,
        calls_only=request.calls_only,
        drop_unknown_tools=request.drop_unknown_tools,
        every=request.every if request.stream else _NEVER,
        prompt_tail=pack_ids(tail),
    )
