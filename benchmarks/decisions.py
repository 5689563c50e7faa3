"""Measurements behind docs/decisions: channels, request bodies, routing, grammars and launches, beside the libraries.

    python benchmarks/decisions.py channels       # needs pyzmq
    python benchmarks/decisions.py bodies         # needs pydantic
    python benchmarks/decisions.py routing        # needs fastapi
    python benchmarks/decisions.py grammars       # needs jsonschema
    python benchmarks/decisions.py launches       # needs triton; no GPU

Contenders take turns in one run. Times are the least of all turns, because other work of a machine only adds to them.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from bough.core.messages import Delta, Generate, ToEngine, pack_ids
from bough.core.sampling import SamplingParams
from bough.ipc import Codec, Inbox, Outbox

TURNS = 5
MESSAGE = Generate(id=7, rid="r" * 24, prompt=pack_ids(list(range(512))), sampling=SamplingParams(max_new_tokens=64))


def least_us(work: Callable[[], Any], count: int) -> float:
    """Microseconds of CPU time that one call takes."""
    best = float("inf")
    for _ in range(TURNS):
        began = time.process_time()
        for _ in range(count):
            work()
        best = min(best, (time.process_time() - began) / count)
    return 1e6 * best


# -- channels ---------------------------------------------------------------------------------------------------------


def _echo_bough(directory: str) -> None:
    inbox: Inbox[Any] = Inbox(f"{directory}/there", ToEngine)
    outbox = Outbox(f"{directory}/back")
    while True:
        for message in inbox.drain(block_s=10.0):
            if message.rid == "end":
                return
            outbox.send(message)


def _echo_zmq(directory: str) -> None:
    import zmq

    context, codec = zmq.Context(), Codec[Any](ToEngine)
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind(f"ipc://{directory}/there")
    outbox.connect(f"ipc://{directory}/back")
    while True:
        message = codec.decode(inbox.recv())
        if message.rid == "end":
            return
        outbox.send(codec.encode(message))


class _Bough:
    def __init__(self, directory: str) -> None:
        self._inbox: Inbox[Any] = Inbox(f"{directory}/back", ToEngine)
        self._outbox = Outbox(f"{directory}/there")

    def send(self, message: Any) -> None:
        self._outbox.send(message)

    def receive(self) -> list[Any]:
        return self._inbox.drain(block_s=10.0)


class _Zmq:
    def __init__(self, directory: str) -> None:
        import zmq

        self._context, self._codec = zmq.Context(), Codec[Any](ToEngine)
        self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._inbox.bind(f"ipc://{directory}/back")
        self._outbox.connect(f"ipc://{directory}/there")

    def send(self, message: Any) -> None:
        self._outbox.send(self._codec.encode(message))

    def receive(self) -> list[Any]:
        return [self._codec.decode(self._inbox.recv())]


def channels() -> None:
    """Round trips of one request of 512 tokens between two processes, and of bursts of 64."""
    ends = {"bough's sockets": (_Bough, _echo_bough), "pyzmq": (_Zmq, _echo_zmq)}
    running, found = {}, {}
    for name, (end, echo) in ends.items():
        directory = tempfile.mkdtemp()
        other = multiprocessing.get_context("spawn").Process(target=echo, args=(directory,), daemon=True)
        other.start()
        running[name] = end(directory)
        found[name] = {"one": [], "burst": []}
    for near in running.values():
        _round(near, 1)  # both ends are there
    for _ in range(TURNS):
        for name, near in running.items():
            found[name]["one"] += [_round(near, 1) for _ in range(400)]
            found[name]["burst"] += [_round(near, 64) / 64 for _ in range(50)]
    for name, times in found.items():
        one, burst = times["one"], times["burst"]
        print(
            f"{name:16} round trip: median {1e6 * statistics.median(one):.0f} us, least {1e6 * min(one):.0f};"
            f" in bursts of 64, per message: median {1e6 * statistics.median(burst):.1f} us, least {1e6 * min(burst):.1f}"
        )
        running[name].send(msgspec.structs.replace(MESSAGE, rid="end"))


def _round(near: Any, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        near.send(MESSAGE)
    got = 0
    while got < count:
        got += len(near.receive())
    return time.perf_counter() - began


# -- bodies -----------------------------------------------------------------------------------------------------------


def bodies() -> None:
    """Validates a chat request of ten messages and two tools, and encodes a streamed chunk."""
    from pydantic import BaseModel

    from bough.entrypoints.http.openai.schema import ChatRequest

    class Function(BaseModel):
        name: str
        description: str | None = None
        parameters: dict[str, Any] | None = None

    class Tool(BaseModel):
        type: str
        function: Function

    class Message(BaseModel):
        role: str
        content: str | list[dict[str, Any]] | None = None
        name: str | None = None

    class Chat(BaseModel):
        model: str
        messages: list[Message]
        temperature: float | None = None
        top_p: float | None = None
        max_tokens: int | None = None
        stop: str | list[str] | None = None
        stream: bool = False
        seed: int | None = None
        tools: list[Tool] | None = None

    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "d" * 80, "parameters": parameters}}
    turns = [{"role": role, "content": "word " * 60} for _ in range(5) for role in ("user", "assistant")]
    body = json.dumps(
        {"model": "m", "messages": turns, "temperature": 0.3, "max_tokens": 64, "stream": True, "tools": [tool, tool]}
    ).encode()
    decoder = msgspec.json.Decoder(ChatRequest)
    print(f"a body of {len(body):,} bytes")
    ours = least_us(lambda: decoder.decode(body), 2000)
    theirs = least_us(lambda: Chat.model_validate_json(body), 2000)
    print(f"  msgspec  {ours:6.1f} us (a schema of {len(ChatRequest.__struct_fields__)} fields)")
    print(f"  pydantic {theirs:6.1f} us (a schema of {len(Chat.model_fields)} fields)")

    class Piece(BaseModel):
        id: int
        text: str
        index: int = 0

    delta, piece = Delta(id=1, text="word"), Piece(id=1, text="word")
    encode = msgspec.json.Encoder().encode
    print("a streamed piece")
    print(f"  msgspec  {least_us(lambda: encode(delta), 20_000):6.2f} us")
    print(f"  pydantic {least_us(piece.model_dump_json, 20_000):6.2f} us")


# -- routing ----------------------------------------------------------------------------------------------------------


def routing() -> None:
    """CPU time of a POST whose handler reads a small JSON body and replies, without the HTTP server around it."""
    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from bough.entrypoints.http.direct import Direct

    class Body(BaseModel):
        text: str
        n: int = 1

    class Asked(msgspec.Struct):
        text: str
        n: int = 1

    decode, reply = msgspec.json.Decoder(Asked).decode, b'{"ok":true}'

    async def handle(request: Request) -> Response:
        decode(await request.body())
        return Response(reply, media_type="application/json")

    others = [Route(f"/v1/other{at}", handle, methods=["POST"]) for at in range(60)]
    plain = Starlette(routes=[*others, Route("/generate", handle, methods=["POST"])])
    direct = Direct(plain, {("POST", "/generate"): handle})
    framework = FastAPI()
    for at in range(60):
        framework.add_api_route(f"/v1/other{at}", handle, methods=["POST"])

    async def generate(body: Any) -> dict[str, bool]:
        return {"ok": True}

    generate.__annotations__ = {"body": Body}  # a name within a function means nothing to FastAPI
    framework.post("/generate")(generate)

    apps: dict[str, Any] = {"bough's direct routes": direct, "Starlette": plain, "FastAPI": framework}
    for name, app in apps.items():
        print(f"{name:22} {asyncio.run(_least_post_us(app)):6.1f} us a request")


async def _least_post_us(app: Callable[..., Awaitable[None]], count: int = 1000) -> float:
    body = b'{"text": "Once upon a time", "n": 1}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200

    best = float("inf")
    for _ in range(TURNS):
        began = time.process_time()
        for _ in range(count):
            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/generate",
                "raw_path": b"/generate", "query_string": b"", "root_path": "", "scheme": "http", "headers": headers,
                "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
            }  # fmt: skip
            await app(scope, receive, send)
        best = min(best, (time.process_time() - began) / count)
    return 1e6 * best


# -- grammars ---------------------------------------------------------------------------------------------------------

_VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"<end>"]
_END = 256
_MOST_BYTES = 3000


def grammars() -> None:
    """Random answers under each of 200 schemas, by bough's compiler and by each library's own: do they fit the schema?"""
    from tests.unit.grammar.test_schema import SCHEMAS, validator

    entries = [each for each in SCHEMAS if "nullable" not in json.dumps(each)]  # which the validator does not know
    compilers = {
        "bough's grammar": _bough_grammar,
        "xgrammar's own": _xgrammar_schema,
        "llguidance's own": _llguidance_schema,
    }
    for name, compile_ in compilers.items():
        refused = wrong_schemas = wrong = right = endless = 0
        for entry in entries:
            schema, rng, seen = entry["schema"], random.Random(entry["name"]), set()
            check = validator(json.dumps(schema))
            try:
                make = compile_(schema)
            except Exception:
                refused += 1
                continue
            for _ in range(20):
                answer = _random_answer(make(), rng)
                fits = None if answer is None else _fits(check, answer)
                endless += fits is None
                right += fits is True
                wrong += fits is False
                seen.add(fits)
            wrong_schemas += False in seen
        print(
            f"{name:17} refuses {refused} of {len(entries)} schemas; of {right + wrong:,} answers {wrong} do not fit"
            f" ({wrong_schemas} schemas); {endless} went on for more than {_MOST_BYTES:,} bytes"
        )


def _fits(check: Any, answer: bytes) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return bool(check.is_valid(value))


def _random_answer(matcher: Any, rng: random.Random) -> bytes | None:
    """Bytes that the matcher allows, closing more often than chance would. None: it does not end."""
    import numpy as np

    mask, answer = np.zeros(9, np.int32), bytearray()
    while len(answer) < _MOST_BYTES:
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:257])
        if _END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return bytes(answer)
        allowed = allowed[allowed < 256]
        if not len(allowed):
            return None
        closing = [byte for byte in allowed if byte in b'"]},']
        chosen = int(rng.choice(closing) if closing and rng.random() < 0.4 else rng.choice(list(allowed)))
        assert matcher.accept(chosen)
        answer.append(chosen)
    return None


def _xgrammar_compiler() -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo(_VOCABULARY, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[_END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class _XgrammarWalk:
    def __init__(self, compiled: Any) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)

    def fill(self, mask: Any) -> None:
        import torch

        given = torch.from_numpy(mask.reshape(1, -1))
        given.fill_(-1)
        self._matcher.fill_next_token_bitmask(given)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


def _bough_grammar(schema: Any) -> Callable[[], Any]:
    from bough.grammar.notation import to_ebnf
    from bough.grammar.sources import grammar_of

    compiled = _xgrammar_compiler().compile_grammar(to_ebnf(grammar_of("json_schema", json.dumps(schema), 8)))
    return lambda: _XgrammarWalk(compiled)


def _xgrammar_schema(schema: Any) -> Callable[[], Any]:
    compiled = _xgrammar_compiler().compile_json_schema(json.dumps(schema), any_whitespace=True)
    return lambda: _XgrammarWalk(compiled)


class _LlguidanceWalk:
    def __init__(self, tokenizer: Any, grammar: str) -> None:
        import llguidance

        self._matcher = llguidance.LLMatcher(tokenizer, grammar)

    def fill(self, mask: Any) -> None:
        import llguidance.numpy
        import numpy as np

        wide = np.zeros((1, -(-self._size // 32)), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, wide, 0)
        bits = np.unpackbits(wide.view(np.uint8), bitorder="little")[:256]
        out = np.zeros(288, np.uint8)
        out[:256], out[_END] = bits, self._matcher.is_accepting()
        mask[:] = np.packbits(out, bitorder="little").view(np.int32)

    _size = 257

    def accept(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)


def _llguidance_schema(schema: Any) -> Callable[[], Any]:
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    _LlguidanceWalk._size = tokenizer.vocab_size
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if problem := llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
        raise ValueError(problem)
    return lambda: _LlguidanceWalk(tokenizer, grammar)


# -- launches ---------------------------------------------------------------------------------------------------------


def launches() -> None:
    """The host's time for one launch of a compiled kernel with ten arguments, up to the driver, which is a fake."""
    import torch
    import triton

    from bough.kernels import launching
    from tests.kernels.test_launching import USUAL, Device, _scaled

    device = Device()
    device.launcher_cls = lambda _source, _metadata: lambda *_: None  # type: ignore[assignment, misc]
    triton.runtime.driver._active = device
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    torch._C._cuda_getCurrentRawStream = lambda _: 7
    launching.has_pdl = lambda _: True  # type: ignore[assignment]
    tensors, integers, floats, (*constants, pdl), num_warps, counts = USUAL
    launcher = launching.Launcher(_scaled)

    def by_triton() -> None:
        numbers = (*integers, *counts, *floats)
        _scaled[(3, 2)](*tensors, *numbers, *constants, pdl, num_warps=num_warps, launch_pdl=True)

    def past_triton() -> None:
        launcher.launch((3, 2), tensors, integers, floats, tuple(constants), num_warps, counts)

    past_triton()
    print(
        f"Triton {triton.__version__}: {least_us(by_triton, 2000):.1f} us; Launcher: {least_us(past_triton, 2000):.1f} us"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    measurements = {
        "channels": channels,
        "bodies": bodies,
        "routing": routing,
        "grammars": grammars,
        "launches": launches,
    }
    measurements[sys.argv[1]]()
