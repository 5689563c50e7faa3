"""The playground in headless Chromium: clicked, typed into, streamed to and looked at."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "entrypoints"))

from browser import Playground, behind_prefix, browser, needs_browser, until
from default_server import default_server
from scripted_server import Answer, FakeServer, serving

# A browser watches a live stream, which needs a quiet machine: hence with the slow tests.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300), needs_browser]

CAPITAL = "What is the capital of France? Answer with one word."
GARDEN = "You are the careful guide of a large botanical garden, and you know each of its plants by name. " * 4
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> enable_thinking #}"
)
PICTURE: dict[str, Any] = {
    "running": 0, "prefilling": 0, "queued": 0, "compiling": 0, "cache_hit_rate": 0.0, "counters": {"output_tokens": 0},
    "pages": {"total": 10, "free": 10, "cached": 0, "evictable": 0, "held": 0, "page_size": 16}, "spans": [], "rows": [],
    "more_spans": False, "more_rows": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def chromium(downloads: Path) -> Iterator[Any]:
    with browser(downloads) as driver:
        yield driver


@pytest.fixture
def page(chromium: Any) -> Iterator[Playground]:
    """The page of a server with the default model. What the browser complains of fails the test."""
    opened = Playground(chromium, default_server()).ready()
    yield opened
    assert opened.complaints() == []


# -- talking to the default model -----------------------------------------------------------------


_WATCH_THE_ANSWER = """
window.answerLengths = [];
new MutationObserver(() => {
  const length = document.querySelector('.message.assistant .markdown')?.textContent.length;
  if (length && window.answerLengths.at(-1) !== length) window.answerLengths.push(length);
}).observe(document.body, {subtree: true, childList: true, characterData: true});
"""


def test_an_answer_streams_and_is_the_api_s(page: Playground, tmp_path: Path) -> None:
    page.sampling(temperature=0, max_tokens=60)
    question = "Explain in two sentences why leaves are green."
    page.run(_WATCH_THE_ANSWER)
    page.ask(question)
    until(page.idle, "the answer")
    lengths = page.run("return window.answerLengths")
    assert len(lengths) >= 4, f"it did not stream: {lengths}"
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "top_p": 0.9, "max_tokens": 60}
    told = httpx.post(f"{default_server()}/v1/chat/completions", json=asked, timeout=60).json()
    assert " ".join(page.answer().split()) == " ".join(told["choices"][0]["message"]["content"].split())
    usage = told["usage"]
    stats = page.stats()
    assert f"{usage['completion_tokens']} tokens" in stats
    assert f"of {usage['prompt_tokens']} prompt tokens cached" in stats
    assert re.search(r"first token [\d.]+ (ms|s) · [\d.]+ tok/s", stats)
    shot = tmp_path / "answer.png"
    assert page.driver.save_screenshot(str(shot))
    assert struct.unpack(">II", shot.read_bytes()[16:24]) == (1280, 900)
    assert shot.stat().st_size > 20_000, "the picture is all but empty"


def test_the_next_turn_carries_the_conversation(page: Playground) -> None:
    page.sampling(temperature=0, max_tokens=24)
    page.ask(CAPITAL)
    assert "Paris" in page.answer()
    page.ask("And what river flows through it?")
    page.answer()
    cached, prompt = re.search(r"([\d,]+) of ([\d,]+) prompt tokens cached", page.stats()).groups()  # type: ignore[union-attr]
    assert int(cached) >= 32, "the first turn's tokens were computed again"
    assert int(prompt) > 60


def test_stop_ends_the_request_on_the_server_too(page: Playground) -> None:
    page.sampling(temperature=0.8, max_tokens=4000)
    page.ask("Tell a very long story about a tree.")
    until(
        lambda: page.run("return document.querySelector('.message.assistant .markdown')?.textContent.length > 20"),
        "text",
    )
    page.one("#stop").click()
    until(page.idle, "the stop", within_s=5)
    assert "stopped" in page.stats()
    before = page.answer()

    def running() -> int:
        return sum(httpx.get(f"{default_server()}/ui/state").json()[name] for name in ("running", "prefilling"))

    until(lambda: running() == 0, "the request to leave the engine", within_s=5)
    assert page.answer() == before


def test_edit_resend_and_another_answer(page: Playground) -> None:
    page.sampling(temperature=0, max_tokens=12)
    page.ask("What is the capital of Italy? Answer with one word.")
    assert "Rome" in page.answer()
    page.press(".message.user", "Edit")
    page.fill(".message.user textarea", CAPITAL)
    page.press(".message.user", "Send again")
    until(lambda: "Paris" in page.answer(), "the new answer")
    assert len(page.all(".message.user")) == len(page.all(".message.assistant")) == 1
    page.press(".message.assistant", "Again")
    until(lambda: "2 of 2" in page.one(".pager").text, "a second answer")
    page.answer()
    page.press(".message.assistant", "Previous answer")
    assert "1 of 2" in page.one(".pager").text
    page.press(".message.assistant", "Delete")
    assert page.all(".message.assistant") == []


def test_export_and_import_bring_everything_back(page: Playground, downloads: Path) -> None:
    page.sampling(temperature=0, max_tokens=12)
    page.tab("sampling")
    page.fill("#system", "Answer briefly.")
    page.ask(CAPITAL)
    answer = page.answer()
    page.one("#export").click()
    saved = until(lambda: list(downloads.glob("bough-*.json")), "the file", within_s=10)[0]
    content = json.loads(saved.read_text())
    assert [message["role"] for message in content["messages"]] == ["user", "assistant"]
    page.one("#new-chat").click()
    page.fill("#system", "")
    assert page.all(".message") == []
    page.one("#import-file").send_keys(str(saved))
    until(lambda: page.all(".message.assistant"), "the messages", within_s=5)
    assert page.answer() == answer
    assert page.one("#system").get_attribute("value") == "Answer briefly."
    page.one("#new-chat").click()
    plain = downloads / "plain.json"
    plain.write_text(json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "**Hello**"}]))
    page.one("#import-file").send_keys(str(plain))
    until(lambda: page.all(".message.assistant strong"), "OpenAI's list of messages", within_s=5)
    plain.write_text("{")
    page.one("#import-file").send_keys(str(plain))
    until(lambda: "can't be opened" in page.one("#toast").text, "a word about the broken file", within_s=5)
    assert len(page.all(".message")) == 2


def test_a_schema_holds_the_answer(page: Playground) -> None:
    page.sampling(temperature=0, max_tokens=120)
    page.tab("json")
    page.choose("#format", "json_schema")
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    page.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
             page.one("#format-source"), json.dumps(schema))  # fmt: skip
    assert page.one("#format-check").text == "Valid JSON"
    page.ask("Name a city.")
    page.answer()
    assert list(json.loads(page.one(".code-block code").get_attribute("textContent") or "")) == ["city"]
    assert "valid JSON" in page.stats()
    page.fill("#format-source", "{")
    page.ask("Another one.")
    until(lambda: "not JSON" in page.one("#toast").text, "a word about the broken schema", within_s=5)
    assert len(page.all(".message.assistant")) == 1


def test_tools_are_called_and_answered(page: Playground) -> None:
    page.sampling(temperature=0, max_tokens=80)
    page.tab("tools")
    page.choose("#tool-choice", "required")
    page.ask("How is the weather in Oslo?")
    until(lambda: page.idle() and page.all(".call"), "a call")
    assert page.one(".call-name").text == "get_weather"
    assert "city" in json.loads(page.one(".call pre").text)
    page.choose("#tool-choice", "auto")
    calls = page.all(".call")
    for call in calls:  # a small model may make several
        assert len(page.all(".message.assistant")) == 1, "it went on before all results were there"
        call.find_element("css selector", ".result textarea").send_keys('{"celsius": -3, "sky": "clear"}')
        call.find_element("css selector", ".result button").click()
    until(lambda: page.idle() and len(page.all(".message.assistant")) == 2, "the answer to the results")
    assert len(page.all(".message.tool")) == len(calls)
    assert "clear" in page.one(".message.tool").text


# -- the live view --------------------------------------------------------------------------------


def test_the_live_view_shows_one_node_shared_by_two_live_requests(page: Playground) -> None:
    url = default_server()
    httpx.post(f"{url}/flush_cache")
    page.tab("live")
    ended = threading.Event()

    def hold(question: str) -> None:
        body = {
            "messages": [{"role": "system", "content": GARDEN}, {"role": "user", "content": question}],
            "max_tokens": 6000, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                if ended.is_set():
                    return

    threads = [
        threading.Thread(target=hold, args=(text,)) for text in ("Where are the oaks?", "Which roses bloom now?")
    ]
    for thread in threads:
        thread.start()
    try:
        (shared,) = until(lambda: page.all(".span.shared[data-requests='2']"), "a span with two readers")
        tokens = int(shared.get_attribute("data-tokens") or 0)
        prompt = httpx.post(f"{url}/tokenize", json={"prompt": GARDEN, "add_special_tokens": False}).json()["count"]
        assert prompt - 16 <= tokens <= prompt + 16, "the shared span is the system message, in whole pages"
        assert "read by 2 live requests" in shared.accessible_name
        assert shared.text.split()[-1] == "×2"
        rows = until(lambda: [row for row in page.all("#batch .row.running") if row.get_attribute("data-span")], "rows")
        assert len(rows) == 2
        assert f"{tokens:,} shared" in (rows[0].get_attribute("title") or "")
        assert page.one("#n-running").text == "2"
        page.run("arguments[0].focus()", rows[0])
        assert "lit" in (page.one(".span.shared").get_attribute("class") or "")
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
    until(lambda: page.all(f".span.kept[data-tokens='{tokens}']"), "the span, cached and read by nobody", within_s=15)
    assert page.all(".span.shared") == []


def test_answers_at_once_share_their_prompt(page: Playground) -> None:
    page.sampling(temperature=0.2, max_tokens=800, n=3)  # cool enough that none of them ends early
    page.ask("Write a few lines about " + "tall old trees and the birds that live in them, " * 6 + "please.")
    until(lambda: page.all(".span.shared[data-requests='3']"), "a span with three readers", within_s=20)
    until(lambda: "this page" in page.one("#batch").text, "the page's own rows", within_s=5)
    page.one("#stop").click()
    until(page.idle, "the stop")
    assert "1 of 3" in page.one(".pager").text


# -- with an engine that follows a script ---------------------------------------------------------


@contextlib.contextmanager
def scripted(*pieces: str, **given: Any) -> Iterator[FakeServer]:
    with serving(Answer(pieces=list(pieces)), **given) as running:
        running.engine.picture = PICTURE
        yield running


def test_reasoning_is_folded(chromium: Any) -> None:
    pieces = ("<think>", "two and ", "two make four", "</think>", "It is **four**.")
    with scripted(*pieces, template=THINKS, served={"reasoning_parser": "qwen3"}) as running:
        page = Playground(chromium, running.url).ready()
        page.ask("2 + 2?")
        assert page.answer() == "It is four."
        assert page.one(".reasoning summary").text == "Thought for 5 words"
        assert not page.one(".reasoning-text").is_displayed()
        page.one(".reasoning summary").click()
        assert page.one(".reasoning-text").text == "two and two make four"
        page.ask("Sure?")
        page.answer()
        assert "two make four" not in _prompt(running)
        assert page.complaints() == []


def _prompt(running: Any) -> str:
    from bough.core.messages import unpack_ids

    tokenizer = running.engine.engine_client.tokenizer
    return str(tokenizer.decode(unpack_ids(running.engine.seen[-1].prompt).tolist(), False))


def test_a_model_can_t_inject_anything(chromium: Any) -> None:
    evil = (
        "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script>\n\n"
        "[click](javascript:document.title='owned') [fine](https://example.com/a_b)\n\n"
        "```html\n<b onclick=alert(1)>x</b>\n```\n\n| a | b |\n|---|---|\n| <i>1</i> | `<u>` |\n\n1. one\n2. two\n   - inner"
    )
    with scripted(*re.findall(r"[\s\S]{1,7}", evil)) as running:
        page = Playground(chromium, running.url).ready()
        page.ask("Hi")
        shown = page.answer()
        assert "<img src=x onerror=\"document.title='owned'\">" in shown
        tags = set(page.run("return [...document.querySelectorAll('.markdown *')].map(e => e.localName)"))
        assert tags <= {"p", "a", "div", "span", "button", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "ol",
                        "ul", "li"}  # fmt: skip
        assert [link.get_attribute("href") for link in page.all(".markdown a")] == ["https://example.com/a_b"]
        assert page.driver.title == "bough playground"
        assert page.one(".code-block code").text == "<b onclick=alert(1)>x</b>"
        assert page.one(".markdown ol li ul li").text == "inner"
        assert page.complaints() == []


def test_the_policy_is_enforced(chromium: Any) -> None:
    with scripted("Hi") as running:
        page = Playground(chromium, running.url).ready()
        inline = "document.title = 'owned'"
        page.run(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: arguments[0]}))", inline
        )
        assert page.driver.title == "bough playground"
        refused = page.driver.execute_async_script(
            "const done = arguments[0]; fetch('https://example.com/').then(() => done('sent'), () => done('refused'))"
        )
        assert refused == "refused"
        assert any("Content Security Policy" in complaint for complaint in page.complaints())


def test_the_key_is_asked_for_and_not_kept_unless_told(chromium: Any) -> None:
    with scripted("Hello", " there.", api_key="s3cret") as running:
        page = Playground(chromium, running.url)
        until(lambda: page.one("#health").text == "key needed", "the need for a key", within_s=10)
        assert page.one("#pane-server").is_displayed()
        page.fill("#key", "s3cret")
        page.one("#api").click()
        page.ready()
        page.ask("Hi")
        assert page.answer() == "Hello there."
        assert "s3cret" not in page.run("return JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
        page.one("#show-code").click()
        assert "s3cret" not in page.one("#code-text").text
        assert "$API_KEY" in page.one("#code-text").text
        page.one("#close-code").click()
        page.one("#remember").click()
        assert "s3cret" in page.run("return JSON.stringify(localStorage)")
        page.driver.refresh()
        page.ready()
        page.driver.get(f"{running.url}/ui/?api={running.url}/other/v1")
        until(lambda: page.one("#elsewhere").is_displayed(), "a word about the other server", within_s=5)
        assert page.one("#key").get_attribute("value") == "", "another address must not get this one's key"


def test_it_works_behind_a_path_prefix(chromium: Any) -> None:
    with scripted("Hello", " there.") as running, behind_prefix(running.url, "/team/llm") as url:
        page = Playground(chromium, url).ready()
        page.ask("Hi")
        assert page.answer() == "Hello there."
        assert page.driver.current_url == f"{url}/ui/"
        assert f"{url}/v1" in page.one("#about").get_attribute("textContent")
        assert page.complaints() == []


def test_it_talks_to_another_server_if_told(chromium: Any) -> None:
    with scripted("From", " elsewhere.", cors_origins="*", insecure=True) as other, scripted("Hi") as running:
        page = Playground(chromium, running.url).ready()
        page.tab("server")
        page.fill("#api", f"{other.url}/v1")
        page.one("#go-api").click()
        until(lambda: page.one("#elsewhere").is_displayed(), "a word about the other server", within_s=5)
        page.ready()
        page.ask("Hi")
        assert page.answer() == "From elsewhere."
        assert not running.engine.seen


def test_the_reference_shows_every_route_without_other_hosts(chromium: Any) -> None:
    with scripted("Hi", api_key="s3cret") as running:
        page = Playground(chromium, running.url)
        page.driver.get(f"{running.url}/docs")
        until(lambda: page.one("#key-form").is_displayed(), "the need for a key", within_s=10)
        page.complaints()
        page.fill("#key", "s3cret")
        page.one("#key-form button").click()
        routes = until(lambda: page.all(".route"), "the routes", within_s=10)
        document = httpx.get(f"{running.url}/openapi.json", headers={"authorization": "Bearer s3cret"}).json()
        named = {
            (path, method) for path, methods in document["paths"].items() for method in methods if method != "head"
        }
        assert len(routes) == len(named)
        page.fill("#filter", "chat completions")
        (found,) = [route for route in routes if route.is_displayed()]
        found.find_element("css selector", "summary").click()
        fields = {cell.text.split()[0] for cell in found.find_elements("css selector", "th")}
        assert {"messages", "temperature", "tools"} <= fields
        assert page.complaints() == []


def test_errors_are_told_in_the_page(chromium: Any) -> None:
    with scripted("Hi") as running:
        page = Playground(chromium, running.url).ready()
        page.sampling(temperature=-3)
        page.ask("Hi")
        until(lambda: page.idle() and page.all(".error"), "the error")
        assert "temperature is -3" in page.one(".error").text


# -- for everybody --------------------------------------------------------------------------------


def test_every_control_has_a_name_and_keys_do_everything(page: Playground) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.run("document.querySelectorAll('[role=tabpanel], [hidden]').forEach(e => e.hidden = false)")
    for control in page.all("button, input, select, textarea, [role], dialog"):
        if control.is_displayed():
            assert control.accessible_name or control.get_attribute("role") == "status", control.get_attribute(
                "outerHTML"
            )
    page.driver.refresh()
    page.ready()
    keys = lambda *pressed: ActionChains(page.driver).send_keys(*pressed).perform()
    assert page.run("return document.activeElement.id") == "prompt"
    keys("What is 1 + 1?", Keys.ENTER)
    until(lambda: page.all(".message.assistant"), "an answer", within_s=10)
    keys(Keys.ESCAPE)
    until(page.idle, "the stop", within_s=10)
    ActionChains(page.driver).key_down(Keys.ALT).send_keys("2").key_up(Keys.ALT).perform()
    assert page.run("return document.activeElement.id") == "tab-sampling"
    keys(Keys.ARROW_RIGHT)
    assert page.one("#pane-json").is_displayed()
    keys("?")
    assert page.one("#help-dialog").is_displayed()
    keys(Keys.ESCAPE)
    keys("/")
    assert page.run("return document.activeElement.id") == "prompt"
    keys(Keys.ARROW_UP)
    assert page.one(".message.user textarea").get_attribute("value") == "What is 1 + 1?"


def test_light_dark_and_the_user_s_choice(page: Playground) -> None:
    ground = lambda: page.run("return getComputedStyle(document.body).backgroundColor")
    light = ground()
    page.look("dark")
    dark = until(lambda: ground() if ground() != light else "", "the dark theme", within_s=5)
    page.one("#theme").click()
    assert page.one("#theme").accessible_name == "Theme: light"
    assert ground() == light
    page.one("#theme").click()
    page.look("light")
    assert ground() == dark
    page.driver.refresh()
    assert ground() == dark


def test_it_fits_a_phone(chromium: Any) -> None:
    page = Playground(chromium, default_server(), width=390, height=844, scale=2).ready()
    assert not page.one("#panel").is_displayed()
    page.ask("What is the capital of Spain? Answer with one word.")
    page.answer()
    for panel_open in (False, True):
        assert page.one("#panel").is_displayed() == panel_open
        assert page.run("return document.documentElement.scrollWidth") <= 390
        controls = "[...document.querySelectorAll('button, select, textarea')].filter(e => e.offsetParent)"
        off = page.run(
            f"return {controls}.filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.id)"
        )
        assert off == []
        if not panel_open:
            page.one("#toggle-panel").click()
    page.one("#close-panel").click()
    assert not page.one("#panel").is_displayed()
