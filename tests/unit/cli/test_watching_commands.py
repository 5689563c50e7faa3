"""top, replay and profile: what they print, for answers like a server's."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bough.cli import profile, replay
from bough.cli.main import main
from bough.cli.top import picture
from bough.core.errors import ConfigError
from bough.entrypoints.http import dump
from bough.entrypoints.http.dump import DumpFiles, Recorded

LOADS: dict[str, Any] = {
    "version": "1.2.3",
    "model": "tiny",
    "loads": [
        {
            "paused": False, "num_running_reqs": 3, "max_running_requests": 8, "utilization": 0.375, "num_waiting_reqs": 2,
            "num_waiting_tokens": 1234, "token_usage": 0.5, "num_used_tokens": 5000, "max_total_num_tokens": 10_000,
            "cache_hit_rate": 0.25, "num_cached_tokens": 777, "gen_throughput": 321.0, "prompt_throughput": 99.0,
            "decode_step_seconds": 0.0125, "queues": {"prefilling": 1, "refused": 4},
            "totals": {"requests": 10, "generation_tokens": 4321, "retractions": 5, "oom": 6},
        }
    ],
}  # fmt: skip
ROW = {
    "rid": "abc", "phase": "running", "prompt_tokens": 100, "cached_tokens": 64, "shared_tokens": 32, "output_tokens": 20,
    "output_limit": 50, "seconds": 2.0,
}  # fmt: skip


def drawn(told: dict[str, Any], rows: int = 20, width: int = 110) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(told, url="http://x", most_rows=rows, width=width))
    return console.export_text()


def test_top_draws_the_numbers() -> None:
    text = drawn(LOADS | {"requests": [ROW] * 25})
    for piece in ("tiny", "3 of 8", "1 in prefill", "50.0 %", "5,000 of 10,000 tokens", "25.0 %", "321 tok/s", "12.5 ms",
                  "4,321 tokens, 5 retracted, 6 out of memory", "abc", "10.0", "+ 5 more"):  # fmt: skip
        assert piece in text, piece
    assert "█" * 12 + "░" * 12 in text, "half of the memory"


def test_top_draws_tokens_per_step_where_there_were_drafts() -> None:
    counts = {"accept_length": 2.416, "draft_tokens": 2000, "accepted_tokens": 1500}
    text = drawn({**LOADS, "loads": [LOADS["loads"][0] | {"speculative": counts}]})
    for piece in ("drafts", "2.42 tok/step", "1,500 of 2,000 drafts right so far"):
        assert piece in text, piece
    assert "█" * 18 + "░" * 6 in text, "three of four were right"
    none = {**counts, "draft_tokens": 0}
    assert "tok/step" not in drawn({**LOADS, "loads": [LOADS["loads"][0] | {"speculative": none}]})


def test_top_fits_a_terminal_of_eighty_columns() -> None:
    large = {
        "num_running_reqs": 256, "max_running_requests": 1024, "num_waiting_reqs": 12_345, "num_waiting_tokens": 8_388_608,
        "num_used_tokens": 781_234, "max_total_num_tokens": 880_000, "gen_throughput": 27_911.0,
        "prompt_throughput": 99_999.0,
    }  # fmt: skip
    row = ROW | {"rid": "a" * 32, "phase": "prefilling", "prompt_tokens": 131_072, "cached_tokens": 131_056,
                 "shared_tokens": 131_008, "output_tokens": 16_384, "output_limit": 16_384, "seconds": 1234.5}  # fmt: skip
    lines = drawn({**LOADS, "loads": [LOADS["loads"][0] | large], "requests": [row]}, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert lines[-1].split() == [
        "a" * 12, "prefilling", "131,072", "131,056", "131,008", "16,384", "16,384", "1234.5", "13.3"
    ]  # fmt: skip
    lines = lines[:-3]
    assert [line.split()[0] for line in lines[2:] if line[:1].strip()] == [
        "running",
        "queued",
        "KV",
        "cache",
        "speed",
        "so",
    ]


def test_top_without_the_list_of_requests() -> None:
    assert "phase" not in drawn(LOADS)
    assert "phase" in drawn(LOADS | {"requests": []})


@pytest.mark.parametrize("command", ["top", "replay", "profile"])
def test_no_server_is_a_clear_error(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "requests-1.jsonl"
    file.write_text(json.dumps({"time": 1, "path": "/x", "status": 200, "seconds": 1, "body": {}}) + "\n")
    arguments = {"top": ["--once"], "replay": [str(file)], "profile": []}[command]
    assert main([command, *arguments, "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    if command == "replay":
        assert "no answer now" in said.out
    else:
        assert said.err.startswith("error: no server answers at http://127.0.0.1:9")


def test_a_profile_of_an_idle_server_says_why_it_is_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"internal_states": [{"counters": {"steps": 7}}]}
    monkeypatch.setattr(profile.Remote, "get", lambda self, path: info)
    monkeypatch.setattr(profile.Remote, "post", lambda self, path, **body: {"num_steps": 0, "file": "x", "top": []})
    assert main(["profile", "--seconds", "0"]) == 1
    assert "why: the server was idle" in capsys.readouterr().err


def lines(directory: Path) -> list[replay.Line]:
    return list(replay.read([str(directory)]))


def test_a_dump_is_private_rolls_over_and_reads_back(tmp_path: Path) -> None:
    files = DumpFiles(tmp_path / "dump", "api", file_bytes=2000)
    for number in range(50):
        files.add(
            Recorded(
                time=float(number), path="/generate", status=200, seconds=0.5, body={"text": "ü" * 20, "n": number}
            )
        )
    files.close()
    written = sorted((tmp_path / "dump").iterdir())
    assert len(written) > 3
    for file in written:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size <= 2000
    read = lines(tmp_path / "dump")
    assert [line.body["n"] for line in read] == list(range(50))
    assert read[0].body["text"] == "ü" * 20


@pytest.mark.parametrize("keeps", [False, True])
def test_media_are_not_dumped_by_default(tmp_path: Path, keeps: bool) -> None:
    code = "iVBORw0KGgo/" * 200
    body = {
        "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{code}"}},
            {"type": "image", "source": {"type": "base64", "data": code}},
            {"type": "text", "text": f'see "data:image/png;base64,{code}" \\ and "that"'},
        ]}],
        "images": [code], "video": f"data:video/jpeg;base64,{code},{code}", "prompt": "words, " * 300, "seed": 7,
    }  # fmt: skip
    files = DumpFiles(tmp_path, "api", media=keeps)
    for each in (json.dumps(body), json.dumps(body).replace("/", "\\/")):
        files.add(Recorded(time=1.0, path="/x", status=200, seconds=0.5, body=msgspec.Raw(each.encode())))
    files.close()
    for line in lines(tmp_path):
        if keeps:
            assert line.body == body
            continue
        said = json.dumps(line.body)
        assert "iVBOR" not in said
        assert said.count("characters, sha256") == 5
        assert line.body["prompt"] == body["prompt"]
        assert line.body["messages"][0]["content"][2]["text"].endswith('" \\ and "that"')


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full, tried, write = threading.Event(), threading.Event(), os.write

    def disk(descriptor: int, data: bytes) -> int:
        if is_full.is_set() and threading.current_thread().name == "dump":
            tried.set()
            write(descriptor, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(dump, "_MOST_WAITING", 4)
    monkeypatch.setattr(os, "write", disk)
    files = DumpFiles(tmp_path, "api")

    def num_done() -> int:
        return sum(path.read_bytes().count(b"\n") for path in tmp_path.iterdir()) + files.dropped

    def add(number: int) -> None:
        """Returns once the writer is done with it."""
        files.add(Recorded(time=1.0, path="/generate", status=200, seconds=0.5, body={"n": number}))
        give_up_s = time.monotonic() + 20
        while num_done() <= number:
            assert time.monotonic() < give_up_s, "the writer is gone"
            time.sleep(0.002)

    add(0)
    is_full.set()
    for number in range(1, 9):
        add(number)
    assert tried.is_set()
    is_full.clear()
    add(9)
    closing = threading.Thread(target=files.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "the end waits for a writer that is gone"
    assert [line.body["n"] for line in lines(tmp_path)] == [0, 9]
    assert files.dropped == 8


def test_a_dump_needs_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't write"):
        DumpFiles(tmp_path / "file" / "below", "api")


@pytest.mark.parametrize("text", ["{", '{"time": 1}', "[]", '{"time":1,"path":"/x","status":200,"seconds":1,"body":3}'])
def test_files_that_are_no_dump(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    assert main(["replay", str(tmp_path / "x.jsonl")]) == 2
    assert "is no recorded request" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "missing.jsonl")]) == 2


def test_replay_keeps_the_pace_and_tells_what_changed() -> None:
    import asyncio
    import threading
    import time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    seen: list[tuple[float, Any, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((time.monotonic(), body, self.headers.get("authorization")))
            self.send_response(body["answer"])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    recorded = [
        replay.Line(100.0 * (at + 1), "/generate", 200, 0.1, {"at": at, "answer": 200 if at else 404})
        for at in range(4)
    ]
    began = time.monotonic()
    outcome = asyncio.run(replay.replay(recorded, url, "k", speed=1000, at_once=8))
    server.shutdown()
    assert dict(outcome.statuses) == {404: 1, 200: 3}
    assert outcome.changed == ["/generate: 200 then, 404 now"]
    assert sorted(body["at"] for _, body, _ in seen) == [0, 1, 2, 3]
    assert all(began + 0.1 * body["at"] <= when < began + 60 for when, body, _ in seen), "five minutes in 0.3 s"
    assert {key for _, _, key in seen} == {"Bearer k"}
    assert "4 requests" in replay.report(recorded, outcome)
