"""`bough chat` against a real HTTP server with a scripted engine."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "entrypoints"))

from scripted_server import Answer, FakeServer, serving

from bough.cli import chat
from bough.cli.chat import Conversation
from bough.core.errors import BoughError, Unavailable


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serving(lambda message, prompt: Answer(pieces=[f"heard {prompt.count('<|im_start|>user')}", "."])) as running:
        yield running


def test_history_grows_and_clears(server: FakeServer) -> None:
    talk = Conversation(server.url, "", system="Be brief.")
    assert talk.model == "fake"
    assert "".join(text for _, text in talk.ask("one")) == "heard 1."
    assert "".join(text for _, text in talk.ask("two")) == "heard 2."
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "tokens/s" in talk.stats.line()
    talk.clear()
    assert "".join(text for _, text in talk.ask("three")) == "heard 1."


def test_a_failed_question_leaves_no_trace(server: FakeServer) -> None:
    talk = Conversation(server.url, "")
    with pytest.raises(BoughError, match="context"):
        list(talk.ask("long " * 2000))
    assert talk.messages == []


def test_one_quick_question(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.run(["--url", server.url, "--quick", "hi", "--stats", "--max-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "heard 1.\n"
    assert "tokens in" in printed.err
    assert server.engine.seen[-1].sampling.max_new_tokens == 5


@pytest.mark.parametrize("typed", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_the_address_may_be_the_banners_or_have_no_scheme(server: FakeServer, typed: str) -> None:
    for url in (server.url, server.url.removeprefix("http://")):
        assert "".join(text for _, text in Conversation(typed.format(url), "").ask("one")) == "heard 1."


def test_a_whole_session(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "", "/stats", "/clear", "/what", "again", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert chat.run(["--url", server.url]) == 0
    printed = capsys.readouterr().out
    assert printed.count("heard 1.") == 2
    assert "server: 1 running, 2 waiting" in printed
    assert "unknown command /what" in printed
    assert next(lines) == "never"


def test_markdown_on_a_terminal(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    chat.show_markdown(Conversation(server.url, "").ask("hi"))
    assert "heard 1." in capsys.readouterr().out


def test_nobody_there() -> None:
    with pytest.raises(Unavailable) as caught:
        Conversation("http://127.0.0.1:9", "")
    assert "bough serve" in caught.value.fix


def test_the_key_is_asked_for() -> None:
    with serving(api_key="s3cret") as running:
        with pytest.raises(BoughError) as caught:
            Conversation(running.url, "")
        assert "--api-key" in caught.value.fix
        assert Conversation(running.url, "s3cret").model == "fake"


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""One pixel."""


def test_a_picture_goes_with_the_next_question_only(server: FakeServer, tmp_path: Path) -> None:
    picture = tmp_path / "a picture.png"
    picture.write_bytes(PNG)
    talk = Conversation(server.url, "")
    sent: list[dict[str, Any]] = []
    talk._client.event_hooks["request"].append(lambda request: sent.append(json.loads(request.content)))
    talk.attach(str(picture))
    with pytest.raises(BoughError, match=r"answered 400.*text"):
        list(talk.ask("what is this?"))
    shown, asked = sent[0]["messages"][-1]["content"]
    assert base64.b64decode(shown["image_url"]["url"].removeprefix("data:image/png;base64,")) == PNG
    assert asked == {"type": "text", "text": "what is this?"}
    assert talk.messages == [], "a question that was refused is not in the way of the next"
    assert "".join(text for _, text in talk.ask("and this?")) == "heard 1."
    assert sent[1]["messages"][-1]["content"] == "and this?"


def test_what_is_no_picture_is_refused(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "good.png").write_bytes(PNG)
    commands = [f"/image {tmp_path}/none.png", f"/image {tmp_path}/text.png", "/image", f"/image {tmp_path}/good.png"]
    lines = iter([*commands, "/clear", "hello", "/history", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert chat.run(["--url", server.url]) == 0
    printed, errors = capsys.readouterr()
    assert "can't read" in errors
    assert "no picture of a kind that is taken" in errors
    assert "(1 with the next question)" in printed
    assert "user: hello\nassistant: heard 1.\n" in printed
    with pytest.raises(BoughError, match="no picture"):
        chat.run(["--url", server.url, "--image", f"{tmp_path}/text.png", "--quick", "hi"])


def test_a_picture_by_its_url_passes_the_door(server: FakeServer) -> None:
    """The picture is fetched here, under guard, and sent as bytes: the server need not reach the web."""
    talk = Conversation(server.url, "")
    talk.attach(f"data:image/gif;base64,{base64.b64encode(PNG).decode()}")
    assert talk.images == [f"data:image/png;base64,{base64.b64encode(PNG).decode()}"], "its bytes say what it is"
    before = len(server.engine.seen)
    with pytest.raises(BoughError, match="nothing is fetched from 127"):
        talk.attach(server.url + "/ui/app.js")
    assert len(server.engine.seen) == before


def interrupted(talk: Conversation, text: str, after: int) -> list[str]:
    """Asks, and presses Ctrl-C once `after` pieces have come."""
    shown: list[str] = []

    def show(pieces: Iterator[tuple[str, str]]) -> None:
        for _ in range(after):
            shown.append(next(pieces)[1])
        raise KeyboardInterrupt

    chat.answer(talk.ask(text), show)
    return shown


def test_an_interrupted_answer_is_kept(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(server.url, "")
    assert interrupted(talk, "one", after=1) == ["heard 1"]
    assert talk.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "heard 1"}]
    assert "/retry" in capsys.readouterr().out
    assert "".join(text for _, text in talk.ask("two")) == "heard 2.", "and the conversation goes on"
    assert interrupted(Conversation(server.url, ""), "one", after=0) == []


def test_a_question_is_asked_again(server: FakeServer) -> None:
    talk = Conversation(server.url, "", system="Be brief.")
    with pytest.raises(BoughError, match="nothing to ask again"):
        talk.retry()
    list(talk.ask("one"))
    list(talk.ask("two"))
    before = list(talk.messages)
    assert "".join(text for _, text in talk.retry()) == "heard 2.", "not as a third"
    assert talk.messages == before


def test_system_message_and_saved_conversations(server: FakeServer, tmp_path: Path) -> None:
    talk = Conversation(server.url, "")
    list(talk.ask("one"))
    assert chat.command(talk, "/system Answer in French.")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    assert chat.command(talk, "/system Be brief.")
    assert [message["content"] for message in talk.messages] == ["Be brief.", "one", "heard 1."]
    assert chat.command(talk, f"/save {tmp_path}/talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == {"model": "fake", "messages": talk.messages}
    assert chat.command(talk, f"/save {tmp_path}/talk.md")
    assert "**user**\n\none" in (tmp_path / "talk.md").read_text()
    with pytest.raises(BoughError, match="can't write"):
        chat.command(talk, f"/save {tmp_path}/no/such/place.md")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["one"], "one"),
        (["one \\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one', "", "  two", 'three"""'], "one\n\n  two\nthree"),
        (['"""', "one", '"""'], "one"),
        (['"""one"""'], "one"),
    ],
)
def test_messages_of_several_lines(typed: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert chat.read_message(on_terminal=False) == message
    assert next(lines, None) is None
