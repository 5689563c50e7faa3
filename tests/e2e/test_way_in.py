"""One server with HTTPS, a path prefix, two API workers and a log file; one on a Unix socket. As their users reach them."""

from __future__ import annotations

import datetime
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))

from serving import Server, body

from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def certificate(folder: Path, name: str, *, days: int = 2) -> None:
    """A self-signed certificate for 127.0.0.1, as NAME.pem and NAME.key."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", str(days),
         "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


def expires(port: int) -> datetime.date:
    """The last day of the certificate that the server shows."""
    shown = ssl.get_server_certificate(("127.0.0.1", port), timeout=10)
    read = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout"], input=shown, capture_output=True, text=True, check=True
    )
    return datetime.datetime.strptime(read.stdout.strip().removeprefix("notAfter="), "%b %d %H:%M:%S %Y %Z").date()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    certificate(made, "server")
    certificate(made, "client")
    return made


@pytest.fixture(scope="module")
def secured(folder: Path) -> Iterator[Server]:
    flags = ["--ssl-certfile", f"{folder}/server.pem", "--ssl-keyfile", f"{folder}/server.key",
             "--ssl-ca-certs", f"{folder}/client.pem", "--root-path", "/llm", "--api-workers", "2",
             "--log-file", f"{folder}/logs/bough.log"]  # fmt: skip
    with Server(*flags) as server:
        yield server


def client(folder: Path) -> httpx.Client:
    context = ssl.create_default_context(cafile=f"{folder}/server.pem")
    context.load_cert_chain(f"{folder}/client.pem", f"{folder}/client.key")
    return httpx.Client(verify=context, timeout=60)


def test_https_with_client_certificates_under_a_prefix(secured: Server, folder: Path) -> None:
    assert secured.url.startswith("https://127.0.0.1:")
    with client(folder) as trusted:
        answer = trusted.post(f"{secured.url}/llm/generate", json=body(tokens=3)).json()
        assert answer["meta_info"]["completion_tokens"] == 3
        assert trusted.get(f"{secured.url}/v1/models").status_code == 200, "a proxy may have removed the prefix"
        assert trusted.get(f"{secured.url}/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
        page = trusted.get(f"{secured.url}/llm", headers={"accept": "text/html"}, follow_redirects=True)
        assert (page.status_code, page.url.path) == (200, "/llm/ui/")
        assert trusted.get(f"{secured.url}/llmx/v1/models").status_code == 404
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{secured.url}/livez", verify=ssl.create_default_context(cafile=f"{folder}/server.pem"))
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.url.replace("https", "http") + "/livez")


def test_sighup_reads_certificates_again_and_opens_the_log_anew(secured: Server, folder: Path) -> None:
    port = int(secured.url.rpartition(":")[2])
    log = folder / "logs" / "bough.log"
    before = expires(port)
    certificate(folder, "server", days=9)
    log.rename(log.with_name("old.log"))
    told = lambda: log.read_text() if log.exists() else ""

    def hang_up() -> bool:
        os.kill(secured.process.pid, signal.SIGHUP)
        return bool(until(lambda: "SIGHUP was passed on to: api0, api1" in told(), 2, 0.1))

    assert until(hang_up, 60), told()  # the second worker may still be starting
    assert expires(port) == before + datetime.timedelta(days=7)
    failed = told().count("could not be read again")
    assert failed == 0
    assert len({expires(port) for _ in range(12)}) == 1, "both workers show the new one"
    whole = (folder / "server.pem").read_text()
    (folder / "server.pem").write_text("no certificate")
    os.kill(secured.process.pid, signal.SIGHUP)
    assert until(lambda: told().count("could not be read again") == 2, 20, 0.1)
    (folder / "server.pem").write_text(whole)
    with client(folder) as trusted:
        assert trusted.get(f"{secured.url}/readyz").status_code == 200, "the old one is shown on"


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "bough.sock"
    with Server("--uds", str(path), "--api-workers", "2") as server:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60
        ) as http:
            for _ in range(4):
                assert http.post("/generate", json=body(tokens=2)).json()["meta_info"]["completion_tokens"] == 2
        assert f"  socket     {path}" in server.log()
        assert f"curl --unix-socket {path} http://localhost/v1/" in server.log()
        server.process.terminate()
        server.process.wait(60)
    assert not path.exists(), "it is removed at the end"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--ssl-certfile", "/nowhere.pem"], "there is no file /nowhere.pem"),
        (["--ssl-certfile", __file__], "OpenSSL refuses"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile was given without --ssl-certfile"),
        (["--root-path", "llm"], "a path begins with /"),
        (["--uds", "/nowhere/there/a.sock"], "can't listen on /nowhere/there/a.sock"),
        (["--log-file", "/proc/nothing/a.log"], "the log file /proc/nothing/a.log can't be written"),
    ],
)
def test_what_is_wrong_is_said_at_once(flags: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bough.cli.main import main

    assert main(["serve", "--port", "0", *flags]) == 2
    assert what in " ".join(capsys.readouterr().err.split())
