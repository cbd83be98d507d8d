"""After one ``prebuild`` no call of ``gdn`` compiles anything (a Hopper device and a compiler)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cake_core import configure, no_build, prebuild, release
from cake_core.testing.routes import empty_cache
from cake_gdn.testing.routes import ROUTES
from cake_gdn.testing.steps import make_step

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.prebuild,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

# A fresh process: a library that is loaded already would not be looked up again.
_CHECK = """
import sys
from cake_core.testing.routes import check_routes
from cake_gdn.testing.routes import PREBUILD, ROUTES, run_route
check_routes("gdn", ROUTES, run_route, **PREBUILD)
assert not [name for name in sys.modules if name.partition(".")[0] in ("fla", "flashinfer")], "a peer was imported"
print(len(ROUTES), "routes")
"""


def test_a_prebuilt_process_compiles_nothing() -> None:
    """R53, R58, R59: every call-time switch of the op, forward and backward, after one prebuild into an empty cache."""
    done = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(len(ROUTES)), "routes"]


def test_one_prebuild_serves_every_size_scan_and_later_variant() -> None:
    """R53: a library holds the scans of few and of many heads and all saved sets; what is configured later builds
    none."""
    release("gdn")
    with empty_cache():
        assert len(prebuild("gdn")) == 5
        with no_build():
            for variant in ("det", "fast"):
                configure(cake_gdn_variant=variant)
                for lengths, heads in (((0,), (1, 2)), ((1,), (2, 2)), ((133,), (16, 64)), ((70, 65), (64, 64))):
                    for save in ("full", "light", "none"):
                        make_step(lengths, heads, state=True, device="cuda").run(save=save)
        configure()
        release("gdn")
    torch.cuda.synchronize()
