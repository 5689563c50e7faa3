"""`bough chat`: chats with a running server. Streams answers, keeps the history, and uses plain HTTP like any
client."""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bough.cli.conversation import Conversation, plain
from bough.config.command_line import CommandParser, add_server_arguments
from bough.core.errors import BoughError

HELP = """/retry        ask the last question again
/system TEXT  set the system message; without TEXT, show it
/image FILE   show this picture (a file, or a URL) with the next question
/save FILE    write the conversation: as JSON (.json), or as Markdown
/history      print the conversation
/clear        forget the conversation
/stats        speed of the last answer, and the server's numbers
/exit         leave (also Ctrl-D)

Several lines: end a line with \\ to continue, or write three quotes before and after them. Ctrl-C stops an answer and
keeps its text so far."""

_PROMPT, _MORE = "> ", ". "
_QUOTES = '"""'

Answer = Callable[[Iterator[tuple[str, str]]], None]
"""Shows an answer as it arrives."""


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough chat",
        description="Talk to a running server.",
        epilog=HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_server_arguments(made)
    made.add_argument("--model", default="", help="name of the model (default: the server's first)")
    made.add_argument("--system", metavar="TEXT", default="", help="system message")
    made.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    made.add_argument("--temperature", type=float, metavar="X", help="0: always the likeliest token")
    made.add_argument("--quick", metavar="TEXT", help="ask one question, print the answer, leave")
    made.add_argument("--image", metavar="FILE", action="append", default=[],
                      help="a file or a URL to show with the first question")  # fmt: skip
    made.add_argument("--stats", action="store_true", help="print speed after each answer")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    options: dict[str, Any] = {}
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    key = arguments.api_key or os.environ.get("BOUGH_API_KEY", "")
    conversation = Conversation(arguments.url, key, model=arguments.model, system=arguments.system, options=options)
    for name in arguments.image:
        conversation.attach(name)
    if arguments.quick is not None:
        show_plain(conversation.ask(arguments.quick))
        if arguments.stats:
            print(conversation.stats.line(), file=sys.stderr)
        return 0
    return talk(conversation, show_stats=arguments.stats)


def talk(conversation: Conversation, *, show_stats: bool = False) -> int:
    """Reads and answers the user's input until they leave."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        import readline  # noqa: F401  gives `input` its editing

        print(f"talking to {conversation.model}; /help lists commands")
    show: Answer = show_markdown if on_terminal else show_plain
    while True:
        try:
            text = read_message(on_terminal)
        except EOFError:
            return 0
        except KeyboardInterrupt:  # at the prompt: forget what was typed
            print()
            continue
        if not text:
            continue
        try:
            if not text.startswith("/"):
                answer(conversation.ask(text), show)
            elif text.split()[0] == "/retry":
                answer(conversation.retry(), show)
            elif not command(conversation, text):
                return 0
            else:
                continue
        except BoughError as error:
            print(error.lines(), file=sys.stderr)
        if show_stats:
            print(conversation.stats.line())


def read_message(on_terminal: bool) -> str:
    """One message: a line, lines that end in a backslash and the one after them, or lines between triple quotes.

    Raises `EOFError` at the end of the input.
    """
    text = input(_PROMPT if on_terminal else "").strip()
    more = _MORE if on_terminal else ""
    if text.startswith(_QUOTES):
        lines = [text.removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input(more))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")
    while text.endswith("\\"):
        text = text[:-1].rstrip() + "\n" + input(more).strip()
    return text


def answer(pieces: Iterator[tuple[str, str]], show: Answer) -> None:
    """Shows an answer; Ctrl-C stops it, and the conversation keeps the text so far."""
    try:
        show(pieces)
    except KeyboardInterrupt:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
        print("\n(stopped; what has come is kept: /retry asks again)")


def command(conversation: Conversation, text: str) -> bool:
    """Runs a /command. Returns False if the user wants to leave. Raises `BoughError`."""
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/image":
            conversation.attach(rest)
            print(f"({len(conversation.images)} with the next question)")
        case "/system":
            if rest:
                conversation.system = rest
            print(f"(system: {conversation.system or 'none'})")
        case "/save":
            path = Path(rest or "conversation.md").expanduser()
            conversation.save(path)
            print(f"(written to {path})")
        case "/history":
            for message in conversation.messages:
                print(f"{message['role']}: {plain(message['content'])}")
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


def show_plain(pieces: Iterator[tuple[str, str]]) -> None:
    """Prints the answer as it arrives, without its reasoning."""
    for kind, piece in pieces:
        if kind == "content":
            print(piece, end="", flush=True)
    print(flush=True)


def show_markdown(pieces: Iterator[tuple[str, str]]) -> None:
    """Renders the answer as Markdown while it arrives; reasoning is dimmed."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

    reasoning, content = "", ""
    with Live(console=Console(), refresh_per_second=12, vertical_overflow="visible") as live:
        for kind, piece in pieces:
            if kind == "reasoning":
                reasoning += piece
            else:
                content += piece
            live.update(Group(Text(reasoning, style="dim"), Markdown(content)) if reasoning else Markdown(content))
