"""Fixtures of the CPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import gqa_emulation
import pytest
import torch
from cake_core import config
from cake_core.testing.cuda_on_cpu.emulation import Program
from gqa_emulation import Kernels


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    return gqa_emulation.compiled(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture
def kernels(programs: dict[str, Program]) -> Kernels:
    return Kernels(programs)


@pytest.fixture(autouse=True)
def _one_thread_and_unconfigured() -> Iterator[None]:
    """Small products gain nothing from a second thread, and lose a lot on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.configure()
    yield
    config.configure()
    torch.set_num_threads(threads)
