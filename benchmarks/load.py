"""Loads an HTTP service from several processes over raw sockets, so that the client is not what limits it.

Each process runs one epoll loop over its connections and reads bodies into one buffer that is used again and again.
Closed loop: so many connections, each sends its next request when the last is answered. Open loop: Poisson arrivals
at a rate; a request's latency counts from when it should have been sent, so a client that falls behind hides nothing.

The length of every answer is checked, and the content of a few: against what the service answered to the same request
when that was alone.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import multiprocessing
import random
import re
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Address = tuple[str, int]
BUFFER_BYTES = 1 << 20
CLOSENESS = 0.1  # relative error: rounding of another batch shape stays far below it, another item's answer far above
PAUSE_S = 0.05  # after an answer that is none, before the connection is used again
SAMPLES = 4  # answers a process keeps for checking
_TIMING = re.compile(rb"(\w+);dur=([\d.]+)")
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class Request:
    """One request as it is sent. items: pictures and clips in it."""

    kind: str
    head: bytes
    body: bytes
    items: int = 1


@dataclass(frozen=True)
class Answer:
    """What is known of a safetensors answer: rows of its embeddings, bytes of all its tensors, a digest of those, and
    values of the embeddings at even distances."""

    tokens: int
    data_bytes: int
    digest: bytes
    values: np.ndarray

    @classmethod
    def read(cls, body: bytes) -> Answer:
        start = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(body[8:start])
        tokens, values = 0, []
        for name, entry in header.items():
            if name.endswith("embeddings"):
                begin, end = (start + offset for offset in entry["data_offsets"])
                flat = np.frombuffer(body[begin:end], _DTYPES[entry["dtype"]])
                flat = flat[:: max(1, len(flat) // 4096)]
                # The upper half of a float32 is a bfloat16.
                values.append((flat.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else flat)
                tokens += entry["shape"][0]
        digest = hashlib.sha256(memoryview(body)[start:]).digest()
        return cls(tokens, len(body) - start, digest, np.concatenate(values).astype(np.float32))

    def error(self, other: Answer) -> float:
        """Relative norm of the difference to `other`; 0 if every byte is equal, infinite if the shapes differ."""
        if self.digest == other.digest:
            return 0.0
        if self.values.shape != other.values.shape:
            return float("inf")
        size = float(np.linalg.norm(other.values))
        error = float(np.linalg.norm(self.values - other.values)) / size if size else float("inf")
        return error if error == error else float("inf")


@dataclass(frozen=True)
class Closed:
    """So many connections over all processes, for `seconds` after `warm_s` that do not count."""

    connections: int
    seconds: float
    warm_s: float = 1.0


@dataclass(frozen=True)
class Open:
    """Poisson arrivals, `rate` a second over all processes. A process opens up to `connections`; past that, requests
    wait in the client, their latency counting on."""

    rate: float
    seconds: float
    warm_s: float = 1.0
    connections: int = 512


@dataclass
class Records:
    """What happened to each request, in columns. status 0: the connection broke; -1: still open at the end.

    start: when it was sent, or should have been. Times are of `time.perf_counter`, the same in all processes.
    """

    start: np.ndarray
    first: np.ndarray
    end: np.ndarray
    status: np.ndarray
    index: np.ndarray
    received: np.ndarray
    stages: dict[str, np.ndarray]
    codes: Counter[str] = field(default_factory=Counter)
    wrong_length: int = 0
    errors: list[float] = field(default_factory=list)
    cpu_shares: list[float] = field(default_factory=list)
    begin: float = 0.0
    finish: float = 0.0


class Target:
    """A service and what is sent to it: requests, each one's known answer, and the order in which they are taken."""

    def __init__(self, address: Address, requests: Sequence[Request], order: Sequence[int]) -> None:
        self.address, self.requests, self.order = address, requests, order
        self.answers: list[Answer] = []

    def prime(self, threads: int = 4) -> Target:
        """Sends every request once, a few at a time, and keeps the answers. Raises if one is refused for ever."""
        with ThreadPoolExecutor(threads) as pool:
            self.answers = list(pool.map(lambda r: Answer.read(ask(self.address, r)), self.requests))
        return self


def ask(address: Address, request: Request, timeout_s: float = 180.0) -> bytes:
    """The body of the answer to one request, asked again while the service is full."""
    deadline = time.monotonic() + timeout_s
    while True:
        connection = http.client.HTTPConnection(*address, timeout=timeout_s)
        try:
            connection.connect()
            connection.sock.sendall(request.head + request.body)
            response = http.client.HTTPResponse(connection.sock, method="POST")
            response.begin()
            body = response.read()
        finally:
            connection.close()
        if response.status == 200:
            return body
        if response.status not in (429, 503) or time.monotonic() > deadline:
            raise RuntimeError(f"{request.kind}: {response.status} {body[:500]!r}")
        time.sleep(0.2)


def run_load(
    target: Target,
    plan: Closed | Open,
    processes: int,
    at: Callable[[str], None] = lambda moment: None,
    drain_s: float = 60.0,
) -> Records:
    """Runs the plan. `at` is called in this process with "begin", "tick" (about once a second) and "end"."""
    # Forked: the requests, which can be many, are shared and not copied.
    context = multiprocessing.get_context("fork")
    if isinstance(plan, Closed):
        processes = min(processes, plan.connections)
    start = time.perf_counter() + 0.2 + 0.05 * processes
    begin, finish = start + plan.warm_s, start + plan.warm_s + plan.seconds
    pipes, children = [], []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(target, plan, rank, processes, start, finish, drain_s, sender))
        child.start()
        sender.close()
        pipes.append(receiver)
        children.append(child)
    _sleep_until(begin)
    at("begin")
    while (now := time.perf_counter()) < finish:
        _sleep_until(min(now + 1, finish))
        if time.perf_counter() < finish:
            at("tick")
    at("end")
    parts = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("start", "first", "end", "status", "index", "received")
    }
    stages = sorted({stage for part in parts for stage in part.stages})
    return Records(
        **columns,
        stages={s: np.concatenate([p.stages[s] for p in parts if s in p.stages]) for s in stages},
        codes=sum((part.codes for part in parts), Counter()),
        wrong_length=sum(part.wrong_length for part in parts),
        errors=[error for part in parts for error in part.errors],
        cpu_shares=[share for part in parts for share in part.cpu_shares],
        begin=begin,
        finish=finish,
    )


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _work(
    target: Target,
    plan: Closed | Open,
    rank: int,
    processes: int,
    start: float,
    finish: float,
    drain_s: float,
    sender: Any,
) -> None:
    sender.send(_Worker(target, plan, rank, processes, start, finish).run(drain_s))
    sender.close()


@dataclass(slots=True, eq=False)
class _Connection:
    """One keep-alive connection and the request on it; index: which, -1 for none."""

    sock: socket.socket | None = None
    mask: int = 0
    index: int = -1
    start: float = 0.0
    first: float = 0.0
    unsent: list[memoryview] = field(default_factory=list)
    head: bytes = b""
    status: int = 0
    left: int = 0
    chunks: Chunks | None = None
    prefix: bytes = b""
    received: int = 0
    kept: list[bytes] | None = None
    timing: bytes = b""
    will_close: bool = False


class _Worker:
    def __init__(
        self, target: Target, plan: Closed | Open, rank: int, processes: int, start: float, finish: float
    ) -> None:
        self.target, self.plan = target, plan
        self.start, self.finish = start, finish
        self.random = random.Random(rank)
        self.order, self.at = target.order, rank * len(target.order) // processes
        self.poll = select.epoll()
        self.by_fd: dict[int, _Connection] = {}
        self.idle: list[_Connection] = []
        self.paused: deque[tuple[float, _Connection]] = deque()
        self.late: deque[float] = deque()
        if isinstance(plan, Closed):
            self.room = plan.connections // processes + (rank < plan.connections % processes)
            self.rate = 0.0
        else:
            self.room, self.rate = plan.connections, plan.rate / processes
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.rows: list[tuple[float, float, float, int, int, int]] = []
        self.timings: list[tuple[float, bytes]] = []
        self.codes: Counter[str] = Counter()
        self.wrong_length = 0
        self.samples: list[tuple[int, bytes]] = []
        self.next_sample = start + plan.warm_s
        self.active = 0

    def run(self, drain_s: float) -> Records:
        _sleep_until(self.start)
        cpu = time.process_time()
        if isinstance(self.plan, Closed):
            for _ in range(self.room):
                self._send(_Connection(), time.perf_counter())
        arrival = self.start + (self.random.expovariate(self.rate) if self.rate else 0.0)
        deadline = self.finish + drain_s
        while True:
            now = time.perf_counter()
            if now >= self.finish and (not self.active or now > deadline):
                break
            while self.rate and arrival <= now and arrival < self.finish:
                self._arrive(arrival)
                arrival += self.random.expovariate(self.rate)
            while self.paused and self.paused[0][0] <= now:
                self._next(self.paused.popleft()[1], now)
            wake = deadline if now >= self.finish else self.finish
            if self.rate and now < self.finish:
                wake = min(wake, arrival)
            if self.paused:
                wake = min(wake, self.paused[0][0])
            for fd, events in self.poll.poll(max(0.0, min(wake - now, 1.0))):
                self._ready(self.by_fd[fd], events)
        # The draining is idle time.
        share = (time.process_time() - cpu) / (self.finish - self.start)
        return self._records(share)

    def _records(self, share: float) -> Records:
        for connection in self.by_fd.values():
            if connection.index >= 0:
                self.rows.append((connection.start, 0.0, 0.0, -1, connection.index, connection.received))
        self.rows.extend((moment, 0.0, 0.0, -1, 0, 0) for moment in self.late)
        columns = np.array(self.rows, dtype=np.float64).reshape(-1, 6).T
        begin = self.start + self.plan.warm_s
        stages: dict[str, list[float]] = {}
        for moment, header in self.timings:
            if moment >= begin:
                for name, value in _TIMING.findall(header):
                    stages.setdefault(name.decode(), []).append(float(value))
        errors = []
        for index, body in self.samples:
            try:
                errors.append(Answer.read(body).error(self.target.answers[index]))
            except (ValueError, KeyError):
                errors.append(float("inf"))
        return Records(
            start=columns[0],
            first=columns[1],
            end=columns[2],
            status=columns[3].astype(np.int32),
            index=columns[4].astype(np.int32),
            received=columns[5].astype(np.int64),
            stages={name: np.array(values) for name, values in stages.items()},
            codes=self.codes,
            wrong_length=self.wrong_length,
            errors=errors,
            cpu_shares=[share],
        )

    def _arrive(self, moment: float) -> None:
        if self.idle:
            self._send(self.idle.pop(), moment)
        elif self.room:
            self.room -= 1
            self._send(_Connection(), moment)
        else:
            self.late.append(moment)

    def _next(self, connection: _Connection, now: float) -> None:
        """What a connection does once it is free."""
        if self.late:
            self._send(connection, self.late.popleft())
        elif self.rate:
            self.idle.append(connection)
        elif now < self.finish:
            self._send(connection, now)

    def _send(self, connection: _Connection, start: float) -> None:
        index = self.order[self.at % len(self.order)]
        self.at += 1
        request = self.target.requests[index]
        connection.index, connection.start = index, start
        connection.unsent = [memoryview(request.head), memoryview(request.body)]
        connection.head, connection.status, connection.prefix = b"", 0, b""
        connection.first, connection.received, connection.left, connection.kept = 0.0, 0, 0, None
        connection.chunks, connection.timing, connection.will_close = None, b"", False
        self.active += 1
        if connection.sock is None:
            self._connect(connection)
        self._write(connection)

    def _connect(self, connection: _Connection) -> None:
        connection.sock = sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(self.target.address)
        connection.mask = select.EPOLLIN
        self.by_fd[sock.fileno()] = connection
        self.poll.register(sock.fileno(), connection.mask)

    def _write(self, connection: _Connection) -> None:
        assert connection.sock is not None
        try:
            while connection.unsent:
                sent = connection.sock.sendmsg(connection.unsent)
                while connection.unsent and sent >= len(connection.unsent[0]):
                    sent -= len(connection.unsent.pop(0))
                if sent:
                    connection.unsent[0] = connection.unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            # An answer may have been sent before the connection was closed.
            connection.unsent = []
        mask = select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0)
        if mask != connection.mask:
            connection.mask = mask
            self.poll.modify(connection.sock.fileno(), mask)

    def _ready(self, connection: _Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            self._write(connection)
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        assert connection.sock is not None
        # A few reads, then the others' turn.
        for _ in range(4):
            try:
                count = connection.sock.recv_into(self.buffer)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._broken(connection)
                return
            if connection.index < 0:
                self._broken(connection)  # Bytes that nobody asked for.
                return
            if self._take(connection, self.buffer[:count]):
                return

    def _take(self, connection: _Connection, data: memoryview) -> bool:
        """Uses bytes of an answer; True if it is complete."""
        if not connection.status:
            connection.first = connection.first or time.perf_counter()
            connection.head += bytes(data)
            end = connection.head.find(b"\r\n\r\n")
            if end < 0:
                return False
            rest = connection.head[end + 4 :]
            self._read_head(connection, connection.head[:end])
            data = memoryview(rest)
        if connection.chunks is not None:
            data, done = connection.chunks.feed(data)
        else:
            connection.left -= len(data)
            done = connection.left <= 0
        connection.received += len(data)
        if len(connection.prefix) < 8:
            connection.prefix += bytes(data[: 8 - len(connection.prefix)])
        if connection.kept is not None:
            connection.kept.append(bytes(data))
        if done:
            self._complete(connection)
        return done

    def _read_head(self, connection: _Connection, head: bytes) -> None:
        lines = head.split(b"\r\n")
        connection.status = int(lines[0].split(b" ", 2)[1])
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            connection.chunks = Chunks()
        else:
            connection.left = int(headers.get(b"content-length", b"0"))
        connection.will_close = headers.get(b"connection", b"").lower() == b"close"
        connection.timing = headers.get(b"server-timing", b"")
        now = time.perf_counter()
        if connection.status != 200:
            connection.kept = []
        elif now >= self.next_sample and len(self.samples) < SAMPLES:
            self.next_sample = now + self.plan.seconds / SAMPLES
            connection.kept = []

    def _complete(self, connection: _Connection) -> None:
        now = time.perf_counter()
        index, status = connection.index, connection.status
        self.rows.append((connection.start, connection.first, now, status, index, connection.received))
        if status == 200:
            data_bytes = connection.received - 8 - int.from_bytes(connection.prefix, "little")
            if data_bytes != self.target.answers[index].data_bytes:
                self.wrong_length += 1
            if connection.kept is not None:
                self.samples.append((index, b"".join(connection.kept)))
            self.codes["200"] += 1
            self.timings.append((now, connection.timing))
        else:
            assert connection.kept is not None
            self.codes[_code(status, b"".join(connection.kept))] += 1
        if connection.will_close or connection.unsent:
            self._drop(connection)
        self._free(connection, now, status == 200)

    def _broken(self, connection: _Connection) -> None:
        now, waiting = time.perf_counter(), connection.index >= 0
        self._drop(connection)
        if waiting:
            self.rows.append((connection.start, connection.first, now, 0, connection.index, connection.received))
            self.codes["broken"] += 1
            self._free(connection, now, False)

    def _free(self, connection: _Connection, now: float, well: bool) -> None:
        connection.index = -1
        self.active -= 1
        if well or self.rate:
            self._next(connection, now)
        else:
            self.paused.append((now + PAUSE_S, connection))

    def _drop(self, connection: _Connection) -> None:
        assert connection.sock is not None
        del self.by_fd[connection.sock.fileno()]
        self.poll.unregister(connection.sock.fileno())
        connection.sock.close()
        connection.sock = None


class Chunks:
    """Takes the chunked coding of HTTP/1.1 (RFC 9112, 7.1) off a body; trailers are read and dropped."""

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        self._ended = False

    def feed(self, data: memoryview) -> tuple[memoryview, bool]:
        """The body's bytes in `data`, and whether the body is complete."""
        stream, out = self._pending + bytes(data), bytearray()
        at = 0
        while True:
            if self._left:
                piece = stream[at : at + self._left]
                # The last two bytes of a chunk are its line end.
                keep = max(0, min(len(piece), self._left - 2))
                out += piece[:keep]
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            end = stream.find(b"\r\n", at)
            if end < 0:
                break
            line, at = stream[at:end], end + 2
            if self._ended:
                if not line:
                    self._pending = b""
                    return memoryview(bytes(out)), True
                continue
            size = int(line.split(b";")[0], 16)
            self._ended = size == 0
            self._left = size + 2 if size else 0
        self._pending = stream[at:]
        return memoryview(bytes(out)), False


def _code(status: int, body: bytes) -> str:
    """The status and, if the body is our envelope, the error's code."""
    try:
        return f"{status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


# --- clients that leave ---


def leave(address: Address, request: Request, moment: str, generator: random.Random) -> bool:
    """Sends a request and leaves before the answer is here; True if it left at the moment asked for.

    moment: "upload" (part of the body is sent), "queue" (all is sent, nothing read) or "download" (the answer begins).
    Half of the clients reset the connection, half close it.
    """
    with socket.create_connection(address, timeout=60) as sock:
        # A small window keeps most of the answer on the server's side.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        if generator.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            if moment == "upload":
                sock.sendall(request.head + request.body[: generator.randrange(1, len(request.body))])
                time.sleep(generator.random() * 0.01)
                return True
            sock.sendall(request.head + request.body)
            if moment == "queue":
                time.sleep(generator.random() * 0.03)
                return True
            return sock.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


def leave_many(address: Address, requests: Sequence[Request], moment: str, count: int, threads: int = 8) -> int:
    """So many clients that leave, several at a time; how many left at the moment asked for."""

    def one(number: int) -> bool:
        generator = random.Random(number)
        return leave(address, requests[number % len(requests)], moment, generator)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(one, range(count)))
