"""After one ``prebuild`` no call of ``conv1d`` compiles anything (a CUDA device and a compiler)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cake_conv1d import causal_conv1d
from cake_conv1d.testing.routes import ROUTES
from cake_core import configure, no_build, prebuild, release
from cake_core.testing.routes import empty_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.prebuild,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

# A fresh process: a library that is loaded already would not be looked up again.
_CHECK = """
import sys
from cake_core.testing.routes import check_routes
from cake_conv1d.testing.routes import PREBUILD, ROUTES, run_route
check_routes("conv1d", ROUTES, run_route, **PREBUILD)
assert not [name for name in sys.modules if name.partition(".")[0] == "flashinfer"], "flashinfer was imported"
print(len(ROUTES), "routes")
"""


def test_a_prebuilt_process_compiles_nothing() -> None:
    """R53, R58, R59: every call-time switch of the op, forward and backward, after one prebuild into an empty cache."""
    done = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(len(ROUTES)), "routes"]


def test_one_prebuild_serves_every_size_taps_and_later_variant() -> None:
    """R53: a library holds both dtypes of the taps and every width; what is configured later builds none."""
    release("conv1d")
    with empty_cache():
        paths = prebuild("conv1d", weight_dtype="bfloat16")
        assert len(paths) == 3
        with no_build():
            assert prebuild("conv1d", weight_dtype="float32") == paths
            for variant, policy in (("det", "bf16"), ("fast", "fp32")):
                configure(cake_conv1d_variant=variant, cake_conv1d_silu_grad_preactivation=policy)
                for dtype in (torch.bfloat16, torch.float32):
                    for width, tokens in ((2, 0), (3, 1), (4, 133), (4, 4097)):
                        w = torch.ones(264, width, device="cuda", dtype=dtype, requires_grad=True)
                        x = torch.ones(tokens, 264, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                        y = causal_conv1d(x, w)
                        assert isinstance(y, torch.Tensor)
                        y.sum().backward()
                        assert w.grad is not None
        configure()
        release("conv1d")
