"""The log line that an engine writes while there is work."""

from __future__ import annotations

from typing import Any

import pytest

from bough.engine.watch import Watch

REPORT: dict[str, Any] = {
    "running": 3, "prefilling": 1, "queued": 2, "compiling": 0, "token_usage": 0.5, "cache_hit_rate_recent": 0.25,
    "output_tokens_per_s": 120.0, "prompt_tokens_per_s": 30.0, "counters": {"retractions": 7},
}  # fmt: skip


@pytest.mark.parametrize(
    ("drafts", "ending"), [({}, "7 retracted so far"), ({"accept_length": 2.25}, "accept length 2.25")]
)
def test_the_line_ends_with_the_accept_length(
    drafts: dict[str, float], ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    nothing: Any = None
    with caplog.at_level("INFO"):
        Watch(nothing, nothing, nothing, nothing, None).report({**REPORT, **drafts})
    (line,) = caplog.messages
    assert line.startswith("running 4, queued 2, KV 50 %, cache hits 25 %, 120 tokens/s out, 30 in")
    assert line.endswith(ending)
