"""API speculation: fewer calls, the same values."""

from __future__ import annotations

import pytest
from lang_fake_server import FakeServer

import bough.lang as sgl
from bough.lang.speculation import Blank, Speculation, match_format


def test_completions_are_served_from_the_text_ahead(fake: FakeServer) -> None:
    fake.script = [
        ("Name: $", "Ada\nBorn: 1815\nJob: analyst\nrest"),
        ("Born: $", "1815\nJob: analyst\n"),
        ("Job: $", "analyst\n"),
        ("Pets: $", "none\n"),
    ]

    def body(s):
        s += "Name: " + sgl.gen("name", stop="\n") + "\nBorn: " + sgl.gen("born", stop="\n")
        s += "\nJob: " + sgl.gen("job", stop="\n") + "\nPets: " + sgl.gen("pets", stop="\n")

    backend = sgl.OpenAI("toy", is_chat_model=False, base_url=fake.url + "/v1")
    plain = sgl.function(body).run(backend=backend)
    assert len(fake.bodies("/v1/completions")) == 4
    fake.requests.clear()
    ahead = sgl.function(num_api_spec_tokens=64)(body).run(backend=backend)
    assert ahead.text() == plain.text()
    assert len(fake.bodies("/v1/completions")) == 2
    assert fake.bodies("/v1/completions")[0]["max_tokens"] == 128
    assert ahead.get_meta_info("born")["speculated"] is True


def test_a_gen_whose_stop_never_comes_is_asked_for_plainly(fake: FakeServer) -> None:
    fake.script = [("Say: $", "abcdefgh")]

    @sgl.function(num_api_spec_tokens=2)
    def program(s):
        s += "Say: " + sgl.gen("x", stop="\n", max_tokens=2)

    state = program.run(backend=sgl.OpenAI("toy", is_chat_model=False, base_url=fake.url + "/v1"))
    assert state["x"] == "ab"


def chat_program(s):
    s += sgl.user("Tell name and job, in the form Name: ...; Job: ...")
    s += sgl.assistant("Name: " + sgl.gen("name", stop=";") + "; Job: " + sgl.gen("job"))


def test_a_chat_message_with_blanks_is_one_call(fake: FakeServer) -> None:
    fake.script = [("in the form", "Name: Ada; Job: analyst")]
    backend = sgl.OpenAI("toy", base_url=fake.url + "/v1")
    state = sgl.function(num_api_spec_tokens=64)(chat_program).run(backend=backend)
    assert (state["name"], state["job"]) == ("Ada", "analyst")
    assert state.messages()[-1]["content"] == "Name: Ada; Job: analyst"
    assert len(fake.bodies("/v1/chat/completions")) == 1
    fake.script = [("in the form", "I would rather not")]
    with pytest.raises(sgl.ProgramError, match="does not follow the message's format: 'I would rather not'"):
        sgl.function(num_api_spec_tokens=64)(chat_program).run(backend=backend)


@pytest.mark.parametrize(
    ("pattern", "reply", "filled"),
    [
        (["A: ", Blank(()), " B: ", Blank(())], "A: x B: y z", ["x", "y z"]),
        ([" A: ", Blank((";",)), "; B: ", Blank(("\n",))], "A: x; B: y\nmore", ["x", "y"]),
        ([Blank((".",)), ". ", Blank(())], "one. two.", ["one", "two."]),
        (["A: ", Blank((";",)), " B"], "A: x; B", None),
        (["A: ", Blank(()), " B"], "A: x", None),
        (["A: "], "B", None),
    ],
)
def test_match_format(pattern: list[str | Blank], reply: str, filled: list[str] | None) -> None:
    assert match_format(pattern, reply) == filled


def test_speculation_is_dropped_when_the_program_says_something_else() -> None:
    ahead = Speculation("one\ntwo\n")
    assert ahead.take(["\n"]) == "one"
    ahead.advance("\n")
    assert ahead.take(["x"]) is None
    assert ahead.take(["wo", "\n"]) == "t"
    ahead.advance("else")
    assert ahead.take(["\n"]) is None
