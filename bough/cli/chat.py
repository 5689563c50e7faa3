"""`bough chat`: talk to a running server. Streams, keeps the history, and speaks plain HTTP like any client."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.cli.remote import server_url
from bough.config.concerns import MediaConfig
from bough.core.errors import BoughError, ConfigError, Unavailable

HELP = """/stats        speed of the last answer, and the server's numbers
/image FILE   show this picture (a file, or a URL) with the next question
/history      print the conversation
/clear        forget the conversation
/exit         leave (also Ctrl-D)"""

_PROMPT = "> "
_MEDIA = MediaConfig(allowed_media_domains=("*",), max_media_bytes=12 * 1024 * 1024)
"""Whoever types a URL means it: any public host may be asked. In base64 it still fits a request of 16 MiB."""


@dataclass
class Stats:
    """How the last answer went."""

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
    """Messages so far, and the server that continues them."""

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
        """Pictures (data URLs) that the next question shows."""
        self.stats = Stats()
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self.images = []

    def attach(self, name: str) -> None:
        """Shows a picture (a file, or a URL) with the next question. Raises `BoughError`."""
        self.images.append(_data_url(name))

    def ask(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields ("reasoning" or "content", text) as it arrives. The answer joins the history when it is complete."""
        images, self.images = self.images, []
        self.messages.append({"role": "user", "content": _content(text, images)})
        answer: list[str] = []
        try:
            for kind, piece in self._stream():
                if kind == "content":
                    answer.append(piece)
                yield kind, piece
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(answer)})

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


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bough chat", description="Talk to a running server.", epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--url", default=os.environ.get("BOUGH_URL", "http://127.0.0.1:30000"), help="the server")
    parser.add_argument("--api-key", default=os.environ.get("BOUGH_API_KEY", ""), help="its key, if it has one")
    parser.add_argument("--model", default="", help="name of the model (default: the server's first)")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token")
    parser.add_argument("--quick", metavar="TEXT", help="ask one question, print the answer, leave")
    parser.add_argument("--image", metavar="FILE", action="append", default=[],
                        help="a file or a URL to show with the first question")  # fmt: skip
    parser.add_argument("--stats", action="store_true", help="print speed after each answer")
    arguments = parser.parse_args(list(argv))
    options: dict[str, Any] = {}
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    conversation = Conversation(
        arguments.url, arguments.api_key, model=arguments.model, system=arguments.system, options=options
    )
    for name in arguments.image:
        conversation.attach(name)
    if arguments.quick is not None:
        answer_plain(conversation, arguments.quick)
        if arguments.stats:
            print(conversation.stats.line(), file=sys.stderr)
        return 0
    return talk(conversation, show_stats=arguments.stats)


def talk(conversation: Conversation, *, show_stats: bool = False) -> int:
    """Reads lines and answers them until the user leaves."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        import readline  # noqa: F401  gives `input` its editing

        print(f"talking to {conversation.model}; /help lists commands")
    while True:
        try:
            text = input(_PROMPT if on_terminal else "").strip()
        except EOFError:
            return 0
        if not text:
            continue
        if text.startswith("/"):
            if not command(conversation, text):
                return 0
            continue
        try:
            answer = answer_markdown if on_terminal else answer_plain
            answer(conversation, text)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except BoughError as error:
            print(error.lines(), file=sys.stderr)
        if show_stats:
            print(conversation.stats.line())


def command(conversation: Conversation, text: str) -> bool:
    """Runs a /command. False: leave."""
    name, _, rest = text.partition(" ")
    match name:
        case "/exit" | "/quit":
            return False
        case "/image":
            _show_image(conversation, rest.strip())
        case "/history":
            for message in conversation.messages:
                print(f"{message['role']}: {_plain(message['content'])}")
        case "/clear":
            conversation.clear()
            print("(forgotten)")
        case "/stats":
            print(conversation.stats.line())
            info = conversation.server_info()
            running, waiting = info.get("num_running"), info.get("num_waiting")
            if running is not None:
                print(f"server: {running} running, {waiting} waiting")
        case "/help":
            print(HELP)
        case other:
            print(f"unknown command {other}\n{HELP}")
    return True


def _show_image(conversation: Conversation, name: str) -> None:
    try:
        conversation.attach(name)
    except BoughError as error:
        print(error.lines())
    else:
        print(f"({len(conversation.images)} with the next question)")


def _content(text: str, images: list[str]) -> str | list[dict[str, Any]]:
    """A message's content, as OpenAI has it."""
    if not images:
        return text
    return [{"type": "image_url", "image_url": {"url": url}} for url in images] + [{"type": "text", "text": text}]


def _plain(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else "(picture)" for part in content)


def _data_url(name: str) -> str:
    """A picture's bytes as a URL: the server need neither read the file nor reach the web. Raises `BoughError`."""
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


def answer_plain(conversation: Conversation, text: str) -> None:
    """Prints the answer as it comes."""
    for kind, piece in conversation.ask(text):
        if kind == "content":
            print(piece, end="", flush=True)
    print(flush=True)


def answer_markdown(conversation: Conversation, text: str) -> None:
    """Renders the answer as Markdown while it comes; reasoning is dim."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

    reasoning, content = "", ""
    with Live(console=Console(), refresh_per_second=12, vertical_overflow="visible") as live:
        for kind, piece in conversation.ask(text):
            if kind == "reasoning":
                reasoning += piece
            else:
                content += piece
            live.update(Group(Text(reasoning, style="dim"), Markdown(content)) if reasoning else Markdown(content))


def _server_error(status: int, text: str) -> BoughError:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    fix = "give the key with --api-key or BOUGH_API_KEY" if status == 401 else ""
    return BoughError(what=f"the server answered {status}: {message}", fix=fix)
