"""Messages of bough.proto to native requests, and deltas back to messages."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, struct_pb2
from msgspec.structs import replace

from bough.core import bounds
from bough.core.errors import BoughError, InvalidRequest
from bough.core.messages import Delta, End, TokenLogprobs, unpack_ids
from bough.engine_client import DeltaStream, Request, native_batch
from bough.engine_client.caller import Caller
from bough.engine_client.media_fields import NATIVE_MEDIA
from bough.entrypoints.grpc import bough_pb2 as pb

Json = dict[str, Any]

_SCALARS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "json_schema", "regex", "ebnf", "structural_tag", "logit_processor", "beam_width",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "stop_regex", "allowed_token_ids", "bad_words", "choice")


def native_fields(message: pb.GenerateRequest) -> Json:
    """The message as a native request. Raises `InvalidRequest` if there is no prompt."""
    fields: Json = {"stream": message.stream if message.HasField("stream") else True}
    match message.WhichOneof("prompt"):
        case "text":
            fields["text"] = message.text
        case "input_ids":
            fields["input_ids"] = ids_of(message.input_ids.ids)
        case _:
            raise InvalidRequest(
                what="there is no prompt", why="a request has one", fix="send text or input_ids", param="prompt"
            )
    if message.HasField("sampling_params"):
        fields["sampling_params"] = sampling_fields(message.sampling_params)
    if message.HasField("logprobs"):
        asked = message.logprobs
        fields |= {
            "return_logprob": True,
            "logprob_start_len": asked.start if asked.HasField("start") else -1,
            "top_logprobs_num": asked.top,
            "return_text_in_logprobs": asked.text,
            "processed_logprobs": asked.processed,
        }
        if asked.token_ids:
            fields["token_ids_logprob"] = list(asked.token_ids)
    for name in ("rid", "cache_salt", "extra_key"):
        if getattr(message, name):
            fields[name] = getattr(message, name)
    if message.priority:
        fields["priority"] = message.priority
    if message.stream_interval:
        fields["stream_interval"] = message.stream_interval
    if message.HasField("session_params"):
        fields["session_params"] = session_fields(message.session_params)
    for medium in message.media:
        name = f"{medium.kind}_data"
        if name not in NATIVE_MEDIA:
            raise InvalidRequest(
                what=f"a medium is of kind {medium.kind[:40]!r}",
                why="kinds are image, video and audio",
                fix="send one of them",
                param="media",
            )
        fields.setdefault(name, []).append(medium.data if medium.WhichOneof("source") == "data" else medium.url)
    return fields


def ids_of(given: Any) -> list[int]:
    """The ids of a message, limited as in a JSON body. Raises `InvalidRequest`."""
    bounds.at_most("json_numbers", len(given), "input_ids")
    return list(given)


def sampling_fields(message: pb.SamplingParams) -> Json:
    fields: Json = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    fields |= {name: list(getattr(message, name)) for name in _LISTS if getattr(message, name)}
    if message.HasField("seed"):
        fields["sampling_seed"] = message.seed
    if message.logit_bias:
        fields["logit_bias"] = dict(message.logit_bias)
    if message.HasField("custom_params"):
        fields["custom_params"] = json_format.MessageToDict(message.custom_params)
    return fields


def session_fields(message: pb.SessionParams) -> Json:
    return {
        "id": message.id,
        "rid": message.rid if message.HasField("rid") else None,
        "offset": message.offset if message.HasField("offset") else None,
        "replace": message.replace,
        "drop_previous_output": message.drop_previous_output,
    }


def request_of(
    message: pb.GenerateRequest, *, defaults: Json, want_text: bool, every: int, caller: Caller, deadline_s: float
) -> Request:
    """A checked request, by the rules of the native API."""
    batch = native_batch(native_fields(message), defaults=defaults, want_text=want_text, every=every, bounded=True)
    return replace(batch.requests[0], caller=caller, deadline_s=deadline_s)


def response_of(stream: DeltaStream, delta: Delta) -> pb.GenerateResponse:
    """A delta as a message."""
    response = pb.GenerateResponse(
        rid=stream.rid, index=stream.index, text=delta.text, output_ids=unpack_ids(delta.tokens).tolist()
    )
    if delta.logprobs is not None:
        response.output_logprobs.extend(logprobs_of(delta.logprobs))
    if delta.prompt_logprobs is not None:
        response.input_logprobs.extend(logprobs_of(delta.prompt_logprobs))
    if delta.end is not None:
        response.finish_reason.CopyFrom(finish_reason(delta.end))
        response.usage.CopyFrom(usage(delta.end))
    return response


def finish_reason(end: End) -> pb.FinishReason:
    reason = pb.FinishReason(type="abort" if end.reason == "error" else end.reason, message=end.message)
    if isinstance(end.matched, int):
        reason.matched_token_id = end.matched
    elif end.matched is not None:
        reason.matched_text = end.matched
    return reason


def usage(end: End) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        cached_tokens=end.cached_tokens,
        reasoning_tokens=end.reasoning_tokens,
        retractions=end.retractions,
        queued_s=end.queued_s,
        prefill_s=end.prefill_s,
        decode_s=end.decode_s,
    )


def logprobs_of(scores: TokenLogprobs) -> list[pb.TokenLogprob]:
    made: list[pb.TokenLogprob] = []
    for at, (token, logprob) in enumerate(zip(scores.token_ids, scores.logprobs, strict=True)):
        top = scores.top[at] if scores.top else []
        texts = scores.top_text[at] if scores.top_text else [""] * len(top)
        chosen = scores.chosen[at] if scores.chosen else []
        made.append(
            pb.TokenLogprob(
                token_id=token,
                logprob=logprob,
                text=scores.text[at] if scores.text else "",
                top=[
                    pb.ScoredToken(token_id=other, logprob=score, text=text)
                    for (other, score), text in zip(top, texts, strict=True)
                ],
                chosen=[pb.ScoredToken(token_id=other, logprob=score) for other, score in chosen],
            )
        )
    return made


def error_of(error: BoughError) -> pb.Error:
    return pb.Error(
        status=error.status,
        type=error.type,
        code=error.code or "",
        message=error.sentence(),
        param=error.param or "",
    )


def struct_of(value: Json) -> struct_pb2.Struct:
    """A JSON object as protobuf's Struct; whole numbers become floating ones there."""
    made = struct_pb2.Struct()
    json_format.ParseDict(value, made)
    return made
