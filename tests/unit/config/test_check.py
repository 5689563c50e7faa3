"""An open server needs a key or an explicit word."""

from __future__ import annotations

import pytest

from bough.config.check import check_exposure, is_loopback
from bough.config.server_args import load_config
from bough.core.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("port", 70_000, "for example --port 30000"),
        ("mem_fraction_static", 0.0001, "for example --mem-fraction-static auto"),
        ("stream_interval", 0, "for example --stream-interval 1"),
    ],
)
def test_the_example_is_one_that_works(name: str, value: object, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({name: value}, environ={})
    assert caught.value.fix == advice
    load_config({name: advice.split()[-1]}, environ={})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "192.168.0.1"])
def test_public_hosts_need_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="without a key"):
        check_exposure(load_config({"host": host}, environ={}).config)
    check_exposure(load_config({"host": host, "api_key": "k"}, environ={}).config)
    check_exposure(load_config({"host": host, "insecure": True}, environ={}).config)
