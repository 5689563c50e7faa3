"""One program on every backend that reaches a real model, and every sampling parameter with what it changes there."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pydantic
import pytest

import bough
import bough as sgl
from tests.covers import long

from .default_server import default_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME = "SmolLM2-135M-Instruct"


class Place(pydantic.BaseModel):
    city: str
    large: bool


@pytest.fixture(scope="module")
def engine() -> Iterator[bough.Engine]:
    with bough.Engine(log_level="warning") as made:
        yield made


BACKENDS: dict[str, Callable[[str], Any]] = {
    "endpoint": sgl.RuntimeEndpoint,
    "openai chat": lambda url: sgl.OpenAI(NAME, base_url=f"{url}/v1", api_key="none"),
    "openai chat, extensions": lambda url: sgl.OpenAI(NAME, base_url=f"{url}/v1", api_key="none", extensions=True),
    "openai completion": lambda url: sgl.OpenAI(
        NAME, is_chat_model=False, chat_template="chatml", base_url=f"{url}/v1", api_key="none", extensions=True
    ),
    "anthropic": lambda url: sgl.Anthropic(NAME, base_url=url, api_key="none"),
}
KINDS = ["engine", *BACKENDS]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "engine":
        yield request.getfixturevalue("engine")
        return
    made = BACKENDS[request.param](default_server())
    yield made
    made.shutdown()


@sgl.function
def capital(s, country):  # type: ignore[no-untyped-def]
    s += sgl.system("You are a geographer. Answer in one short sentence.")
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, stop="."))
    s += sgl.user("Is it a large city?")
    s += sgl.assistant(sgl.select("large", ["yes", "no"]))
    s += sgl.user("Write its name and whether it is large as JSON.")
    s += sgl.assistant(sgl.gen("place", schema=Place, max_tokens=64))
    s += sgl.user("How many words was that?")
    s += sgl.assistant(sgl.gen_int("words", max_tokens=24))


@pytest.mark.parametrize("backend", KINDS, indirect=True)
def test_one_program_on_every_backend(backend: Any) -> None:
    state = capital.run(country="France", backend=backend, temperature=0.0)
    assert "Paris" in state["answer"]
    assert "." not in state["answer"]
    assert state["large"] in ("yes", "no")
    assert isinstance(state["place"], Place)
    int(state["words"])
    assert [message["role"] for message in state.messages()] == ["system", *["user", "assistant"] * 4]
    assert state.get_meta_info("answer")["finish_reason"]["type"] == "stop"
    most = 0
    for _ in range(5):
        streamed = capital.run(country="France", backend=backend, temperature=0.0, stream=True)
        pieces = list(streamed.text_iter("answer"))
        assert "".join(pieces) == streamed["answer"] == state["answer"]
        most = max(most, len(pieces))
        if most > 1:
            return
    pytest.fail("the answer never came in pieces")


@pytest.mark.parametrize("backend", ["openai chat", "anthropic"], indirect=True)
def test_a_remote_api_says_what_it_cannot_do(backend: Any) -> None:
    @sgl.function
    def year(s):  # type: ignore[no-untyped-def]
        s += sgl.user("Which year is it?")
        s += sgl.assistant(sgl.gen("year", regex="[0-9]{4}"))

    with pytest.raises(sgl.ProgramError, match="can't do regex") as caught:
        year.run(backend=backend)
    assert caught.value.origin.function == "year"
    assert "sgl.gen(" in str(caught.value)
    assert isinstance(caught.value.__cause__, sgl.Unsupported)


def test_a_refusal_of_the_server_names_the_programs_line() -> None:
    @sgl.function
    def hot(s, heat):  # type: ignore[no-untyped-def]
        s += "Once upon a time" + sgl.gen("story", max_tokens=2, temperature=heat)

    backend = sgl.RuntimeEndpoint(default_server())
    states = hot.run_batch([{"heat": 0.0}, {"heat": -3.0}, {"heat": 0.0}], backend=backend)
    assert [state.error() is None for state in states] == [True, False, True]
    failure = states[1].error()
    assert isinstance(failure, sgl.ProgramError)
    assert "temperature" in str(failure)
    assert failure.origin.line == inspect.getsourcelines(hot.func)[1] + 2
    assert states[0]["story"] == states[2]["story"]
    backend.shutdown()


# -- parameters

PROMPT = "The capital of France is"
RHYTHM = "red blue red blue red blue red blue red blue"


def generate(backend: Any, prompt: str = PROMPT, **parameters: Any) -> tuple[Any, Any]:
    """The text and meta information of one gen, greedy unless told otherwise."""

    @sgl.function
    def one(s):  # type: ignore[no-untyped-def]
        s += prompt + sgl.gen("x", **{"max_tokens": 8, "temperature": 0.0, **parameters})

    state = one.run(backend=backend)
    return state["x"], state.get_meta_info("x")


@pytest.mark.parametrize("backend", [long("engine"), "endpoint"], indirect=True)
def test_every_parameter_of_gen_does_something(backend: Any) -> None:
    tested = {"name", "max_tokens", "temperature"}

    def gen(prompt: str = PROMPT, **parameters: Any) -> tuple[Any, Any]:
        tested.update(parameters)
        return generate(backend, prompt, **parameters)

    greedy, meta = gen()
    assert greedy.startswith(" Paris")
    assert meta["completion_tokens"] == 8
    assert gen(max_tokens=3)[1]["completion_tokens"] == 3
    told = check_logprobs(gen, greedy)
    check_stops(gen, greedy, told)
    check_sampling(gen, greedy)
    check_constraints(gen)
    chat = "<|im_start|>user\nSay only: Hi.<|im_end|>\n<|im_start|>assistant\n"
    assert gen(chat, max_tokens=64)[1]["completion_tokens"] < 64
    assert gen(chat, max_tokens=64, ignore_eos=True)[1]["completion_tokens"] == 64
    assert tested | {"schema"} == set(inspect.signature(sgl.gen).parameters)


Gen = Callable[..., tuple[Any, Any]]


def check_logprobs(gen: Gen, greedy: str) -> list[Any]:
    _, plain = gen(return_logprob=True)
    assert len(plain["output_token_logprobs"]) == 8
    assert all(entry[0] <= 0 for entry in plain["output_token_logprobs"])
    assert len(plain.get("input_token_logprobs") or ()) <= 1
    _, told = gen(return_logprob=True, logprob_start_len=2, top_logprobs_num=3, return_text_in_logprobs=True)
    assert len(told["input_token_logprobs"]) == told["prompt_tokens"] - 2
    assert all(len(entry) == 3 for entry in told["output_top_logprobs"])
    assert "".join(entry[2] for entry in told["output_token_logprobs"]) == greedy
    return list(told["output_token_logprobs"])


def check_stops(gen: Gen, greedy: str, told: list[Any]) -> None:
    at = next(n for n in range(2, 8) if told[n][2].strip() and told[n][2] not in "".join(e[2] for e in told[:n]))
    token, text = told[at][1], told[at][2]
    before = greedy[: greedy.index(text)]
    assert gen(stop=[text])[0] == before
    assert gen(stop_regex=re.escape(text))[0] == before
    _, meta = gen(stop_token_ids=[token])
    assert (meta["finish_reason"]["type"], meta["finish_reason"]["matched"]) == ("stop", token)
    assert meta["completion_tokens"] == at + 1
    _, meta = gen(stop_token_ids=[token], min_tokens=at + 2)
    assert meta["completion_tokens"] >= at + 2


def check_sampling(gen: Gen, greedy: str) -> None:
    samples, metas = gen(n=3)
    assert samples == [greedy] * 3
    assert len(metas) == 3
    assert gen(temperature=50.0)[0] != greedy
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert gen(temperature=50.0, **narrow)[0] == greedy, narrow
    steady = gen(RHYTHM, max_tokens=16)[0].split()
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert len(set(gen(RHYTHM, max_tokens=16, **penalty)[0].split())) > len(set(steady)), penalty


def check_constraints(gen: Gen) -> None:
    assert gen(dtype=bool)[0] in ("True", "False")
    int(gen(dtype="int")[0])
    float(gen(dtype=float)[0])
    assert gen(regex="(green|grey) [0-9]{2}")[0].startswith("gre")
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    assert isinstance(json.loads(gen(json_schema=schema, max_tokens=32)[0])["sure"], bool)
    text, meta = gen(choices=[" Berlin", " Paris"])
    assert text == " Paris"
    assert len(meta["normalized_prompt_logprobs"]) == 2
    text, meta = gen(choices=[" Berlin", " Paris"], choices_method=sgl.greedy_token_selection)
    assert text == " Paris"
    assert "greedy_logprob_matrix" in meta


def token_ids(text: str) -> list[int]:
    reply = httpx.post(f"{default_server()}/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=60)
    return list(reply.json()["tokens"])


def test_defaults_of_a_run_are_those_of_every_gen() -> None:
    backend = sgl.RuntimeEndpoint(default_server())

    @sgl.function
    def two(s):  # type: ignore[no-untyped-def]
        s += PROMPT + sgl.gen("x") + sgl.gen("y", max_tokens=1)

    state = two.run(backend=backend, max_new_tokens=3, temperature=0.0, stop=["aris"], return_logprob=True)
    assert state["x"] == " P"
    assert state.get_meta_info("y")["completion_tokens"] == 1
    assert len(state.get_meta_info("y")["output_token_logprobs"]) == 1
    backend.shutdown()


# -- what it costs


def test_a_choice_costs_the_prompt_once_and_the_options() -> None:
    backend = sgl.RuntimeEndpoint(default_server())

    @sgl.function
    def pick(s, prompt, options):  # type: ignore[no-untyped-def]
        s += prompt + sgl.select("x", options)

    prompt = " ".join(f"Rule {n}: trees have {n} leaves." for n in range(60)) + " The tree has"
    options = [f" {n} leaves and a bird" for n in range(12)]
    flush()
    before = computed_tokens()
    state = pick.run(prompt, options, backend=backend)
    computed = computed_tokens() - before
    assert state["x"] in options
    in_prompt, in_options = len(token_ids(prompt)), sum(len(token_ids(o)) for o in options)
    page = 16  # only whole pages are shared: each option computes what the prompt has in its last one again
    assert in_prompt < computed <= in_prompt + in_options + (len(options) + 1) * (page + 1)
    assert computed < 2 * in_prompt
    backend.shutdown()


def flush() -> None:
    """As soon as nothing runs: what ended at a stop string is still computed for a step or two."""
    assert httpx.post(f"{default_server()}/flush_cache?timeout=60", timeout=90).status_code == 200


def computed_tokens() -> int:
    info = httpx.get(f"{default_server()}/server_info", timeout=60).json()
    return int(info["internal_states"][0]["counters"]["prompt_tokens"])
