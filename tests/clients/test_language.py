"""Programs of the language through the real litellm, which has an environment of its own (`make test-clients`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("litellm", reason="litellm is not installed here: run `make test-clients`")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import bough as sgl  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"


@sgl.function
def capital(s, country):  # type: ignore[no-untyped-def]
    s += sgl.user(f"What is the capital of {country}? Answer with one word.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, stop="."))
    s += sgl.user("Is it a large city?")
    s += sgl.assistant(sgl.select("large", ["yes", "no"]))
    s += sgl.user("How many words was that?")
    s += sgl.assistant(sgl.gen_int("words", max_tokens=24))


@pytest.mark.parametrize("stream", [False, True])
def test_a_program_on_litellm(url: str, stream: bool) -> None:
    backend = sgl.LiteLLM(f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none")
    state = capital.run(country="France", backend=backend, temperature=0.0, stream=stream)
    pieces = list(state.text_iter("answer"))
    assert "Paris" in "".join(pieces)
    assert state["answer"] == "".join(pieces)
    assert state["large"] in ("yes", "no")
    int(state["words"])


def test_what_litellm_cannot_do_is_said(url: str) -> None:
    @sgl.function
    def year(s):  # type: ignore[no-untyped-def]
        s += sgl.user("Which year is it?")
        s += sgl.assistant(sgl.gen("year", regex="[0-9]{4}"))

    with pytest.raises(sgl.ProgramError, match="can't do regex"):
        year.run(backend=sgl.LiteLLM(f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none"))


def test_an_error_of_the_provider_names_the_programs_line(url: str) -> None:
    backend = sgl.LiteLLM("openai/no-such-model", api_base=f"{url}/nowhere", api_key="none")
    with pytest.raises(sgl.ProgramError) as caught:
        capital.run(country="France", backend=backend)
    assert caught.value.origin.function == "capital"
