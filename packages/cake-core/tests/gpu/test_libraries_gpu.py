"""GPU checks 4, 5, 8 and 9: one CUDA runtime, the portable build, refused launches, builds on autograd's threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cake_core import device, no_build, release, toolchain
from cake_core.build import BuildForbidden
from cake_core.loader import KernelPackage
from cake_core.testing.routes import check_routes, empty_cache
from cake_core.testing.synthetic_op import api
from cake_core.testing.synthetic_op.testing import routes
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nvcc,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]


def program(package: KernelPackage) -> Callable[..., Any]:
    return package.function(f"checks_{device.device_arch(package=package)}")


def in_a_child(code: str, *arguments: str) -> Any:
    """What a fresh process prints last, as JSON. PTX is compiled there, not taken from the driver's cache."""
    environment = {**os.environ, "CUDA_CACHE_DISABLE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_torch_and_the_libraries_share_one_cuda_runtime(
    checks: KernelPackage, mapped: Callable[[str], set[str]], figure: Callable[..., None]
) -> None:
    """R43: GPU check 4. Libraries of this toolkit run on the runtime that torch brought; ``cake doctor`` names it."""
    x = torch.ones(3, device="cuda")
    program(checks)("bend", torch.empty_like(x), x, 0.0, 0)
    torch.cuda.synchronize()
    runtimes = mapped("/libcudart.so")
    assert len(runtimes) == 1, runtimes
    done = subprocess.run([sys.executable, "-m", "cake_core.cli", "doctor", "--json"], capture_output=True, text=True)
    lines = {check["what"]: check["found"] for check in json.loads(done.stdout)["machine"]}
    assert {lines["libcudart"]} == runtimes
    figure(4, "CUDA release of the toolkit", float("{}.{}".format(*toolchain.find_toolchain().release)), "")
    figure(4, "CUDA release of torch", float(str(torch.version.cuda)), "", f"torch {torch.__version__}")


_FIRST_CALL = """
import hashlib, json, sys, time
from pathlib import Path
import torch, tvm_ffi
from cake_core import no_build
from cake_core.loader import KernelPackage
folder = Path(sys.argv[1])
package = KernelPackage(folder, folder / "aot")
x = torch.linspace(-9, 9, 100_003, dtype=torch.float64).float().cuda()
y = torch.full_like(x, torch.nan)
package.path(sys.argv[2])  # asks the compilers for their versions
torch.cuda.synchronize()
times = [time.perf_counter()]
with no_build():
    run = package.function(sys.argv[2])
times.append(time.perf_counter())
for _ in range(2):
    run("bend", y, x, 0.5, 0)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
digest = hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()
assert bool(y.isfinite().all())
print(json.dumps([digest, *(1e3 * (b - a) for a, b in zip(times, times[1:]))]))
"""


@pytest.mark.sm90
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wants a device of capability 9.0",
)
def test_the_portable_library_gives_the_bits_of_the_own_one(checks: KernelPackage, figure: Callable[..., None]) -> None:
    """GPU check 5: the driver compiles the PTX of the sm_80 entry at its first call; the results are the same."""
    checks.build(("checks_sm_80", "checks_sm_90a"))
    digests = set[str]()
    for library in ("checks_sm_80", "checks_sm_90a"):
        digest, load, first, second = in_a_child(_FIRST_CALL, str(checks.root), library)
        digests.add(digest)
        figure(5, f"load {library}", load, "ms")
        figure(5, f"first call of {library}", first, "ms", "with what the driver compiles and loads")
        figure(5, f"second call of {library}", second, "ms")
    assert len(digests) == 1


def test_a_refused_launch_leaves_the_next_torch_call_healthy(checks: KernelPackage) -> None:
    """R47: GPU check 8. The error is reported once, by the call that caused it."""
    x = torch.ones(3, device="cuda")
    y = torch.zeros_like(x)
    run = program(checks)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"oversized: cudaError\w+ \(\d+\): "):
            run("oversized", y, x, 0.0, 0)
        assert (x + 1).sum().item() == 6
        torch.cuda.synchronize()
        run("bend", y, torch.zeros_like(x), 2.0, 0)
        assert y.tolist() == [2.0] * 3
    run("unchecked", y, x, 0.0, 0)
    with pytest.raises(RuntimeError):  # what the check in the binding prevents
        x + 1
    assert (x + 1).sum().item() == 6


def test_a_backward_compiles_nothing_after_prebuild(synthetic: None) -> None:
    """R53, R58: GPU check 9. Every route, forward and backward, with builds forbidden in the whole process."""
    check_routes("synthetic", routes.ROUTES, routes.run_route, **routes.PREBUILD)


def test_a_build_on_autograds_thread_is_forbidden_too(synthetic: None) -> None:
    """R58: GPU check 9. The backward runs on another thread than the one inside ``no_build()``."""
    threads: list[int] = []
    x, weight = torch.ones(70, 64, device="cuda", requires_grad=True), torch.ones(64, device="cuda")

    def forward() -> Tensor:
        y = api.scale_columns(x, weight)
        y.register_hook(lambda _: threads.append(threading.get_ident()))
        return y.sum()

    with empty_cache():
        release("synthetic")
        loss = forward()
        with no_build(), pytest.raises(BuildForbidden, match="scale_bwd_det_vec4"):
            loss.backward()
        assert threads
        assert threads[0] != threading.get_ident()
        assert x.grad is None
        forward().backward()  # outside it builds
        assert x.grad is not None
        assert bool((x.grad == 1).all())
    release("synthetic")
