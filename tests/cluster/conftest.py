"""One cluster for all its tests, and clients that ask it all the time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from benchmarks.checked import Answer, CheckedLoad, Request, first_answers
from tests.cluster.cluster import ServiceCluster
from tests.integration.media import jpeg, mp4, png, webp_animation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test runs first also waits for the cluster, on a machine that may be busy."""
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster() -> Iterator[ServiceCluster]:
    with ServiceCluster() as running:
        yield running


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Something for every pool."""
    samples = [
        png(256, 288, 1),
        jpeg(640, 480, 2),
        webp_animation(96, 64, 5, 3),
        mp4(128, 96, 8, 4),
        mp4(96, 96, 40, 5),
    ]
    return [Request(sample.name, sample.data) for sample in samples]


@pytest.fixture(scope="session")
def references(cluster: ServiceCluster, requests: list[Request]) -> dict[str, Answer]:
    """The answers before anything is broken."""
    answers = first_answers(cluster.url, requests)
    assert {answer.status for answer in answers.values()} == {200}
    return answers


@pytest.fixture
def load(cluster: ServiceCluster, requests: list[Request], references: dict[str, Answer]) -> Callable[[], CheckedLoad]:
    """Two clients, to be opened by the test."""
    return lambda: CheckedLoad(cluster.url, requests, references, clients=2, pause_s=0.3)


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Iterator[Callable[[str, object], None]]:
    """Keeps figures, which are printed as one JSON object after the last test."""
    figures: dict[str, object] = {}
    yield figures.__setitem__
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(json.dumps(figures, indent=1))
