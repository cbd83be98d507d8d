"""Fixtures of the CPU tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from cake_core.testing.cuda_on_cpu.emulation import Program, compile_program
from norms_emulation import csrc


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    names = [(op, f"{op}_{half}") for op in ("rmsnorm", "gated_rmsnorm") for half in ("fwd", "bwd")]
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda name: compile_program(csrc(name[0]), name[1], folder), names))
    return {path.stem: Program(path) for path in paths}
