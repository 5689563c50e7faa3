"""Takes the pictures of the playground in docs/images: `python tests/e2e/shoot_playground.py [FOLDER]`."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from browser import Playground, browser, until, why_not
from default_server import default_server

GUIDE = (
    "You are the guide of a large botanical garden. You know its trees, its roses and its birds, and you are brief. "
    * 5
)
QUESTIONS = ("Where are the oaks?", "Which roses bloom now?", "What birds nest here?", "How old is the elm?")
EARLIER = ("What is a bough?", "Do you have maples?", "When do you open?")
ASKED = ("Why is the sky blue?", "Write a Python function that adds two numbers.")


def _body(question: str) -> dict[str, object]:
    messages = [{"role": "system", "content": GUIDE}, {"role": "user", "content": question}]
    return {"messages": messages, "ignore_eos": True, "temperature": 0.5}


class Traffic:
    """Requests with the same beginning, for as long as the picture needs them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._hold, args=(text,)) for text in QUESTIONS]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _hold(self, question: str) -> None:
        body = {**_body(question), "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=120) as answer:
            for _ in answer.iter_lines():
                if self._over.is_set():
                    return


def shoot(page: Playground, url: str, theme: str, target: Path) -> None:
    httpx.post(f"{url}/flush_cache").raise_for_status()
    for question in EARLIER:
        httpx.post(
            f"{url}/v1/chat/completions", json={**_body(question), "max_tokens": 40}, timeout=60
        ).raise_for_status()
    page.look(theme)
    page.sampling(temperature=0, max_tokens=150)
    page.ask(ASKED[0])
    page.answer()
    page.sampling(max_tokens=44, n=2)
    with Traffic(url):
        until(lambda: page.all(".span.shared[data-requests='4']"), "four requests that share")
        page.ask(ASKED[1])
        page.answer()
        until(lambda: page.run("return document.getAnimations().length === 0"), "colours that no longer change")
        page.driver.save_screenshot(str(target))


def main(folder: Path) -> None:
    if why_not():
        raise SystemExit(why_not())
    folder.mkdir(parents=True, exist_ok=True)
    url = default_server()
    with tempfile.TemporaryDirectory() as downloads, browser(Path(downloads)) as driver:
        for theme in ("light", "dark"):
            page = Playground(driver, url, width=1360, height=860).ready()
            shoot(page, url, theme, folder / f"playground-{theme}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "images")
