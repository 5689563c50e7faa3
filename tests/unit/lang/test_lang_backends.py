"""The same programs on every kind of backend; requests checked against the official clients' own types."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import lang_toy_model as toy
import pytest
from anthropic.types import MessageCreateParams
from lang_fake_server import FakeServer
from lang_toy_engine import ToyEngine
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import BaseModel, TypeAdapter

import bough.lang as sgl
from bough.lang.backends.http import retry_delay_s
from bough.lang.backends.resolve import as_backend


class Answer(BaseModel):
    city: str
    sure: bool


@sgl.function
def capital(s, country):
    s += sgl.system("Be brief.")
    s += sgl.user(f"Capital of {country}?")
    s += sgl.assistant(sgl.gen("city", max_tokens=16, stop="\n"))
    s += sgl.user("Are you sure?")
    s += sgl.assistant(sgl.select("sure", ["yes", "no"]))


SCRIPT = [("Capital of France", "Paris")]


def make(kind: str, fake: FakeServer) -> Any:
    if kind == "native":
        return sgl.RuntimeEndpoint(fake.url)
    if kind == "openai chat":
        return sgl.OpenAI("toy", base_url=fake.url + "/v1", api_key="k")
    if kind == "openai chat, extensions":
        return sgl.OpenAI("toy", base_url=fake.url + "/v1", extensions=True)
    if kind == "openai completion":
        return sgl.OpenAI("toy", False, "chatml", base_url=fake.url + "/v1")
    if kind == "anthropic":
        return sgl.Anthropic("toy", base_url=fake.url, api_key="k")
    engine = ToyEngine()
    engine.fake.script = fake.script
    return engine


KINDS = ["native", "engine", "openai chat", "openai chat, extensions", "openai completion", "anthropic"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_one_program_on_every_backend(kind: str, stream: bool, fake: FakeServer) -> None:
    fake.script = SCRIPT
    state = capital.run(country="France", backend=make(kind, fake), stream=stream)
    assert "".join(state.text_iter("city")) == "Paris"
    assert state["city"] == "Paris"
    assert state["sure"] in ("yes", "no")
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[2]["content"] == "Paris"
    assert state.get_meta_info("city")["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "openai completion"])
def test_typed_generation_on_every_backend(kind: str, fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("Where?")
        s += sgl.assistant(sgl.gen("answer", schema=Answer))
        s += sgl.user("How many?")
        s += sgl.assistant(sgl.gen("count", dtype=int))
        s += sgl.user("Name?")
        s += sgl.assistant(sgl.gen_string("name"))

    state = program.run(backend=make(kind, fake))
    assert state["answer"] == Answer(city="word", sure=True)
    assert int(state["count"]) in (0, 3)
    assert state["name"].startswith('"')
    assert state["name"].endswith('"')


def test_chat_requests_are_what_the_official_client_would_send(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.system("S") + sgl.user("look " + sgl.image(b"\x89PNG....") + " there")
        s += sgl.assistant(sgl.gen("a", temperature=0.5, top_p=0.9, stop=["x"], max_tokens=9, n=2,
                                   frequency_penalty=0.1, presence_penalty=0.2, return_logprob=True))  # fmt: skip
        s += sgl.user("more") + sgl.assistant(sgl.gen("b", schema=Answer))

    program.run(backend=make("openai chat", fake))
    first, second = fake.bodies("/v1/chat/completions")
    for body in (first, second):
        TypeAdapter(chat_params.CompletionCreateParamsNonStreaming).validate_python(body)
    assert first["messages"][1]["content"] == [
        {"type": "text", "text": "look "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"\x89PNG....").decode()}},
        {"type": "text", "text": " there"},
    ]  # fmt: skip
    assert (first["temperature"], first["max_tokens"], first["n"], first["logprobs"]) == (0.5, 9, 2, True)
    assert "temperature" not in second
    assert second["response_format"]["json_schema"]["schema"]["properties"].keys() == {"city", "sure"}
    assert {h["authorization"] for h in fake.headers} == {"Bearer k"}


def test_completion_requests_are_what_the_official_client_would_send(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += (
            "One: "
            + sgl.gen("a", max_tokens=2, temperature=0, return_logprob=True)
            + " pick "
            + sgl.select("b", ["x", "yes"])
        )

    state = program.run(backend=make("openai completion", fake))
    generated, scored = fake.bodies("/v1/completions")
    for body in (generated, scored):
        TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
    prompt = f"One: {state['a']} pick "
    assert scored["prompt"] == [prompt + "x", prompt + "yes"]
    own = toy.tokenize(prompt)
    assert toy.VOCAB[own[-1]] == " "  # which "yes" merges with and "x" does not: both are scored from before it
    means = []
    for option in ("x", "yes"):
        logprobs = toy.input_logprobs(toy.tokenize(prompt + option))[len(own) - 1 :]
        means.append(sum(p for p in logprobs if p is not None) / len(logprobs))
    assert state.get_meta_info("b")["normalized_prompt_logprobs"] == pytest.approx(means)


def test_anthropic_requests_are_what_the_official_client_would_send(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.system("S") + sgl.user("look " + sgl.image(b"\xff\xd8\xff...") + sgl.image("https://x.test/y.png"))
        s += sgl.assistant(sgl.gen("a", temperature=0.5, top_k=3, stop="x", max_tokens=9))
        s += sgl.user("more") + sgl.assistant(sgl.gen("b", schema=Answer))

    program.run(backend=make("anthropic", fake))
    first, second = fake.bodies("/v1/messages")
    for body in (first, second):
        TypeAdapter(MessageCreateParams).validate_python(body)
    assert (first["system"], first["stop_sequences"], first["top_k"]) == ("S", ["x"], 3)
    image, url = first["messages"][0]["content"][1:]
    assert image["source"]["media_type"] == "image/jpeg"
    assert url["source"] == {"type": "url", "url": "https://x.test/y.png"}
    assert second["messages"][1]["role"] == "assistant"
    assert "city" in second["output_config"]["format"]["schema"]["properties"]
    assert fake.headers[0]["x-api-key"] == "k"
    assert fake.headers[0]["anthropic-version"]


@pytest.mark.parametrize(
    ("kind", "what", "names"),
    [
        ("openai chat", sgl.gen("x", regex="a+"), "regex"),
        ("openai chat", sgl.gen("x", top_k=3), "top_k"),
        ("openai chat", "partly " + sgl.gen("x"), "gen after text inside assistant"),
        ("openai chat", sgl.select("x", ["a", "b"], choices_method=sgl.greedy_token_selection), "GreedyTokenSelection"),
        ("openai completion", sgl.gen("x", json_schema={"type": "object"}), "json_schema"),
        ("openai completion", sgl.image(b"BM...") + sgl.gen("x"), "image"),
        ("anthropic", sgl.gen("x", n=2), " n"),
        ("anthropic", sgl.video(b"...", 4) + sgl.user_end() + sgl.assistant(sgl.gen("x")), "video"),
        ("anthropic", sgl.gen("x", regex="a+"), "regex"),
    ],
)
def test_what_a_backend_cannot_do_is_said_clearly(kind: str, what: Any, names: str, fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("Hi") + (sgl.user_begin() if "video" in names else sgl.assistant_begin()) + what

    with pytest.raises(sgl.ProgramError) as caught:
        program.run(backend=make(kind, fake))
    assert names in str(caught.value)
    assert "can't do" in str(caught.value)
    assert isinstance(caught.value.__cause__, sgl.Unsupported)
    assert caught.value.fix


def test_extensions_carry_the_native_parameters(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("Hi")
        s += sgl.assistant("The number is " + sgl.gen("x", regex="[0-9]{3}", top_k=5, min_tokens=2, stop_token_ids=[4]))

    state = program.run(backend=make("openai chat, extensions", fake))
    body = fake.bodies("/v1/chat/completions")[0]
    assert state["x"] == "000"
    assert (body["regex"], body["top_k"], body["min_tokens"], body["stop_token_ids"]) == ("[0-9]{3}", 5, 2, [4])
    assert body["messages"][-1] == {"role": "assistant", "content": "The number is"}
    assert body["continue_final_message"] is True


def test_programs_without_roles_reach_chat_models_as_one_message(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "Once upon " + sgl.gen("x", max_tokens=2) + " and " + sgl.gen("y", max_tokens=2)

    state = program.run(backend=make("anthropic", fake))
    bodies = fake.bodies("/v1/messages")
    assert bodies[1]["messages"] == [{"role": "user", "content": f"Once upon {state['x']} and "}]


def test_a_busy_api_is_asked_again(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.fail_with["/v1/chat/completions"] = (429, {"error": {"message": "slow down"}})
    pauses: list[tuple[str | None, int]] = []

    def pause(retry_after: str | None, attempt: int) -> float:
        pauses.append((retry_after, attempt))
        if len(pauses) == 2:
            fake.fail_with.clear()
        return 0.0

    monkeypatch.setattr("bough.lang.backends.http.retry_delay_s", pause)
    backend = sgl.OpenAI("toy", base_url=fake.url + "/v1", max_retries=3)
    capital.run(country="France", backend=backend, max_new_tokens=1)
    assert pauses == [(None, 0), (None, 1)]
    monkeypatch.undo()
    assert [retry_delay_s(None, 0), retry_delay_s(None, 1), retry_delay_s("7", 0)] == [0.5, 1.0, 7.0]
    fake.fail_with["/v1/chat/completions"] = (429, {"error": {"message": "slow down"}})
    with pytest.raises(sgl.ProgramError, match="slow down"):
        capital.run(country="France", backend=sgl.OpenAI("toy", base_url=fake.url + "/v1", max_retries=0))


def test_http_errors_say_what_the_server_said(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")

    fake.fail_with["/generate"] = (401, {"error": {"message": "bad key"}})
    with pytest.raises(sgl.ProgramError, match=r"(?s)answered 401.*bad key.*api_key") as caught:
        program.run(backend=sgl.RuntimeEndpoint(fake.url, api_key="wrong"))
    assert caught.value.__cause__.http_status == 401  # type: ignore[union-attr]
    assert fake.headers[-1]["authorization"] == "Bearer wrong"
    with pytest.raises(sgl.ProgramError, match="no answer from http://127"):
        program.run(backend=sgl.RuntimeEndpoint("http://127.0.0.1:9"))


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    """A server that answers each connection once, promises to keep it, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    reply = json.dumps({"text": "ok", "meta_info": {}}).encode()
    seen = []
    hung_up = threading.Semaphore(0)

    def answer_once() -> None:
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                seen.append(connection.recv(65536))
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(reply)}\r\n\r\n".encode()
                connection.sendall(head + reply)
            hung_up.release()

    thread = threading.Thread(target=answer_once, daemon=True)
    thread.start()

    @sgl.function
    def program(s):
        for _ in range(3):
            s += "x" + sgl.gen("a")
            assert hung_up.acquire(timeout=30)
            time.sleep(0.05)

    with listener:
        state = program.run(backend=sgl.RuntimeEndpoint(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        assert state.text() == "xokxokxok"
        thread.join(30)
    assert len(seen) == 3


def test_an_aborted_request_is_an_error(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")

    aborted = {"type": "abort", "message": "shutting down", "status_code": 503}
    monkeypatch.setattr(fake, "write", lambda prompt, params: ("", aborted))
    for stream in (False, True):
        state = program.bind().run_batch([{}], backend=sgl.RuntimeEndpoint(fake.url))[0]
        assert "shutting down" in str(state.error())
        if stream:
            state = program.run(backend=sgl.RuntimeEndpoint(fake.url), stream=True)
            assert "shutting down" in str(state.error())


def test_module_functions(fake: FakeServer) -> None:
    with pytest.raises(sgl.LangError, match="set_default_backend"):
        sgl.flush_cache()
    with pytest.raises(sgl.LangError, match="a str is not a backend"):
        sgl.set_default_backend("http://x")
    endpoint = sgl.RuntimeEndpoint(fake.url)
    sgl.set_default_backend(endpoint)
    assert sgl.get_server_info() == {"version": "toy"}
    assert endpoint.get_model_name() == "toy/toy-instruct"
    assert endpoint.get_chat_template().role_prefix_and_suffix["user"] == ("<|im_start|>user\n", "<|im_end|>\n")
    endpoint.cache_prefix("warm this up")
    fake.computed_tokens = 0
    endpoint.cache_prefix("warm this up")
    assert fake.computed_tokens == 1
    sgl.flush_cache()
    endpoint.cache_prefix("warm this up")
    assert fake.computed_tokens == 1 + len(toy.tokenize("warm this up"))
    with pytest.raises(sgl.Unsupported, match="flush_cache"):
        sgl.flush_cache(make("anthropic", fake))


def test_an_engine_is_a_backend_as_it_is(fake: FakeServer) -> None:
    engine = make("engine", fake)
    state = capital.run(country="Spain", backend=engine, max_new_tokens=2)
    assert state["city"] == toy.detokenize(
        toy.generate(
            toy.tokenize(
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital of Spain?<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
            16,
        )
    )
    scoring = [call for call in engine.calls if isinstance(call["prompt"], list)]
    assert len(scoring) == 1
    assert set(scoring[0]) == {"prompt", "sampling_params", "return_logprob", "logprob_start_len"}
    assert sgl.get_server_info(engine)["model_path"] == "toy/chatml-instruct"


def test_litellm(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reply(dict[str, Any]):
        def model_dump(self) -> dict[str, Any]:
            return dict(self)

    async def acompletion(**arguments: Any) -> Any:
        options = {key: arguments.pop(key) for key in ("api_base",)}
        assert options == {"api_base": "somewhere"}
        async with httpx.AsyncClient() as client:
            reply = await client.post(fake.url + "/v1/chat/completions", json=arguments)
        if not arguments.get("stream"):
            return Reply(reply.json())

        async def events() -> AsyncIterator[Reply]:
            for line in reply.text.splitlines():
                if line.startswith("data: {"):
                    yield Reply(json.loads(line[6:]))

        return events()

    with pytest.raises(sgl.LangError, match="pip install litellm"):
        sgl.LiteLLM("x/y")
    module = types.ModuleType("litellm")
    module.acompletion = acompletion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    fake.script = SCRIPT
    backend = sgl.LiteLLM("x/y", api_base="somewhere")
    for stream in (False, True):
        state = capital.run(country="France", backend=backend, stream=stream)
        assert state["city"] == "Paris"
        assert state["sure"] == "yes"


def test_pictures_and_films_reach_the_server(backend: sgl.RuntimeEndpoint, fake: FakeServer, tmp_path: Path) -> None:
    fake.model_info["image_token"] = "<pic>"
    picture = tmp_path / "p.png"
    picture.write_bytes(b"\x89PNG1234")

    @sgl.function
    def program(s):
        s += sgl.user("See " + sgl.image(str(picture)) + " and " + sgl.video(b"film", num_frames=4))
        s += sgl.assistant(sgl.gen("x", max_tokens=1))

    state = program.run(backend=backend)
    body = fake.bodies("/generate")[-1]
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG1234").decode()
    assert body["image_data"] == [url]
    film = "data:video/mp4;base64," + base64.b64encode(b"film").decode()
    assert body["video_data"] == [{"url": film, "num_frames": 4}]
    assert "See <pic> and <video>" in body["text"]
    assert state.messages()[0]["content"][1]["image_url"]["url"] == url

    @sgl.function
    def missing(s):
        s += sgl.image("no/such.png") + sgl.gen("x")

    with pytest.raises(sgl.ProgramError, match=r"can't read 'no/such\.png'"):
        missing.run(backend=backend)


LAUNCHER = """
import sys, argparse
sys.path[:0] = {paths!r}
from lang_fake_server import FakeServer
from lang_toy_engine import ToyEngine
import uvicorn
parser = argparse.ArgumentParser()
for flag in ("--host", "--port", "--log-level", "--model-path"):
    parser.add_argument(flag)
parser.add_argument("--trust-remote-code", action="store_true")
args = parser.parse_args()
assert args.trust_remote_code
if args.model_path == "broken":
    sys.exit(3)
uvicorn.run(FakeServer().app(), host=args.host, port=int(args.port), log_level="error")
"""


def test_runtime_starts_and_stops_a_server(tmp_path: Path) -> None:
    launcher = tmp_path / "launch.py"
    launcher.write_text(LAUNCHER.format(paths=[str(Path(__file__).parent)]))
    command = [sys.executable, str(launcher)]
    with sgl.Runtime(command=command, model_path="toy", trust_remote_code=True, tp_size=None) as runtime:
        state = capital.run(country="France", backend=runtime, max_new_tokens=2)
        assert state["sure"] in ("yes", "no")
        ids = runtime.get_tokenizer().encode("Hello the")
        assert runtime.get_tokenizer().decode(ids) == "Hello the"
        told = json.loads(runtime.generate("x", {"max_new_tokens": 2}, return_logprob=True, lora_path=None))
        assert told["meta_info"]["completion_tokens"] == 2

        async def stream() -> str:
            return "".join([piece async for piece in runtime.async_generate("x", {"max_new_tokens": 2})])

        assert asyncio.run(stream()) == json.loads(runtime.generate("x", {"max_new_tokens": 2}))["text"]
        process = runtime.process
        assert process is not None
    assert process.poll() is not None
    runtime.shutdown()
    with pytest.raises(sgl.LangError, match="exit code 3"):
        sgl.Runtime(command=command, model_path="broken", trust_remote_code=True)


def test_event_loops_that_have_ended_leave_no_connections(fake: FakeServer) -> None:
    endpoint = sgl.RuntimeEndpoint(fake.url)

    async def ask() -> None:
        await endpoint.async_server_info()

    def num_sockets() -> int:
        gc.collect()
        found = 0
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # another thread has just closed it
                found += "socket" in os.readlink(path)
        return found

    asyncio.run(ask())
    before = num_sockets()
    for _ in range(8):
        asyncio.run(ask())
    give_up_s = time.monotonic() + 20
    while num_sockets() > before + 2:  # the server's ends close a moment later
        assert time.monotonic() < give_up_s, "each loop's connection is still open"
        time.sleep(0.01)
    endpoint.shutdown()


def test_a_forgotten_engine_is_forgotten(fake: FakeServer) -> None:
    engines = [make("engine", fake) for _ in range(3)]
    are_there = [weakref.ref(engine) for engine in engines]
    for engine in engines:
        assert as_backend(engine) is as_backend(engine)
        assert capital.run(country="Spain", backend=engine, max_new_tokens=2)["city"]
    del engine, engines
    give_up_s = time.monotonic() + 20
    while any(each() is not None for each in are_there[:2]):  # the loop's thread lets go of its last task, too
        assert time.monotonic() < give_up_s, "only the last that was used is kept"
        gc.collect()
        time.sleep(0.01)


def test_openai_counts_its_tokens(fake: FakeServer) -> None:
    backend = sgl.OpenAI("toy", base_url=fake.url + "/v1", api_key="k")

    @sgl.function
    def program(s):
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("answer", max_tokens=3))

    program.run(backend=backend)
    once = (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens)
    assert once[0] > 0
    assert once[1] == 3
    program.run(backend=backend)
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (2 * once[0], 6)
    backend.token_usage.reset()
    assert backend.token_usage == sgl.TokenUsage()
