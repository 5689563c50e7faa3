"""`bough run [MODEL] [TEXT]`: serves a model and prints its answer to TEXT, or chats with it, in one terminal."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

from bough.cli.config_flags import help_text, parse, wants_help
from bough.config.check import has_keys
from bough.config.command_line import CommandParser
from bough.core.errors import BoughError, ConfigError

ABOUT = """Serves MODEL and asks it TEXT, or talks to it for as long as you like; /exit ends both.

  bough run org/repo "Why is the sky blue?"      prints the answer and ends
  cat notes.txt | bough run org/repo "Summarise:"   what is piped in follows TEXT
  bough run                                      talks to the default model; so does `bough run default`

  --system TEXT                   System message.
  --stats                         Print speed after each answer.

Takes every flag of `bough serve` as well."""


def parser() -> CommandParser:
    """The flags that `bough serve` does not have."""
    made = CommandParser(prog="bough run", add_help=False, allow_abbrev=False)
    made.add_argument("--system", metavar="TEXT", default="", help="system message")
    made.add_argument("--stats", action="store_true", help="print speed after each answer")
    return made


def run(argv: Sequence[str]) -> int:
    topic = wants_help(argv)
    if topic is not None:
        print(help_text("run", ABOUT, topic))
        return 0
    own, rest = parser().parse_known_args(list(argv))
    words, flags = leading_words(rest)
    if len(words) > 2:
        raise ConfigError(
            what=f"unexpected argument {words[2]!r}",
            why="a model and one text are taken",
            fix='put the text in quotes, as in `bough run MODEL "a text"`',
        )
    model = [words[0]] if words and words[0] != "default" else []
    environ = {"BOUGH_LOG_LEVEL": "warning", "BOUGH_PORT": "0", **os.environ}
    loaded = parse([*model, *flags], environ).loaded
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    text = question(words[1] if len(words) > 1 else "")

    from bough.cli.chat import show_plain, talk
    from bough.cli.conversation import Conversation
    from bough.cli.serving import LocalServer, run_in_loop
    from bough.observability.log import set_up_logging

    set_up_logging("api0", loaded.config.log)
    config, key = loaded.config, ""
    if has_keys(config.server):  # the chat has one of its own: the file may hold digests only
        key = secrets.token_hex(16)
        config = replace(config, server=replace(config.server, api_key=(*config.server.api_key, f"chat={key}")))
    server = LocalServer(config)
    ready = threading.Event()
    failure: list[BoughError] = []

    def serve() -> None:
        try:
            run_in_loop(server.run(lambda _: ready.set()))
        except BoughError as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="server", daemon=True)
    thread.start()
    try:
        ready.wait()
        if not failure:
            conversation = Conversation(server.url, key, system=own.system)
            if not text:
                talk(conversation, show_stats=own.stats)
            else:
                show_plain(conversation.ask(text))
                if own.stats:
                    print(conversation.stats.line(), file=sys.stderr)
    finally:
        server.stop_now()
        thread.join(15)
    if failure:
        raise failure[0]
    return 0


def leading_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first flag, and the rest."""
    first = next((at for at, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return list(arguments[:first]), list(arguments[first:])


def question(text: str) -> str:
    """The question: `text`, followed by piped input. Empty: the user wants to chat."""
    if sys.stdin is None or sys.stdin.isatty():
        return text
    piped = sys.stdin.read().strip()
    return "\n\n".join(part for part in (text, piped) if part)
