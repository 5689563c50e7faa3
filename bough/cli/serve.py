"""`bough serve [MODEL]`: serves a model over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bough.cli.config_flags import help_text, parse, wants_help
from bough.config.server_args import dump_yaml

ABOUT = """Serves MODEL (a directory, a hub id or a .gguf file) over HTTP, with OpenAI's API and SGLang's native one.
Without a model, the embedded default one is served."""


def run(argv: Sequence[str]) -> int:
    topic = wants_help(argv)
    if topic is not None:
        print(help_text("serve", ABOUT, topic))
        return 0
    parsed = parse(argv)
    if parsed.dump_config:
        print(dump_yaml(parsed.loaded.config, parsed.loaded.origins), end="")
        return 0
    for note in parsed.loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    config = parsed.loaded.config

    from bough.cli.serving import LocalServer, banner, run_until_signalled
    from bough.observability.log import set_up_logging

    set_up_logging("api0", config.log)
    if config.server.supervise:
        from bough.cli.supervisor import Supervisor

        supervisor = Supervisor(config)
        return run_until_signalled(supervisor, lambda service: print(banner(supervisor.server, service), flush=True))
    server = LocalServer(config)
    return run_until_signalled(server, lambda service: print(banner(server, service), flush=True))
