"""det of both norms: a thousand repeats, other streams, pool bounds and processes, and the frozen bits. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.det import assert_repeats, assert_same_in_a_fresh_process, on_fewer_multiprocessors
from cake_core.testing.frozen import digest, uniform
from cake_core.testing.gates import assert_same_bits
from cake_norms._frozen import EPS, GATED_RMSNORM, RMSNORM
from cake_norms.gated_rmsnorm import rmsnorm_gate_bwd, rmsnorm_gate_fwd
from cake_norms.rmsnorm import zero_centered_rmsnorm_bwd, zero_centered_rmsnorm_fwd
from torch import Tensor

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Outputs = tuple[Tensor, ...]


def _configure(pool: int = 0) -> None:
    configure(cake_rmsnorm_variant="det", cake_gated_rmsnorm_variant="det", cake_workspace_pool_bytes=pool)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


def _step(rows: int, hidden: int, dtype: str) -> Callable[[], Outputs]:
    x, dy = (uniform(rows, hidden, seed=seed).to(DEVICE) for seed in (1, 2))
    w = uniform(hidden, seed=3).to(DEVICE, DTYPES[dtype])

    def run() -> Outputs:
        y, rstd = zero_centered_rmsnorm_fwd(x, w, EPS)
        dx, dweight = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
        assert dx is not None
        assert dweight is not None
        return y, rstd, dx, dweight

    return run


def _gated_step(tokens: int, heads: int, dim: int, activation: str, dtype: str) -> Callable[[], Outputs]:
    shape = (tokens, heads, dim)
    x, z, dy = (uniform(*shape, seed=seed).to(DEVICE) for seed in (1, 2, 3))
    w = uniform(dim, seed=4).to(DEVICE, DTYPES[dtype])

    def run() -> Outputs:
        y = rmsnorm_gate_fwd(x, z, w, EPS, activation=activation)
        gradients = rmsnorm_gate_bwd(dy, x, z, w, EPS, activation=activation)
        return (y, *(gradient for gradient in gradients if gradient is not None))

    return run


STEPS: dict[str, Callable[[], Callable[[], Outputs]]] = {
    "rmsnorm 16411 x 2048": lambda: _step(16411, 2048, "bf16"),
    "rmsnorm 1100000 x 256, two waves": lambda: _step(1_100_000, 256, "fp32"),
    "gated 4099 x 32 x 128": lambda: _gated_step(4099, 32, 128, "silu", "bf16"),
}


def _same(got: Outputs, want: Outputs, where: str) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(one, other, f"{where}: output {index}")


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_thousand_repeats_have_the_same_bits(name: str) -> None:
    """With the pool off, too small and large enough."""
    run = STEPS[name]()
    assert_repeats(run, _same, 1000, pool=_configure, bounds=(0, 1 << 12, 1 << 30))


def all_digests() -> str:
    return str({name: digest(make()()) for name, make in STEPS.items()})


def test_a_fresh_process_has_the_same_bits() -> None:
    assert_same_in_a_fresh_process(all_digests)


@pytest.mark.parametrize(("case", "frozen"), RMSNORM.items(), ids=str)
def test_rmsnorm_has_its_frozen_bits(case: tuple[int, int, str], frozen: tuple[str, ...]) -> None:
    assert digest(_step(*case)()) == frozen


@pytest.mark.sm90
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="bits of ex2 and rcp on sm_90"
)
@pytest.mark.parametrize(("case", "frozen"), GATED_RMSNORM.items(), ids=str)
def test_gated_rmsnorm_has_its_frozen_bits(case: tuple[int, int, int, str, str], frozen: tuple[str, ...]) -> None:
    assert digest(_gated_step(*case)()) == frozen


@pytest.mark.parametrize("name", STEPS)
def test_fewer_multiprocessors_have_the_same_bits(name: str) -> None:
    """N06: a quarter of the device runs the same partition in more rounds."""
    run = STEPS[name]()
    want = run()
    _same(on_fewer_multiprocessors(run), want, "32 multiprocessors")
