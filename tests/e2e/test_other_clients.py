"""The default model through the clients of other dialects: a real server, real processes, real answers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import ollama
import openai
import pytest

from bough.entrypoints.grpc import bough_pb2 as pb
from bough.entrypoints.grpc.bough_pb2_grpc import BoughStub
from tests.waiting import until

from .conftest import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


class Served:
    """A `bough serve` with everything on: a key, gRPC, a batch directory."""

    def __init__(self, directory: Path) -> None:
        self.grpc = f"127.0.0.1:{free_port()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bough", "serve", "--port", "0", "--grpc-port", self.grpc.split(":")[1],
             "--batch-dir", str(directory), "--api-key", "s3cret"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, process_group=0,
        )  # fmt: skip
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)
            if found:
                os.set_blocking(self.process.stdout.fileno(), False)
                return found[1]
        raise AssertionError("the server did not start:\n" + "".join(said))

    def end(self) -> int:
        """Asks it to end; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("batches"))
    yield made
    assert made.end() == 0


def test_anthropic(served: Served) -> None:
    with anthropic.Anthropic(
        _strict_response_validation=True, base_url=served.url, api_key="s3cret", max_retries=0
    ) as client:
        asked: dict[str, Any] = {"model": "default", "max_tokens": 24, "messages": CAPITAL}
        made = client.messages.create(**asked, extra_body={"temperature": 0})
        assert "Paris" in made.content[0].text  # type: ignore[union-attr]
        assert made.stop_reason == "end_turn"
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_message().content[0].text == made.content[0].text  # type: ignore[union-attr]
        counted = client.messages.count_tokens(model="default", messages=CAPITAL).input_tokens
        assert counted == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
        tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                                                    "required": ["city"]}}  # fmt: skip
        forced = client.messages.create(
            **{**asked, "max_tokens": 128},
            tools=[tool],
            tool_choice={"type": "any"},  # type: ignore[arg-type, typeddict-item, list-item]
        )
        assert forced.stop_reason == "tool_use"
        assert forced.content[-1].input["city"] in ("Oslo", "Rome")  # type: ignore[union-attr]
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(
            _strict_response_validation=True, base_url=served.url, api_key="wrong", max_retries=0
        ).messages.create(**asked)


def test_responses(served: Served) -> None:
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{served.url}/v1", api_key="s3cret", max_retries=0
    ) as client:
        first = client.responses.create(model="default", input=CAPITAL, temperature=0, max_output_tokens=24)
        assert "Paris" in first.output_text
        with client.responses.stream(model="default", input=CAPITAL, temperature=0, max_output_tokens=24) as stream:
            assert stream.get_final_response().output_text == first.output_text
        second = client.responses.create(
            model="default", input="Say that again.", previous_response_id=first.id, temperature=0, max_output_tokens=16
        )
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        assert second.usage.input_tokens_details.cached_tokens > 0
        schema = {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        }
        made = client.responses.create(
            model="default", input="One or two?", max_output_tokens=32,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        )  # fmt: skip
        assert json.loads(made.output_text)["n"] in (1, 2)


def test_ollama(served: Served) -> None:
    client = ollama.Client(host=served.url, headers={"authorization": "Bearer s3cret"})
    options = {"temperature": 0, "num_predict": 24}
    made = client.chat(model="default", messages=CAPITAL, options=options)
    assert "Paris" in (made.message.content or "")
    told = client.chat(model="default", messages=CAPITAL, options=options, stream=True)
    assert "".join(each.message.content or "" for each in told) == made.message.content
    assert client.generate(model="default", prompt="1, 2, 3,", raw=True, options=options).response.startswith(" 4")
    assert client.list().models[0].model == "SmolLM2-135M-Instruct"
    assert client.list().models[0].size


def test_grpc(served: Served) -> None:
    key = (("authorization", "Bearer s3cret"),)
    with grpc.insecure_channel(served.grpc) as channel:
        stub = BoughStub(channel)
        greedy = pb.SamplingParams(temperature=0, max_new_tokens=8)
        request = pb.GenerateRequest(text="The capital of France is", sampling_params=greedy)
        text = "".join(each.text for each in stub.Generate(request, metadata=key))
        headers = {"authorization": "Bearer s3cret"}
        body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        assert text == httpx.post(f"{served.url}/generate", json=body, headers=headers, timeout=60).json()["text"]
        assert "Paris" in text
        many = [pb.GenerateCommand(generate=pb.GenerateRequest(text=f"{n}", sampling_params=greedy, rid=str(n)))
                for n in range(8)]  # fmt: skip
        told = list(stub.GenerateMany(iter(many), metadata=key))
        assert {each.rid for each in told if each.HasField("finish_reason")} == {str(n) for n in range(8)}
        load = lambda: stub.GetLoads(pb.GetLoadsRequest(), metadata=key).loads[0]
        assert load().max_total_num_tokens > 0
        assert until(lambda: load().num_running_reqs == 0)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_batches(served: Served) -> None:
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{served.url}/v1", api_key="s3cret", max_retries=0
    ) as client:
        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions",
                  "body": {"prompt": f"{n}, {n + 1},", "max_tokens": 4, "temperature": 0}} for n in range(20)]  # fmt: skip
        upload = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
        upload.name = "in.jsonl"
        source = client.files.create(file=upload, purpose="batch")
        batch = client.batches.create(input_file_id=source.id, endpoint="/v1/completions", completion_window="24h")
        assert until(lambda: client.batches.retrieve(batch.id).status == "completed", 240)
        batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert {each["custom_id"] for each in answers} == {str(n) for n in range(20)}
        by_id = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
        assert by_id["3"].startswith(" 5")
