import dataclasses
import stat
from pathlib import Path

import pytest

from bough.config.concerns import CacheConfig, Config, ModelConfig, ServerConfig
from bough.core.errors import BoughError, ConfigError, WeightsError
from bough.ipc import (
    Endpoints,
    EngineStatus,
    Launch,
    load_launch,
    read_error,
    read_status,
    save_launch,
    write_error,
    write_status,
)


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return Endpoints(str(tmp_path))


def test_a_launch_survives_its_file(endpoints: Endpoints) -> None:
    config = dataclasses.replace(
        Config(),
        model=ModelConfig(model="m", context_length=4096),
        cache=CacheConfig(page_size=16),
        server=ServerConfig(cors_origins=("a", "b"), api_key=("secret",)),
    )
    launch = Launch(config=config, directory=endpoints.directory, parent_pid=7, lifeline_fd=5, listen_fds=(9,))
    save_launch(launch)
    assert load_launch(endpoints.directory) == launch
    assert stat.S_IMODE(endpoints.path("launch.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"config": 3}'])
def test_a_bad_launch_file_says_so(endpoints: Endpoints, content: bytes | None) -> None:
    if content is not None:
        endpoints.path("launch.json").write_bytes(content)
    with pytest.raises(ConfigError, match="launch file"):
        load_launch(endpoints.directory)


def test_status_is_starting_until_written(endpoints: Endpoints) -> None:
    assert read_status(endpoints).phase == "starting"
    write_status(endpoints, EngineStatus(phase="ready", facts={"context_length": 8192}))
    assert read_status(endpoints).facts == {"context_length": 8192}
    assert [path.name for path in Path(endpoints.directory).iterdir()] == ["status.json"]


def test_errors_keep_their_type_and_three_lines(endpoints: Endpoints) -> None:
    write_error(endpoints, "engine", WeightsError(what="a", why="b", fix="c"))
    error = read_error(endpoints, "engine")
    assert type(error) is WeightsError
    assert error.lines() == "error: a\n  why: b\n  fix: c"
    assert read_error(endpoints, "detok") is None


def test_unexpected_errors_become_ours(endpoints: Endpoints) -> None:
    write_error(endpoints, "engine", ZeroDivisionError("by zero"), traceback="Traceback ...")
    error = read_error(endpoints, "engine")
    assert type(error) is BoughError
    assert "ZeroDivisionError: by zero" in error.what
    assert error.__notes__ == ["Traceback ..."]


def test_an_error_file_can_not_name_another_class(endpoints: Endpoints) -> None:
    endpoints.error("engine").write_text('{"kind": "annotations", "what": "x"}')
    error = read_error(endpoints, "engine")
    assert type(error) is BoughError
    assert error.what == "x"
