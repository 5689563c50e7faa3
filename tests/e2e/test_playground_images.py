"""The playground shows a model that sees what is attached, pasted and dropped: its answers are about the picture."""

from __future__ import annotations

import base64
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from renders import QUESTIONS, Scene, draw_scene, render

sys.path.insert(0, str(Path(__file__).parent))

from browser import Playground, browser, needs_browser, until

from .conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300), needs_browser]

MODEL = Path(__file__).parents[1] / "golden" / "vision"
GIVE = """
const bytes = Uint8Array.from(atob(arguments[0]), (each) => each.charCodeAt(0));
const moved = new DataTransfer();
moved.items.add(new File([bytes], "a.png", { type: "image/png" }));
const event = arguments[1] === "paste"
  ? new ClipboardEvent("paste", { clipboardData: moved, bubbles: true })
  : new DragEvent("drop", { dataTransfer: moved, bubbles: true });
document.getElementById("prompt").dispatchEvent(event);
"""
"""What a browser does when somebody pastes or drops a file."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    server = Server({"model_path": str(MODEL), "device": "cpu", "cpu_threads": 1, "context_length": 256})
    try:
        with browser(tmp_path_factory.mktemp("downloads")) as driver:
            made = Playground(driver, server.url).ready()
            made.sampling(temperature=0)
            yield made
    finally:
        server.end()


def png(scene: Scene) -> bytes:
    file = io.BytesIO()
    render(scene).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("way", ["attach", "paste", "drop"])
def test_a_picture_is_seen(page: Playground, way: str, tmp_path: Path) -> None:
    scene = draw_scene(random.Random(f"asked {way}"))
    page.one("#new-chat").click()
    if way == "attach":
        assert page.one("#attach").is_displayed()
        (tmp_path / "a.png").write_bytes(png(scene))
        page.one("#image-file").send_keys(str(tmp_path / "a.png"))
    else:
        page.run(GIVE, base64.b64encode(png(scene)).decode(), way)
    until(lambda: page.all("#attachments img"), "the preview", within_s=10)
    assert page.run("return document.querySelector('#attachments img').naturalWidth") == 32
    page.ask(QUESTIONS["digit"][0])
    assert page.answer().strip() == scene.digit
    assert page.all("#attachments img") == [], "it went with the question"
    assert page.all(".message.user img"), "where it is shown"


def test_a_preview_can_be_taken_away_and_other_files_do_nothing(page: Playground, tmp_path: Path) -> None:
    page.one("#new-chat").click()
    for number in range(2):
        page.run(GIVE, base64.b64encode(png(draw_scene(random.Random(number)))).decode(), "drop")
    until(lambda: len(page.all("#attachments img")) == 2, "both previews", within_s=10)
    page.one("#attachments button").click()
    assert len(page.all("#attachments img")) == 1
    (tmp_path / "a.txt").write_text("no picture")
    page.one("#image-file").send_keys(str(tmp_path / "a.txt"))
    page.one("#attachments button").click()
    assert page.all("#attachments img") == []
    assert page.complaints() == []
