"""The load generator against a small server of its own: what it counts, and that it sees wrong answers."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import Answer, Chunks, Closed, Open, Request, Target, leave_many, run_load


def tensors(rows: int, seed: int) -> bytes:
    """A safetensors body: `0.embeddings` float32 [rows, 4]."""
    values = np.random.default_rng(seed).standard_normal((rows, 4)).astype("<f4")
    entry = {"dtype": "F32", "shape": [rows, 4], "data_offsets": [0, values.nbytes]}
    header = json.dumps({"__metadata__": {"x": "y"}, "0.embeddings": entry}).encode()
    return len(header).to_bytes(8, "little") + header + values.tobytes()


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    coded = b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return coded + b"0\r\nTrailer: 1\r\n\r\n"


@dataclass
class Server:
    """answer: body of a request, and how many came before -> bytes of the response; b"" closes the connection."""

    answer: Callable[[bytes, int], bytes]
    connections: int = 0
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, sock: socket.socket) -> None:
        with suppress(ConnectionError), sock, sock.makefile("rb") as stream:
            while line := stream.readline():
                length = 0
                while (line := stream.readline().strip().lower()) not in (b"",):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = stream.read(length)
                if len(body) < length:
                    return
                with self.lock:
                    self.requests += 1
                    response = self.answer(body, self.requests - 1)
                sock.sendall(response)
                if not response or b"Connection: close" in response[:200]:
                    return


@contextmanager
def serving(answer: Callable[[bytes, int], bytes]) -> Iterator[tuple[Server, tuple[str, int]]]:
    server, listener = Server(answer), socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            server.connections += 1
            threading.Thread(target=server.serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server, listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def request(name: str, items: int = 1) -> Request:
    body = name.encode()
    head = f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return Request(name, head.encode(), body, items)


def honest(body: bytes, number: int) -> bytes:
    """Two sizes, by what was asked; every third answer is chunked."""
    found = tensors(3, 1) if body == b"small" else tensors(50_000, 2)
    if number % 3:
        return reply(found, headers="Server-Timing: decode;dur=1.5, total;dur=3.0\r\n")
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(found, 70_001)


def test_closed_loop_counts_and_checks_every_answer() -> None:
    with serving(honest) as (server, address):
        target = Target(address, [request("small"), request("large", 16)], [0, 1, 0]).prime()
        primed = server.connections
        moments: list[str] = []
        records = run_load(target, Closed(3, 1.2, warm_s=0.1), 2, moments.append)
    assert [answer.tokens for answer in target.answers] == [3, 50_000]
    assert [answer.data_bytes for answer in target.answers] == [48, 800_000]
    assert moments == ["begin", "tick", "end"]
    assert server.connections - primed == 3  # kept alive
    assert records.codes == {"200": server.requests - 2}
    assert len(records.status) == server.requests - 2
    assert (records.status == 200).all()
    assert (records.start <= records.first).all()
    assert (records.first <= records.end).all()
    sizes = np.array([len(tensors(3, 1)), len(tensors(50_000, 2))])
    assert (records.received == sizes[records.index]).all()
    # Two of three are small, in this order.
    assert (records.index == 0).sum() >= (records.index == 1).sum() > 0
    assert records.wrong_length == 0
    assert records.errors
    assert set(records.errors) == {0.0}
    assert set(records.stages["total"]) == {3.0}


def test_wrong_answers_are_seen() -> None:
    primed = False

    def answer(body: bytes, number: int) -> bytes:
        if not primed:
            return reply(tensors(300, 1))
        # Another item's tensors, or a length that is not this item's.
        return reply(tensors(300, 2) if number % 2 else tensors(299, 1))

    with serving(answer) as (_, address):
        target = Target(address, [request("a")], [0]).prime()
        primed = True
        records = run_load(target, Closed(1, 0.5, warm_s=0.0), 1)
    assert abs(records.wrong_length - len(records.status) / 2) <= 1
    assert records.errors
    assert min(records.errors) > 0.5


def test_refusals_and_broken_connections_are_counted_apart() -> None:
    def answer(body: bytes, number: int) -> bytes:
        if number == 0 or number % 4 == 1:
            return reply(tensors(3, 1))
        if number % 4 == 2:
            return reply(b'{"error": {"code": "overloaded"}}', "503 Service Unavailable", "Connection: close\r\n")
        return b"" if number % 4 == 3 else reply(b"<html>", "502 Bad Gateway")

    with serving(answer) as (server, address):
        target = Target(address, [request("a")], [0]).prime()
        records = run_load(target, Open(80, 1.0, warm_s=0.0), 1)
    assert set(records.codes) == {"200", "503 overloaded", "broken", "502"}
    assert sum(records.codes.values()) == len(records.status) == server.requests - 1
    assert {0, 200, 502, 503} == set(records.status)


def test_open_loop_counts_from_when_a_request_was_due() -> None:
    """One connection for more than it can carry: the waiting in the client shows in the latency."""
    pause = threading.Event()

    def answer(body: bytes, number: int) -> bytes:
        pause.wait(0.02)
        return reply(tensors(3, 1))

    with serving(answer) as (_, address):
        target = Target(address, [request("a")], [0]).prime()
        records = run_load(target, Open(200, 0.5, warm_s=0.0, connections=1), 1)
    latency = records.end - records.start
    assert (records.status == 200).all()
    # Each takes 20 ms and one comes every 5: the last ones have waited for all before them.
    assert latency.max() > 0.02 * len(latency) / 2


@given(st.binary(max_size=200), st.integers(1, 50), st.lists(st.integers(1, 40), min_size=1))
def test_chunked_bodies_come_out_whatever_the_cuts(body: bytes, size: int, cuts: list[int]) -> None:
    stream, chunks, found, done, turn = chunked(body, size), Chunks(), b"", False, 0
    while stream:
        assert not done
        cut = cuts[turn % len(cuts)]
        data, done = chunks.feed(memoryview(stream[:cut]))
        found, stream, turn = found + bytes(data), stream[cut:], turn + 1
    assert done
    assert found == body


def test_bfloat16_answers_compare_as_the_numbers_they_hold() -> None:
    values = np.random.default_rng(0).standard_normal((20, 8)).astype("<f4")
    bits = (values.view("<u4") >> 16).astype("<u2")
    header = json.dumps(
        {"0.embeddings": {"dtype": "BF16", "shape": [20, 8], "data_offsets": [0, bits.nbytes]}}
    ).encode()
    answer = Answer.read(len(header).to_bytes(8, "little") + header + bits.tobytes())
    np.testing.assert_allclose(answer.values, values.ravel(), rtol=2**-7)
    assert answer.error(answer) == 0.0
    other = Answer.read(len(header).to_bytes(8, "little") + header + (bits ^ 1).tobytes())
    assert 0 < other.error(answer) < 2**-6


@pytest.mark.parametrize("moment", ["upload", "queue", "download"])
def test_clients_leave_when_they_are_told_to(moment: str) -> None:
    seen: list[bytes] = []

    def answer(body: bytes, number: int) -> bytes:
        seen.append(body)
        return reply(tensors(500_000, 1))

    with serving(answer) as (server, address):
        assert leave_many(address, [request("x" * random.Random(0).randrange(1000, 2000))], moment, 10, 2) == 10
        assert server.connections == 10
    # A body that is cut off reaches nobody.
    assert len(seen) <= 10 * (moment != "upload")
