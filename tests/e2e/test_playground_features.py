"""The playground in headless Chromium: what it keeps, how it shows answers, and what it says when something is wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "entrypoints"))

from browser import Playground, browser, needs_browser, until
from scripted_server import Answer, FakeServer, serving
from test_playground import PICTURE

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300), needs_browser]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("downloads")) as driver:
        yield driver


@pytest.fixture
def running() -> Iterator[FakeServer]:
    with serving(Answer(pieces=["Hello", " there."])) as started:
        started.engine.picture = PICTURE
        yield started


def says(running: FakeServer, text: str) -> None:
    """What the model answers from now on."""
    running.engine.script = lambda *_: Answer(pieces=re.findall(r"[\s\S]{1,9}", text))


def titles(page: Playground) -> list[str]:
    return [each.get_attribute("title") or "" for each in page.all("#chat-list .chat-title")]


# -- conversations --------------------------------------------------------------------------------


def test_conversations_persist_and_can_be_found(chromium: Any, running: FakeServer) -> None:
    page = Playground(chromium, running.url).ready()
    assert page.one("#chat-none").text == "Conversations are kept here, in this browser."
    for question in ("Tell me about oaks", "Tell me about roses"):
        page.one("#new-chat").click()
        page.ask(question)
        assert page.answer() == "Hello there."
    assert titles(page) == ["Tell me about roses", "Tell me about oaks"]
    page.driver.refresh()
    page.ready()
    until(lambda: page.all(".message.user"), "the conversation of before", within_s=10)
    assert page.one(".message.user").text.startswith("Tell me about roses")
    page.all("#chat-list .chat-title")[1].click()
    until(lambda: "oaks" in page.one(".message.user").text, "the older one", within_s=5)
    assert titles(page)[0] == "Tell me about roses", "to look at one does not move it"
    page.ask("And their leaves?")
    page.answer()
    assert titles(page)[0] == "Tell me about oaks", "a new turn does"
    page.fill("#chat-search", "leaves")
    assert titles(page) == ["Tell me about oaks"]
    page.fill("#chat-search", "HELLO")
    assert len(titles(page)) == 2, "answers are searched too"
    page.fill("#chat-search", "nothing like it")
    assert titles(page) == []
    assert page.one("#chat-none").text == "No conversation has these words."
    assert page.complaints() == []


def test_rename_delete_and_undo(chromium: Any, running: FakeServer) -> None:
    page = Playground(chromium, running.url).ready()
    page.ask("A first question")
    page.answer()
    page.press("#chat-list li", "Rename A first question")
    box = page.one("#chat-list input")
    page.run("arguments[0].value = ''", box)  # WebDriver's own way takes the focus away, which ends the edit
    box.send_keys("Trees\n")
    assert titles(page) == ["Trees"]
    page.ask("More")
    page.answer()
    assert titles(page) == ["Trees"], "a given name stays"
    page.press("#chat-list li", "Delete Trees")
    assert titles(page) == []
    assert page.all(".message") == []
    assert "Deleted" in page.one("#toast").text
    page.one("#toast button").click()
    until(lambda: titles(page) == ["Trees"], "the conversation to come back", within_s=5)
    assert len(page.all(".message.user")) == 2
    page.press("#chat-list li", "Delete Trees")
    page.driver.refresh()
    page.ready()
    assert page.all(".message") == []
    assert titles(page) == []
    page.ask("Another")
    page.answer()
    page.press(".message.user", "Delete")
    assert page.all(".message") == []
    page.one("#toast button").click()
    until(lambda: len(page.all(".message")) == 2, "the removed messages", within_s=5)


# -- how answers are shown ------------------------------------------------------------------------


def test_formulas(chromium: Any, running: FakeServer) -> None:
    inside = "Since $a^2 + b^2 = c^2$ and \\(x_1\\), it costs $5 and $6."
    says(running, inside + "\n\n$$\n\\int_0^1 x\\,dx = \\frac12\n$$\n\n\\[ e = mc^2 \\]")
    page = Playground(chromium, running.url).ready()
    assert not page.run("return performance.getEntriesByType('resource').some(e => e.name.includes('/vendor/'))")
    page.ask("Maths, please")
    until(lambda: len(page.all(".formula.drawn .katex")) == 4, "four formulas", within_s=20)
    assert len(page.all("div.formula .katex-display")) == 2
    assert "it costs $5 and $6." in page.one(".markdown p").text
    assert page.run("return document.fonts.ready.then(() => [...document.fonts].some(f => f.status === 'loaded'))")
    assert page.complaints() == []


def test_programs_are_coloured(chromium: Any, running: FakeServer) -> None:
    source = 'def add(a, b):\n    return "<b>" + str(a + b)  # a < b'
    says(running, f"Here:\n\n```python\n{source}\n```\n\n```nosuchlanguage\n1 < 2\n```")
    page = Playground(chromium, running.url).ready()
    page.ask("A program, please")
    until(lambda: page.all("code.coloured .hljs-keyword"), "colours", within_s=20)
    assert page.one("code.coloured").get_attribute("textContent") == source
    assert page.all(".code-block code")[1].text == "1 < 2"
    assert page.complaints() == []


def test_lists_tasks_and_tables(chromium: Any, running: FakeServer) -> None:
    says(running, """1. one
   - inner *a*
   - inner b

2. two

   more of two
3. three
- [x] done
- [ ] open

| left | right | code |
|:-----|------:|:----:|
| a \\| b | 1 | `x|y` |
| short |

Text with a \\*star\\* and a | bar.""")  # fmt: skip
    page = Playground(chromium, running.url).ready()
    page.ask("A list, please")
    page.answer()
    shown = page.run("""
      const all = (selector) => [...document.querySelectorAll('.markdown ' + selector)];
      const text = (selector) => all(selector).map(e => e.innerText.trim());
      return {ordered: all('> ol').length, items: all('> ol > li').length, inner: text('ol ul li'),
              paragraphs: text('ol > li:nth-child(2) p'), boxes: all('.task input').map(e => [e.checked, e.disabled]),
              tasks: text('.task'), head: text('th'), cells: text('td'),
              sides: all('td').slice(0, 3).map(e => getComputedStyle(e).textAlign), last: text('p').at(-1)}""")
    assert (shown["ordered"], shown["items"]) == (1, 3)
    assert shown["inner"] == ["inner a", "inner b"]
    assert shown["paragraphs"] == ["two", "more of two"]
    assert shown["boxes"] == [[True, True], [False, True]]
    assert shown["tasks"] == ["done", "open"]
    assert shown["head"] == ["left", "right", "code"]
    assert shown["cells"] == ["a | b", "1", "x|y", "short", "", ""]
    assert shown["sides"] == ["left", "right", "center"]
    assert shown["last"] == "Text with a *star* and a | bar."
    assert page.complaints() == []


def test_json_is_shown_as_code(chromium: Any, running: FakeServer) -> None:
    says(running, '{"city": "Paris", "river": "the *Seine*"}')
    page = Playground(chromium, running.url).ready()
    page.ask("JSON, please")
    until(lambda: page.all("code.coloured .hljs-attr"), "coloured JSON", within_s=20)
    assert page.one(".code-head span").text == "json"
    assert page.one("code.coloured").text.splitlines() == ["{", '  "city": "Paris",', '  "river": "the *Seine*"', "}"]
    assert page.all(".markdown em") == []


# -- the state of things --------------------------------------------------------------------------


def test_retry_after_an_error(chromium: Any) -> None:
    with serving(Answer(pieces=["Fine", "."])) as running:
        running.engine.picture = PICTURE
        page = Playground(chromium, running.url).ready()
        page.sampling(temperature=-3)
        page.ask("Hi")
        until(lambda: page.idle() and page.all(".error button"), "the error and its button")
        page.tab("sampling")
        page.fill("#s-temperature", "1")
        page.press(".message.assistant", "Try again")
        until(lambda: page.answer() == "Fine.", "the answer")
        assert not page.one(".error").is_displayed()
        assert page.all(".pager span") == [], "the failed answer has left"


def test_the_context_meter(chromium: Any, running: FakeServer) -> None:
    page = Playground(chromium, running.url).ready()
    assert not page.one("#context").is_displayed()
    page.ask("Hi")
    page.answer()
    length = page.one("#context").get_attribute("aria-valuemax")
    prompt = int(re.search(r"of ([\d,]+) prompt tokens", page.stats())[1].replace(",", ""))  # type: ignore[index]
    answered = int(re.search(r"(\d+) tokens ·", page.stats())[1])  # type: ignore[index]
    assert page.one("#context-text").text == f"{prompt + answered:,} of {int(length or 0):,} tokens"
    page.fill("#prompt", "x" * 400)
    assert page.one("#context-text").text.startswith(f"≈ {prompt + answered + 100:,} of")


def test_a_span_shows_its_text(chromium: Any) -> None:
    with serving(Answer(pieces=["Hi"])) as running:
        ids = running.engine.engine_client.tokenizer.encode("You are a careful guide")
        span = {"id": 1, "parent": 0, "tokens": 40, "pages": 3, "depth": 40, "requests": 0, "hits": 2, "children": 0,
                "first_ids": ids}  # fmt: skip
        running.engine.picture = {**PICTURE, "spans": [span]}
        page = Playground(chromium, running.url).ready()
        box = until(lambda: page.all(".span"), "the span")[0]
        assert "You are a careful guide" in (box.get_attribute("title") or "")
        assert "found again 2 times" in (box.get_attribute("title") or "")


def test_a_dead_server_is_noticed(chromium: Any) -> None:
    with serving(Answer(pieces=["Hi"])) as running:
        running.engine.picture = PICTURE
        page = Playground(chromium, running.url).ready()
        page.tab("sampling")  # nothing of the live view is asked for
    until(lambda: page.one("#health").text == "unreachable", "the pill to notice", within_s=20)


def test_a_wrong_key_is_said_to_be_wrong(chromium: Any) -> None:
    with serving(Answer(pieces=["Hi"]), api_key="s3cret") as running:
        running.engine.picture = PICTURE
        page = Playground(chromium, running.url)
        until(lambda: page.one("#health").text == "key needed", "the need for a key", within_s=10)
        assert page.one("#key-check").text == "This server wants a key."
        page.fill("#key", "wrong")
        page.one("#api").click()
        until(lambda: page.one("#health").text == "wrong key", "the pill", within_s=10)
        assert page.one("#key-check").text == "The server does not accept this key."
        page.fill("#key", "s3cret")
        page.one("#api").click()
        page.ready()
        assert page.one("#key-check").text == ""


def test_the_bare_address_leads_here(chromium: Any, running: FakeServer) -> None:
    Playground(chromium, running.url)
    chromium.get(f"{running.url}/")
    assert chromium.current_url == f"{running.url}/ui/"


def test_a_phone_has_a_plain_plus_and_the_list_as_a_sheet(chromium: Any, running: FakeServer) -> None:
    page = Playground(chromium, running.url, width=390, height=844).ready()
    assert page.one("#new-chat").text == "+"
    assert not page.one("#chats").is_displayed()
    page.ask("Hi")
    page.answer()
    page.one("#toggle-chats").click()
    assert titles(page) == ["Hi"]
    assert page.run("return document.documentElement.scrollWidth") <= 390
    page.one("#chat-list .chat-title").click()
    until(lambda: not page.one("#chats").is_displayed(), "the sheet to close", within_s=5)
