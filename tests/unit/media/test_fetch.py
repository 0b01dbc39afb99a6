"""Fetching: what is refused before a connection is made, and what a connection may bring."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from app.errors import FovealError
from app.media import fetch as module
from app.media.fetch import fetch, is_public
from configs.settings import FetchSettings

LOCAL = {"enabled": True, "schemes": ("http", "https"), "allow_networks": ("127.0.0.0/8",)}
PICTURE = bytes(range(256)) * 40


def get(url: str, limit: int = 1_000_000, **settings: Any) -> bytes:
    return asyncio.run(fetch(url, FetchSettings(**settings), limit))


def refusal(url: str, limit: int = 1_000_000, **settings: Any) -> FovealError:
    with pytest.raises(FovealError) as caught:
        get(url, limit, **settings)
    return caught.value


class Handler(BaseHTTPRequestHandler):
    """Serves what the path asks for and remembers the requests."""

    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Host"]))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", rest if ":" in rest else "/" + rest)
            self.end_headers()
        elif kind == "status":
            self.send_response(int(rest))
            self.end_headers()
        elif kind == "gzip":
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
        elif kind == "claims":
            self.send_response(200)
            self.send_header("Content-Length", rest)
            self.end_headers()
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(10_000):
                    self.wfile.write(bytes(10_000))
            except OSError:
                self.seen.append(("hung up", ""))
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                pass
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PICTURE)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64," + base64.b64encode(PICTURE).decode(),
        "DATA:;base64," + base64.b64encode(PICTURE).decode(),
        "data:image/png;charset=x;BASE64," + base64.b64encode(PICTURE).decode().replace("+", "%2B").replace("=", "%3D"),
        "data:," + "".join(f"%{b:02X}" for b in PICTURE),
    ],
)
def test_data_uris_are_always_read(uri: str) -> None:
    assert get(uri) == PICTURE
    assert refusal(uri, limit=len(PICTURE) - 1).code == "body_too_large"


@pytest.mark.parametrize("uri", ["data:image/png;base64", "data:;base64,@@@@", "data:;base64,QUJ", "data:;base64,é"])
def test_broken_data_uris(uri: str) -> None:
    assert refusal(uri).code == "malformed_request"


def test_a_huge_data_uri_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.base64, "b64decode", lambda *a, **k: pytest.fail("decoded"))
    assert refusal("data:;base64," + "A" * 100_000, limit=1000).code == "body_too_large"


def test_fetching_is_off_by_default(url: str) -> None:
    for address in (url, "https://example.com/x.jpg", "file:///etc/passwd"):
        assert refusal(address).code == "fetch_forbidden"
    assert Handler.seen == []


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd",
        "ftp://example.com/x",
        "gopher://127.0.0.1/",
        "http://example.com/x.jpg",
        "https://user:secret@example.com/x",
        "https:///x",
        "https://",
        "http",
        "",
        "//example.com/x",
        "https://0177.0.0.1/",
    ],
)
def test_urls_that_are_not_allowed(address: str) -> None:
    assert refusal(address, enabled=True).code == "fetch_forbidden"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a9fe:a9fe]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[ff02::1]",
    ],
)
def test_addresses_that_are_not_public(host: str) -> None:
    error = refusal(f"https://{host}/x.jpg", enabled=True)
    assert error.code == "fetch_forbidden"
    assert "not public" in error.message


def test_public_addresses() -> None:
    for text in ("8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(text))


def test_hosts_outside_the_allow_list() -> None:
    for host in ("example.com", "evil-example.org", "example.org.evil.com"):
        error = refusal(f"https://{host}/x", enabled=True, allow_hosts=("*.example.org", "cdn.net"))
        assert error.code == "fetch_forbidden"
        assert "allow_hosts" in error.message
    # An allowed host at a private address is refused all the same.
    assert "not public" in refusal("https://localhost/x", enabled=True, allow_hosts=("localhost",)).message


def test_content_and_host_header(url: str) -> None:
    assert get(url + "/picture", **LOCAL) == PICTURE
    assert Handler.seen == [("/picture", url.removeprefix("http://"))]


def resolver(answers: dict[str, list[str]], asked: list[str]) -> Any:
    async def getaddrinfo(self: Any, host: str, port: int, **kwargs: Any) -> list[Any]:
        asked.append(host)
        address = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        if address == "none":
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in address.split(",")]

    return getaddrinfo


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: list[str] = []

    def install(**answers: list[str]) -> list[str]:
        table = {name.replace("_", "."): value for name, value in answers.items()}
        monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolver(table, asked))
        return asked

    return install


def test_the_checked_address_is_the_one_connected_to(server: ThreadingHTTPServer, dns: Any) -> None:
    """A name that answers differently the second time (rebinding) is not asked a second time."""
    asked = dns(media_test=["127.0.0.1", "10.0.0.1"])
    port = server.server_address[1]
    assert get(f"http://media.test:{port}/x", **LOCAL) == PICTURE
    assert asked == ["media.test"]
    assert Handler.seen == [("/x", f"media.test:{port}")]


def test_one_private_address_among_several_is_enough_to_refuse(server: ThreadingHTTPServer, dns: Any) -> None:
    dns(mixed_test=["127.0.0.1,10.0.0.1"])
    assert "not public" in refusal(f"http://mixed.test:{server.server_address[1]}/x", **LOCAL).message
    assert Handler.seen == []


def test_the_next_address_is_tried_when_one_does_not_answer(server: ThreadingHTTPServer, dns: Any) -> None:
    dns(two_test=["127.0.0.2,127.0.0.1"])
    assert get(f"http://two.test:{server.server_address[1]}/x", **LOCAL) == PICTURE


def test_names_that_do_not_resolve(dns: Any) -> None:
    dns(gone_test=["none"])
    assert refusal("http://gone.test/x", **LOCAL).code == "fetch_failed"


def test_redirects_are_followed_and_counted(url: str) -> None:
    assert get(url + "/redirect/redirect/picture", **LOCAL) == PICTURE
    error = refusal(url + "/redirect/redirect/redirect/picture", **LOCAL, max_redirects=2)
    assert error.code == "fetch_failed"
    assert "max_redirects" in error.message
    assert refusal(url + "/redirect/picture", **LOCAL, max_redirects=0).code == "fetch_failed"


@pytest.mark.parametrize(
    "target",
    [
        "http://10.0.0.1/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "file:///etc/passwd",
        "ftp://x/",
    ],
)
def test_redirects_pass_the_same_checks(url: str, target: str) -> None:
    assert refusal(f"{url}/redirect/{target}", **LOCAL).code == "fetch_forbidden"
    assert len(Handler.seen) == 1


def test_redirects_cannot_leave_the_allow_list(url: str) -> None:
    error = refusal(f"{url}/redirect/http://example.com/x", **LOCAL, allow_hosts=("127.0.0.1",))
    assert error.code == "fetch_forbidden"


def test_size_limits(url: str) -> None:
    assert refusal(url + "/picture", limit=len(PICTURE) - 1, **LOCAL).code == "body_too_large"
    assert refusal(url + "/picture", **LOCAL, max_bytes=100).code == "body_too_large"
    assert refusal(url + "/claims/99999999999", **LOCAL).code == "body_too_large"
    assert refusal(url + "/endless", limit=50_000, **LOCAL).code == "body_too_large"


def test_the_time_limit_is_on_the_whole(url: str) -> None:
    started = time.monotonic()
    error = refusal(url + "/slow", **LOCAL, timeout_s=0.3)
    assert error.code == "fetch_failed"
    assert "timeout_s" in error.message
    assert time.monotonic() - started < 4


def test_answers_that_are_no_content(url: str) -> None:
    for path in ("/status/404", "/status/500", "/status/204", "/gzip"):
        assert refusal(url + path, **LOCAL).code == "fetch_failed"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert refusal(f"http://127.0.0.1:{closed.getsockname()[1]}/", **LOCAL).code == "fetch_failed"


def test_proxies_in_the_environment_are_not_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert get(url + "/picture", **LOCAL) == PICTURE


def test_tls_verifies_the_name_and_not_the_address(server: ThreadingHTTPServer, dns: Any, tmp_path: Any) -> None:
    """With a certificate for `media.test`, that name works and another at the same address does not."""
    pytest.importorskip("cryptography", reason="makes the certificate")
    key, certificate = certificate_for("media.test")
    (tmp_path / "pem").write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")
    names: list[str | None] = []
    context.sni_callback = lambda connection, name, _: names.append(name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    trust = ssl.create_default_context(cadata=certificate.decode())
    dns(media_test=["127.0.0.1"], other_test=["127.0.0.1"])
    port = server.server_address[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tls_context", lambda: trust)
        assert get(f"https://media.test:{port}/x", **LOCAL) == PICTURE
        assert refusal(f"https://other.test:{port}/x", **LOCAL).code == "fetch_failed"
    assert refusal(f"https://media.test:{port}/x", **LOCAL).code == "fetch_failed"
    assert names[:2] == ["media.test", "other.test"]


def certificate_for(name: str) -> tuple[bytes, bytes]:
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)
