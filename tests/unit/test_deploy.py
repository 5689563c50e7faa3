"""Files in `deploy/` that other programs read: names and values must be those of bough, the Dockerfile and Prometheus."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.config.concerns import Config
from bough.config.flags import is_setting

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KEY = "a-key-for-the-test"


def setting_names(text: str) -> set[str]:
    return {name.removeprefix("BOUGH_").lower() for name in re.findall(r"BOUGH_[A-Z_]+(?==|: )", text)}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def prometheus_config() -> str:
    content: str = compose()["configs"]["prometheus"]["content"]
    return content.replace("${BOUGH_API_KEY}", KEY)


@pytest.mark.parametrize("name", ["bough.env", "compose.yaml"])
def test_variables_are_settings(name: str) -> None:
    names = setting_names((DEPLOY / name).read_text())
    assert {"api_key", "model"} <= names
    for each in names - {"listen"}:  # BOUGH_LISTEN is read by the compose file itself
        assert is_setting(each), each


def test_services_have_what_the_image_promises() -> None:
    sys.path.insert(0, str(DEPLOY))
    try:
        from dockerfile import read_dockerfile
    finally:
        sys.path.remove(str(DEPLOY))
    stages = {stage.name: stage for stage in read_dockerfile(ROOT / "Dockerfile")}
    (volumes,) = (step.text.split() for step in stages["base"].instructions if step.name == "VOLUME")
    (port,) = (step.text for step in stages["base"].instructions if step.name == "EXPOSE")
    services = compose()["services"]
    for name in ("bough", "cuda"):
        service = services[name]
        assert service["build"]["target"] in stages
        assert [volume.partition(":")[2] for volume in service["volumes"]] == volumes
        assert service["ports"][0].endswith(f":{port}:{port}")
        seconds = int(service["stop_grace_period"].removesuffix("s"))
        assert seconds > Config().server.drain_timeout_s, "Docker would kill a server that drains"
    assert str(Config().server.port) == port


def test_prometheus_finds_whichever_server_runs() -> None:
    """A target that is not there would be reported as down for ever."""
    services = compose()["services"]
    (job,) = yaml.safe_load(prometheus_config())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    for name in ("bough", "cuda"):
        assert target.partition(":")[0] in services[name]["networks"]["default"]["aliases"]
    assert job["job_name"] == "bough", "alerts.yaml asks for it"
    assert job["authorization"] == {"credentials": KEY}


def test_the_unit_stops_later_than_the_server() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "bough.service")
    service = unit["Service"]
    assert service["ExecStart"].endswith("/bin/bough serve")
    assert float(service["TimeoutStopSec"]) > Config().server.drain_timeout_s
    assert service["ExecReload"].endswith("kill -HUP $MAINPID")
    folders = {service[f"{kind}Directory"] for kind in ("State", "Cache", "Logs")}
    assert folders == {"bough"}
    assert "#BOUGH_LOG_FILE=/var/log/bough/" in (DEPLOY / "bough.env").read_text(), "the only place for logs"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "bough.service"
    text = (DEPLOY / "bough.service").read_text()
    unit.write_text(text.replace("/opt/bough/bin/bough", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "bough.service" not in done.stderr + done.stdout
    unit.write_text(text + "\n[Service]\nProtectSystm=strict\n")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "ProtectSystm" in done.stderr, "it names what it does not know"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "monitoring" / "alerts.yaml", tmp_path)
    shutil.copy(DEPLOY / "monitoring" / "prometheus.yaml", tmp_path / "alone.yaml")
    (tmp_path / "prometheus.yaml").write_text(prometheus_config())
    for name in ("prometheus.yaml", "alone.yaml"):
        done = subprocess.run(["promtool", "check", "config", str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "6 rules found" in done.stdout
