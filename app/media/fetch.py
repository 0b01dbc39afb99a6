"""Bytes behind an `image_url` or `video_url`: data: URIs always, https (and http) only where enabled.

A host name is resolved once, every address it has is checked, and the connection goes to a checked address (the name
stays in the Host header and in TLS), so a second, different DNS answer is never asked for. Redirects are followed by
hand and pass the same checks. Proxies, netrc and certificates named in the environment are not used.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fnmatch
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from functools import cache, partial
from urllib.parse import unquote_to_bytes

import certifi
import httpx

from app.errors import FovealError
from app.threads import in_thread
from configs.settings import FetchSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REDIRECTS = {301, 302, 303, 307, 308}
# Azure's metadata and DNS service answers on a public address.
_PUBLIC_BUT_PRIVATE = {ipaddress.ip_address("168.63.129.16")}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


async def fetch(url: str, settings: FetchSettings, max_body_bytes: int) -> bytes:
    """The bytes that `url` stands for.

    Raises:
        FovealError: `malformed_request` for a broken data: URI; `fetch_forbidden` for a scheme, host or address that
            is not allowed; `fetch_failed` for everything that goes wrong on the way, the time limit included;
            `body_too_large`.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return await in_thread(partial(_data_uri, url, max_body_bytes))
    if not settings.enabled:
        raise FovealError("fetch_forbidden", "fetching URLs is off (fetch.enabled); send a data: URI or the bytes")
    limit = min(settings.max_bytes, max_body_bytes)
    try:
        async with asyncio.timeout(settings.timeout_s):
            return await _follow(url, settings, limit)
    except TimeoutError:
        message = f"the URL took longer than fetch.timeout_s = {settings.timeout_s:g} s"
        raise FovealError("fetch_failed", message) from None
    except httpx.HTTPError as e:
        raise FovealError("fetch_failed", f"the URL could not be fetched: {type(e).__name__}") from e


def _data_uri(url: str, limit: int) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise FovealError("malformed_request", "the data: URI has no comma")
    if not head.lower().endswith(";base64"):
        data = unquote_to_bytes(body)
    else:
        if len(body) > limit // 3 * 4 + 4096:
            raise _too_large(limit)
        try:
            data = base64.b64decode(unquote_to_bytes(body) if "%" in body else body, validate=True)
        except (binascii.Error, ValueError):
            raise FovealError("malformed_request", "the data: URI is not valid base64") from None
    if len(data) > limit:
        raise _too_large(limit)
    return data


def _too_large(limit: int) -> FovealError:
    return FovealError("body_too_large", f"the content behind the URL is over {limit} bytes")


@cache
def tls_context() -> ssl.SSLContext:
    """Trusts certifi's roots alone, whatever the environment names."""
    return ssl.create_default_context(cafile=certifi.where())


async def _follow(url: str, settings: FetchSettings, limit: int) -> bytes:
    async with httpx.AsyncClient(
        verify=tls_context(), trust_env=False, follow_redirects=False, timeout=settings.timeout_s
    ) as client:
        target = _parse(url)
        for _ in range(settings.max_redirects + 1):
            addresses = await _allowed_addresses(target, settings)
            location = None
            async with _Pinned(client, target, addresses) as response:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    location = response.headers["location"]
                elif response.status_code != 200:
                    raise FovealError("fetch_failed", f"the URL answered with status {response.status_code}")
                else:
                    return await _read(response, limit)
            target = _parse(str(_join(target, location)))
    raise FovealError("fetch_failed", f"more than fetch.max_redirects = {settings.max_redirects} redirects")


def _parse(url: str) -> httpx.URL:
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, ValueError, TypeError):
        raise FovealError("fetch_forbidden", "the URL is not valid") from None
    if not target.host:
        raise FovealError("fetch_forbidden", "the URL has no host")
    if target.userinfo:
        raise FovealError("fetch_forbidden", "the URL carries a user name or password")
    return target


def _join(base: httpx.URL, location: str) -> httpx.URL:
    try:
        return base.join(location)
    except (httpx.InvalidURL, ValueError):
        raise FovealError("fetch_failed", "the URL redirects to an invalid one") from None


async def _allowed_addresses(url: httpx.URL, settings: FetchSettings) -> list[Address]:
    """Addresses to connect to, all of them checked.

    Raises:
        FovealError: `fetch_forbidden`; `fetch_failed` when the name does not resolve.
    """
    if url.scheme not in settings.schemes:
        raise FovealError("fetch_forbidden", f"{url.scheme}: URLs are not allowed (fetch.schemes)")
    host = url.raw_host.decode("ascii").lower().rstrip(".")
    if settings.allow_hosts and not any(_host_matches(host, pattern) for pattern in settings.allow_hosts):
        raise FovealError("fetch_forbidden", "the URL's host is not in fetch.allow_hosts")
    addresses = await _resolve(host, url.port or {"https": 443, "http": 80}[url.scheme])
    for address in addresses:
        if not is_public(address) and not any(address in network for network in settings.allow_networks):
            # The address is not named: it would tell a stranger about the inner network.
            raise FovealError("fetch_forbidden", "the URL's host is at an address that is not public")
    return addresses


def _host_matches(host: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(host, pattern.lower())


async def _resolve(host: str, port: int) -> list[Address]:
    try:
        return [ipaddress.ip_address(host.strip("[]"))]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FovealError("fetch_failed", "the URL's host name does not resolve") from None
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet, the IPv4 address inside an IPv6 one included."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(embedded)
    return address.is_global and not address.is_multicast and address not in _PUBLIC_BUT_PRIVATE


class _Pinned:
    """A streamed GET of `url` from the first of `addresses` that accepts a connection."""

    def __init__(self, client: httpx.AsyncClient, url: httpx.URL, addresses: Sequence[Address]) -> None:
        self._client, self._url, self._addresses = client, url, addresses
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        host = self._url.netloc.decode("ascii")
        failure: httpx.HTTPError | None = None
        for address in self._addresses:
            request = self._client.build_request(
                "GET",
                self._url.copy_with(host=str(address)),
                # Identity: the size limit counts what arrives, and nothing may unpack to more.
                headers={"Host": host, "Accept-Encoding": "identity", "User-Agent": "foveal"},
                extensions={"sni_hostname": self._url.raw_host.decode("ascii")},
            )
            try:
                self._response = await self._client.send(request, stream=True)
            except httpx.ConnectError as e:
                failure = e
                continue
            return self._response
        raise failure or httpx.ConnectError("no address")

    async def __aexit__(self, *exc: object) -> None:
        if self._response is not None:
            await self._response.aclose()


async def _read(response: httpx.Response, limit: int) -> bytes:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise FovealError("fetch_failed", "the URL answered with a content encoding that was not asked for")
    length = response.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)
