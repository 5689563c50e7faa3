"""Which version serves a product: what was measured wins, Hopper's rule fills the gaps, the library takes the rest."""

import json
from pathlib import Path

import pytest
import torch

from bough.kernels.linear import table
from bough.kernels.linear.skinny import SkinnyTiling

CPU = torch.device("cpu")
MEASURED = Path(table.__file__).parent / "measured"


def choose(operation: str, tokens: int, rows: int, depth: int) -> SkinnyTiling | None:
    return table.choose(operation, tokens, rows, depth, torch.bfloat16, CPU)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: table.Entries = {
        "linear/4/6144x4096/bfloat16": SkinnyTiling(16, 64, 4, 3, 2),
        "linear/16/6144x4096/bfloat16": None,
    }
    monkeypatch.setattr(table, "entries", lambda _: measured)
    monkeypatch.setattr(table, "is_ready", lambda _: True)


@pytest.mark.usefixtures("hopper")
def test_what_was_measured_wins() -> None:
    assert choose("linear", 3, 6144, 4096) == SkinnyTiling(16, 64, 4, 3, 2)
    assert choose("linear", 9, 6144, 4096) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("operation", "tokens", "rows", "depth", "is_served"),
    [
        ("linear", 32, 6144, 4096, True),
        ("silu_mul", 1, 28672, 4096, True),
        ("linear", 33, 6144, 4096, False),  # too many tokens
        ("linear", 4, 10240, 1024, True),
        ("linear", 1, 960, 4096, False),  # too small a weight
        ("linear", 1, 8224, 4096, False),  # rows not in whole tiles
        ("linear", 15, 5120, 2880, True),  # in steps of 64
        ("linear", 16, 5120, 2880, False),
        ("linear", 32, 201088, 2880, True),
        ("linear", 1, 6144, 4128, False),  # depth not in whole steps
        ("silu_mul", 1, 28672 + 64, 4096, False),  # a half not in whole tiles
    ],
)
def test_the_rule(operation: str, tokens: int, rows: int, depth: int, is_served: bool) -> None:
    assert choose(operation, tokens, rows, depth) == (table.early(operation, depth) if is_served else None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("rows", "depth", "split"), [(3648, 2048, 2), (2048, 2048, 2), (1024, 4096, 4), (8448, 1024, 1), (4224, 2048, 2)]
)
def test_weights_that_the_rings_hold_are_asked_for_at_once(
    rows: int, depth: int, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "num_sms", lambda _: 132)
    config = choose("linear", 4, rows, depth)
    assert config is not None
    assert (config.programs_per_sm, config.split) == (0, split)
    assert depth <= split * config.block_k * config.num_stages
    assert rows // config.block_n * split <= 132
    assert choose("linear", 33, rows, depth) is None
    assert choose("linear", 4, rows + 4224, depth) == table.early("linear", depth), "more programs than multiprocessors"
    assert table.at_once(rows, depth + 64, 132) is None, "a depth in no whole steps"


def test_nothing_is_assumed_of_other_devices() -> None:
    assert choose("linear", 1, 6144, 4096) is None


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_measurements_load(path: Path) -> None:
    for name, value in json.loads(path.read_text()).items():
        operation, tokens, shape, dtype = name.split("/")
        rows, depth = map(int, shape.split("x"))
        assert name == table.entry_name(operation, int(tokens), rows, depth, getattr(torch, dtype))
        assert value is None or SkinnyTiling(**value).block_n > 0


@pytest.mark.parametrize(
    "text",
    [
        '{"linear/4/6144x4096/bfloat16": {"block_n": 16, "block_k": 64, "num_warps": 4, "num_stages": 3, "gone": 0}}',
        '{"linear/4/6144x4096/bfloat16": 7}',
        "[]",
        "{",
    ],
)
def test_measurements_of_another_version_are_left_aside(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table.table_path(CPU)
    path.write_text(text)
    table.entries.cache_clear()
    try:
        assert table.entries(CPU) == {}
        assert "left aside" in caplog.text
    finally:
        table.entries.cache_clear()


def test_without_a_directory_for_them_there_are_no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> Path:
        raise PermissionError("somebody else's")

    monkeypatch.setattr(table, "cache_directory", taken)
    table.entries.cache_clear()
    try:
        assert table.entries(CPU) == {}
    finally:
        table.entries.cache_clear()
