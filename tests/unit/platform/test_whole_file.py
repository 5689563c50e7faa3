"""Files replaced in one move: readers see whole contents, failures leave nothing behind."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from bough.platform.whole_file import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_replaces_the_content_for_its_owner_alone(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"old and longer")
    path.chmod(0o644)
    write_whole(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_file_and_its_name_have_reached_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    synced: list[tuple[bool, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda on: synced.append((stat.S_ISDIR(os.fstat(on).st_mode), path.exists())))
    write_whole(path, b"new", durable=True)
    assert synced == [(False, False), (True, True)], "the content before the move, the directory after it"


def test_threads_of_one_process_write_at_once_and_readers_see_whole_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([letter]) * 200_000 for letter in b"abcd"]
    write_whole(path, contents[0])
    problems: list[object] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(30):
                write_whole(path, data)
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.read_bytes() not in contents:
            problems.append("half a file")
    for thread in threads:
        thread.join()
    assert not problems
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_the_old_content_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("bough.platform.whole_file.os.replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
