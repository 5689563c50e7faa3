"""`bough serve [MODEL]`: serves a model over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bough.cli.config_flags import help_text, parse, wants_help
from bough.config.server_args import Loaded, dump_yaml
from bough.core.errors import BoughError, ConfigError

if TYPE_CHECKING:
    from bough.cli.serving import LocalServer
    from bough.entrypoints.service import Service

_log = logging.getLogger(__name__)

ABOUT = """Serves MODEL (a directory, a hub id or a .gguf file) over HTTP, with OpenAI's API and SGLang's native one.
Without a model, the embedded default one is served."""


def run(argv: Sequence[str]) -> int:
    topic = wants_help(argv)
    if topic is not None:
        print(help_text("serve", ABOUT, topic))
        return 0
    try:
        parsed = parse(argv)
    except ConfigError as error:
        if not asks_for_json(argv, os.environ):
            raise
        return _tell(error)
    if parsed.dump_config:
        print(dump_yaml(parsed.loaded.config, parsed.loaded.origins), end="")
        return 0
    if parsed.loaded.config.log.log_format != "json":
        for note in parsed.loaded.notes:
            print(f"note: {note}", file=sys.stderr)
        return _place(parsed.loaded, argv, _show_banner)
    try:
        return _place(parsed.loaded, argv, _log_ready)
    except BoughError as error:
        return _tell(error)


def _place(loaded: Loaded, argv: Sequence[str], opened: Callable[[LocalServer, Service | None], None]) -> int:
    """Serves, with the other machines that Ray finds if it is asked to."""
    parallel = loaded.config.parallel
    if not parallel.use_ray or parallel.node_rank > 0:
        return _serve(loaded, opened)
    from bough.cli.ray_places import RayPlaces

    places = RayPlaces(loaded.config, argv)
    try:
        return _serve(replace(loaded, config=places.config), opened)
    finally:
        places.close()


def _serve(loaded: Loaded, opened: Callable[[LocalServer, Service | None], None]) -> int:
    from bough.cli.serving import LocalServer, run_until_signalled
    from bough.observability.log import set_up_logging

    config = loaded.config
    set_up_logging("api0", config.log)
    if config.log.log_format == "json":
        for note in loaded.notes:
            _log.info(note)
    if config.server.supervise:
        from bough.cli.supervisor import Supervisor

        supervisor = Supervisor(config)
        return run_until_signalled(supervisor, lambda service: opened(supervisor.server, service))
    server = LocalServer(config)
    return run_until_signalled(server, lambda service: opened(server, service))


def _show_banner(server: LocalServer, service: Service | None) -> None:
    from bough.cli.serving import banner

    print(banner(server, service), flush=True)


def _log_ready(server: LocalServer, service: Service | None) -> None:
    """`service`: None on a machine that takes no requests."""
    model = {} if service is None else {"model": service.served.name}
    _log.info("ready", extra={"url": server.url, **model, "seconds": round(server.seconds, 1)})


def asks_for_json(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the log should be JSON, judged from arguments that could not be parsed."""
    pairs = list(zip(argv, [*argv[1:], ""], strict=True))
    return (
        ("--log-format", "json") in pairs
        or "--log-format=json" in argv
        or environ.get("BOUGH_LOG_FORMAT", "").lower() == "json"
    )


def _tell(error: BoughError) -> int:
    """The error that ended the command, as the last line of a log of JSON. Returns the exit status."""
    from bough.cli.main import exit_status
    from bough.observability.json_lines import json_line

    logged = json_line("api0", error.what, level="error", logger="bough", why=error.why, fix=error.fix)
    print(logged, file=sys.stderr, flush=True)
    return exit_status(error)
