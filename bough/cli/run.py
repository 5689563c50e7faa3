"""`bough run [MODEL]`: serves a model and talks to it, in one terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from bough.cli.config_flags import help_text, parse, wants_help
from bough.core.errors import BoughError

ABOUT = "Serves MODEL for as long as you talk to it. Takes every flag of `bough serve`; /exit ends both."


def run(argv: Sequence[str]) -> int:
    topic = wants_help(argv)
    if topic is not None:
        print(help_text("run", ABOUT, topic))
        return 0
    environ = {"BOUGH_LOG_LEVEL": "warning", "BOUGH_PORT": "0", **os.environ}
    loaded = parse(argv, environ).loaded
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)

    from bough.cli.chat import Conversation, talk
    from bough.cli.serving import LocalServer, run_in_loop
    from bough.observability.log import set_up_logging

    set_up_logging("api0", loaded.config.log)
    server = LocalServer(loaded.config)
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
            talk(Conversation(server.url, loaded.config.server.api_key))
    finally:
        server.stop_now()
        thread.join(15)
    if failure:
        raise failure[0]
    return 0
