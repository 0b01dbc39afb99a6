from __future__ import annotations

import pytest
from hypothesis import settings

from tests.unit.media.corpus import Case, build

# The first example of a test may be the one that imports transformers.
settings.register_profile("media", deadline=None)
settings.load_profile("media")


@pytest.fixture(scope="session")
def cases() -> dict[str, list[Case]]:
    return build()
