"""Every test starts and ends with an unconfigured process; compilers that take milliseconds for those that ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cake_core import configure, toolchain
from cake_core.testing.fake_toolchain import FakeToolchain


@pytest.fixture(autouse=True)
def default_configuration() -> Iterator[None]:
    configure()
    yield
    configure()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolchain:
    """Compilers that take milliseconds and an empty cache, for this process and its children."""
    fake = FakeToolchain(tmp_path / "tools")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    toolchain.forget()
    return fake
