"""The parts of the load test: HTTP, prompts, numbers, and the engine's flags beside a measurement's own."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bough.bench.engine_settings import parse_with_settings
from bough.bench.http_stream import StreamingClient
from bough.bench.load import RequestResult, ShareResult
from bough.bench.prompts import WordList, add_dataset_flags, make_prompts
from bough.bench.report import confidence, histogram, in_flight, summarise
from bough.config.default_model import default_model_path
from bough.core.errors import ConfigError
from bough.tokenizer import load_tokenizer

# -- HTTP ---------------------------------------------------------------------------------------------------------


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def scripted(script: Script) -> tuple[asyncio.Server, StreamingClient]:
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    return server, StreamingClient(f"http://127.0.0.1:{port}/base", {"x-key": "7"})


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(next(line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length")))
    return head, await reader.readexactly(length)


async def test_pieces_arrive_one_by_one_and_connections_are_kept() -> None:
    heads: list[str] = []
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while not reader.at_eof():
            head, body = await read_request(reader)
            heads.append(head)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for piece in (body, b"second", b"third"):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(b"0\r\n\r\n")

    server, client = await scripted(script)
    for _ in range(2):
        pieces: list[bytes] = []
        assert await client.request("POST", "/x", b"first", pieces.append) == 200
        assert pieces == [b"first", b"second", b"third"]
    assert connections == 1
    assert heads[0].startswith("POST /base/x HTTP/1.1\r\n")
    assert "x-key: 7\r\n" in heads[0]
    client.close()
    server.close()


async def test_a_kept_connection_that_was_closed_is_replaced_once() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        if connections == 1:
            await reader.read(1)  # the second request arrives and is not answered
        writer.close()

    server, client = await scripted(script)
    for _ in range(2):
        pieces: list[bytes] = []
        assert await client.request("POST", "/", b"x", pieces.append) == 200
        assert pieces == [b"ok"]
    assert connections == 2
    server.close()


async def test_an_answer_cut_short_is_an_error() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this")
        writer.close()

    server, client = await scripted(script)
    with pytest.raises(ConnectionError):
        await client.request("POST", "/", b"", lambda data: None)
    server.close()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="address"):
        StreamingClient("ftp://somewhere")


# -- prompts ------------------------------------------------------------------------------------------------------


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser, default="random", num_prompts=10)
    return parser.parse_args(flags)


def test_random_texts_have_the_wanted_lengths() -> None:
    tokenizer = load_tokenizer(default_model_path())
    vocabulary = WordList(tokenizer=tokenizer, size=tokenizer.vocab_size)
    flags = ("--input-len", "200", "--output-len", "50", "--random-range-ratio", "0.5")
    prompts = make_prompts(options(*flags), vocabulary)
    assert len(prompts) == 10
    for prompt in prompts:
        assert 100 <= prompt.input_len <= 200
        assert 25 <= prompt.output_len <= 50
        assert len(tokenizer.encode(prompt.text, add_special_tokens=False)) == pytest.approx(prompt.input_len, abs=2)
    assert len({prompt.text for prompt in prompts}) == 10
    assert prompts == make_prompts(options(*flags), vocabulary)
    assert prompts != make_prompts(options(*flags, "--seed", "2"), vocabulary)
    guessed = make_prompts(options("--input-len", "100"), WordList(tokenizer=None))
    for prompt in guessed:
        assert len(tokenizer.encode(prompt.text)) == pytest.approx(100, abs=3)


def test_groups_share_their_beginning() -> None:
    flags = ("--dataset", "generated-shared-prefix", "--gsp-num-groups", "3", "--gsp-prompts-per-group", "4",
             "--gsp-system-prompt-len", "30", "--gsp-question-len", "6")  # fmt: skip
    prompts = make_prompts(options(*flags), WordList(tokenizer=None))
    beginnings = {prompt.text.split("\n\n")[0]: prompt.group for prompt in prompts}
    assert len(prompts) == 12
    assert sorted(beginnings.values()) == [0, 1, 2]
    assert len({prompt.text for prompt in prompts}) == 12


def test_sharegpt_takes_first_turns(tmp_path: Path) -> None:
    def entry(*turns: str) -> dict[str, Any]:
        names = ("human", "gpt")
        return {"conversations": [{"from": names[at % 2], "value": turn} for at, turn in enumerate(turns)]}

    told = [
        entry("tell me a story about the sea", "once upon a time there was a sea"),
        entry("hi", "hello"),  # too short
        entry("only one turn is not enough here"),
        entry("a long one " * 5000, "with an answer that is fine"),
    ]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(told))
    prompts = make_prompts(options("--dataset", "sharegpt", "--dataset-path", str(file)), WordList(tokenizer=None))
    assert [prompt.text for prompt in prompts] == ["tell me a story about the sea"]
    assert prompts[0].output_len == round(8 * 1.3)


def test_custom_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two", "output_len": 3}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    flags = ("--dataset", "custom", "--dataset-path", str(file), "--output-len", "9")
    first, second = make_prompts(options(*flags), WordList(tokenizer=None))
    assert (first.text, first.output_len) == ("one two", 3)
    assert (second.messages, second.output_len) == ([{"role": "user", "content": "hi"}], 9)
    file.write_text('{"prompt": 3}\n')
    with pytest.raises(ConfigError) as caught:
        make_prompts(options(*flags), WordList(tokenizer=None))
    assert "line 1" in caught.value.why
    with pytest.raises(ConfigError, match="is a file"):
        make_prompts(options("--dataset", "custom"), WordList(tokenizer=None))
    with pytest.raises(ConfigError, match="vocabulary"):
        make_prompts(options("--dataset", "random-ids"), WordList(tokenizer=None))


# -- numbers ------------------------------------------------------------------------------------------------------


def outcome(sent: float, first: float, ended: float, tokens: int) -> RequestResult:
    step = (ended - first) / max(1, tokens - 1)
    return RequestResult(
        due_s=sent, sent_s=sent, first_s=first, ended_s=ended, gaps_s=[step] * (tokens - 1),
        arrivals=[(first + step * at, 1) for at in range(tokens)], input_tokens=10, output_tokens=tokens,
    )  # fmt: skip


def summary(outcomes: list[RequestResult], busy: float = 0.1, lag_ms: float = 1.0, **asked: Any) -> dict[str, Any]:
    result = ShareResult(outcomes=outcomes, busy=busy, lag_ms=lag_ms, wall_s=1.0)
    return summarise(result, **{"rate": float("inf"), "max_concurrency": 0, "limits": {}, "streamed": True, **asked})


def test_numbers_of_a_run_done_by_hand() -> None:
    done = [outcome(1.0, 1.1, 2.1, 11), outcome(1.5, 1.8, 3.0, 5)]
    facts = summary(done, limits={"ttft": 200.0, "tpot": 150.0})
    assert facts["duration"] == pytest.approx(2.0)
    assert facts["request_throughput"] == pytest.approx(1.0)
    assert facts["output_throughput"] == pytest.approx(8.0)
    assert facts["mean_ttft_ms"] == pytest.approx(200.0)
    assert facts["mean_tpot_ms"] == pytest.approx(200.0)
    assert facts["mean_itl_ms"] == pytest.approx(1000 * (1.0 + 1.2) / 14)
    assert facts["p90_e2e_ms"] == pytest.approx(1460.0)
    assert facts["concurrency"] == pytest.approx((1.1 + 1.5) / 2.0)
    assert (facts["request_goodput"], facts["good_share"]) == (0.5, 0.5)
    assert in_flight(done) == ([1.0, 1.5, 2.1, 3.0], [1, 2, 1, 0])
    assert [line.split()[-2] for line in histogram(done).splitlines()[1:]] == ["0.0", "70.0", "30.0"]


def test_the_verdict_names_the_limit() -> None:
    steady = [outcome(at * 0.1, at * 0.1 + 0.05, at * 0.1 + 0.2, 4) for at in range(40)]
    late = [outcome(at * 0.1, at * 0.3 + 0.05, at * 0.3 + 0.2, 4) for at in range(40)]
    assert summary(steady)["limit"] == "server"
    assert summary(steady, rate=10.0)["limit"] == "rate"
    assert "10.00 requests/s offered" in summary(steady, rate=10.0)["verdict"]
    assert summary(late, rate=10.0)["limit"] == "server"
    assert "3.36 of the 10.00 requests/s offered" in summary(late, rate=10.0)["verdict"]
    slow_from_the_start = [outcome(at * 0.25, at * 0.25 + 1.0, at * 0.25 + 6.0, 4) for at in range(20)]
    assert summary(slow_from_the_start, rate=4.0)["limit"] == "short", "1.9 of 4 a second is not keeping up"
    assert summary(steady, rate=10.0, busy=0.97)["limit"] == "client"
    assert summary(steady, rate=10.0, lag_ms=80.0)["limit"] == "client"
    assert summary(steady, max_concurrency=2)["limit"] == "cap"


def test_confidence_is_students() -> None:
    mean, half = confidence([9.0, 10.0, 11.0])
    assert (mean, half) == (10.0, pytest.approx(4.303 * 1.0 / 3**0.5, rel=1e-3))
    assert confidence([5.0]) == (5.0, 0.0)


# -- flags --------------------------------------------------------------------------------------------------------


def test_the_engines_flags_stand_beside_the_own_ones() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--batch", type=int, nargs="+")
    words = [
        "some/model",
        "--batch",
        "1",
        "2",
        "--dtype",
        "float32",
        "--tp=2",
        "--no-cuda-graph",
        "--disable-radix-cache",
    ]
    own, settings = parse_with_settings(parser, words)
    assert own.batch == [1, 2]
    assert settings == {
        "model_path": "some/model", "dtype": "float32", "tp": "2", "cuda_graph": False, "disable_radix_cache": True,
    }  # fmt: skip
    for wrong in (["--dtpye", "x"], ["--dtype"], ["--batch", "1", "--dtype", "x", "stray"], ["--no-dtype"]):
        with pytest.raises(ConfigError):
            parse_with_settings(parser, wrong)
    for wrong, meant in ((["--bacth", "1"], "--batch"), (["--dtpye", "x"], "--dtype")):
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            parse_with_settings(parser, wrong)
