"""`Engine` over the fake engine process: shapes, streams, batches, failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import BoughError, ConfigError, Conflict, InvalidRequest, RequestFailed, Unavailable
from bough.offline import Engine, _busy_s
from tests.unit.engine_client.conftest import FAKE
from tests.unit.engine_client.test_client import BAD, IDS, SLOW, echo


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(programs=FAKE) as made:
        yield made


def wait_until_live(engine: Engine, expected: int) -> None:
    """So many requests run in the engine."""
    give_up = time.monotonic() + 30
    while (live := engine.get_server_info()["internal_states"][0]["live"]) != expected:
        assert time.monotonic() < give_up, f"{live} requests run"
        time.sleep(0.02)


def test_one_prompt_gives_one_dict(engine: Engine) -> None:
    answer = engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 5})
    assert isinstance(answer, dict)
    assert answer["output_ids"] == echo(IDS, 5)
    assert engine.tokenizer is not None
    assert answer["text"] == engine.tokenizer.decode(echo(IDS, 5))
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 5, 1)
    assert meta["e2e_latency"] > 0
    assert meta["id"]


def test_many_prompts_give_a_list_in_order(engine: Engine) -> None:
    prompts = ["first prompt", "second", "and a third one"]
    answers = engine.generate(prompts, {"max_new_tokens": 3})
    assert isinstance(answers, list)
    assert engine.tokenizer is not None
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["output_ids"] == echo(engine.tokenizer.encode(prompt), 3)
    twice = engine.generate(prompts[0], {"max_new_tokens": 2, "n": 2})
    assert isinstance(twice, list)
    assert len(twice) == 2


def test_streaming_grows_to_the_whole(engine: Engine) -> None:
    whole = engine.generate("some prompt", {"max_new_tokens": 6})
    assert isinstance(whole, dict)
    pieces = list(engine.generate("some prompt", {"max_new_tokens": 6}, stream=True))
    assert all(isinstance(piece, dict) for piece in pieces)
    texts = [piece["text"] for piece in pieces]
    assert texts == sorted(texts, key=len)
    assert texts[-1] == whole["text"]
    assert pieces[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    batch = list(engine.generate(["a b", "c d"], {"max_new_tokens": 2}, stream=True))
    assert {piece["index"] for piece in batch} == {0, 1}


def test_leaving_a_stream_ends_its_request(engine: Engine) -> None:
    stream = engine.generate(input_ids=[SLOW, 9], stream=True)
    assert not isinstance(stream, dict | list)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until_live(engine, 0)


async def test_async_generation(engine: Engine) -> None:
    one, many = await asyncio.gather(
        engine.async_generate(input_ids=IDS, sampling_params={"max_new_tokens": 2}),
        engine.async_generate(["x", "y"], {"max_new_tokens": 2}),
    )
    assert isinstance(one, dict)
    assert isinstance(many, list)
    stream: Any = await engine.async_generate(input_ids=IDS, sampling_params={"max_new_tokens": 4}, stream=True)
    pieces = [piece async for piece in stream]
    assert pieces[-1]["output_ids"] == echo(IDS, 4)
    task = asyncio.create_task(engine.async_generate(input_ids=[SLOW, 9]))  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_errors_of_requests(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        engine.generate("x", {"temperature": "hot"})
    with pytest.raises(InvalidRequest, match="there is no prompt"):
        engine.generate()
    with pytest.raises(RequestFailed, match="bad luck"):
        engine.generate(input_ids=[BAD, 9])
    with pytest.raises(RequestFailed, match="bad luck"):
        list(engine.generate(input_ids=[BAD, 9], stream=True))
    answers = engine.generate(input_ids=[[BAD, 9], IDS], sampling_params={"max_new_tokens": 1})
    assert isinstance(answers, list)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers[1]["output_ids"] == echo(IDS, 1)
    with pytest.raises(InvalidRequest, match="does not embed"):
        engine.encode("x")


def test_logprobs_in_native_shape(engine: Engine) -> None:
    answer = engine.generate(
        input_ids=IDS,
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )
    assert isinstance(answer, dict)
    meta = answer["meta_info"]
    assert engine.tokenizer is not None
    assert meta["output_token_logprobs"][0] == [-0.5, IDS[-1], engine.tokenizer.token_text(IDS[-1])]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_top_logprobs"]) == 2


def test_control(engine: Engine) -> None:
    wait_until_live(engine, 0)  # what a test before has cancelled
    assert engine.flush_cache() == {"flushed": True}
    info = engine.get_server_info()
    assert info["context_length"] == 256
    for secret in ("api_key", "admin_api_key", "metrics_api_key"):
        assert f"'{secret}'" not in str(info)
    model = engine.get_model_info()
    assert model["is_generation"] is True
    assert model["role_affixes"]["user"] == ["<|im_start|>user\n", "<|im_end|>\n"]
    results: list[Any] = []
    slow = threading.Thread(target=lambda: results.append(engine.generate(input_ids=[[SLOW, 9]], rid="slow")))
    slow.start()
    wait_until_live(engine, 1)
    with pytest.raises(Conflict):
        engine.flush_cache()
    assert engine.abort("slow") == 1
    slow.join(30)
    assert results[0][0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(engine.get_all_child_pids()) == 2


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError):
        Engine(no_such_setting=1, programs=FAKE)


def test_when_the_engine_dies_calls_fail_and_shutdown_works() -> None:
    engine = Engine(programs=FAKE)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate(input_ids=[SLOW, 9])
        except BaseException as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until_live(engine, 1)
    os.kill(engine._running.pids["engine"], signal.SIGKILL)
    waiting.join(30)
    assert not waiting.is_alive()
    assert isinstance(caught[0], Unavailable)
    with pytest.raises(Unavailable):
        engine.generate(input_ids=IDS)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(Unavailable, match="shut down"):
        engine.generate(input_ids=IDS)


def test_without_a_tokenizer() -> None:
    with Engine(programs=FAKE, skip_tokenizer_init=True) as engine:
        answer = engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 3})
        assert isinstance(answer, dict)
        assert answer["output_ids"] == echo(IDS, 3)
        assert "text" not in answer
        with pytest.raises(InvalidRequest, match="the prompt is text"):
            engine.generate("text")


def test_without_a_tokenizer_tokens_come_straight_from_the_engine() -> None:
    with Engine(programs=FAKE, skip_tokenizer_init=True) as engine:
        assert set(engine._running.pids) == {"engine"}
        stopped = engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 8, "stop_token_ids": [IDS[-2]]})
        assert isinstance(stopped, dict)
        assert stopped["output_ids"] == echo(IDS, 2)
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": IDS[-2]}
        news = list(engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 4}, stream=True))
        assert [each["output_ids"] for each in news][-1] == echo(IDS, 4)
        assert news[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        scored = engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 2}, return_logprob=True)
        assert isinstance(scored, dict)
        assert [entry[1] for entry in scored["meta_info"]["output_token_logprobs"]] == echo(IDS, 2)
        mixed = engine.generate(input_ids=[[5] * n for n in range(1, 40)], sampling_params={"max_new_tokens": 3})
        assert [each["meta_info"]["prompt_tokens"] for each in mixed] == list(range(1, 40))  # type: ignore[index]
        assert all(each["output_ids"] == [5] * 3 for each in mixed)  # type: ignore[index]
        assert engine.flush_cache() is not None


def test_a_failed_start_raises_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "fail")
    with pytest.raises(BoughError, match="cheese"):
        Engine(programs=FAKE)


def test_a_large_batch_has_little_overhead(engine: Engine) -> None:
    """512 prompts in and 512 answers out; most of the time is the fake engine's."""
    prompts = [[100 + i] * 200 for i in range(512)]
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        answers = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 2})
        best = min(best, time.process_time() - started)
        assert len(answers) == 512  # type: ignore[arg-type]
    print(f"this process's share of 512 requests: {best * 1e3:.1f} ms")
    assert best < 0.5


def num_selectors() -> int:
    """Of the event loops in this process."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has just closed it
            found += "eventpoll" in os.readlink(path)
    return found


def test_a_start_that_fails_at_the_last_moment_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Engine) -> None:
        raise BoughError(what="no luck")

    monkeypatch.setattr(Engine, "_open_engine_client", fail)
    selectors, threads = num_selectors(), threading.active_count()
    with pytest.raises(BoughError, match="no luck"):
        Engine(programs=FAKE)
    give_up = time.monotonic() + 30
    while threading.active_count() > threads or num_selectors() > selectors:  # told to end, they do a moment later
        assert time.monotonic() < give_up, threading.enumerate()
        time.sleep(0.02)


def test_a_fork_of_the_owner_takes_none_of_its_answers() -> None:
    with Engine(programs=FAKE) as made:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(Unavailable, match="another process"):
                    made.generate(input_ids=IDS)
                made.shutdown()
                status = 2 if made._closed else 0  # only its owner ends it
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert made.generate(input_ids=IDS, sampling_params={"max_new_tokens": 2})["output_ids"] == echo(IDS, 2)


def test_callers_wait_busily_only_where_another_device_computes_and_cores_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device, cores, busy in (("cuda", 16, True), ("cuda", 2, False), ("cpu", 16, False), (None, 16, False)):
        monkeypatch.setattr("bough.platform.processor.usable_cpus", lambda cores=cores: cores)
        assert (_busy_s({} if device is None else {"device": device}) > 0) is busy
