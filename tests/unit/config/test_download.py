"""A model comes from a hub that takes its time: how many bytes are there is reported on the way, and is right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.unit.config.fake_hub import FakeHub

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": save({"x": np.zeros(2_000_000, np.float32)}),
    "original/model.safetensors": bytes(5_000_000),
    "picture.png": bytes(100),
}
WANTED = len(FILES["config.json"]) + len(FILES["model.safetensors"])

SCRIPT = """
from bough.cli import progress
from bough.config import download
from bough.config.server_args import build_config
from bough.launch import located

progress._LINE_EVERY_S = download._REPORT_EVERY_S = 0.0
reported = []
shown = progress.Progress()
def hear(done, total):
    reported.append((done, total))
    shown.show("downloading our/model", done, total)

config, _ = located(build_config(model="our/model"), hear)
print(config.model.served_model_name, config.model.model, *(f"{done}/{total}" for done, total in reported))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    made = FakeHub(FILES)
    yield made
    made.close()


def fetch(hub: FakeHub, cache: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=150, check=False,
        env={**os.environ, **hub.environ(cache), **environ},
    )  # fmt: skip


def test_bytes_are_reported_while_they_come(hub: FakeHub, tmp_path: Path) -> None:
    # The first connection breaks in the middle; the second waits for long enough that a speed can be told.
    broken = threading.Event()

    def slowly(name: str, data: bytes) -> bytes | None:
        if name != "model.safetensors":
            return data
        if not broken.is_set():
            broken.set()
            return None
        threading.Event().wait(0.7)
        return data

    hub.before_sending = slowly
    done = fetch(hub, tmp_path)
    hub.before_sending = None
    assert done.returncode == 0, done.stderr
    name, path, *reported = done.stdout.split()
    assert name == "our/model"
    assert sorted(each.name for each in Path(path).iterdir()) == ["config.json", "model.safetensors"]
    numbers = [tuple(map(int, each.split("/"))) for each in reported]
    assert {total for _, total in numbers} == {WANTED}, "what is not wanted does not count"
    parts = [part for part, _ in numbers]
    assert parts == sorted(parts)
    assert parts[-1] == WANTED
    assert any(0 < part < WANTED for part in parts), "not only at the end"
    assert re.search(r"^downloading our/model: [\d.]+ MiB of 7\.63 MiB", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"MiB/s, \d+ s left$", done.stderr, re.MULTILINE), done.stderr
    assert "%|" not in done.stderr, "one bar is enough"

    again = fetch(hub, tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.split()) == 2, "what is there is not reported again"
    alone = fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert alone.returncode == 0, "and needs no hub"


def test_a_hub_that_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "our/model is not on this machine and the hub can't be reached" in done.stderr


def test_a_directory_of_the_operators_is_used_instead_of_the_hubs_cache(hub: FakeHub, tmp_path: Path) -> None:
    script = SCRIPT.replace('model="our/model"', f'model="our/model", download_dir={str(tmp_path / "mine")!r}')
    command = [sys.executable, "-c", script]
    for environ in (hub.environ(tmp_path / "cache"), {**hub.environ(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **environ}
        )
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "mine") in done.stdout.split()[1]
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
