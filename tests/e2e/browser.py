"""Headless Chromium, and the playground as somebody who looks at it would describe it."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
DRIVER = shutil.which("chromedriver") or ""


def why_not() -> str:
    """What is missing to run a browser; empty: nothing."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install selenium)"
    if not CHROMIUM or not DRIVER:
        return "Chromium is not installed (apt-get install chromium chromium-driver)"
    return ""


needs_browser = pytest.mark.skipif(bool(why_not()), reason=why_not())


@contextlib.contextmanager
def browser(downloads: Path) -> Iterator[Chrome]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def until(look: Callable[[], T], what: str, within_s: float = 60) -> T:
    """What `look` returns, once that is something."""
    give_up = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < give_up, f"waited {within_s} s for {what}"
        time.sleep(0.05)
    return found


class Playground:
    """The page at `url`, opened afresh with nothing kept from before."""

    def __init__(self, driver: Chrome, url: str, *, width: int = 1280, height: int = 900, scale: float = 1) -> None:
        self.driver = driver
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 700,
        )
        self.look("light")
        driver.get(f"{url}/ui")
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.execute_async_script(
            "const done = arguments[0]; const gone = indexedDB.deleteDatabase('bough');"
            "gone.onsuccess = gone.onerror = gone.onblocked = () => done()"
        )
        driver.get(f"{url}/ui")
        driver.get_log("browser")

    def command(self, name: str, **given: Any) -> None:
        self.driver.execute_cdp_cmd(name, given)

    def look(self, scheme: str) -> None:
        """What the system prefers."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def ready(self) -> Playground:
        until(lambda: self.one("#health").text == "ready", "the server to be ready")
        return self

    def fill(self, selector: str, text: str) -> None:
        box = self.one(selector)
        box.clear()
        box.send_keys(text)

    def choose(self, selector: str, value: str) -> None:
        self.one(f"{selector} option[value='{value}']").click()

    def tab(self, name: str) -> None:
        self.one(f"#tab-{name}").click()
        assert self.one(f"#pane-{name}").is_displayed()

    def sampling(self, **values: object) -> None:
        self.tab("sampling")
        for name, value in values.items():
            self.fill(f"#s-{name}", str(value))
        self.tab("live")

    def ask(self, text: str) -> None:
        self.fill("#prompt", text)
        self.one("#send").click()

    def idle(self) -> bool:
        return self.one("#send").is_displayed()

    def answer(self) -> str:
        """The last answer, once it is complete."""
        until(lambda: self.idle() and self.all(".message.assistant"), "the answer")
        return str(self.run("return [...document.querySelectorAll('.message.assistant .markdown')].at(-1).innerText"))

    def stats(self) -> str:
        return str(self.run("return [...document.querySelectorAll('.message.assistant .stats')].at(-1).textContent"))

    def press(self, selector: str, label: str) -> None:
        """A message's button, by its label."""
        message = self.all(selector)[-1]
        buttons = message.find_elements("css selector", "button")
        button = next(each for each in buttons if label in (each.text, each.accessible_name))
        self.run("arguments[0].click()", button)

    def complaints(self) -> list[str]:
        """What the browser's console says went wrong."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@contextlib.contextmanager
def behind_prefix(target: str, prefix: str) -> Iterator[str]:
    """A reverse proxy that serves `target` under a path prefix, the way people put a server behind nginx."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def _pass_on(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            kept = {
                name: value for name, value in self.headers.items() if name.lower() in ("content-type", "authorization")
            }
            url = target + self.path.removeprefix(prefix)
            with httpx.stream(self.command, url, content=body, headers=kept, timeout=60) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                for piece in answer.iter_raw():
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
