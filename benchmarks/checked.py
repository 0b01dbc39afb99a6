"""Clients that know the right answers: they compare bit for bit, ask again where that is allowed, and keep count."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import httpx

# What a client may simply ask again: the service says so, or the connection broke.
MAY_RETRY = {502, 503, 504}
Outcome = Literal["right", "wrong", "retry", "failed", "hang"]


@dataclass(frozen=True)
class Request:
    """One body for /v1/encode. `name` is unique among those that a load sends."""

    name: str
    data: bytes
    params: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What must be the same every time: of an encoding all tensors, bit for bit; of an error status and code."""

    status: int
    content: bytes

    @classmethod
    def of(cls, response: httpx.Response) -> Self:
        if response.status_code != 200:
            return cls(response.status_code, response.json()["error"]["code"].encode())
        # The metadata tells which budget the item shared, which depends on its neighbours.
        size = int.from_bytes(response.content[:8], "little")
        header = json.loads(response.content[8 : 8 + size])
        del header["__metadata__"]
        return cls(200, json.dumps(header, sort_keys=True).encode() + response.content[8 + size :])


@dataclass(frozen=True)
class Attempt:
    """One try. started: `time.monotonic()`. detail: the status, or the name of the client's exception."""

    name: str
    started: float
    seconds: float
    outcome: Outcome
    detail: str


class CheckedLoad:
    """`clients` threads that ask without pause while the context is open.

    Args:
        references: of each request's name the right answer; see `first_answers`.
        timeout_s: seconds without an answer that count as a hang; above the service's own deadline.
        patience_s: seconds after which a request that still has no right answer counts as lost.
        pause_s: of each client between two requests.
    """

    def __init__(
        self,
        url: str,
        requests: Sequence[Request],
        references: Mapping[str, Answer],
        *,
        clients: int,
        timeout_s: float = 60.0,
        patience_s: float = 120.0,
        pause_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._url, self._requests, self._references = url, requests, references
        self._timeout_s, self._patience_s, self._pause_s = timeout_s, patience_s, pause_s
        self.attempts: list[Attempt] = []
        self.settled: Counter[str] = Counter()
        self.lost: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed} {i}"),), daemon=True)
            for i in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the clients once each has its answer."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def outcomes(self, since: float = 0.0) -> dict[str, int]:
        """Attempts that started at or after `since`, by outcome and, unless it is right, detail."""
        kinds = Counter(
            a.outcome if a.outcome == "right" else f"{a.outcome} {a.detail}"
            for a in list(self.attempts)
            if a.started >= since
        )
        return dict(sorted(kinds.items()))

    def count(self, *outcomes: Outcome) -> int:
        return sum(a.outcome in outcomes for a in list(self.attempts))

    def summary(self) -> dict[str, Any]:
        """Figures for a report: requests, attempts by outcome, and milliseconds of the right answers."""
        right = sorted(a.seconds * 1000 for a in self.attempts if a.outcome == "right")
        return {
            "requests": sum(self.settled.values()) + len(self.lost),
            "right": sum(self.settled.values()),
            "lost": self.lost[:20],
            "attempts": self.outcomes(),
            "p50_ms": round(right[len(right) // 2], 1) if right else None,
            "p99_ms": round(right[len(right) * 99 // 100], 1) if right else None,
            "max_ms": round(right[-1], 1) if right else None,
        }

    def _client(self, rng: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=self._timeout_s) as session:
            while not self._stop.is_set():
                self._settle(session, rng.choice(self._requests))
                self._stop.wait(self._pause_s)

    def _settle(self, session: httpx.Client, request: Request) -> None:
        """Asks until the answer is there; a request that is lost is named and given up."""
        limit = time.monotonic() + self._patience_s
        while True:
            attempt = self._attempt(session, request)
            self.attempts.append(attempt)
            if attempt.outcome == "right":
                self.settled[request.name] += 1
                return
            if attempt.outcome in ("wrong", "failed") or time.monotonic() > limit:
                self.lost.append(f"{request.name}: {attempt.outcome} {attempt.detail}")
                return
            time.sleep(0.2)

    def _attempt(self, session: httpx.Client, request: Request) -> Attempt:
        started = time.monotonic()
        outcome: Outcome
        try:
            response = session.post("/v1/encode", content=request.data, params=dict(request.params))
        except httpx.TimeoutException as error:
            outcome, detail = "hang", type(error).__name__
        except httpx.TransportError as error:
            outcome, detail = "retry", type(error).__name__
        else:
            outcome, detail = self._judge(response, self._references[request.name])
        return Attempt(request.name, started, time.monotonic() - started, outcome, detail)

    @staticmethod
    def _judge(response: httpx.Response, expected: Answer) -> tuple[Outcome, str]:
        detail = str(response.status_code)
        if response.status_code in MAY_RETRY:
            return "retry", detail
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer = Answer.of(response)
            if answer == expected:
                return "right", detail
            if answer.status == 200:
                return "wrong", detail
            detail = f"{detail} {answer.content.decode()}"
        return "failed", detail


def first_answers(url: str, requests: Sequence[Request], timeout_s: float = 120.0) -> dict[str, Answer]:
    """Each request's answer from a service that is well, asked alone and twice.

    Raises:
        RuntimeError: the two differ, or one is an error that a client may retry.
    """
    answers: dict[str, Answer] = {}
    with httpx.Client(base_url=url, timeout=timeout_s) as session:
        for _ in range(2):
            for request in requests:
                answer = Answer.of(session.post("/v1/encode", content=request.data, params=dict(request.params)))
                if answer.status in MAY_RETRY or answers.setdefault(request.name, answer) != answer:
                    raise RuntimeError(f"{request.name} has no steady answer: {answer.status}")
    return answers
