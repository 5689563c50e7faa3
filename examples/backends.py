"""Where an example runs: the command-line options that all of them share."""

from __future__ import annotations

import argparse
import atexit
from typing import Any

import bough as sgl

APIS = ("native", "openai-chat", "openai-completion", "engine")


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend-url", default="http://127.0.0.1:30000", help="a running server")
    options.add_argument("--api", choices=APIS, default="native", help="how to talk to it; engine: no server at all")
    options.add_argument("--model", default="default", help="the model's name (OpenAI routes) or path (engine)")
    options.add_argument("--api-key", default=None)
    return options


def use_backend(options: argparse.Namespace) -> None:
    """Make the backend that the options name the default one."""
    sgl.set_default_backend(_backend(options))


def _backend(options: argparse.Namespace) -> Any:
    if options.api == "native":
        return sgl.RuntimeEndpoint(options.backend_url, api_key=options.api_key)
    if options.api == "engine":
        engine = sgl.Engine() if options.model == "default" else sgl.Engine(model_path=options.model)
        atexit.register(engine.shutdown)
        return engine
    return sgl.OpenAI(
        options.model,
        is_chat_model=options.api == "openai-chat",
        chat_template=None if options.api == "openai-chat" else "chatml",
        base_url=options.backend_url.rstrip("/") + "/v1",
        api_key=options.api_key,
        extensions=True,
    )
