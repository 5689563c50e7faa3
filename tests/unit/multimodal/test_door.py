"""The door against servers that lie, crawl, flood and lead astray. All of them run on this machine's loopback addresses."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bough.config.concerns import MediaConfig
from bough.core.errors import BoughError, ConfigError
from bough.multimodal import Door, MediaError, MediaNotAllowed, MediaTooLarge, MediaUnreachable, MediaUnsupported
from bough.multimodal.address import parse_web
from bough.multimodal.allowed import AllowList


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (12, 8), (1, 2, 3)).save(out, "PNG")
    return out.getvalue()


PNG = _png()
HERE = "127.0.0.1"
OTHER = "127.0.0.2"

Handler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Site:
    """A web server that does what the test says."""

    port: int = 0
    requests: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    def url(self, path: str = "/", host: str = HERE) -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def site(
    answer: Handler, address: str = HERE, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Site]:
    made = Site()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            made.requests.append(head.split(" ")[1])
            made.headers.append(head)
            await answer(made.requests[-1], reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, address, port, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def says(body: bytes, status: str = "200 OK", **headers: str) -> Handler:
    async def answer(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", *lines])
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return answer


def moves(to: str, status: str = "302 Found") -> Handler:
    return says(b"", status, location=to)


def door(*domains: str, resolve: Any = None, **settings: Any) -> Door:
    config = MediaConfig(allowed_media_domains=domains or (f"{HERE}/32",), **settings)
    return Door(config) if resolve is None else Door(config, resolve=resolve)


def names(**addresses: list[str]) -> Any:
    """A resolver that knows these names (dashes for dots) and nothing else."""

    async def resolve(host: str, port: int) -> list[str]:
        if host.replace(".", "_") in addresses:
            return addresses[host.replace(".", "_")]
        if host.replace(".", "").isdigit():
            return [host]
        raise OSError("no such host")

    return resolve


async def refused(door: Door, url: str, kind: type[MediaError]) -> MediaError:
    with pytest.raises(kind) as caught:
        await door.fetch(url)
    text = caught.value.sentence()
    for internal in ("Traceback", "0x", "httpcore", "ConnectError", OTHER, "169.254"):
        assert internal not in text or internal in url, text
    assert caught.value.status == 400
    return caught.value


# -- plain fetches --------------------------------------------------------------------------------


async def test_a_listed_server_is_asked() -> None:
    async with site(says(PNG, content_type="text/html")) as there:
        picture = await door().fetch(there.url("/a/b.png?x=1#part"))
    assert (picture.data, picture.kind, picture.width, picture.height) == (PNG, "png", 12, 8)
    assert there.requests == ["/a/b.png?x=1"]
    assert f"host: {HERE}:{there.port}" in there.headers[0].lower()
    assert "cookie" not in there.headers[0].lower()


async def test_no_environment_leads_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would look names up again, behind our back."""
    async with site(says(PNG)) as there, site(says(b"proxied")) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        assert (await door().fetch(there.url())).data == PNG
        assert proxy.requests == []


async def test_nothing_is_fetched_unless_it_is_listed() -> None:
    async with site(says(PNG)) as there:
        error = await refused(Door(MediaConfig()), there.url(), MediaNotAllowed)
        assert "--allowed-media-domains" in error.why
        await refused(door("example.com"), there.url(), MediaNotAllowed)
        await refused(door("*"), there.url(), MediaNotAllowed)  # everyone public, and this one is not
        assert there.requests == []


@pytest.mark.parametrize(
    "status", ["404 Not Found", "500 Oops", "204 No Content", "304 Not Modified", "206 Partial Content"]
)
async def test_other_answers(status: str) -> None:
    async with site(says(b"secret words of another server", status)) as there:
        error = await refused(door(), there.url(), MediaUnreachable)
    assert "secret" not in error.sentence()


async def test_what_is_no_picture() -> None:
    async with site(says(b"<html>", content_type="image/png")) as there:
        error = await refused(door(), there.url(), MediaUnsupported)
    assert "html" not in error.sentence()


async def test_packed_answers_are_not_unpacked() -> None:
    async with site(says(PNG, content_encoding="gzip")) as there:
        await refused(door(), there.url(), MediaUnreachable)
        assert "accept-encoding: identity" in there.headers[0].lower()


async def test_nobody_there() -> None:
    async with site(says(PNG)) as there:
        url = there.url()
    await refused(door(), url, MediaUnreachable)


@pytest.mark.parametrize(
    "garbage", [b"\x00\x01\x02\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000]
)
async def test_servers_that_speak_no_http(garbage: bytes) -> None:
    async def answer(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(garbage)
        await writer.drain()

    async with site(answer) as there:
        await refused(door(media_timeout_s=2.0), there.url(), MediaUnreachable)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate for cats.example that nobody trusts yet."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", made, "-days", "2",
         "-subj", "/CN=cats.example", "-addext", "subjectAltName=DNS:cats.example"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, made


async def test_https_is_checked_against_the_name_not_the_address(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, made = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    allowed = door(
        "cats.example", "dogs.example", f"{HERE}/32", resolve=names(cats_example=[HERE], dogs_example=[HERE])
    )
    async with site(says(PNG), tls=context) as there:
        safe = there.url(host="cats.example").replace("http:", "https:")
        await refused(allowed, safe, MediaUnreachable)
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
        assert (await allowed.fetch(safe)).data == PNG
        await refused(allowed, safe.replace("cats", "dogs"), MediaUnreachable)
        assert len(there.requests) == 1
    async with site(moves("http://cats.example/"), tls=context) as there:
        await refused(allowed, there.url(host="cats.example").replace("http:", "https:"), MediaNotAllowed)


# -- redirects and names --------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_redirects_are_followed(status: str) -> None:
    async with site(says(PNG)) as end, site(moves(end.url("/real"), status)) as start:
        assert (await door().fetch(start.url())).data == PNG
        assert end.requests == ["/real"]


async def test_a_redirect_on_the_same_server() -> None:
    async def answer(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (moves("/there") if path == "/here" else says(PNG))(path, reader, writer)

    async with site(answer) as there:
        assert (await door().fetch(there.url("/here"))).data == PNG
        assert there.requests == ["/here", "/there"]


TRAPS = [
    "http://{other}:{port}/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]:{port}/",
    "http://localhost:{port}/",
    "http://10.0.0.1/",
    "http://[::ffff:127.0.0.2]:{port}/",
    "http://2130706434:{port}/",
    "http://0x7f.2:{port}/",
    "http://metadata.google.internal/",
    "//{other}:{port}/",
    "file:///etc/passwd",
    "gopher://{other}:{port}/",
    "http://127.0.0.1:{port}@{other}:{port}/",
    "http://{other}:{port}\\@127.0.0.1/",
    "data:image/png;base64,aaaa",
    "",
]


@pytest.mark.parametrize("trap", TRAPS)
async def test_redirects_lead_nowhere_else(trap: str) -> None:
    async with site(says(PNG), OTHER) as private:
        to = trap.format(other=OTHER, port=private.port)
        async with site(moves(to)) as start:
            with pytest.raises(MediaError) as caught:
                await door().fetch(start.url())
            assert len(start.requests) == 1
        assert private.requests == []
        assert OTHER not in caught.value.sentence() or OTHER in to


@pytest.mark.parametrize("trap", TRAPS)
async def test_nor_does_listing_everybody(trap: str) -> None:
    """Any public host may be asked; what is reached by a redirect is checked all the same."""

    async def resolve(host: str, port: int) -> list[str]:
        return [HERE] if host == "start.example" else [host] if host[:1].isdigit() or ":" in host else [OTHER]

    async with site(says(PNG), OTHER) as private:
        async with site(moves(trap.format(other=OTHER, port=private.port))) as start:
            with pytest.raises(MediaError):
                await door("*", f"{HERE}/32", resolve=resolve).fetch(start.url(host="start.example"))
            assert len(start.requests) == 1
        assert private.requests == []


async def test_redirects_are_bounded() -> None:
    async with site(moves("/again")) as there:
        await refused(door(), there.url(), MediaUnreachable)
        assert len(there.requests) == 4


async def test_a_name_that_changes_its_mind_gains_nothing() -> None:
    """A resolver that is honest once. What it said when it was asked is what is connected to, and it is asked once a hop."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return [HERE] if len(asked) == 1 else [OTHER]

    async with site(says(b"private"), OTHER) as private, site(says(PNG), HERE, private.port) as public:
        rebound = door("cats.example", f"{HERE}/32", resolve=rebinding)
        assert (await rebound.fetch(public.url(host="cats.example"))).data == PNG
        assert asked == ["cats.example"]
        assert f"host: cats.example:{public.port}" in public.headers[0].lower()
        await refused(rebound, public.url(host="cats.example"), MediaNotAllowed)
        assert private.requests == []


async def test_one_private_address_among_public_ones_spoils_them() -> None:
    async with site(says(PNG)) as there:
        mixed = door("cats.example", f"{HERE}/32", resolve=names(cats_example=[HERE, "10.0.0.1"]))
        await refused(mixed, there.url(host="cats.example"), MediaNotAllowed)
        assert there.requests == []


async def test_a_dead_address_is_passed_over() -> None:
    async with site(says(PNG)) as there:
        two = door("cats.example", "127.0.0.0/8", resolve=names(cats_example=["127.0.0.9", HERE]))
        assert (await two.fetch(there.url(host="cats.example"))).data == PNG


async def test_a_private_name_and_no_name_look_the_same() -> None:
    """Who may ask any public host must not learn which names exist inside."""
    inner = door("*", resolve=names(inside_example=["10.0.0.5"]))
    private = await refused(inner, "http://inside.example/", MediaNotAllowed)
    missing = await refused(inner, "http://missing.example/", MediaNotAllowed)
    assert private.sentence().replace("inside", "missing") == missing.sentence()


# -- slow and huge --------------------------------------------------------------------------------


async def test_a_body_larger_than_it_may_be_is_given_up_at_once() -> None:
    sent = 0

    async def endless(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" if path == "/c" else b"HTTP/1.1 200 OK\r\n\r\n"
        )
        while sent < 100 << 20:
            writer.write(b"10000\r\n" + bytes(65_536) + b"\r\n" if path == "/c" else bytes(65_536))
            sent += 65_536
            await writer.drain()

    for path in ("/c", "/plain"):
        sent = 0
        async with site(endless) as there:
            await refused(door(max_media_bytes=1 << 20), there.url(path), MediaTooLarge)
        assert sent < 20 << 20


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async def answer(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n")
        await reader.read()  # until the client goes away

    async with site(answer) as there:
        await refused(door(media_timeout_s=60.0), there.url(), MediaTooLarge)


async def test_a_cut_body_is_no_picture() -> None:
    async def answer(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + PNG)

    async with site(answer) as there:
        await refused(door(), there.url(), MediaUnreachable)


@pytest.mark.parametrize("stage", ["connected", "headers", "body"])
async def test_slow_servers_are_given_up_in_time(stage: str) -> None:
    """One byte at a time is not an answer, however often a byte comes."""
    parts = {
        "connected": b"",
        "headers": b"HTTP/1.1 200 OK\r\nx: ",
        "body": b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n",
    }

    async def drip(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(parts[stage])
        while True:
            if stage != "connected":
                writer.write(b"y")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with site(drip) as there:
        began = time.monotonic()
        error = await refused(door(media_timeout_s=0.5), there.url(), MediaUnreachable)
        assert time.monotonic() - began < 20
        assert "0.5 s" in error.why


async def test_the_time_is_for_all_hops_together() -> None:
    """The first takes most of it. If the second had as much again, it would be answered."""
    answered: list[str] = []

    async def answer(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2.0)
        answered.append(path)
        await moves("/again")(path, reader, writer)

    for _ in range(3):  # a machine that stalls between the end and the second answer does so once
        answered.clear()
        async with site(answer) as there:
            await refused(door(media_timeout_s=3.0), there.url(), MediaUnreachable)
            assert len(there.requests) <= 2
        if len(answered) < 2:
            return
    pytest.fail("the second had as much time as the first")


async def test_a_slow_resolver_is_given_up_in_time() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    began = time.monotonic()
    await refused(door("a.example", resolve=never, media_timeout_s=0.3), "http://a.example/", MediaUnreachable)
    assert time.monotonic() - began < 30


# -- URLs, domains, addresses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x",
        "http://a b/",
        "http://user@example.com/",
        "http://example.com\\@127.0.0.1/",
        "http://ex%61mple.com/",
        "http://[::1/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://exämple.com/",
        "http://example.com/\r\nx: y",
        "http://example.com/ä",
        "https:example.com",
        "http://./",
        "ftp://example.com/",
        "http:/\\example.com",
        "http://a/" + "b" * 9000,
        "javascript:alert(1)",
        "",
        "cat.png",
        "//example.com/x",
        "/etc/passwd",
        "http://example.com/\x00",
        "blob:http://example.com/x",
        "http://\u017fecret.example.com/",  # a long s, whose capital is an S
        "http://\u212aeys.example.com/",  # a Kelvin sign, whose small letter is a k
        "http://example.com/\u017f",
    ],
)
async def test_odd_urls_are_refused(url: str) -> None:
    async def nobody(host: str, port: int) -> list[str]:
        raise AssertionError("nothing is looked up")

    with pytest.raises(MediaError):
        await door("*", resolve=nobody).fetch(url)


def test_urls_are_read_once_and_plainly() -> None:
    at = parse_web("HTTPS://Example.COM.:8443?q=1#x")
    assert (at.scheme, at.host, at.port, at.target) == ("https", "example.com", 8443, "/?q=1")
    v6 = parse_web("http://[2001:DB8::1]/x")
    assert (v6.host, v6.port, v6.target) == ("2001:db8::1", 80, "/x")
    assert v6.moved("/y").host == "2001:db8::1"
    with pytest.raises(MediaError):
        at.moved("//evil.example/")


PRIVATE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.8.8.8",
    "168.63.129.16", "169.254.169.254", "169.254.0.1", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1",
    "192.168.0.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::", "2001:db8::1",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "100::1", "not-an-address",
    "127.1", "0x7f000001",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not AllowList.of(["*", "example.com"]).has_address(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450::1", "193.0.0.1"]
)
def test_public_addresses(address: str) -> None:
    assert AllowList.of(["example.com"]).has_address(address)


def test_a_listed_network_is_open_and_no_other() -> None:
    allowed = AllowList.of(["10.1.0.0/16", "fd12::/16", "store.example"])
    assert [allowed.has_address(each) for each in ("10.1.2.3", "10.2.0.1", "fd12::9", "127.0.0.1")] == [
        True,
        False,
        True,
        False,
    ]
    assert [allowed.has_name(each) for each in ("10.1.2.3", "10.2.0.1", "8.8.8.8", "store.example", "a.store.example")] == [
        True, False, False, True, False,
    ]  # fmt: skip


def test_domains() -> None:
    allowed = AllowList.of(["Example.com.", "*.cdn.example", ".img.example"])
    good = ["example.com", "a.cdn.example", "a.b.cdn.example", "x.img.example"]
    bad = [
        "www.example.com",
        "cdn.example",
        "badexample.com",
        "example.com.evil.example",
        "xcdn.example",
        "img.example",
    ]
    assert all(map(allowed.has_name, good))
    assert not any(map(allowed.has_name, bad))


@pytest.mark.parametrize(
    "entry",
    ["169.254.169.254", "169.254.0.0/16", "0.0.0.0/0", "::/0", "fe80::/10", "http://x", "a b", "", "*x*", "a/b"],
)
def test_lists_that_can_not_be_meant(entry: str) -> None:
    with pytest.raises(ConfigError, match="can't be among the allowed media domains"):
        door(entry)


# -- data and files -------------------------------------------------------------------------------


async def test_data_urls_need_no_permission() -> None:
    shut = Door(MediaConfig(max_media_bytes=len(PNG)))
    text = base64.b64encode(PNG).decode()
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:text/plain;charset=x;BASE64,"):
        assert (await shut.fetch(head + text)).data == PNG


async def test_base64_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes and the same errors as at once, wherever the parts end."""
    door = Door(MediaConfig())
    monkeypatch.setattr("bough.multimodal.door._CHARS_AT_ONCE", 8)
    for size in range(30):
        data = bytes(range(size))
        assert await door.read("data:;base64," + base64.b64encode(data).decode()) == data
    for broken in ("AA==AAAA", "AAAAAAA=AAAAAAAA", "AAAAAAAAA", "AAAAAAAAAA*A", "=AAA" * 4):
        with pytest.raises(binascii.Error):
            base64.b64decode(broken, validate=True)
        with pytest.raises(MediaError):
            await door.read("data:;base64," + broken)


@pytest.mark.parametrize(
    ("url", "kind"),
    [("data:image/png,abc", MediaError), ("data:image/png;base64", MediaError), ("data:image/png;base64,a b!", MediaError),
     ("data:image/png;base64,AAAA", MediaUnsupported), ("data:image/png;base64,", MediaUnsupported),
     ("data:video/jpeg;base64,/9j/4A,/9j/4A", MediaError), ("data:image/png;base64,é", MediaError),
     ("data:image/png;base64," + "A" * 3000, MediaTooLarge)],
)  # fmt: skip
async def test_data_urls_that_hold_no_picture(url: str, kind: type[MediaError]) -> None:
    await refused(Door(MediaConfig(max_media_bytes=2048)), url, kind)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """root/ with a picture and every way out of it."""
    root = tmp_path / "root"
    (root / "in ner").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "rootless").mkdir()
    (tmp_path / "rootless" / "cat.png").write_bytes(PNG)
    (root / "cat.png").write_bytes(PNG)
    (root / "in ner" / "cat.png").write_bytes(PNG)
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "inside.png").symlink_to(root / "cat.png")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe.png")
    return root


async def test_files_below_the_directory(disk: Path) -> None:
    local = Door(MediaConfig(allowed_local_media_path=str(disk)))
    for url in (f"file://{disk}/cat.png", f"file://localhost{disk}/in%20ner/cat.png", f"FILE:{disk}/cat.png"):
        assert (await local.fetch(url)).data == PNG


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "%2e%2e/secret.png",
        "..%2fsecret.png",
        "link.png",
        "inside.png",
        "out/secret.png",
        "out/rootless/cat.png",
        "../rootless/cat.png",
        "pipe.png",
        "in%20ner",
        "",
        ".",
        "none.png",
        "cat.png/x",
        "cat.png%00.png",
        "./cat.png",
        "/cat.png",
    ],
)
async def test_no_way_out_of_the_directory(disk: Path, path: str) -> None:
    with pytest.raises(MediaError) as caught:
        await Door(MediaConfig(allowed_local_media_path=str(disk))).fetch(f"file://{disk}/{path}")
    assert str(disk) not in caught.value.sentence()


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "file://{disk}less/cat.png", "file://otherhost{disk}/cat.png", "file:cat.png", "file:///"],
)
async def test_other_files(disk: Path, url: str) -> None:
    with pytest.raises(MediaError) as caught:
        await Door(MediaConfig(allowed_local_media_path=str(disk))).fetch(url.format(disk=disk))
    assert str(disk) not in caught.value.sentence()


async def test_files_are_off_by_default_and_bounded(disk: Path) -> None:
    url = f"file://{disk}/cat.png"
    await refused(Door(MediaConfig()), url, MediaNotAllowed)
    (disk / "large.png").write_bytes(PNG + bytes(5000))
    await refused(
        Door(MediaConfig(allowed_local_media_path=str(disk), max_media_bytes=2048)),
        f"file://{disk}/large.png",
        MediaTooLarge,
    )


@pytest.mark.parametrize("root", ["/", "/nowhere/at/all", "{disk}/cat.png"])
def test_directories_that_can_not_be_meant(disk: Path, root: str) -> None:
    with pytest.raises(BoughError, match="media can't be read from"):
        Door(MediaConfig(allowed_local_media_path=root.format(disk=disk)))
