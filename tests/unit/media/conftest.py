from __future__ import annotations

import logging

import pytest

from tests.unit.media.corpus import Case, build


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    logging.getLogger("libav").setLevel(logging.CRITICAL)
    return build()
