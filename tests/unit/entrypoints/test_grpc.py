"""The native service over gRPC with a real channel: the same requests, bounds and keys as over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from scripted_server import CONTEXT, EOS, INFO, Answer, FakeServer, endless, serving, wait_until

from bough.core.bounds import BOUNDS
from bough.core.messages import End
from bough.entrypoints.grpc import bough_pb2 as pb
from bough.entrypoints.grpc.bough_pb2_grpc import BoughStub
from bough.entrypoints.grpc.guard import ADMIN_METHODS
from bough.entrypoints.grpc.server import GrpcServer
from bough.observability.health import State

Code = grpc.StatusCode


@contextlib.contextmanager
def listening(script: Any = None, **given: Any) -> Iterator[tuple[FakeServer, Any]]:
    """A scripted server with gRPC beside HTTP, and a channel to it."""
    with serving(script, **given) as running:

        async def open_server() -> GrpcServer:
            made = GrpcServer(running.service, "127.0.0.1", 0)
            await made.start()
            return made

        def call(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, running._loop).result(60)

        server = call(open_server())
        try:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield running, channel
        finally:
            call(server.close())


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[FakeServer, Any]]:
    with listening() as made:
        yield made


@pytest.fixture
def stub(opened: tuple[FakeServer, Any]) -> Any:
    return BoughStub(opened[1])


def test_generate(opened: tuple[FakeServer, Any], stub: Any) -> None:
    request = pb.GenerateRequest(text="Hi", rid="mine", sampling_params=pb.SamplingParams(max_new_tokens=20))
    told = list(stub.Generate(request))
    assert "".join(each.text for each in told) == "Hello there."
    assert bytes(token for each in told for token in each.output_ids) == b"Hello there."
    assert len(told) >= 2
    assert {each.rid for each in told} == {"mine"}
    assert not any(each.HasField("finish_reason") for each in told[:-1])
    last = told[-1]
    assert (last.finish_reason.type, last.finish_reason.matched_token_id) == ("stop", EOS)
    assert (last.usage.completion_tokens, last.usage.cached_tokens) == (len("Hello there."), 2)
    assert opened[0].engine.seen[-1].sampling.max_new_tokens == 20


def test_every_parameter_arrives(opened: tuple[FakeServer, Any], stub: Any) -> None:
    params = pb.SamplingParams(
        max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.2, seed=-3, n=2, stop=["A", "B"], stop_token_ids=[7], stop_regex=["x+"],
        ignore_eos=True, skip_special_tokens=False, no_stop_trim=True, logit_bias={3: 1.5}, allowed_token_ids=[1, 2],
        regex="a*", logit_processor=None, bad_words=["no"],
    )  # fmt: skip
    params.custom_params.update({"k": 1.5, "t": "x"})
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=[65, 66]), sampling_params=params, priority=4, cache_salt="s", extra_key="e", stream=False,
        logprobs=pb.LogprobOptions(start=0, top=2, token_ids=[65], text=True),
    )  # fmt: skip
    told = list(stub.Generate(request))
    assert sorted({each.index for each in told}) == [0, 1]
    seen = opened[0].engine.seen[-1]
    sampling = seen.sampling
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.temperature) == (9, 2, 0.7)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 5, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.stop, sampling.stop_token_ids, sampling.stop_regex) == (("A", "B"), (7,), ("x+",))
    assert (sampling.ignore_eos, sampling.skip_special_tokens, sampling.no_stop_trim) == (True, False, True)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({3: 1.5}, (1, 2))
    assert sampling.grammar is not None
    assert (sampling.grammar.kind, sampling.grammar.source) == ("regex", "a*")
    assert sampling.custom_params == {"k": 1.5, "t": "x"}
    assert {message.sampling.seed for message in opened[0].engine.seen[-2:]} == {-3, -2}
    assert (seen.priority, seen.namespace, seen.stream) == (4, "e\ns", True)
    first = next(each for each in told if each.input_logprobs)
    assert [each.token_id for each in first.input_logprobs] == [65, 66]
    assert not first.input_logprobs[0].HasField("logprob")
    assert first.input_logprobs[1].logprob == -1.5
    scored = next(each for each in told if each.output_logprobs).output_logprobs[0]
    assert (scored.text, scored.logprob, len(scored.top)) == ("H", -0.5, 2)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pb.GenerateRequest(), "no prompt"),
        (pb.GenerateRequest(text=""), "empty"),
        (pb.GenerateRequest(input_ids=pb.TokenIds(ids=[999])), "999"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=-1)), "temperature"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(n=1000)), "n is too large: 1000"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(stop=["x"] * 40)), "stop"),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(regex="a", ebnf="b")), "regex"),
        (pb.GenerateRequest(text="a", logprobs=pb.LogprobOptions(top=5000)), "top_logprobs_num"),
        (pb.GenerateRequest(text="a", rid="x" * 300), "rid"),
        (pb.GenerateRequest(text="a" * 5000), "tokens"),
    ],
)
def test_wrong_requests(stub: Any, request_: Any, says: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request_))
    assert refused.value.code() is Code.INVALID_ARGUMENT
    assert says in refused.value.details()
    assert dict(refused.value.trailing_metadata())["bough-code"]


def test_metadata_is_bounded_as_headers_are(stub: Any) -> None:
    most = BOUNDS["header_bytes"].most
    assert stub.GetLoads(pb.GetLoadsRequest(), metadata=(("x-filler", "x" * (most // 2)),)) is not None
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetLoads(pb.GetLoadsRequest(), metadata=(("x-filler", "x" * 2 * most),))
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED
    assert "metadata" in refused.value.details()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (End(reason="error", message="it broke", status=500), Code.INTERNAL),
        (End(reason="abort", message="too late", status=504, code="deadline_exceeded"), Code.DEADLINE_EXCEEDED),
        (End(reason="abort", message="the queue is full", status=429), Code.RESOURCE_EXHAUSTED),
    ],
)
def test_engine_failures(end: End, code: Any) -> None:
    with listening(Answer(pieces=["one"], end=end)) as (_, channel), pytest.raises(grpc.RpcError) as failed:
        list(BoughStub(channel).Generate(pb.GenerateRequest(text="a")))
    assert (failed.value.code(), failed.value.details()) == (code, end.message)


def test_bugs_show_nothing_of_themselves() -> None:
    with listening() as (running, channel):

        async def broken(*_: object) -> None:
            raise RuntimeError("secret at 0xdeadbeef")

        running.service.engine_client.submit_batch = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(grpc.RpcError) as failed:
            list(BoughStub(channel).Generate(pb.GenerateRequest(text="a")))
        assert failed.value.code() is Code.INTERNAL
        assert "secret" not in failed.value.details()


def test_leaving_and_deadlines_end_requests() -> None:
    with listening(endless()) as (running, channel):
        stub = BoughStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="a"))
        assert next(call).text
        call.cancel()
        for time_s in (0.3, 3, 30):  # the first may end before the server has heard of it
            with pytest.raises(grpc.RpcError) as late:
                list(stub.Generate(pb.GenerateRequest(text="a"), timeout=time_s))
            assert late.value.code() is Code.DEADLINE_EXCEEDED
            if len(running.engine.seen) == 2:
                break
        assert running.engine.seen[0].deadline_s == 0.0
        assert running.engine.seen[1].deadline_s > 0
        wait_until(lambda: len(running.engine.aborted) == 2)


def test_aborting_by_name() -> None:
    with listening(endless()) as (_, channel):
        stub = BoughStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="a", rid="one"))
        next(call)
        assert stub.Abort(pb.AbortRequest(rid="on")).aborted == 0
        assert stub.Abort(pb.AbortRequest(rid="one")).aborted == 1
        assert list(call)[-1].finish_reason.type == "abort"
        with pytest.raises(grpc.RpcError):
            stub.Abort(pb.AbortRequest())


# -- many over one stream -------------------------------------------------------------------------


def generate(rid: str, text: str = "a", **fields: Any) -> Any:
    return pb.GenerateCommand(generate=pb.GenerateRequest(text=text, rid=rid, **fields))


def test_many_over_one_stream(stub: Any) -> None:
    bad = generate("bad", sampling_params=pb.SamplingParams(temperature=-1))
    told = list(stub.GenerateMany(iter([generate("one"), bad, generate("two"), generate("")])))
    texts: dict[str, str] = {}
    for each in told:
        texts[each.rid] = texts.get(each.rid, "") + each.text
    assert len(texts) == 4
    assert sorted(texts.values()) == ["", "Hello there.", "Hello there.", "Hello there."]
    errors = [each for each in told if each.HasField("error")]
    assert [(each.rid, each.error.status, each.error.param) for each in errors] == [("bad", 400, "temperature")]
    assert sum(each.finish_reason.type == "stop" for each in told) == 3


def test_a_conversation_over_one_stream() -> None:
    with listening(endless()) as (running, channel):

        async def talk() -> None:
            async with grpc.aio.insecure_channel(channel._channel.target().decode()) as made:
                call = BoughStub(made).GenerateMany()
                await call.write(generate("one"))
                assert (await call.read()).rid == "one"
                await call.write(generate("one"))
                await call.write(generate("two"))
                seen: list[Any] = []
                while not any(each.HasField("error") for each in seen) or not any(each.rid == "two" for each in seen):
                    seen.append(await call.read())
                assert [each.error.param for each in seen if each.HasField("error")] == ["rid"]
                assert {each.rid for each in seen} == {"one", "two"}
                await call.write(pb.GenerateCommand(abort_rid="one"))
                while not (last := await call.read()).HasField("finish_reason"):
                    pass
                assert (last.rid, last.finish_reason.type) == ("one", "abort")
                assert (await call.read()).rid == "two"
                call.cancel()

        asyncio.run(talk())
        wait_until(lambda: len(running.engine.aborted) == 2)


# -- the rest -------------------------------------------------------------------------------------


def test_tokens(stub: Any) -> None:
    made = stub.Tokenize(pb.TokenizeRequest(text="Hi"))
    assert (list(made.ids), made.max_model_len) == ([72, 105], CONTEXT)
    assert stub.Detokenize(pb.DetokenizeRequest(ids=[72, 105, EOS])).text == "Hi"
    assert stub.Detokenize(pb.DetokenizeRequest(ids=[72, EOS], skip_special_tokens=False)).text == "H<|im_end|>"
    with pytest.raises(grpc.RpcError):
        stub.Detokenize(pb.DetokenizeRequest(ids=[-1]))


def test_a_model_that_generates_does_not_embed(stub: Any) -> None:
    for call, message in ((stub.Embed, pb.EmbedRequest), (stub.Classify, pb.ClassifyRequest)):
        for request in (message(text="a"), message()):
            with pytest.raises(grpc.RpcError) as refused:
                call(request)
            assert refused.value.code() is Code.INVALID_ARGUMENT


def test_telling(stub: Any) -> None:
    assert [model.id for model in stub.ListModels(pb.ListModelsRequest()).models] == ["fake"]
    model = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.max_model_len, model.vocab_size) == ("fake", CONTEXT, 258)
    assert model.details["has_chat_template"] is True
    server = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.version
    assert server.details["max_queued_requests"] == 4096
    assert "api_key" not in server.details
    load = stub.GetLoads(pb.GetLoadsRequest()).loads[0]
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_waiting_tokens) == (2, INFO["queued"], 30)
    assert (load.num_used_tokens, load.max_total_num_tokens) == (50 * 16, 100 * 16)


def test_control() -> None:
    with listening(admin_api_key="s4cret", api_key="s3cret") as (running, channel):
        stub = BoughStub(channel)
        key, admin = ([("authorization", f"Bearer {each}")] for each in ("s3cret", "s4cret"))
        stub.FlushCache(pb.FlushCacheRequest(), metadata=key)
        running.engine.flush_error = "requests are running"
        with pytest.raises(grpc.RpcError) as busy:
            stub.FlushCache(pb.FlushCacheRequest(), metadata=key)
        assert busy.value.code() is Code.FAILED_PRECONDITION
        stub.PauseGeneration(pb.PauseGenerationRequest(mode="retract"), metadata=admin)
        assert running.engine.calls[-1].mode == "retract"
        stub.ContinueGeneration(pb.ContinueGenerationRequest(), metadata=admin)
        told = stub.StartProfile(pb.StartProfileRequest(num_steps=3), metadata=admin)
        assert told.details["fake"] is True
        assert (running.engine.calls[-1].start, running.engine.calls[-1].num_steps) == (True, 3)
        stub.StopProfile(pb.StopProfileRequest(), metadata=admin)
        assert running.engine.calls[-1].start is False
        with pytest.raises(grpc.RpcError):
            stub.StartProfile(pb.StartProfileRequest(num_steps=-1), metadata=admin)
        with pytest.raises(grpc.RpcError) as wrong:
            stub.PauseGeneration(pb.PauseGenerationRequest(mode="sideways"), metadata=admin)
        assert wrong.value.code() is Code.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as forbidden:
            stub.Abort(pb.AbortRequest(abort_all=True), metadata=key)
        assert forbidden.value.code() is Code.PERMISSION_DENIED
        assert stub.Abort(pb.AbortRequest(abort_all=True), metadata=admin).aborted == 0


USER = [{"role": "user", "content": "Hi"}]


def call(stub: Any, path: str, body: Any, **more: Any) -> list[Any]:
    request = pb.CallRequest(path=path, json=body if isinstance(body, str) else json.dumps(body))
    return [json.loads(each.json) for each in stub.Call(request, **more)]


def test_json_routes_are_those_of_http(opened: tuple[FakeServer, Any], stub: Any) -> None:
    running = opened[0]
    for path, body in (
        ("/v1/chat/completions", {"messages": USER, "rid": "mine"}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 9}),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [1]}),
        ("/generate", {"text": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
    ):
        (over_grpc,) = call(stub, path, body, timeout=60)
        over_http = httpx.post(running.url + path, json=body).json()
        assert over_grpc.keys() == over_http.keys()
        for name in ("choices", "content", "text", "tokens", "scores"):
            assert over_grpc.get(name) == over_http.get(name)
    chunks = call(stub, "/v1/chat/completions", {"messages": USER, "stream": True})
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == "Hello there."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    kinds = [each["type"] for each in call(stub, "/v1/messages", {"messages": USER, "max_tokens": 9, "stream": True})]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": -5}, "max_tokens"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 10**12}, "max_output_tokens"),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": -5}}, "max_new_tokens"),
    ],
)
def test_json_routes_refuse_in_their_own_words(stub: Any, path: str, body: Any, param: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(stub, path, body)
    assert param in refused.value.details()
    assert ("max_new_tokens" in refused.value.details()) is (param == "max_new_tokens")
    assert dict(refused.value.trailing_metadata())["bough-param"] == param


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/nowhere", {}, Code.NOT_FOUND),
        ("/pause_generation", {}, Code.NOT_FOUND),
        ("/v1/chat/completions", "{", Code.INVALID_ARGUMENT),
        ("/v1/chat/completions", {"messages": []}, Code.INVALID_ARGUMENT),
        ("/v1/chat/completions", {"messages": USER, "model": "other"}, Code.NOT_FOUND),
        ("/v1/embeddings", {"input": "Hi"}, Code.INVALID_ARGUMENT),
        ("/api/chat", {"model": "fake", "messages": USER}, Code.INVALID_ARGUMENT),
    ],
)
def test_json_routes_refuse_as_over_http(stub: Any, path: str, body: Any, code: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(stub, path, body, timeout=60)
    assert refused.value.code() is code
    assert refused.value.details()


def test_leaving_a_json_route_ends_its_request() -> None:
    with listening(endless()) as (running, channel):
        body = json.dumps({"messages": USER, "stream": True})
        answers = BoughStub(channel).Call(pb.CallRequest(path="/v1/chat/completions", json=body))
        next(answers)
        answers.cancel()
        wait_until(lambda: running.engine.aborted)
        assert running.engine.aborted == [running.engine.seen[-1].id]


def every_method() -> list[tuple[str, Any]]:
    service = pb.DESCRIPTOR.services_by_name["Bough"]
    return [(method.name, getattr(pb, method.input_type.name)) for method in service.methods]


@pytest.mark.parametrize("sent", [(), (("authorization", "Bearer wrong"),), (("authorization", "s3cret"),)])
def test_without_the_key_nothing_opens(sent: Any) -> None:
    with listening(api_key="s3cret", admin_api_key="s4cret") as (running, channel):
        for name, message in every_method():
            call = channel.stream_stream(
                f"/bough.v1.Bough/{name}",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=bytes,
            )
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([message()]), metadata=sent, timeout=60))
            assert refused.value.code() is Code.UNAUTHENTICATED, name
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            ProtoReflectionDescriptorDatabase(channel).get_services()
    assert not running.engine.seen


def test_admin_methods_need_an_admin_key(stub: Any) -> None:
    protected = {name.rpartition("/")[2] for name in ADMIN_METHODS}
    assert protected == {"PauseGeneration", "ContinueGeneration", "StartProfile", "StopProfile"}
    with pytest.raises(grpc.RpcError) as refused:
        stub.PauseGeneration(pb.PauseGenerationRequest())
    assert refused.value.code() is Code.UNAUTHENTICATED


def test_isolated_caches_are_those_of_http() -> None:
    import httpx

    with listening(isolate_cache=True, api_key="a") as (running, channel):
        key = [("authorization", "Bearer a")]
        list(BoughStub(channel).Generate(pb.GenerateRequest(text="a"), metadata=key))
        httpx.post(f"{running.url}/generate", json={"text": "a"}, headers=dict(key))
        over_grpc, over_http = (message.namespace for message in running.engine.seen)
    assert over_grpc == over_http != ""


def test_large_messages_are_refused() -> None:
    with listening(max_body_bytes=10_000) as (_, channel), pytest.raises(grpc.RpcError) as refused:
        list(BoughStub(channel).Generate(pb.GenerateRequest(text="a" * 20_000)))
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED


def test_overload() -> None:
    with listening(endless(), max_queued_requests=1) as (running, channel):
        stub = BoughStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(text="a")) for _ in range(running.service.admission.max_requests)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(pb.GenerateRequest(text="a")))
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        assert int(dict(refused.value.trailing_metadata())["retry-after"]) >= 1
        for call in calls:
            call.cancel()


def test_health(opened: tuple[FakeServer, Any]) -> None:
    running, channel = opened
    health = health_pb2_grpc.HealthStub(channel)
    Response = health_pb2.HealthCheckResponse
    assert health.Check(health_pb2.HealthCheckRequest(service="bough.v1.Bough")).status == Response.SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert unknown.value.code() is Code.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == Response.SERVING
    beat = running.pulse.beat
    running.pulse.beat = type(beat)(**{**_fields(beat), "state": State.DRAINING})
    try:
        assert next(watch).status == Response.NOT_SERVING
    finally:
        running.pulse.beat = beat
        watch.cancel()


def _fields(beat: Any) -> dict[str, Any]:
    return {name: getattr(beat, name) for name in ("steps", "age_s", "state", "num_running", "num_waiting", "pid")}


def test_reflection(opened: tuple[FakeServer, Any]) -> None:
    database = ProtoReflectionDescriptorDatabase(opened[1])
    assert {"bough.v1.Bough", "grpc.health.v1.Health"} <= set(database.get_services())
    found = descriptor_pool.DescriptorPool(database).FindServiceByName("bough.v1.Bough")
    assert "GenerateMany" in found.methods_by_name


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    import grpc_tools

    root = Path(__file__).parents[3]
    out = tmp_path / "set"
    include = Path(grpc_tools.__file__).parent / "_proto"
    path = "bough/entrypoints/grpc/bough.proto"
    assert protoc.main(["", f"-I{root}", f"-I{include}", f"--descriptor_set_out={out}", path]) == 0
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    ours = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(ours)
    compiled.ClearField("source_code_info")
    for message in (compiled, ours):
        for each in _all_fields(message):
            each.ClearField("json_name")
    assert compiled == ours, "run the command in bough/entrypoints/grpc/__init__.py"


def _all_fields(proto: Any) -> Iterator[Any]:
    for message in [*proto.message_type, *(inner for outer in proto.message_type for inner in outer.nested_type)]:
        yield from message.field


def test_metadata_is_bounded(opened: tuple[FakeServer, Any], stub: Any) -> None:
    """As the headers of HTTP are."""
    asked = pb.GenerateRequest(text="Hi")
    seen = len(opened[0].engine.seen)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(asked, metadata=[(f"x-{at}", "y" * 1000) for at in range(70)]))
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED
    assert len(opened[0].engine.seen) == seen
    assert list(stub.Generate(asked, metadata=[(f"x-{at}", "y" * 1000) for at in range(10)]))
