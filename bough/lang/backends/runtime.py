"""A server that is started and stopped with the program."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.errors import BackendError, LangError
from bough.lang.loop import run_sync


class RemoteTokenizer:
    """The tokenizer of a server's model, over HTTP."""

    def __init__(self, endpoint: RuntimeEndpoint) -> None:
        self._endpoint = endpoint

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list(run_sync(self._endpoint.http.post("/tokenize", body))["tokens"])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        body = {"tokens": list(token_ids), "skip_special_tokens": skip_special_tokens}
        return str(run_sync(self._endpoint.http.post("/detokenize", body))["text"])


class Runtime:
    """Starts `python -m bough.launch_server` with the given arguments and waits until it is ready.

    Arguments are the server's flags with underscores (`model_path="...", tp_size=2`). Use it as a context manager or
    call `shutdown()`; it also stops with the process. Pass it wherever a backend is expected.
    """

    def __init__(
        self,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        command: Sequence[str] | None = None,
        **server_args: Any,
    ) -> None:
        host = str(server_args.pop("host", "127.0.0.1"))
        port = int(server_args.pop("port", 0))
        kept = _keep_port() if not port else None
        if kept is not None:
            port = int(kept.getsockname()[1])
            if not sys.platform.startswith("linux"):
                kept.close()  # elsewhere one socket has a port
        api_key = server_args.get("api_key")
        self.url = f"http://{host}:{port}"
        flags = _flags({"host": host, "port": port, "log_level": log_level, **server_args})
        launch = list(command) if command is not None else [sys.executable, "-m", "bough.launch_server"]
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = subprocess.Popen([*launch, *flags])
            atexit.register(self.shutdown)
            self.endpoint = RuntimeEndpoint(self.url, api_key=api_key)
            self._wait_ready(launch_timeout)
        except BaseException:
            self.shutdown()
            raise
        finally:
            if kept is not None:
                kept.close()

    def _wait_ready(self, launch_timeout: float) -> None:
        deadline = time.monotonic() + launch_timeout
        while time.monotonic() < deadline:
            assert self.process is not None
            code = self.process.poll()
            if code is not None:
                raise LangError(
                    what=f"the server ended with exit code {code} before it was ready",
                    why="its last lines on the terminal say why",
                    fix="correct the arguments given to Runtime, or start with log_level='info' to see more",
                )
            try:
                with urlopen(Request(f"{self.url}/health"), timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.2)
        raise BackendError(
            what=f"the server at {self.url} was not ready after {launch_timeout:g} s",
            why="loading the model takes longer",
            fix="pass a larger launch_timeout=",
        )

    def generate(
        self,
        prompt: str | list[str],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool | list[bool] | None = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        lora_path: list[str | None] | None = None,
        **fields: Any,
    ) -> str:
        """One native generate request; its answer as JSON text, as SGLang's Runtime gives it."""
        body = {
            "text": prompt, "sampling_params": sampling_params or {}, "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len, "top_logprobs_num": top_logprobs_num, "lora_path": lora_path, **fields,
        }  # fmt: skip
        given = {name: value for name, value in body.items() if value is not None}
        return json.dumps(run_sync(self.endpoint.call(given)))

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Stream one prompt's text, piece by piece."""
        sent = 0
        body = {"text": prompt, "sampling_params": sampling_params or {}, **fields}
        async for reply in self.endpoint.call_stream(body):
            if len(reply["text"]) > sent:
                yield reply["text"][sent:]
                sent = len(reply["text"])

    add_request = async_generate
    """SGLang's other name of it."""

    def encode(self, prompt: str | list[str]) -> str:
        """Embeddings of an embedding model, as JSON text."""
        return json.dumps(run_sync(self.endpoint.http.post("/encode", {"text": prompt})))

    def get_tokenizer(self) -> RemoteTokenizer:
        return RemoteTokenizer(self.endpoint)

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def flush_cache(self) -> None:
        self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self.endpoint.get_server_info()

    def shutdown(self) -> None:
        """Stop the server and wait until it is gone; a second call does nothing."""
        process, self.process = self.process, None
        if process is None:
            return
        atexit.unregister(self.shutdown)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _flags(args: dict[str, Any]) -> list[str]:
    """Keyword arguments as command-line flags; True is a bare flag, False and None are left out."""
    flags: list[str] = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(flag)
        elif isinstance(value, list | tuple):
            flags.extend([flag, *map(str, value)])
        elif isinstance(value, dict):
            flags.extend([flag, json.dumps(value)])
        else:
            flags.extend([flag, str(value)])
    return flags


def _keep_port() -> socket.socket:
    """A free port, reserved until it is closed; a server may bind it in the meantime and listen."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept
