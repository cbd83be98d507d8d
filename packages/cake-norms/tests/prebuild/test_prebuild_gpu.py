"""After one ``prebuild`` no call of either norm compiles anything (a CUDA device and a compiler)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cake_core import configure, no_build, prebuild, release
from cake_core.testing.routes import empty_cache
from cake_norms.gated_rmsnorm.testing import routes as gated_routes
from cake_norms.rmsnorm import ZeroCenteredRMSNorm
from cake_norms.rmsnorm.testing import routes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.prebuild,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

# A fresh process: a library that is loaded already would not be looked up again.
_CHECK = """
import sys
from cake_core.testing.routes import check_routes
from {module} import PREBUILD, ROUTES, run_route
check_routes("{op}", ROUTES, run_route, **PREBUILD)
assert not [name for name in sys.modules if name.partition(".")[0] == "flashinfer"], "flashinfer was imported"
print(len(ROUTES), "routes")
"""


@pytest.fixture(scope="module")
def checked() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Op -> its process. Both compile at the same time."""

    def run(op: str) -> subprocess.CompletedProcess[str]:
        code = _CHECK.format(op=op, module=f"cake_norms.{op}.testing.routes")
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:
        yield {op: pool.submit(run, op) for op in ("rmsnorm", "gated_rmsnorm")}


@pytest.mark.parametrize(
    ("op", "table"), [("rmsnorm", routes.ROUTES), ("gated_rmsnorm", gated_routes.ROUTES)], ids=["rmsnorm", "gated"]
)
def test_a_prebuilt_process_compiles_nothing(
    checked: dict[str, Future[subprocess.CompletedProcess[str]]], op: str, table: Mapping[str, Mapping[str, Any]]
) -> None:
    """R53, R58, R59: every call-time switch of the op, forward and backward, after one prebuild into an empty cache."""
    done = checked[op].result()
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(len(table)), "routes"]


def test_one_prebuild_serves_every_width_token_count_and_later_variant() -> None:
    """R53: one hidden size's libraries hold every other; a variant configured after construction builds nothing."""
    release("rmsnorm")
    with empty_cache():
        paths = prebuild("rmsnorm", hidden_size=2048)
        assert len(paths) == 2
        layer = ZeroCenteredRMSNorm(512, device="cuda", dtype=torch.bfloat16)
        with no_build():
            assert prebuild("rmsnorm", hidden_size=5120) == paths
            for variant in ("det", "fast"):
                configure(cake_rmsnorm_variant=variant)
                for rows in (0, 1, 31, 133, 4097, 32771):
                    x = torch.ones(rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                    layer(x).sum().backward()
        configure()
        release("rmsnorm")
    assert layer.weight.grad is not None
