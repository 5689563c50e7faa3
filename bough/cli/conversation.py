"""A conversation with a running server: messages, streamed answers, and their speed."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.cli.remote import server_url
from bough.config.concerns import MediaConfig
from bough.core.errors import BoughError, ConfigError, Unavailable

_MEDIA = MediaConfig(allowed_media_domains=("*",), max_media_bytes=12 * 1024 * 1024)
"""The user typed the URL, so that every public host is allowed. 12 MiB fit into a request of 16 MiB as base64."""


@dataclass
class Stats:
    """Speed of the last answer."""

    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        if not self.usage:
            return "nothing was answered yet"
        tokens = self.usage["completion_tokens"]
        pace = (tokens - 1) / (self.ended - self.first) if tokens > 1 and self.ended > self.first else 0.0
        cached = self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return (
            f"first token after {1000 * (self.first - self.started):.0f} ms, then {pace:.1f} tokens/s; "
            f"{self.usage['prompt_tokens']} tokens in ({cached} cached), {tokens} out"
        )


class Conversation:
    """Messages so far, and the server that answers them."""

    def __init__(self, url: str, key: str, *, model: str = "", system: str = "", options: dict[str, Any] | None = None):
        import httpx

        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = server_url(url)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=600.0))
        self._url = url
        self._system = system
        self._options = options or {}
        self.model = model or self._first_model()
        self.messages: list[dict[str, Any]] = []
        self.images: list[str] = []
        """Images (data URLs) for the next question."""
        self.stats = Stats()
        self.clear()

    @property
    def system(self) -> str:
        """The system message; empty: none."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        """Changes the system message of this conversation from the next question on."""
        self._system = text
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*self._opening(), *rest]

    def clear(self) -> None:
        """Removes all messages except the system message."""
        self.messages = self._opening()
        self.images = []

    def _opening(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def attach(self, name: str) -> None:
        """Adds an image (a file, or a URL) to the next question. Raises `BoughError`."""
        self.images.append(_data_url(name))

    def ask(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields ("reasoning" or "content", text) as it arrives; question and answer join the history.

        If an answer is interrupted (the caller closes the iterator, or Ctrl-C), its text so far is kept. A question
        that fails, or is interrupted before any text arrives, is not kept. Raises `BoughError`.
        """
        images, self.images = self.images, []
        self.messages.append({"role": "user", "content": _content(text, images)})
        answer: list[str] = []
        try:
            for kind, piece in self._stream():
                if kind == "content":
                    answer.append(piece)
                yield kind, piece
        except (KeyboardInterrupt, GeneratorExit):
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()
            raise
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    def take_back(self) -> str | list[dict[str, Any]] | None:
        """Removes the last question and its answer; returns the question, or None."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                content: str | list[dict[str, Any]] = message["content"]
                return content
        return None

    def retry(self) -> Iterator[tuple[str, str]]:
        """Sends the last question again, with its images. Raises `BoughError` if there is none."""
        question = self.take_back()
        if question is None:
            raise ConfigError(what="there is nothing to ask again", why="no question was answered yet")
        if isinstance(question, str):
            return self.ask(question)
        self.images = [part["image_url"]["url"] for part in question if part["type"] == "image_url"]
        return self.ask(" ".join(part["text"] for part in question if part["type"] == "text"))

    def save(self, path: Path) -> None:
        """Writes the conversation: as JSON (the API's messages) if the name ends in .json, else as Markdown.

        Raises `ConfigError` if it can't be written.
        """
        if path.suffix == ".json":
            text = json.dumps({"model": self.model, "messages": self.messages}, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "\n\n".join(f"**{each['role']}**\n\n{plain(each['content'])}" for each in self.messages) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                what=f"can't write {path}", why=error.strerror or str(error), fix="name another file"
            ) from error

    def server_info(self) -> dict[str, Any]:
        response = self._call("GET", "/server_info")
        found: dict[str, Any] = response.json()
        return found

    def _stream(self) -> Iterator[tuple[str, str]]:
        import httpx

        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        self.stats = Stats(started=time.perf_counter())
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _server_error(response.status_code, response.text)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    yield from self._read(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self.stats.ended = time.perf_counter()

    def _read(self, chunk: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if "error" in chunk:
            raise BoughError(what=chunk["error"]["message"])
        if chunk.get("usage"):
            self.stats.usage = chunk["usage"]
        for choice in chunk["choices"]:
            for name, kind in (("reasoning_content", "reasoning"), ("content", "content")):
                text = choice["delta"].get(name)
                if text:
                    self.stats.first = self.stats.first or time.perf_counter()
                    yield kind, text

    def _first_model(self) -> str:
        name: str = self._call("GET", "/v1/models").json()["data"][0]["id"]
        return name

    def _call(self, method: str, path: str) -> Any:
        import httpx

        try:
            response = self._client.request(method, path)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _server_error(response.status_code, response.text)
        return response

    def _unreachable(self, error: Exception) -> Unavailable:
        return Unavailable(
            what=f"there is no server at {self._url}",
            why=str(error) or type(error).__name__,
            fix="start one with `bough serve` (or `bough run`), or name another with --url",
        )


def _content(text: str, images: list[str]) -> str | list[dict[str, Any]]:
    """A message's content in OpenAI's format."""
    if not images:
        return text
    return [{"type": "image_url", "image_url": {"url": url}} for url in images] + [{"type": "text", "text": text}]


def plain(content: str | list[dict[str, Any]]) -> str:
    """The text of a message; images are replaced by a placeholder."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else "(picture)" for part in content)


def _data_url(name: str) -> str:
    """An image as a data: URL, so that the server needs no access to the file or the web. Raises `BoughError`."""
    from bough.multimodal import Door
    from bough.multimodal.local import read_file

    door = Door(_MEDIA)
    if name.lower().startswith(("http://", "https://", "data:")):
        picture = asyncio.run(door.fetch(name))
    else:
        path = Path(name).expanduser()
        try:
            picture = door.check(read_file(path, _MEDIA.max_media_bytes))
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(what=f"can't read {path}", why=why, fix="name a PNG, JPEG, GIF or WebP file") from error
    return f"data:{picture.mime};base64,{base64.b64encode(picture.data).decode()}"


def _server_error(status: int, text: str) -> BoughError:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    fix = "give the key with --api-key or BOUGH_API_KEY" if status == 401 else ""
    return BoughError(what=f"the server answered {status}: {message}", fix=fix)
