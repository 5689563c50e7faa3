"""Native JSON: requests of `/generate` and `Engine.generate`, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct

from bough.core import bounds
from bough.core.bounds import MOST_REPLICAS
from bough.core.errors import InvalidRequest
from bough.core.messages import Delta, End, Ids, LogprobSpec, TokenLogprobs, unpack_ids
from bough.engine_client.gate import num_tokens
from bough.engine_client.media_fields import NATIVE_MEDIA, native_media, split_by_prompt
from bough.engine_client.request import PRIORITIES, Request
from bough.engine_client.sampling import Sampling, parse_sampling
from bough.engine_client.sessions import SessionParams
from bough.engine_client.stream import DeltaStream
from bough.engine_client.unserved import is_off, refuse_unserved

Json = dict[str, Any]

_PER_REQUEST: Final = frozenset(
    {"sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"}
    | {"processed_logprobs", "return_hidden_states", "priority", "cache_salt", "extra_key", "session_params"}
    | {"data_parallel_rank", "routed_dp_rank"}
    | {"speculate", "lora_path"}
)
"""Fields that may have one value for all prompts, or a list with one value per prompt."""
_MEDIA_FIELDS: Final = frozenset({*NATIVE_MEDIA, "mm_processor_kwargs", "max_dynamic_patch", "min_dynamic_patch"})
"""Fields with the media of each prompt, and settings of the media processor."""
_FOR_ALL: Final = frozenset({"return_text_in_logprobs", "return_prompt_token_ids", "stream_interval"})
NATIVE_FIELDS: Final = frozenset({*_PER_REQUEST, *_MEDIA_FIELDS, *_FOR_ALL, "text", "prompt", "input_ids", "stream"})
"""Every field that `native_batch` understands."""


class NativeBatch(Struct, frozen=True):
    """The prompts of one native request."""

    requests: list[Request]
    single: bool
    """A single prompt, not in a list: with n = 1 the answer is one object."""
    stream: bool

    @property
    def one_answer(self) -> bool:
        return self.single and self.requests[0].sampling.n == 1


def native_batch(
    fields: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    want_text: bool = True,
    every: int = 1,
    pool: str = "",
    bounded: bool = False,
) -> NativeBatch:
    """Reads a native request. Null means: not given. Raises `InvalidRequest` naming the field.

    `defaults` are the model's own sampling parameters; `every` the server's tokens between two deltas; `pool` what a
    pooling model is to return; `bounded`: the prompts and their answers are counted, as they are not for `Engine`.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if "lora_path" in given and is_off(given["lora_path"]):
        del given["lora_path"]
    if not given.keys() <= NATIVE_FIELDS and (others := refuse_unserved(given, given.keys() - NATIVE_FIELDS)):
        unknown = min(others)
        raise InvalidRequest(
            what=f"there is no field {unknown[:60]!r}",
            why=f"known are {', '.join(sorted(NATIVE_FIELDS))}",
            fix="remove it",
            param=unknown[:60],
        )
    prompts, single = _prompts(given)
    sizes = list(map(num_tokens, prompts)) if bounded else []
    bounds.batch(sizes, "text")
    stream = _flag("stream", given.get("stream", False))
    shared = {name: value for name, value in given.items() if name in _FOR_ALL}
    columns = {
        name: _column(name, value, len(prompts), single) for name, value in given.items() if name in _PER_REQUEST
    }
    columns |= {
        name: split_by_prompt(name, value, len(prompts), single)
        for name, value in given.items()
        if name in _MEDIA_FIELDS
    }
    sampling: dict[int, Sampling] = {}  # parameters given once are read once
    requests: list[Request] = []
    for at, prompt in enumerate(prompts):
        row = shared | {name: column[at] for name, column in columns.items() if column[at] is not None}
        params = row.pop("sampling_params", None)
        if id(params) not in sampling:
            sampling[id(params)] = parse_sampling(params, defaults)
        requests.append(_request(prompt, row, sampling[id(params)], stream, want_text, every, pool))
    if bounded:
        counted = zip(sizes, requests, strict=True)
        bounds.batch((size for size, each in counted for _ in range(each.sampling.n)), "sampling_params.n")
    return NativeBatch(requests, single, stream)


def _prompts(given: Mapping[str, Any]) -> tuple[list[str | Sequence[int] | Ids], bool]:
    names = [name for name in ("text", "prompt", "input_ids") if name in given]
    if len(names) != 1:
        raise InvalidRequest(
            what="there is no prompt" if not names else f"{names[0]} and {names[1]} were both given",
            why="a request has one prompt, or one list of them",
            fix="send text or input_ids",
            param=names[1] if names else "text",
        )
    name = names[0]
    value = given[name]
    if name != "input_ids":
        if isinstance(value, str):
            return [value], True
        if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
            return list(value), False
        raise _wrong(name, value, "a text or a list of texts")
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return [value], True
    if is_listed(value) and len(value):
        if not is_listed(value[0]):
            return [value], True
        if all(map(is_listed, value)):
            return list(value), False
    raise _wrong(name, value, "a list of token ids or a list of such lists")


def is_listed(value: Any) -> bool:
    """Whether it has elements. An array without dimensions is a number."""
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _column(name: str, value: Any, rows: int, single: bool) -> Sequence[Any]:
    """One value for each prompt."""
    listed = isinstance(value, list | tuple)
    if name == "token_ids_logprob":
        listed = listed and bool(value) and all(each is None or isinstance(each, list | tuple) for each in value)
    if not listed:
        if name == "rid" and rows > 1:
            return [f"{value}_{at}" for at in range(rows)]
        return [value] * rows
    if len(value) != rows or single:
        raise InvalidRequest(
            what=f"{name} has {len(value)} entries for {rows} prompt{'s' if rows > 1 else ''}",
            why="a list must have one entry for each prompt",
            fix=f"send one {name}, or a list as long as the prompts'",
            param=name,
        )
    return list(value)


def _request(
    prompt: str | Sequence[int] | Ids,
    row: Mapping[str, Any],
    sampling: Sampling,
    stream: bool,
    want_text: bool,
    every: int,
    pool: str,
) -> Request:
    """`row`: what is given of this prompt, and not null."""
    if sampling.every is not None:
        row = {"stream_interval": sampling.every, **row}
    fields: Json = {"every": every}
    for name, value in row.items():
        if name in _READERS:
            field, read = _READERS[name]
            fields[field] = read(name, value)
    return Request(
        prompt=prompt,
        sampling=sampling.params,
        room=sampling.room,
        bad_words=sampling.bad_words,
        stream=stream,
        want_text=want_text,
        logprobs=_logprobs(row) if "return_logprob" in row else None,
        media=native_media(row) if not _MEDIA_FIELDS.isdisjoint(row) else (),
        namespace=namespace_of(fields.pop("cache_salt", ""), fields.pop("extra_key", "")),
        pool=pool,
        **fields,
    )


def namespace_of(cache_salt: str, extra_key: str = "") -> str:
    """The cache namespace of a request: different salts or keys never share a prefix."""
    return f"{extra_key}\n{cache_salt}" if cache_salt or extra_key else ""


def session_params(given: Any) -> SessionParams:
    """`session_params`, checked. Raises `InvalidRequest`."""
    names = {"id", "rid", "offset", "replace", "drop_previous_output"}
    if not isinstance(given, Mapping) or set(given) - names or not isinstance(given.get("id"), str):
        raise _wrong("session_params", given, f"an object with an id, and of {', '.join(sorted(names - {'id'}))}")
    offset, rid = given.get("offset"), given.get("rid")
    return SessionParams(
        id=given["id"],
        rid=None if rid is None else _name("session_params.rid", rid, "rid_chars"),
        offset=None if offset is None else _integer("session_params.offset", offset, -(2**31), 2**31 - 1),
        replace=_flag("session_params.replace", given.get("replace") or False),
        drop_previous_output=_flag("session_params.drop_previous_output", given.get("drop_previous_output") or False),
    )


def _logprobs(given: Mapping[str, Any]) -> LogprobSpec | None:
    if not _flag("return_logprob", given["return_logprob"]):
        return None
    scored = given.get("token_ids_logprob", ())
    if not isinstance(scored, list | tuple):
        raise _wrong("token_ids_logprob", scored, "a list of token ids")
    bounds.count("token_ids_logprob", scored, "token_ids_logprob")
    top = _integer("top_logprobs_num", given.get("top_logprobs_num", 0), 0, 2**31 - 1)
    bounds.at_most("native_top_logprobs", top, "top_logprobs_num")
    return LogprobSpec(
        start=_integer("logprob_start_len", given.get("logprob_start_len", -1), -1, 2**31 - 1),
        top=top,
        token_ids=tuple(_integer("token_ids_logprob", each, 0, 2**31 - 1) for each in scored),
        processed=_flag("processed_logprobs", given.get("processed_logprobs", False)),
    )


def _hidden_states(name: str, value: Any) -> Literal["", "last", "all"]:
    if value is False:
        return ""
    if value is True or value == "all":
        return "all"
    if value == "last":
        return "last"
    raise _wrong(name, value, 'true, false, "all" or "last"')


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise _wrong(name, value, f"an integer from {low} to {high}")
    return int(value)


def _priority(name: str, value: Any) -> int:
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    if isinstance(value, str):
        raise _wrong(name, value, f"an integer, or one of {', '.join(PRIORITIES)}")
    return _integer(name, value, -(2**31), 2**31 - 1)


def _name(name: str, value: Any, most: str = "salt_chars") -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    bounds.count(most, value, name)
    return value


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequest:
    shown = repr(value)
    if isinstance(value, dict) or is_listed(value):
        shown = f"{'a' if len(value) else 'an empty'} {type(value).__name__}"
    return InvalidRequest(
        what=f"{name} is {shown[:60]}", why=f"it must be {wanted}", fix=f"send a valid {name}", param=name
    )


_READERS: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "rid": ("rid", lambda name, value: _name(name, value, "rid_chars")),
    "return_text_in_logprobs": ("logprob_text", _flag),
    "return_prompt_token_ids": ("return_prompt", _flag),
    "return_hidden_states": ("hidden_states", _hidden_states),
    "cache_salt": ("cache_salt", _name),
    "extra_key": ("extra_key", _name),
    "priority": ("priority", lambda name, value: _priority(name, value)),
    "data_parallel_rank": ("data_parallel_rank", lambda name, value: _integer(name, value, 0, MOST_REPLICAS - 1)),
    "routed_dp_rank": ("data_parallel_rank", lambda name, value: _integer(name, value, 0, MOST_REPLICAS - 1)),
    "speculate": ("speculate", _flag),
    "lora_path": ("adapter", _name),
    "session_params": ("session", lambda _, value: session_params(value)),
    "stream_interval": ("every", lambda name, value: _integer(name, value, 1, 2**31 - 1)),
}
"""Fields that are read one by one, and what they are called in a `Request`."""


def draft_fields(end: End) -> Json:
    """Numbers about a request's drafts, under SGLang's names; empty without speculative decoding."""
    if not end.decode_steps:
        return {}
    return {
        "spec_verify_ct": end.decode_steps,
        "spec_accept_length": (end.decode_steps + end.accepted_tokens) / end.decode_steps,
        "spec_accept_token_num": end.accepted_tokens,
        "spec_draft_token_num": end.draft_tokens,
        "spec_accept_rate": end.accepted_tokens / end.draft_tokens if end.draft_tokens else 0.0,
        "spec_accept_histogram": end.right_drafts,
    }


# -- answers --------------------------------------------------------------------------------------


class NativeAnswer:
    """Renders the deltas of one stream as native JSON: everything so far, or with `incremental` only what is new."""

    def __init__(
        self,
        stream: DeltaStream,
        request: Request,
        *,
        incremental: bool = False,
        text: bool = True,
        weight_version: str = "default",
    ) -> None:
        self._stream = stream
        self._weight_version = weight_version
        self._request = request
        self._incremental = incremental
        self._text = text
        self._said: list[str] = []
        self._tokens: list[int] = []
        self._num_tokens = 0
        self._output: list[TokenLogprobs] = []
        self._input: list[TokenLogprobs] = []
        self._hidden: list[list[float]] = []

    def add(self, delta: Delta) -> Json:
        """The answer after this delta."""
        if delta.embedding or self._request.pool:
            return self._pooled(delta)
        if self._incremental:
            self._said.clear()
            self._tokens = []
            self._output.clear()
            self._input.clear()
            self._hidden = []
        self._said.append(delta.text)
        new = unpack_ids(delta.tokens).tolist()
        self._tokens += new
        self._num_tokens += len(new)
        if delta.logprobs is not None:
            self._output.append(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._input.append(delta.prompt_logprobs)
        if delta.hidden_states is not None:
            last = self._request.hidden_states == "last"
            self._hidden = delta.hidden_states[-1:] if last else self._hidden + delta.hidden_states
        answer: Json = {"text": "".join(self._said)} if self._text else {}
        if self._request.return_prompt and delta.end is not None:
            answer["prompt_token_ids"] = self._stream.prompt.tolist()
        return {**answer, "output_ids": list(self._tokens), "meta_info": self._meta(delta.end)}

    def _meta(self, end: End | None) -> Json:
        stream = self._stream
        meta: Json = {
            "id": stream.rid,
            "finish_reason": None if end is None else finish_reason(end),
            "prompt_tokens": len(stream.prompt),
            "completion_tokens": self._num_tokens if end is None else end.completion_tokens,
            "cached_tokens": 0 if end is None else end.cached_tokens,
            "weight_version": self._weight_version,
            "e2e_latency": time.monotonic() - stream.began_s,
        }
        if end is not None:
            meta |= {
                "reasoning_tokens": end.reasoning_tokens,
                **{f"{kind}_tokens": count for kind, count in end.media_tokens.items()},
                "num_retractions": end.retractions,
                "queue_time": end.queued_s,
                "prefill_time": end.prefill_s,
                "decode_time": end.decode_s,
                **draft_fields(end),
            }
        if self._request.logprobs is not None:
            meta |= self._logprob_fields(self._request.logprobs)
        if self._request.hidden_states:
            meta["hidden_states"] = self._hidden
        return meta

    def _logprob_fields(self, spec: LogprobSpec) -> Json:
        fields: Json = {}
        for side, parts in (("input", self._input), ("output", self._output)):
            fields[f"{side}_token_logprobs"] = [entry for part in parts for entry in _entries(part)]
            if spec.top:
                fields[f"{side}_top_logprobs"] = [row for part in parts for row in _top_entries(part)]
            if spec.token_ids:
                fields[f"{side}_token_ids_logprobs"] = [
                    [[score, token_id, None] for token_id, score in row] for part in parts for row in part.chosen
                ]
        if self._input:
            _hide_first(fields)
        fields["output_token_logprobs_length"] = len(fields["output_token_logprobs"])
        return fields

    def _pooled(self, delta: Delta) -> Json:
        end = delta.end
        return {
            "embedding": np.frombuffer(delta.embedding, "<f4").tolist(),
            "meta_info": {
                "id": self._stream.rid,
                "finish_reason": None if end is None else finish_reason(end),
                "prompt_tokens": len(self._stream.prompt),
                "cached_tokens": 0 if end is None else end.cached_tokens,
                "e2e_latency": time.monotonic() - self._stream.began_s,
            },
        }


def finish_reason(end: End) -> Json:
    """How a request ended, as the native API reports it."""
    match end.reason:
        case "stop":
            return {"type": "stop", "matched": end.matched}
        case "length":
            said = {"message": end.message} if end.message else {}
            return {"type": "length", "length": end.completion_tokens, **said}
        case _:
            return {
                "type": "abort",
                "message": end.message,
                "status_code": end.status or None,
                "err_type": end.code or None,
            }


def _hide_first(fields: Json) -> None:
    """Where prompt tokens are scored, the first has null for its score and no alternatives, wherever `logprob_start_len` is:
    SGLang scores a token from the position before it, which is outside of what was asked for. Clients count on it."""
    first = fields["input_token_logprobs"][0]
    fields["input_token_logprobs"][0] = [None, *first[1:]]
    for name in ("input_top_logprobs", "input_token_ids_logprobs"):
        if name in fields:
            fields[name][:1] = [None]


def _entries(part: TokenLogprobs) -> list[list[Any]]:
    texts: Sequence[str | None] = part.text or [None] * len(part.token_ids)
    return [list(entry) for entry in zip(part.logprobs, part.token_ids, texts, strict=True)]


def _top_entries(part: TokenLogprobs) -> list[list[list[Any]]]:
    if not part.top_text:
        return [[[score, token_id, None] for token_id, score in row] for row in part.top]
    return [
        [[score, token_id, text] for (token_id, score), text in zip(row, texts, strict=True)]
        for row, texts in zip(part.top, part.top_text, strict=True)
    ]
