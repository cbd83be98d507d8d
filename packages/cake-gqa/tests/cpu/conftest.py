"""Fixtures of the CPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cake_core import config


@pytest.fixture(autouse=True)
def _one_thread_and_unconfigured() -> Iterator[None]:
    """Small products gain nothing from a second thread, and lose a lot on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.configure()
    yield
    config.configure()
    torch.set_num_threads(threads)
