"""A server that speaks the native, OpenAI and Anthropic APIs with the toy model behind, and keeps count.

`script` answers prompts that match a pattern with a given text, so that programs can be led; everything else the toy
model writes. A prefix cache counts computed prompt tokens: what one request put in serves those that arrive after it
was answered, not those that arrived beside it.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from typing import Any

import lang_toy_model as toy
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

CHATML = {role: [f"<|im_start|>{role}\n", "<|im_end|>\n"] for role in ("system", "user", "assistant")}


class FakeServer:
    def __init__(self) -> None:
        self.url = ""
        self.start_anew()

    def start_anew(self) -> None:
        """Forget everything but the address."""
        self.script: list[tuple[str, str]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.model_info: dict[str, Any] = {"model_path": "toy/toy-instruct", "role_affixes": CHATML}
        self.server_info: dict[str, Any] = {"version": "toy"}
        self.fail_with: dict[str, tuple[int, dict[str, Any]]] = {}
        self.computed_tokens = 0
        self.most_at_once = 0
        self.disconnects = 0
        self.delay_s = 0.0
        self.answer_when = 0  # nobody is answered before so many have asked
        self.taken: threading.Semaphore | None = None  # a stream goes on when its reader has taken a piece
        self.join_reply: dict[str, Any] = {"success": True, "session_id": "session-1", "computed_tokens": 0}
        self._asked = 0
        self._at_once = 0
        self._cached: set[tuple[int, ...]] = set()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.requests if at == path]

    # -- the model

    def prefill(self, ids: list[int], keep_from: int | None) -> int:
        """Count the tokens to compute; logprobs from `keep_from` on need those tokens computed. Returns cached ones."""
        limit = len(ids) - 1 if keep_from is None else min(keep_from, len(ids) - 1)
        cached = max((n for n in range(max(limit, 0) + 1) if tuple(ids[:n]) in self._cached), default=0)
        self.computed_tokens += len(ids) - cached
        return cached

    def remember(self, ids: list[int]) -> None:
        self._cached.update(tuple(ids[:n]) for n in range(len(ids) + 1))

    def write(self, prompt: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """(text, finish reason)."""
        limit = params.get("max_new_tokens", 128)
        if params.get("regex"):
            return toy.smallest_match(params["regex"]), {"type": "stop", "matched": 0}
        if params.get("json_schema"):
            return toy.smallest_instance(json.loads(params["json_schema"])), {"type": "stop", "matched": 0}
        for pattern, reply in self.script:
            if re.search(pattern, prompt, re.DOTALL):
                text = reply
                break
        else:
            text = toy.detokenize(toy.generate(toy.tokenize(prompt), limit))
        cut = toy.detokenize(toy.tokenize(text)[:limit])
        reason: dict[str, Any] = {"type": "length", "length": limit} if cut != text else {"type": "stop", "matched": 0}
        stops = params.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            if stop in cut:
                cut = cut[: cut.index(stop)]
                reason = {"type": "stop", "matched": stop}
        return cut, reason

    async def answer(self, body: dict[str, Any], index: int | None) -> dict[str, Any]:
        def own(value: Any) -> Any:
            return value[index] if index is not None else value

        ids = own(body["input_ids"]) if "input_ids" in body else toy.tokenize(own(body["text"]))
        params = body.get("sampling_params") or {}
        start = body.get("logprob_start_len", -1) if body.get("return_logprob") else -1
        cached = self.prefill(ids, start if start >= 0 else None)
        self._asked += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.delay_s)
            while self._asked < self.answer_when:
                await asyncio.sleep(0.005)
        finally:
            self._at_once -= 1
        text, reason = "", {"type": "length", "length": 0}
        if params.get("max_new_tokens") != 0:
            text, reason = self.write(toy.detokenize(ids), params)
        out = toy.tokenize(text)
        self.remember(ids + out)
        meta: dict[str, Any] = {
            "id": body.get("rid", "r"),
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "cached_tokens": cached,
            "finish_reason": reason,
        }
        if body.get("return_logprob"):
            rows = list(zip(toy.input_logprobs(ids), ids, [toy.VOCAB[i] for i in ids], strict=True))
            meta["input_token_logprobs"] = [list(row) for row in rows[start:]] if start >= 0 else []
            if meta["input_token_logprobs"]:
                meta["input_token_logprobs"][0][0] = None
            meta["output_token_logprobs"] = [[-0.5, i, toy.VOCAB[i]] for i in out]
        return {"text": text, "output_ids": out, "meta_info": meta}

    # -- routes

    async def _read(self, request: Request) -> dict[str, Any]:
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.requests.append((request.url.path, body))
        self.headers.append(dict(request.headers))
        return body

    def _failure(self, path: str) -> Response | None:
        if path in self.fail_with:
            status, body = self.fail_with[path]
            return JSONResponse(body, status_code=status)
        return None

    async def generate(self, request: Request) -> Response:
        body = await self._read(request)
        failure = self._failure("/generate")
        if failure is not None:
            return failure
        batch = body.get("input_ids", body.get("text"))
        if isinstance(batch, list) and (not batch or isinstance(batch[0], str | list)):
            return JSONResponse(await asyncio.gather(*(self.answer(body, i) for i in range(len(batch)))))
        if isinstance(body.get("text"), str) and "POISON" in body["text"]:
            return JSONResponse({"error": {"message": "poisoned prompt"}}, status_code=400)
        n = (body.get("sampling_params") or {}).get("n", 1)
        if n > 1:
            return JSONResponse([await self.answer(body, None) for _ in range(n)])
        reply = await self._unless_gone(request, body)
        if reply is None:
            return Response(status_code=499)
        if not body.get("stream"):
            return JSONResponse(reply)
        return StreamingResponse(self._cumulative(reply), media_type="text/event-stream")

    async def _unless_gone(self, request: Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None, and work stopped, when the client goes away first."""
        work = asyncio.create_task(self.answer(body, None))
        while not (await asyncio.wait([work], timeout=0.05))[0]:
            if await request.is_disconnected():
                work.cancel()
                self.disconnects += 1
                return None
        return work.result()

    async def _cumulative(self, reply: dict[str, Any]) -> Any:
        in_pieces = self.server_info.get("incremental_streaming_output")
        pieces = [toy.VOCAB[i] for i in reply["output_ids"]] or [""]
        for i in range(len(pieces)):
            await self._until_taken()
            text = pieces[i] if in_pieces else "".join(pieces[: i + 1])
            meta = reply["meta_info"] | {"completion_tokens": i + 1}
            if i + 1 < len(pieces):
                meta["finish_reason"] = None
            yield f"data: {json.dumps({'text': text, 'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"

    async def _until_taken(self) -> None:
        give_up_s = time.monotonic() + 10  # what shows nothing is not taken
        while self.taken is not None and not self.taken.acquire(blocking=False) and time.monotonic() < give_up_s:
            await asyncio.sleep(0.002)

    async def chat(self, request: Request) -> Response:
        body = await self._read(request)
        failure = self._failure("/v1/chat/completions")
        if failure is not None:
            return failure
        prompt = "".join(f"{m['role']}: {_plain(m['content'])}\n" for m in body["messages"])
        if body.get("continue_final_message"):
            prompt = prompt.rstrip("\n")
        schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        params = {"max_new_tokens": limit, "stop": body.get("stop"), "regex": body.get("regex")}
        params["json_schema"] = json.dumps(schema) if schema else None
        text, reason = self.write(prompt, params)
        usage = {"prompt_tokens": len(toy.tokenize(prompt)), "completion_tokens": len(toy.tokenize(text))}
        if body.get("stream"):
            return StreamingResponse(_deltas(text, reason, chat=True), media_type="text/event-stream")
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason["type"],
        }
        if body.get("logprobs"):
            content = [{"token": toy.VOCAB[i], "logprob": -0.5, "top_logprobs": []} for i in toy.tokenize(text)]
            choice["logprobs"] = {"content": content}
        return JSONResponse({"id": "c", "choices": [choice] * body.get("n", 1), "usage": usage})

    async def complete(self, request: Request) -> Response:
        body = await self._read(request)
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices = []
        for prompt in prompts:
            params = {name: body.get(name) for name in ("stop", "regex", "json_schema")}
            params["max_new_tokens"] = body["max_tokens"]
            text, reason = self.write(prompt, params)
            choice: dict[str, Any] = {"text": text, "finish_reason": reason["type"]}
            if body.get("echo"):
                ids = toy.tokenize(prompt) + toy.tokenize(text)
                pieces = [toy.VOCAB[i] for i in ids]
                offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
                logprobs = toy.input_logprobs(ids)
                choice["logprobs"] = {"tokens": pieces, "token_logprobs": logprobs, "text_offset": offsets}
            choices.append(choice)
        if body.get("stream"):
            return StreamingResponse(_deltas(choices[0]["text"], {"type": "stop"}, chat=False))
        return JSONResponse({"id": "t", "choices": choices * body.get("n", 1), "usage": {"prompt_tokens": 1}})

    async def messages(self, request: Request) -> Response:
        body = await self._read(request)
        prompt = "".join(f"{m['role']}: {_plain(m['content'])}\n" for m in body["messages"])
        schema = ((body.get("output_config") or {}).get("format") or {}).get("schema")
        params = {"max_new_tokens": body["max_tokens"], "stop": body.get("stop_sequences")}
        params["json_schema"] = json.dumps(schema) if schema else None
        text, reason = self.write(prompt, params)
        stop = "max_tokens" if reason["type"] == "length" else "end_turn"
        if body.get("stream"):
            return StreamingResponse(_anthropic_events(text, stop), media_type="text/event-stream")
        content = [{"type": "text", "text": text}]
        usage = {"input_tokens": 7, "output_tokens": len(toy.tokenize(text))}
        return JSONResponse({"id": "m", "content": content, "stop_reason": stop, "usage": usage})

    async def info(self, request: Request) -> Response:
        await self._read(request)
        return JSONResponse(self.model_info if request.url.path == "/model_info" else self.server_info)

    async def flush(self, request: Request) -> Response:
        await self._read(request)
        self._cached.clear()
        return PlainTextResponse("Cache flushed.")

    async def separate(self, request: Request) -> Response:
        body = await self._read(request)
        reasoning, _, text = body["text"].partition("||")
        return JSONResponse({"reasoning_text": reasoning, "text": text})

    async def join(self, request: Request) -> Response:
        await self._read(request)
        return self._failure("/concate_and_append_request") or JSONResponse(self.join_reply)

    async def tokens(self, request: Request) -> Response:
        body = await self._read(request)
        if request.url.path == "/tokenize":
            return JSONResponse({"tokens": toy.tokenize(body["prompt"])})
        return JSONResponse({"text": toy.detokenize(body["tokens"])})

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    def app(self) -> Starlette:
        routes = [
            ("/generate", self.generate), ("/v1/chat/completions", self.chat), ("/v1/completions", self.complete),
            ("/v1/messages", self.messages), ("/model_info", self.info), ("/server_info", self.info),
            ("/flush_cache", self.flush), ("/separate_reasoning", self.separate),
            ("/concate_and_append_request", self.join), ("/tokenize", self.tokens), ("/detokenize", self.tokens),
            ("/health", self.health),
        ]  # fmt: skip
        return Starlette(routes=[Route(path, handler, methods=["GET", "POST"]) for path, handler in routes])


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "".join(p.get("text", "<media>") for p in content)


async def _deltas(text: str, reason: dict[str, Any], *, chat: bool) -> Any:
    for i in toy.tokenize(text):
        piece = toy.VOCAB[i]
        choice = {"delta": {"content": piece}} if chat else {"text": piece}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    last = {"delta": {}} if chat else {"text": ""}
    yield f"data: {json.dumps({'choices': [last | {'finish_reason': reason['type']}]})}\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 3, 'completion_tokens': 4}})}\n\n"
    yield "data: [DONE]\n\n"


async def _anthropic_events(text: str, stop: str) -> Any:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 7}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
    ]
    for i in toy.tokenize(text):
        delta = {"type": "text_delta", "text": toy.VOCAB[i]}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    events.append({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 5}})
    events.append({"type": "message_stop"})
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def serve(fake: FakeServer) -> tuple[uvicorn.Server, threading.Thread]:
    """Start the server on a free port; `fake.url` is set when it answers."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(fake.app(), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the fake server did not start"
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return server, thread
