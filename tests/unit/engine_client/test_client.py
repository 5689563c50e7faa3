"""The engine client over real channels and the real detokenizer, with an engine that echoes prompts backwards."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from bough.core.errors import (
    BoughError,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from bough.core.messages import LogprobSpec, unpack_ids
from bough.core.sampling import SamplingParams
from bough.engine_client import EngineClient, Request, WorkHold
from bough.engine_client.replicas import Replicas
from bough.engine_client.request import pieces
from bough.engine_client.sessions import SessionParams
from bough.ipc import Endpoints
from bough.launch import ServerProcesses
from bough.observability.metrics import Sheet
from bough.observability.requests import RequestMeter
from bough.tokenizer import Tokenizer
from tests.unit.engine_client.conftest import WORKERS

SLOW, BAD = 7, 8
IDS = [100, 200, 300, 400]


def request(prompt: Any = IDS, max_new_tokens: int = 8, **more: Any) -> Request:
    names = set(SamplingParams.__struct_fields__)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, **{k: v for k, v in more.items() if k in names})
    return Request(prompt=prompt, sampling=sampling, **{k: v for k, v in more.items() if k not in names})


def echo(prompt: list[int], length: int) -> list[int]:
    return [prompt[-1 - i % len(prompt)] for i in range(length)]


async def live_in_engine(engine_client: EngineClient, expected: int) -> bool:
    give_up_s = time.monotonic() + 30
    while (await engine_client.info())["live"] != expected:
        if time.monotonic() > give_up_s:
            return False
        await asyncio.sleep(0.01)
    return True


async def test_a_whole_answer(engine_client: EngineClient, smollm: Tokenizer) -> None:
    (delta,) = await engine_client.collect(request())
    assert unpack_ids(delta.tokens).tolist() == echo(IDS, 8)
    assert delta.text == smollm.decode(echo(IDS, 8))
    assert delta.end is not None
    assert (delta.end.reason, delta.end.prompt_tokens, delta.end.completion_tokens) == ("length", 4, 8)
    assert engine_client.num_live == 0


async def test_streaming_equals_not_streaming(engine_client: EngineClient) -> None:
    (whole,) = await engine_client.collect(request("Hello there, wörld 🎉!", 12))
    (stream,) = await engine_client.submit(request("Hello there, wörld 🎉!", 12, stream=True))
    deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert b"".join(delta.tokens for delta in deltas) == whole.tokens
    assert [delta.end is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_a_request_that_need_not_stream_costs_the_engine_one_message(engine_client: EngineClient) -> None:
    before = (await engine_client.info())["sent"]
    await engine_client.collect(request(max_new_tokens=50))
    assert (await engine_client.info())["sent"] == before + 1
    await engine_client.collect(request(max_new_tokens=50, stop=("never",)))
    assert (await engine_client.info())["sent"] > before + 10, "stop strings must be seen as tokens come"


async def test_text_is_tokenised_as_the_tokenizer_does(engine_client: EngineClient, smollm: Tokenizer) -> None:
    text = "many words " * 15
    (stream,) = await engine_client.submit(request(text, 1))
    assert stream.prompt.tolist() == smollm.encode(text)
    await stream.collect()


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64])
async def test_a_session_keeps_what_was_sent_whatever_becomes_of_the_callers_array(
    engine_client: EngineClient, kind: type
) -> None:
    session = engine_client.sessions.open()
    buffer = np.array([50, 51, 52], kind)
    await engine_client.collect(request(buffer, 1, rid="first", session=SessionParams(id=session)))
    buffer[:] = 9
    (stream,) = await engine_client.submit(request([60], 1, session=SessionParams(id=session, rid="first")))
    assert stream.prompt.tolist()[:3] == [50, 51, 52]
    await stream.collect()


async def test_n_answers_have_seeds_of_their_own(engine_client: EngineClient) -> None:
    streams = await engine_client.submit(request(n=3, seed=10, rid="triple"))
    assert [stream.index for stream in streams] == [0, 1, 2]
    assert len({stream.id for stream in streams}) == 3
    assert {stream.rid for stream in streams} == {"triple"}
    for stream in streams:
        assert (await stream.collect()).end is not None
    last = (await engine_client.info())["last"]
    assert (last["seed"], last["n"], last["rid"]) == (12, 1, "triple")


@pytest.mark.parametrize(
    ("length", "room", "wanted", "expected"),
    [(250, "exact", 6, 6), (250, "at_most", 128, 6), (10, "fill", 128, 246), (10, "at_most", 20, 20)],
)
async def test_lengths_are_made_to_fit(
    engine_client: EngineClient, length: int, room: Any, wanted: int, expected: int
) -> None:
    await engine_client.collect(request([50] * length, wanted, room=room))
    assert (await engine_client.info())["last"]["max_new_tokens"] == expected


@pytest.mark.parametrize(("least", "expected"), [(100, 6), (6, 6), (3, 3)])
async def test_the_least_length_is_made_to_fit_as_well(engine_client: EngineClient, least: int, expected: int) -> None:
    """An answer that may have 6 tokens can't be made to have 100: the engine would never end it."""
    await engine_client.collect(request([50] * 250, 128, room="at_most", min_new_tokens=least))
    last = (await engine_client.info())["last"]
    assert (last["max_new_tokens"], last["min_new_tokens"]) == (6, expected)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request([50] * 250, 7), PromptTooLong, "257"),
        (request([50] * 256, 1, room="fill"), PromptTooLong, "256 tokens"),
        (request("word " * 400_000, 1, room="fill"), PromptTooLong, "at least"),
        (request([]), InvalidRequest, "empty"),
        (request(""), InvalidRequest, "empty"),
        (request([1, 49_152]), InvalidRequest, "49152"),
        (request([-1]), InvalidRequest, "-1"),
        (request([1.5]), InvalidRequest, "token ids"),
        (request([[1]]), InvalidRequest, "token ids"),
        (request(["x"]), InvalidRequest, "token ids"),
        (request([2**70]), InvalidRequest, "token ids"),
        (request([-1, "x"]), InvalidRequest, "token ids"),
        (request([5, 2**31]), InvalidRequest, "token id 2147483648"),
        (request([5, -(2**40)]), InvalidRequest, "token id -1099511627776"),
        (request(np.array([5, 2**31], np.uint32)), InvalidRequest, "token id 2147483648"),
        (request(logit_bias={49_152: 1.0}), InvalidRequest, "logit_bias"),
        (request(rid="x" * 1000), InvalidRequest, "rid is too large"),
        (request(every=0), InvalidRequest, "stream_interval"),
    ],
)
async def test_what_can_not_be_served_is_refused_before_the_engine_hears_of_it(
    engine_client: EngineClient, bad: Request, error: type[BoughError], words: str
) -> None:
    before = (await engine_client.info())["generate"]
    with pytest.raises(error, match=words):
        await engine_client.submit(bad)
    with pytest.raises(error):
        await engine_client.submit_batch([request(), bad])
    assert (await engine_client.info())["generate"] == before
    assert engine_client.num_live == 0


async def test_stop_strings_end_the_answer_and_the_engine(engine_client: EngineClient, smollm: Tokenizer) -> None:
    ids = smollm.encode(" one two three")
    said = smollm.decode(echo(ids, 3))
    stop = said[6:9]
    for stream in (True, False):
        (delta,) = await engine_client.collect(request(ids, 100, stop=(stop,), stream=stream))
        assert delta.end is not None
        assert (delta.end.reason, delta.end.matched) == ("stop", stop)
        assert delta.text == said[: said.index(stop)]
        assert delta.end.completion_tokens == len(delta.tokens) // 4 < 10
    assert await live_in_engine(engine_client, 0)


async def test_eos_ends_unless_ignored(engine_client: EngineClient) -> None:
    (ended,) = await engine_client.collect(request([2, 50], 6))
    assert ended.end is not None
    assert (ended.end.reason, ended.end.matched, len(ended.tokens) // 4) == ("stop", 2, 2)
    (ignored,) = await engine_client.collect(request([2, 50], 6, ignore_eos=True))
    assert ignored.end is not None
    assert (ignored.end.reason, len(ignored.tokens) // 4) == ("length", 6)


async def test_cancelling_a_wait_aborts(engine_client: EngineClient) -> None:
    assert await live_in_engine(engine_client, 0)
    task = asyncio.create_task(engine_client.collect(request([SLOW, 9])))
    assert await live_in_engine(engine_client, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await live_in_engine(engine_client, 0)
    assert engine_client.num_live == 0


async def test_leaving_a_stream_aborts(engine_client: EngineClient) -> None:
    (stream,) = await engine_client.submit(request([SLOW, 9], stream=True))
    async with stream:
        async for _ in stream:
            break
    assert await live_in_engine(engine_client, 0)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_that_is_behind_gets_news_in_one_piece(engine_client: EngineClient) -> None:
    (stream,) = await engine_client.submit(request(max_new_tokens=40, stream=True))
    async with asyncio.timeout(60):
        while engine_client.num_live:
            await asyncio.sleep(0.01)
    deltas = [delta async for delta in stream]
    assert len(deltas) == 1
    assert unpack_ids(deltas[0].tokens).tolist() == echo(IDS, 40)


async def test_abort_by_name(engine_client: EngineClient) -> None:
    (mine,) = await engine_client.submit(request([SLOW, 9], rid="mine"))
    (other,) = await engine_client.submit(request([SLOW, 9], rid="mine too"))
    assert engine_client.abort("mine") == 1
    delta = await mine.collect()
    assert delta.end is not None
    assert delta.end.reason == "abort"
    assert not other.ended
    assert engine_client.abort() == 1
    await other.collect()
    assert engine_client.abort("nobody") == 0


async def test_a_failed_request_says_why(engine_client: EngineClient) -> None:
    (delta,) = await engine_client.collect(request([BAD, 9]))
    assert delta.end is not None
    assert (delta.end.reason, delta.end.message, delta.end.status) == ("error", "bad luck", 500)


async def test_control_calls(engine_client: EngineClient) -> None:
    assert await live_in_engine(engine_client, 0)
    assert await engine_client.flush_cache() == {"flushed": True}
    (stream,) = await engine_client.submit(request([SLOW, 9]))
    with pytest.raises(Conflict, match="running"):
        await engine_client.flush_cache()
    stream.abort()
    assert await engine_client.pause("retract") == {"paused": True}
    assert await engine_client.resume() == {"paused": False}
    with pytest.raises(InvalidRequest, match="mode"):
        await engine_client.pause("sometimes")
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await engine_client.profile(start=True, timeout_s=0.1)


async def test_when_the_engine_is_gone_everybody_is_told(engine_client: EngineClient) -> None:
    (stream,) = await engine_client.submit(request([SLOW, 9]))
    waiting = asyncio.create_task(stream.collect())
    call = asyncio.create_task(engine_client.profile(start=True))
    await asyncio.sleep(0.05)
    engine_client.abort()
    (other,) = await engine_client.submit(request([SLOW, 9], stream=True))
    await anext(other)
    engine_client.fail_all(BoughError(what="an inner cause with a /path"))
    with pytest.raises(Unavailable) as caught:
        await call
    assert "/path" not in caught.value.sentence()
    with pytest.raises(Unavailable):
        await other.collect()
    with pytest.raises(Unavailable):
        await engine_client.submit(request())
    with pytest.raises(Unavailable):
        await engine_client.flush_cache()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


class CountingGate:
    def __init__(self, most: int) -> None:
        self.most, self.now, self.began_count = most, 0, 0

    def admit(self, *, requests: int, tokens: int) -> CountingGate.WorkHold:
        if self.now + requests > self.most:
            raise Overloaded(what="full")
        self.now += requests
        return self.WorkHold(self)

    class WorkHold:
        def __init__(self, gate: CountingGate) -> None:
            self.gate, self.open = gate, True

        def began(self) -> None:
            self.gate.began_count += 1

        def end(self) -> None:
            if self.open:
                self.open = False
                self.gate.now -= 1


async def test_a_search_that_begins_as_the_engine_goes_is_told(engine_client: EngineClient) -> None:
    (stream,) = await engine_client.submit(Request(prompt=IDS, sampling=SamplingParams(beam_width=2, max_new_tokens=4)))
    engine_client.fail_all(Unavailable(what="gone"))
    with pytest.raises(Unavailable, match="gone"):
        await asyncio.wait_for(stream.collect(), 30)


async def test_telling_many_that_the_engine_is_gone_takes_no_memory(engine_client: EngineClient) -> None:
    engine_client.fail_all(Unavailable(what="gone"))
    depths = []
    for _ in range(3):
        with pytest.raises(Unavailable) as told:
            await engine_client.submit(Request(prompt=IDS))
        depths.append(len(told.traceback))
    assert len(set(depths)) == 1, "every refusal keeps the frames of those before it"


@pytest.mark.parametrize(
    ("prompt", "least", "most"),
    [("word " * 300, 300, 600), ("日本語" * 100, 300, 400), ("\ud800", 1, 2), ("", 1, 1), ([1, 2, 3], 3, 3)],
)
async def test_the_gate_hears_about_how_long_a_prompt_is_before_it_is_tokenised(
    prompt: str | list[int], least: int, most: int
) -> None:
    heard: list[int] = []

    class ShutGate:
        def admit(self, *, requests: int, tokens: int) -> WorkHold:
            heard.append(tokens)
            raise Overloaded(what="shut")

    engine_client = EngineClient(
        Endpoints("nowhere"), tokenizer=None, context_length=4096, vocab_size=100, gate=ShutGate()
    )
    with pytest.raises(Overloaded):
        await engine_client.submit(request(prompt))
    assert len(heard) == 1
    assert least <= heard[0] <= most


async def test_the_gate_counts_from_submission_to_the_end(running: ServerProcesses, smollm: Tokenizer) -> None:
    gate = CountingGate(3)
    engine_client = EngineClient.from_facts(running.endpoints, running.facts, smollm, worker=next(WORKERS), gate=gate)
    await engine_client.start()
    try:
        streams = await engine_client.submit(request([SLOW, 9], n=2, stream=True))
        assert gate.now == 2
        with pytest.raises(Overloaded):
            await engine_client.submit(request(n=2))
        with pytest.raises(InvalidRequest):
            await engine_client.submit(request([-1]))
        assert gate.now == 2
        await anext(streams[0])
        assert gate.began_count >= 1
        await engine_client.collect(request())
        for stream in streams:
            stream.abort()
        assert gate.now == 0
    finally:
        await engine_client.close()


async def test_without_a_tokenizer_ids_go_in_and_out(running: ServerProcesses) -> None:
    engine_client = EngineClient.from_facts(running.endpoints, running.facts, None, worker=next(WORKERS))
    await engine_client.start()
    try:
        (delta,) = await engine_client.collect(request())
        assert unpack_ids(delta.tokens).tolist() == echo(IDS, 8)
        assert delta.text == ""
        for bad in (request("text"), request(stop=("x",)), Request(prompt=IDS, bad_words=("x",))):
            with pytest.raises(InvalidRequest, match=r"were given|is text"):
                await engine_client.submit(bad)
    finally:
        await engine_client.close()


async def test_bad_words_are_tokenised_both_ways(engine_client: EngineClient, smollm: Tokenizer) -> None:
    await engine_client.collect(Request(prompt=IDS, sampling=SamplingParams(max_new_tokens=1), bad_words=("damn",)))
    forms = [smollm.encode("damn", add_special_tokens=False), smollm.encode(" damn", add_special_tokens=False)]
    assert (await engine_client.info())["last"]["bad_words"] == forms


async def test_logprobs_arrive_with_text(engine_client: EngineClient, smollm: Tokenizer) -> None:
    spec = LogprobSpec(start=1, top=2)
    (delta,) = await engine_client.collect(request(max_new_tokens=3, logprobs=spec, logprob_text=True))
    assert delta.logprobs is not None
    assert delta.prompt_logprobs is not None
    assert delta.logprobs.token_ids == echo(IDS, 3)
    assert delta.logprobs.text == [smollm.token_text(i) for i in echo(IDS, 3)]
    assert delta.logprobs.top_text[0] == [smollm.token_text(IDS[-1])] * 2
    assert delta.prompt_logprobs.token_ids == IDS[1:]


async def test_a_long_batch_is_sent_in_pieces_and_given_up_whole(
    engine_client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces keep their order; if one of the last is refused, the engine is left with none of the first."""
    long = [SLOW] + [100] * 200
    good = [request([100 + i] * 240, 1, ignore_eos=True) for i in range(150)]
    streams = await engine_client.submit_batch(good)
    assert [group[0].prompt[0] for group in streams] == [100 + i for i in range(150)]
    answers = [await group[0].collect() for group in streams]
    assert [unpack_ids(delta.tokens).tolist() for delta in answers] == [[100 + i] for i in range(150)]
    monkeypatch.setattr("bough.engine_client.request._PIECE_IDS", 400)
    before = await engine_client.info()
    with pytest.raises(InvalidRequest, match="token id -1"):
        await engine_client.submit_batch([request(long, 4) for _ in range(4)] + [request([5, -1])])
    assert (await engine_client.info())["abort"] == before["abort"] + 4
    assert engine_client.num_live == 0
    assert await live_in_engine(engine_client, before["live"])


@pytest.mark.parametrize("lengths", [[1], [20_000], [16_383, 1, 1], [9000] * 5, [1] * 40_000])
def test_pieces_are_whole_and_in_order(lengths: list[int]) -> None:
    requests = [request(range(length)) for length in lengths]
    cut = list(pieces(requests))
    assert [each for piece in cut for each in piece] == requests
    sizes = [sum(len(each.prompt) for each in piece) for piece in cut]
    assert all(size >= 16_384 for size in sizes[:-1])
    assert all(size - len(piece[-1].prompt) < 16_384 for size, piece in zip(sizes, cut, strict=True))


async def test_a_large_batch_costs_little(engine_client: EngineClient) -> None:
    """512 prompts of 2,000 ids would not fit this engine's context, so 200: submitted at well under 0.1 ms each."""
    batch = [request([100 + i] * 200, 4) for i in range(512)]
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        groups = await engine_client.submit_batch(batch)
        spent = time.process_time() - started
        for (stream,) in groups:
            delta = await stream.collect()
            assert delta.end is not None
        best = min(best, spent)
    print(f"submitting 512: {best * 1e3:.1f} ms")
    assert best < 0.25
    assert engine_client.stats.submitted >= 3 * 512
    assert engine_client.stats.live == 0


class Nobody:
    """An engine's end that takes everything and never answers."""

    def send(self, message: object) -> None: ...

    def send_all(self, messages: list[object]) -> None: ...


async def test_a_search_that_fails_is_no_longer_live() -> None:
    gate, sheet = CountingGate(2), Sheet(None, "api")
    engine_client = EngineClient(Endpoints("nowhere"), tokenizer=None, context_length=64, vocab_size=100, gate=gate)
    engine_client._replicas = Replicas([Nobody()], [], "prefix")  # type: ignore[list-item]
    engine_client.meter = RequestMeter(sheet)
    (stream,) = await engine_client.submit(request([1, 2, 3], beam_width=2))
    await asyncio.sleep(0)
    assert (gate.now, sheet.board.read()["num_live_reqs"]) == (2, 1)
    engine_client.fail_all(Unavailable(what="gone"))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(stream.collect(), 30)
    assert (gate.now, sheet.board.read()["num_live_reqs"]) == (0, 0)
