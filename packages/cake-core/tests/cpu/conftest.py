"""Every test starts and ends with an unconfigured process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cake_core import configure


@pytest.fixture(autouse=True)
def default_configuration() -> Iterator[None]:
    configure()
    yield
    configure()
