"""A server with known timing: the first token after `first_s`, each later one `each_s` after the one before."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class TimedServer:
    def __init__(self) -> None:
        self.url = ""
        self.first_s = 0.05
        self.each_s = 0.02
        self.fail_after: int | None = None
        """Requests after that many get status 500."""
        self.meet = 0
        """Nobody but the first is answered before so many are being answered at once."""
        self.at_once = 0
        self.most_at_once = 0
        self.times: list[float] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    def forget(self) -> None:
        self.first_s, self.each_s, self.fail_after, self.meet = 0.05, 0.02, None, 0
        self.most_at_once, self.times, self.bodies = 0, [], []

    async def info(self, request: Request) -> Response:
        if request.url.path == "/v1/models":
            return JSONResponse({"data": [{"id": "timed"}]})
        return JSONResponse({"vocab_size": 100, "tokenizer_path": "nowhere"})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append((request.url.path, body))
        self.times.append(time.monotonic())
        if self.fail_after is not None and len(self.bodies) > self.fail_after:
            return JSONResponse({"error": {"message": "out of order"}}, 500)
        native = request.url.path == "/generate"
        new = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        chat = "chat" in request.url.path
        events = self.native(new) if native else self.openai(new, chat)
        if body.get("stream"):
            return StreamingResponse(events, media_type="text/event-stream")
        last = [event async for event in events][-2 if native else -3]
        reply = json.loads(last.removeprefix("data: "))
        if not native:
            reply["usage"] = USAGE | {"completion_tokens": new}
        return JSONResponse(reply)

    async def tokens(self, new: int) -> AsyncIterator[int]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            while len(self.bodies) > 1 and self.most_at_once < self.meet:
                await asyncio.sleep(0.002)
            for number in range(1, new + 1):
                await asyncio.sleep(self.first_s if number == 1 else self.each_s)
                yield number
        finally:
            self.at_once -= 1

    async def native(self, new: int) -> AsyncIterator[str]:
        async for number in self.tokens(new):
            meta = {"completion_tokens": number, "prompt_tokens": 11, "cached_tokens": 0, "finish_reason": None}
            if number == new:
                meta |= {"cached_tokens": 4, "finish_reason": {"type": "length", "length": new}}
            yield f"data: {json.dumps({'text': 'x' * number, 'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"

    async def openai(self, new: int, chat: bool) -> AsyncIterator[str]:
        if chat:
            yield f"data: {json.dumps({'choices': [{'delta': {'role': 'assistant', 'content': ''}}]})}\n\n"
        async for _ in self.tokens(new):
            choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': USAGE | {'completion_tokens': new}})}\n\n"
        yield "data: [DONE]\n\n"


USAGE = {"prompt_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}


def serve(fake: TimedServer) -> tuple[uvicorn.Server, threading.Thread]:
    app = Starlette(
        routes=[
            Route("/v1/models", fake.info),
            Route("/model_info", fake.info),
            *(Route(path, fake.answer, methods=["POST"])
              for path in ("/generate", "/v1/completions", "/v1/chat/completions")),
        ]
    )  # fmt: skip
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    return server, thread
