"""Undocumented names of libraries that bough relies on: an update that moves one of them fails here, by its name.

pyproject.toml bounds the versions of uvicorn and xgrammar; Triton's comes with torch.
"""

from __future__ import annotations

import inspect

import pytest
import torch


def test_uvicorn_connections() -> None:
    """`entrypoints/http/protocol.py` derives from the connection, and looks at requests that wait for their turn."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    overridden = (
        "connection_made", "connection_lost", "data_received", "send_400_response", "on_message_begin", "on_url",
        "on_header", "on_headers_complete", "on_body", "on_message_complete",
    )  # fmt: skip
    assert [name for name in overridden if not callable(getattr(HttpToolsProtocol, name, None))] == []
    assert list(inspect.signature(HttpToolsProtocol.__init__).parameters)[1:4] == [
        "config",
        "server_state",
        "app_state",
    ]
    made = inspect.getsource(HttpToolsProtocol.__init__)
    for attribute in ("loop", "transport", "flow", "scope", "cycle", "pipeline"):
        assert f"self.{attribute}" in made, attribute
    cycle = inspect.getsource(RequestResponseCycle.__init__)
    for attribute in ("response_complete", "disconnected", "message_event"):
        assert f"self.{attribute}" in cycle, attribute


def test_uvicorn_servers() -> None:
    """`entrypoints/http/server.py` sets these instead of having signals caught."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(lambda: None))
    assert (server.started, server.should_exit, server.force_exit) == (False, False, False)
    assert callable(server.capture_signals)
    assert callable(server.serve)


def test_xgrammar_without_its_package() -> None:
    """`grammar/xgrammar_backend.py` loads the native classes alone."""
    pytest.importorskip("xgrammar")
    from bough.grammar.xgrammar_backend import _load

    core = _load(without_torch=False)
    for name in ("TokenizerInfo", "GrammarCompiler", "GrammarMatcher", "BatchGrammarMatcher"):
        assert callable(getattr(core, name)), name


def test_triton_launchers() -> None:
    """`kernels/launching.py` keeps these of each compiled form; tests/kernels/test_launching.py compares what they do."""
    compiler = pytest.importorskip("triton.compiler")
    made = inspect.getsource(compiler.CompiledKernel)
    for attribute in ("run", "function", "packed_metadata"):
        assert attribute in made, attribute


def test_triton_compiles() -> None:
    """`kernels/ahead.py` takes these places while steps are rehearsed; tests/kernels/test_ahead.py compiles a kernel so."""
    jit = pytest.importorskip("triton.runtime.jit")
    compiles = inspect.signature(jit.JITFunction._do_compile).parameters
    assert list(compiles)[1:] == ["key", "signature", "device", "constexprs", "options", "attrs", "warmup"]
    assert list(inspect.signature(jit.JITFunction.run).parameters) == ["self", "args", "grid", "warmup", "kwargs"]
    assert "device_caches" in inspect.getsource(jit.JITFunction.__init__)


def test_torch_functions() -> None:
    assert callable(torch._scaled_mm), "kernels/packed_linear/triton.py: products of FP8 weights"
    if torch.cuda.is_available():
        assert callable(torch._C._cuda_getCurrentRawStream), "kernels/cuda_source.py: where launches go"
