"""Fixtures of the CPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import gdn_emulation
import pytest
import torch
from cake_core import config
from cake_core.testing.cuda_on_cpu.emulation import Program
from gdn_emulation import Kernels


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    return gdn_emulation.compiled(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture
def kernels(programs: dict[str, Program]) -> Kernels:
    return Kernels(programs)


@pytest.fixture(autouse=True)
def _one_thread_and_unconfigured() -> Iterator[None]:
    """Products of 128 x 128 gain nothing from a second thread, and lose a lot on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.configure()
    yield
    config.configure()
    torch.set_num_threads(threads)


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """Autocast to BF16 on CUDA. ``torch.autocast`` sets it too, but not on a machine without a device."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])
