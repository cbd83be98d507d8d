"""Fixtures of the CPU tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from cake_core.testing.cuda_on_cpu.emulation import Program, compile_program
from conv_emulation import CSRC, PROGRAMS, Kernels


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda name: compile_program(CSRC, name, folder), PROGRAMS))
    return {path.stem: Program(path) for path in paths}


@pytest.fixture
def kernels(programs: dict[str, Program]) -> Kernels:
    return Kernels(programs)
